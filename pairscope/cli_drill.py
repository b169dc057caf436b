"""`pairscope drill`: simulated faults to train on, in a terminal or with answers from a file."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pairscope.config import gather
from pairscope.drill.play import Ask, Ended, Played, Stage, Why, causes_table, play, score_table, sums
from pairscope.drill.rounds import DIFFICULTIES
from pairscope.drill.transcript import transcript
from pairscope.options import SPOKEN, ConfigOption, LangOption, Refused, one_line_for_mistakes, overrides
from telemetry.messages import say

ANSWERS_ENDED = 3
EXIT_CODES = {Why.QUIT: 0, Why.ANSWERS: ANSWERS_ENDED, Why.MISTAKES: ANSWERS_ENDED, Why.INTERRUPTED: 130}
ANSWER_LIMIT = 200
LINE_LIMIT = 1 << 16  # of a file or a pipe, which need not have an end
MOST_ROUNDS = 100


def d(key: str, **values: object) -> str:
    return say(f"drill.about.{key}", SPOKEN, **values)


def drill_command(
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=MOST_ROUNDS, help=d("rounds"))] = 5,
    seed: Annotated[int | None, typer.Option("--seed", help=d("seed"))] = None,
    difficulty: Annotated[
        str, typer.Option("--difficulty", metavar="|".join(DIFFICULTIES), help=d("difficulty"))
    ] = "medium",
    causes: Annotated[bool, typer.Option("--list", help=d("list"))] = False,
    answers: Annotated[Path | None, typer.Option("--answers", metavar="FILE|-", help=d("answers"))] = None,
    as_json: Annotated[bool, typer.Option("--json", help=d("json"))] = False,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        language = gather(config, overrides(state_dir=None, store=None, lang=lang), lang).language
        console = Console(highlight=False, stderr=as_json)
        if causes:
            console.print(causes_table(language))
            return
        if difficulty not in DIFFICULTIES:
            raise Refused(say("drill.mistake.difficulty", language, text=difficulty, known=", ".join(DIFFICULTIES)))
        chosen = random.SystemRandom().randrange(1, 10**6) if seed is None else seed
        done: list[Played] = []
        ended = _played(console, answers, rounds, chosen, difficulty, language, done)
        if done:
            console.print()
            console.print(score_table(done, language))
        if ended is not None:
            where = say(f"drill.ended.{ended}", language, number=len(done) + 1, rounds=rounds)
            console.print(where, style="yellow", markup=False, soft_wrap=True)
        console.print(say("drill.sum", language, **sums(done)), markup=False)
        again = say("drill.again", language, seed=chosen, difficulty=difficulty, rounds=rounds)
        console.print(again, style="dim", markup=False, soft_wrap=True)
        if as_json:
            print(json.dumps(transcript(done, chosen, difficulty), ensure_ascii=False, indent=1))
        raise typer.Exit(0 if ended is None else EXIT_CODES[ended])


def _played(
    console: Console, answers: Path | None, rounds: int, seed: int, difficulty: str, language: str, done: list[Played]
) -> Why | None:
    """Play into `done`; what ended it before its last round was over, None for nothing."""
    try:
        with _asking(answers, console, language) as ask, _told(rounds, language) as tell:
            play(Stage(ask, console, tell, language), seed, rounds, difficulty, done)
    except Ended as ended:
        return ended.why
    except KeyboardInterrupt:
        console.print()
        return Why.INTERRUPTED if len(done) < rounds else None
    return None


@contextmanager
def _asking(answers: Path | None, console: Console, language: str) -> Iterator[Ask]:
    """Answers from a person at a terminal, else line by line from the file or from stdin, shown as if typed."""
    if answers is not None and str(answers) != "-":
        try:
            file = answers.open(encoding="utf-8", errors="replace")
        except OSError as error:
            reason = error.strerror or str(error)
            raise Refused(say("drill.mistake.answers", language, path=answers, reason=reason)) from None
        with file:
            yield _from(_lines(file), console)
        return
    if sys.stdin is None:  # started with it closed
        yield lambda _prompt: None
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if answers is None and sys.stdin.isatty():
        yield lambda prompt: _typed(console, prompt)
    else:
        yield _from(_lines(sys.stdin), console)


def _lines(file: TextIO) -> Iterator[str]:
    return iter(lambda: file.readline(LINE_LIMIT), "")


def _from(lines: Iterator[str], console: Console) -> Ask:
    def ask(prompt: str) -> str | None:
        line = next(lines, None)
        if line is not None:
            console.print(f"{prompt}{line.rstrip()[:ANSWER_LIMIT]}", markup=False, soft_wrap=True)
        return line[:ANSWER_LIMIT] if line is not None else None

    return ask


def _typed(console: Console, prompt: str) -> str:
    try:
        return console.input(prompt, markup=False)[:ANSWER_LIMIT]
    except EOFError:  # Ctrl-D
        console.print()
        return "quit"


@contextmanager
def _told(rounds: int, language: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal while a round is simulated, gone while somebody thinks; elsewhere one line as each is begun."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        number, making = 0, False

        def announce(share: float) -> None:
            nonlocal number, making
            if share < 1 and not making:
                number += 1
                console.print(say("drill.making_round", language, number=number, rounds=rounds), soft_wrap=True)
            making = share < 1

        yield announce
        return
    columns = (TextColumn("{task.description}"), BarColumn())
    running: list[Progress] = []

    def tell(share: float) -> None:
        if share >= 1:
            while running:
                running.pop().stop()
            return
        if not running:
            progress = Progress(*columns, console=console, transient=True)
            progress.add_task(say("drill.making", language), total=1.0)
            running.append(progress)  # before it hides the cursor, so that Ctrl-C in the midst of that shows it again
            progress.start()
        running[0].update(running[0].task_ids[0], completed=share)

    try:
        yield tell
    finally:
        tell(1.0)
