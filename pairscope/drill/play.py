"""The talk of a drill: shows a round, answers looks, takes a guess, tells the truth, and keeps the score."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pairscope.drill.layout import laid_out
from pairscope.drill.looks import LOOKS, Row, events, look, wall
from pairscope.drill.rounds import DIFFICULTIES, Difficulty, Draw, Round, draw, make
from pairscope.drill.scoring import HARMLESS, Guess, Points, score
from rules.course import Incident, incidents_of
from rules.present import MARKS
from rules.priors import STEP_OF
from rules.verdict import Cause, Diagnosis, Status, Step
from telemetry.lineprotocol import printable
from telemetry.messages import say

Ask = Callable[[str], str | None]
"""Called with the prompt; the answer, or None when there are no more."""

MOST_MISTAKES = 50
"""So many answers in a row that are none end the drill: nobody is there, or a file of something else is read."""

STATUS_STYLE = {
    Status.CONFIRMED: "bold red",
    Status.SYMPTOM: "yellow",
    Status.RULED_OUT: "green",
    Status.NO_DATA: "dim",
}


class Why(StrEnum):
    """What ended a drill before its last round. Each has its sentence."""

    QUIT = "quit"
    ANSWERS = "answers"  # there are no more
    MISTAKES = "mistakes"
    INTERRUPTED = "interrupted"


class Ended(Exception):
    """The drill ends in the midst of a round."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Played:
    """One round as it went. `looks` are in the order in which they were asked for."""

    round: Round
    drawn: Draw
    looks: tuple[str, ...]
    guess: Guess | None
    points: Points


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a drill is played: what is asked, where it is shown, how far a round is told to be, and in which language."""

    ask: Ask
    console: Console
    tell: Callable[[float], None]
    language: str

    def t(self, key: str, **values: object) -> str:
        return say(f"drill.{key}", self.language, **values)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text), style=style), soft_wrap=not self.console.is_terminal)


def play(stage: Stage, seed: int, rounds: int, difficulty: str, done: list[Played]) -> None:
    """Play the rounds into `done`, so that what was played stands whatever ends it. Ended when the answers end."""
    chosen = DIFFICULTIES[difficulty]
    for number in range(1, rounds + 1):
        drawn = draw(seed, number, chosen)
        stage.tell(0.0)
        played = make(number, drawn, chosen, stage.tell)
        stage.tell(1.0)
        done.append(_round(stage, played, drawn, rounds, chosen))


def _round(stage: Stage, played: Round, drawn: Draw, rounds: int, difficulty: Difficulty) -> Played:
    stage.console.print()
    stage.say(stage.t("round", number=played.number, rounds=rounds), "bold")
    stage.say(stage.t("scene", nodes=len(played.nodes), gpus=difficulty.gpus))
    _show(stage, wall(played, stage.language))
    stage.say(stage.t("short_help", looks=", ".join(LOOKS)), "dim")
    looks: list[str] = []
    guess = _talk(stage, played, looks)
    points = score(played, guess, len(looks))
    _truth(stage, played, guess, points, looks)
    return Played(played, drawn, tuple(looks), guess, points)


def _talk(stage: Stage, played: Round, looks: list[str]) -> Guess | None:
    """Answer what is asked, note the looks in `looks`, and end with the guess, or None for none. Ended."""
    guess: Guess | Cause | None = None
    mistakes = 0
    while mistakes < MOST_MISTAKES:
        answer = stage.ask(stage.t("prompt", looks=len(looks)))
        if answer is None:
            raise Ended(Why.ANSWERS)
        words = printable(answer).strip().lower().split()
        if words and words[0] in ("quit", "exit", "q"):
            raise Ended(Why.QUIT)
        if words and words[0] in ("giveup", "skip"):
            return None
        if words and _shown(stage, played, words, looks):
            mistakes = 0
            continue
        if words:
            guess = _guess(stage, played, words[1:] if words[0] == "guess" else words, guess)
            if isinstance(guess, Guess):
                return guess
        mistakes += 1
    raise Ended(Why.MISTAKES)


def _shown(stage: Stage, played: Round, words: Sequence[str], looks: list[str]) -> bool:
    """Whether these words asked to be shown something, which then is shown."""
    name = _look_named(words)
    if name is not None:
        looks.append(name)
        _look(stage, played, name)
    elif words[0] in ("help", "?", "h"):
        _help(stage)
    elif words[0] in ("causes", "list"):
        stage.console.print(causes_table(stage.language))
    elif words[0] == "wall":
        _show(stage, wall(played, stage.language))
    else:
        return False
    return True


def _look_named(words: Sequence[str]) -> str | None:
    """The view that `look power`, `look at power` or `power` asks for: a word alone that is also a cause is a look."""
    name = words[-1] if words[0] == "look" else words[0] if len(words) == 1 else ""
    return name if name in LOOKS else None


def _look(stage: Stage, played: Round, name: str) -> None:
    stage.say(stage.t(f"look.{name}"), "bold")
    _show(stage, look(name, played, stage.language))
    if name == "events":
        found = events(played)
        for time_ns, words in found:
            stage.say(f"  {datetime.fromtimestamp(time_ns / 1e9, UTC):%H:%M:%S}  {words}")
        if not found:
            stage.say(f"  {stage.t('no_events')}")


def _show(stage: Stage, rows: Sequence[Row]) -> None:
    if not rows:
        stage.say(f"  {stage.t('nothing_read')}")
        return
    plain = not (stage.console.encoding or "").lower().startswith("utf")
    for line in laid_out(rows, stage.console.width, stage.t, plain=plain):
        stage.console.print(line, soft_wrap=True)


def _help(stage: Stage) -> None:
    for line in ("help_look", "help_guess", "help_wall", "help_end"):
        stage.say(f"  {stage.t(line)}")
    for name in LOOKS:
        stage.say(f"    {name:<12} {stage.t(f'look.{name}')}")


def _guess(stage: Stage, played: Round, words: Sequence[str], asked: Guess | Cause | None) -> Guess | Cause | None:
    """A cause, and a node where there are several. The cause alone after asking for its node, which may come alone then;
    None with a word of what is missing. `asked` is what the last answer came to."""
    cause = _cause(words[0], stage.language) if words else None
    places = words[1:]
    if cause is None and isinstance(asked, Cause) and len(words) == 1 and _node(played, words[0]):
        cause, places = asked, words
    if cause is None:
        near = difflib.get_close_matches(words[0], [*map(str, Cause), *LOOKS], n=1) if words else []
        stage.say(stage.t("not_known", near=near[0] if near else "help"), "yellow")
        return None
    if cause in HARMLESS or len(played.nodes) == 1:
        return Guess(cause)
    node = _node(played, places[0]) if places else None
    if node is None:
        stage.say(stage.t("which_node", nodes=", ".join(played.nodes), cause=cause), "yellow")
        return cause
    return Guess(cause, node)


def _node(played: Round, word: str) -> str | None:
    """The node of this name, or of this end of a name: n02 is sim-n02."""
    nodes = [node for node in played.nodes if node == word or node.endswith(f"-{word}")]
    return nodes[0] if len(nodes) == 1 else None


def _cause(word: str, language: str) -> Cause | None:
    for cause in Cause:
        if word in (str(cause), say(f"rules.cause.{cause}", language).lower()):
            return cause
    return Cause.NONE if word in ("healthy", "nothing") else None


# --- the truth


def _truth(stage: Stage, played: Round, guess: Guess | None, points: Points, looks: Sequence[str]) -> None:
    style = "bold green" if points.right else "bold red"
    stage.console.print()
    stage.say(stage.t(_outcome(guess, points)), style)
    stage.say(truth_text(played, stage.language))
    shown = _diagnosis_of(played)
    for line in triage_text(played, stage.language):
        stage.say(line)
    stage.say(stage.t("walk"))
    for report in shown.steps:
        names = ", ".join(name for name, entry in LOOKS.items() if entry.step is report.step)
        status = say(f"rules.status.{report.status}", stage.language)
        step = say(f"rules.step.{report.step}", stage.language)
        line = f"  {MARKS[report.status]} {int(report.step)} {step}: {status}  [{names}]"
        stage.say(line, STATUS_STYLE[report.status])
        if report.status is Status.CONFIRMED:
            for found in report.evidence:
                stage.say(f"      {found.text(stage.language)}")
    least = least_looks(played)
    key = "looks_none" if played.cause in HARMLESS else "looks_least"
    stage.say(stage.t(key, looks=len(looks), least=least))
    told = {"total": points.total, "cause": points.cause, "node": points.node, "quick": points.quick}
    stage.say(stage.t("points", **told), "bold")


def _outcome(guess: Guess | None, points: Points) -> str:
    if guess is None:
        return "outcome.gave_up"
    if points.right:
        return "outcome.right"
    return "outcome.false_alarm" if points.false_alarm else "outcome.missed" if points.missed else "outcome.wrong"


def truth_text(played: Round, language: str) -> str:
    truth = played.truth
    if truth is None:
        return say("drill.truth.healthy", language)
    fault = say(f"simulator.fault.{truth.fault.replace('-', '_')}", language)
    if truth.null_twin:
        return say("drill.truth.twin", language, fault=fault)
    when = datetime.fromtimestamp(truth.since_ns / 1e9, UTC).strftime("%H:%M:%S")
    place = " / ".join(truth.subject.values())
    cause = say(f"rules.cause.{truth.cause}", language)
    return say("drill.truth.fault", language, cause=cause, fault=fault, place=place, when=when)


def judged(played: Round) -> list[tuple[Incident, float | None]]:
    """What triage told, each with the seconds from the strike until it was first named (None without a strike)."""
    found = []
    for incident in incidents_of(played.courses.values(), played.start_ns, played.end_ns):
        first_ns = min(struck.spell.first_ns for struck in incident.struck)
        found.append((incident, (first_ns - played.truth.since_ns) / 1e9 if played.truth is not None else None))
    return found


def triage_text(played: Round, language: str) -> list[str]:
    lines = []
    for incident, after_s in judged(played):
        values = {
            "cause": say(f"rules.cause.{incident.cause}", language),
            "confidence": incident.verdict.confidence,
            "place": " / ".join(
                incident.subject[tag] for tag in ("rack", "node", "engine", "gpu") if tag in incident.subject
            ),
        }
        if after_s is None:
            lines.append(say("drill.triage.said", language, **values))
        else:
            lines.append(say("drill.triage.said_after", language, after_s=max(0.0, after_s), **values))
        lines.append(f"  {incident.verdict.summary.text(language)}")
    return lines or [say("drill.triage.silent", language)]


def _diagnosis_of(played: Round) -> Diagnosis:
    """The judgement whose walk is shown: of the worst-hit pair, else of the struck one, else of the first."""
    found = incidents_of(played.courses.values(), played.start_ns, played.end_ns)
    if found:
        return found[0].struck[0].spell.diagnosis
    node = played.truth.subject.get("node") if played.truth is not None else None
    courses = list(played.courses.values())
    return next((course.last for course in courses if course.key[0] == node), courses[0].last)


def least_looks(played: Round) -> int:
    """Views that lie before and in the step of the truth, in the order of the walk: whoever walks finds it by then."""
    step = STEP_OF.get(played.cause, Step.SOFTWARE)
    return sum(entry.step <= step for entry in LOOKS.values())


# --- tables


def causes_table(language: str) -> Table:
    """Every cause that may be guessed, with the step that looks at it and the views that show it."""
    table = Table(box=None, header_style="bold")
    for head in ("cause", "means", "step", "looks"):
        table.add_column(say(f"drill.head.{head}", language), overflow="fold")
    for cause in Cause:
        step = STEP_OF.get(cause)
        at = f"{int(step)} {say(f'rules.step.{step}', language)}" if step is not None else ""
        names = ", ".join(name for name, entry in LOOKS.items() if entry.step is step)
        table.add_row(str(cause), say(f"drill.cause.{cause}", language), at, names)
    return table


def score_table(done: Sequence[Played], language: str) -> Table:
    table = Table(box=None, header_style="bold")
    for head in ("round", "truth", "guess", "triage", "looks", "points"):
        table.add_column(
            say(f"drill.head.{head}", language), justify="right" if head in ("looks", "points") else "left"
        )
    for played in done:
        guess = played.guess
        told = str(guess.cause) + (f" {guess.node}" if guess.node else "") if guess else "-"
        there = ", ".join(sorted(played.round.right_nodes)) if len(played.round.nodes) > 1 else ""
        triage = ", ".join(str(incident.cause) for incident, _ in judged(played.round)) or str(Cause.NONE)
        mark = "✓" if played.points.right else "✗"
        table.add_row(
            f"{played.round.number} {mark}",
            f"{played.round.cause} {there}".strip(),
            told,
            triage,
            str(len(played.looks)),
            str(played.points.total),
        )
    return table


def sums(done: Sequence[Played]) -> dict[str, int]:
    return {
        "rounds": len(done),
        "right": sum(played.points.right for played in done),
        "false_alarms": sum(played.points.false_alarm for played in done),
        "missed": sum(played.points.missed for played in done),
        "looks": sum(len(played.looks) for played in done),
        "points": sum(played.points.total for played in done),
        "most": 100 * len(done),
    }
