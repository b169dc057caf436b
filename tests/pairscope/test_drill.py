"""The drill: what is shown tells no truth, guesses are scored by it, and it ends well whatever comes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from agent.simulator.faults import FAULTS
from pairscope import cli_drill
from pairscope.cli import app
from pairscope.drill.layout import laid_out
from pairscope.drill.looks import LOOKS, Row, events, look, sparkline, wall
from pairscope.drill.play import Ended, Played, Stage, judged, least_looks, play, truth_text
from pairscope.drill.rounds import DIFFICULTIES, Draw, Round, draw, faults_of, make
from pairscope.drill.scoring import Guess, score
from pairscope.drill.transcript import transcript
from rules.priors import STEP_OF
from rules.verdict import Cause
from telemetry.messages import say

SHORT = replace(DIFFICULTIES["medium"], seconds=240.0)


@cache
def braked() -> Round:
    """Two nodes; the second loses its supplies."""
    return make(1, Draw(7, "power-brake", "sim-n02", False, 40.0), SHORT)


@cache
def quiet() -> Round:
    return make(2, Draw(7, None, "sim-n01", False, 40.0), replace(SHORT, nodes=1, gpus=2, seconds=60.0))


def shown(played: Round, language: str = "en") -> str:
    rows = [*wall(played, language), *(row for name in LOOKS for row in look(name, played, language))]
    return "\n".join([*map(str, rows), *(words for _, words in events(played))])


def staged(answers: list[str], language: str = "en") -> tuple[Stage, io.StringIO]:
    out = io.StringIO()
    given: Iterator[str] = iter(answers)
    return Stage(lambda _prompt: next(given, None), Console(file=out, width=120), lambda _share: None, language), out


def test_a_seed_draws_the_same_rounds_and_another_others() -> None:
    medium = DIFFICULTIES["medium"]
    assert [draw(3, n, medium) for n in range(1, 9)] == [draw(3, n, medium) for n in range(1, 9)]
    assert [draw(3, n, medium) for n in range(1, 9)] != [draw(4, n, medium) for n in range(1, 9)]


def test_no_cause_comes_twice_before_all_have_come() -> None:
    medium = replace(DIFFICULTIES["medium"], healthy=0.0)
    count = len(faults_of(medium))
    causes = [FAULTS[draw(3, number, medium).fault or ""].cause for number in range(1, 2 * count + 1)]
    assert len(set(causes[:count])) == len(set(causes[count:])) == count


@pytest.mark.parametrize("name", DIFFICULTIES)
def test_every_difficulty_has_faults_of_all_kinds_and_healthy_rounds(name: str) -> None:
    drawn = [draw(11, number, DIFFICULTIES[name]) for number in range(1, 401)]
    healthy = sum(entry.fault is None or entry.twin for entry in drawn) / len(drawn)
    assert 0.05 < healthy < 0.45
    causes = {FAULTS[entry.fault].cause for entry in drawn if entry.fault}
    assert causes >= {
        "thermal",
        "power",
        "gpu_fault",
        "memory_kv",
        "request_mix",
        "scheduling",
        "software",
        "telemetry",
    }
    assert len({entry.node for entry in drawn}) == DIFFICULTIES[name].nodes
    assert any(entry.twin for entry in drawn) is (name != "easy")
    scopes = {FAULTS[fault].scope for faults in faults_of(DIFFICULTIES[name]).values() for fault in faults}
    assert ("rack" in scopes) is (name == "hard")


def test_what_can_be_seen_shows_the_fault_where_it_is_and_does_not_name_it() -> None:
    played = braked()
    text = shown(played).lower()
    for said in (
        "power-brake",
        say("simulator.fault.power_brake"),
        "null_twin",
        "twin",
        "simulated",
        "healthy",
    ):
        assert said.lower() not in text, said
    brake = [row for row in look("power", played, "en") if "brake" in row.what]
    assert [(row.place, row.then, row.now) for row in brake] == [
        ("sim-n01", "0 %", "0 %"),
        ("sim-n02", "0 %", "100 %"),
    ]


SAMPLED = ("gpu-lost", "hot-inlet", "kv-fragmentation", "hung-engine", "noisy-neighbour", "slow-disk")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.long) for name in FAULTS]
)
def test_no_view_of_any_fault_names_it_or_points_at_its_node(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.rounds.PAST_S", 120.0)
    small = replace(SHORT, gpus=2, seconds=100.0)
    played = make(1, Draw(7, fault, "sim-n02", False, 20.0), small)
    for language in ("en", "zh"):
        text = shown(played, language).lower()
        hidden = {
            fault,
            say(FAULTS[fault].description, language),
            "simul",
            "模拟",
            "twin",
        }
        assert [words for words in hidden if words.lower() in text] == []
        views = [wall(played, language), *(look(name, played, language) for name in LOOKS)]
        assert [row for rows in views for row in rows if "sim-n" in row.what + row.then + row.now] == []
    for _, told in events(played):
        about, _, words = told.partition(": ")
        assert about.startswith("sim-n") and "sim-n" not in words


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_event_of_any_fault_says_its_name_or_that_it_is_played(language: str) -> None:
    for fault in FAULTS.values():
        for event in (*fault.events, *fault.twin_events):
            words = f"{event.text} {event.detail}".lower()
            assert fault.name not in words and "simul" not in words and "twin" not in words
            assert say(fault.description, language).lower() not in words


def test_every_cause_of_a_fault_can_be_seen_in_some_view() -> None:
    steps = {entry.step for entry in LOOKS.values()}
    assert {STEP_OF[Cause(fault.cause)] for fault in FAULTS.values() if fault.cause != "none"} <= steps
    assert all(rows for rows in (look(name, braked(), "en") for name in LOOKS))


def test_points_are_for_the_cause_the_node_and_few_looks() -> None:
    played = braked()
    right = Guess(Cause.POWER, "sim-n02")
    assert [score(played, right, looks).total for looks in (0, 1, 2, 4, 9)] == [100, 100, 97, 91, 80]
    assert score(played, Guess(Cause.POWER, "sim-n01"), 1).total == 80
    near, far = score(played, Guess(Cause.THERMAL, "sim-n02"), 1), score(played, Guess(Cause.SOFTWARE, "sim-n01"), 1)
    assert (near.total, near.right, far.total, far.right) == (40, False, 0, False)
    missed = score(played, Guess(Cause.NONE), 1)
    assert (missed.total, missed.missed) == (0, True)
    assert score(played, None, 0).total == 0


def test_in_a_healthy_round_nothing_is_the_answer_and_an_alarm_costs() -> None:
    played = quiet()
    assert played.right_nodes == frozenset()
    for cause in (Cause.NONE, Cause.DEMAND):
        assert score(played, Guess(cause), 1).total == 100
    alarm = score(played, Guess(Cause.THERMAL), 1)
    assert (alarm.total, alarm.false_alarm, alarm.right) == (-20, True, False)


def test_a_wrong_cause_on_a_single_node_earns_nothing_for_the_node() -> None:
    alone = replace(braked(), nodes=("sim-n02",))
    assert score(alone, Guess(Cause.SOFTWARE), 1).total == 0
    assert score(alone, Guess(Cause.POWER), 1).total == 100


def test_the_truth_is_told_after_the_guess_with_what_triage_said_and_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.play.make", lambda *_: braked())
    answers = ["", "look at power", "nonsense", "guess power", "guess power n09", "causes", "guess power n02"]
    stage, out = staged(answers)
    done: list[Played] = []
    play(stage, 1, 1, "medium", done)
    before, after = out.getvalue().split("Right.")
    truth = truth_text(braked(), "en")
    assert truth in after and truth not in before and say("simulator.fault.power_brake") not in before
    assert "On which node?" in before and "Did you mean" in before
    (incident, after_s), *_ = judged(braked())
    assert incident.cause is Cause.POWER and after_s is not None and 0 <= after_s < 60
    assert "Triage said power" in after and "1 Temperature and power: confirmed" in after
    assert (done[0].looks, done[0].guess, done[0].points.total) == (("power",), Guess(Cause.POWER, "sim-n02"), 100)
    assert least_looks(braked()) == 4
    told = transcript(done, 1, "medium")
    assert json.loads(json.dumps(told))["rounds"][0]["truth"]["fault"] == "power-brake"
    assert told["sum"] == {
        "rounds": 1,
        "right": 1,
        "false_alarms": 0,
        "missed": 0,
        "looks": 1,
        "points": 100,
        "most": 100,
    }


def test_a_guess_in_chinese_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.play.make", lambda *_: braked())
    stage, out = staged(["guess 供电 n02"], "zh")
    done: list[Played] = []
    play(stage, 1, 1, "medium", done)
    assert done[0].points.right and "正确" in out.getvalue()


@pytest.mark.parametrize("answers", [[], ["quit"], ["look gpu"], ["\x1b]0;x\x07"] * 60])
def test_it_ends_where_the_answers_end(answers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.play.make", lambda *_: quiet())
    stage, out = staged(answers)
    with pytest.raises(Ended):
        play(stage, 1, 3, "easy", [])
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("trend", "line"),
    [
        ((0.0, 7.0), "▁█"),
        ((5.0, None, 5.0), "▅ ▅"),
        ((None, None), "  "),
        ((), ""),
        ((100.0, 100.5), "▄▅"),
        ((0.0,), "▁"),
    ],
)
def test_a_sparkline_shows_holes_and_does_not_blow_up_noise(trend: tuple[float | None, ...], line: str) -> None:
    assert sparkline(trend) == line
    assert len(sparkline(trend, plain=True)) == len(trend) and sparkline(trend, plain=True).isascii()


LONG_ROW = Row(
    "sim-n01", "throttled GPUs of a node and more", "12 168 tokens/s", "11 985 tokens/s", tuple(map(float, range(30)))
)
SHORT_ROW = Row("sim-n02", "功率", "4 583 W", "—", (None, *map(float, range(29))))


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_a_view_fits_the_width_and_loses_the_oldest_of_its_trend_alone(width: int, language: str) -> None:
    for rows in ([LONG_ROW, SHORT_ROW], [SHORT_ROW], wall(braked(), language), look("power", braked(), language)):
        lines = [line.plain for line in laid_out(rows, width, staged([], language)[0].t)]
        assert [line for line in lines if cell_len(line) > width] == []
        text = "\n".join(lines)
        for row in rows:
            assert row.what in text and row.then in text
            newest = sparkline(row.trend)[-12:]
            assert any(line.endswith(newest) and row.now in line for line in lines)


def test_columns_of_chinese_and_english_stand_under_each_other_and_all_is_shown_where_there_is_room() -> None:
    lines = [line.plain for line in laid_out([LONG_ROW, SHORT_ROW], 120, staged([])[0].t)]
    first, second = (line for line in lines if line.startswith("  "))
    assert cell_len(first) == cell_len(second) and first.endswith(sparkline(LONG_ROW.trend))
    assert "10 min, own scale" in lines[0] and "…" not in "".join(lines)
    narrow = [line.plain for line in laid_out([LONG_ROW, SHORT_ROW], 80, staged([])[0].t)]
    assert "10 min" not in narrow[0] and any(line.endswith(sparkline(LONG_ROW.trend)[-12:]) for line in narrow)


def test_a_node_alone_is_a_guess_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.play.make", lambda *_: braked())
    stage, out = staged(["n02", "guess power", "nonsense", "n02", "guess power", "look power", "sim-n02"])
    done: list[Played] = []
    play(stage, 1, 1, "medium", done)
    assert done[0].guess == Guess(Cause.POWER, "sim-n02") and out.getvalue().count("On which node?") == 2
    stage, _ = staged(["guess power sim-n01"])
    play(stage, 1, 1, "medium", done)
    assert done[1].guess == Guess(Cause.POWER, "sim-n01")


def test_what_strikes_one_gpu_strikes_now_this_and_now_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pairscope.drill.rounds.PAST_S", 60.0)
    medium = DIFFICULTIES["medium"]
    assert {draw(3, number, medium).gpu for number in range(1, 41)} == set(range(medium.gpus))
    played = make(1, Draw(7, "gpu-lost", "sim-n02", False, 20.0, gpu=3), replace(SHORT, seconds=60.0))
    assert played.truth is not None and played.truth.subject == {"node": "sim-n02", "engine": "sim-n02-e1", "gpu": "3"}


@pytest.mark.parametrize("at", ["while a round is made", "at the prompt"])
def test_ctrl_c_in_a_terminal_tells_the_score_and_leaves_the_terminal_as_it_was(at: str) -> None:
    main, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "pairscope", "drill", "--lang", "en", "--seed", "3", "--difficulty", "easy"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        seen, sent, deadline = b"", False, time.monotonic() + 300
        while time.monotonic() < deadline and (process.poll() is None or select.select([main], [], [], 0)[0]):
            if select.select([main], [], [], 0.2)[0]:
                seen += os.read(main, 65536)
            if not sent and (b"simulating" if at.startswith("while") else b"[looks: 0] > ") in seen:
                os.write(main, b"\x03")
                sent = True
        process.kill()
    after = termios.tcgetattr(terminal)
    os.close(main)
    os.close(terminal)
    assert process.returncode == 130, seen[-2000:]
    assert b"Interrupted in round 1 of 5." in seen and b"0 of 0 points" in seen and b"Traceback" not in seen
    assert after == before and seen.rfind(b"\x1b[?25h") >= seen.rfind(b"\x1b[?25l")


# --- the command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("pairscope.drill.play.make", lambda number, *_: braked() if number == 1 else quiet())

    def run(*arguments: str, given: str | bytes | None = None) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["drill", "--lang", "en", *arguments], input=given)
        return done.exit_code, done.stdout, done.stderr

    return run


def test_answers_of_a_file_play_a_drill_whose_json_is_alone_on_stdout(run: Run, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text("look power\nguess power n02\nguess thermal n01\n", "utf-8")
    code, told, seen = run("--rounds", "2", "--seed", "4", "--answers", str(answers), "--json")
    assert code == 0
    found = json.loads(told)
    assert [entry["points"]["total"] for entry in found["rounds"]] == [100, -20]
    assert found["sum"]["false_alarms"] == 1
    assert "--seed 4" in seen and "80 of 200 points" in seen and "\x1b" not in seen


def test_where_no_bar_is_seen_each_round_is_told_as_it_is_begun(run: Run) -> None:
    code, told, seen = run("--rounds", "2", given="guess power n02\nguess none\n")
    assert code == 0 and "making" not in told
    assert seen.splitlines() == ["making round 1 of 2 ...", "making round 2 of 2 ..."]


def test_answers_without_end_and_without_lines_end_the_drill(run: Run) -> None:
    code, told, seen = run("--rounds", "1", "--seed", "4", "--difficulty", "easy", "--answers", "/dev/zero", "--json")
    assert code == 3 and json.loads(told)["rounds"] == [] and "Too many answers in a row that are none" in seen


def test_stdin_that_is_no_terminal_gives_the_answers_too(run: Run) -> None:
    code, told, _ = run("--rounds", "2", given="guess power n02\nquit\n")
    assert code == 0 and "100 of 100 points. Rounds played: 1;" in told and "Ended in round 2 of 2." in told


@pytest.mark.parametrize(
    ("given", "number"), [("", 1), ("look power\nguess power\n", 1), ("guess power n02\nwall\n", 2)]
)
def test_answers_that_end_too_early_are_told_with_the_round_and_exit_three(run: Run, given: str, number: int) -> None:
    code, told, _ = run("--rounds", "5", given=given)
    score = "100 of 100 points. Rounds played: 1;" if number == 2 else "0 of 0 points. Rounds played: 0;"
    assert code == 3 and f"The answers ended in round {number} of 5." in told and score in told


def test_a_stdin_that_is_closed_or_no_text_is_an_end_of_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--rounds", "1", given=b"\xff\xfe\n")[0] == 3
    monkeypatch.setattr("sys.stdin", None)
    with cli_drill._asking(None, Console(file=io.StringIO()), "en") as ask:
        assert ask("") is None


def test_ctrl_c_ends_it_with_the_score_so_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(["guess power n02"])

    def ask(_prompt: str) -> str:
        for answer in given:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_drill, "_from", lambda *_: ask)
    code, told, error = run("--rounds", "2", "--answers", "-")
    assert (
        code == 130
        and "100 of 100 points. Rounds played: 1;" in told
        and "Interrupted in round 2 of 2." in told
        and "Traceback" not in error
    )


@pytest.mark.parametrize("arguments", [["--difficulty", "fiendish"], ["--answers", "/nonexistent/file"]])
def test_a_mistake_is_one_line_and_exit_two(run: Run, arguments: list[str]) -> None:
    code, told, error = run(*arguments)
    assert (code, told, error.count("\n")) == (2, "", 1)


def test_the_causes_are_listed_with_where_they_show(run: Run) -> None:
    code, told, _ = run("--list")
    assert code == 0
    assert all(str(cause) in told for cause in Cause) and all(name in told for name in LOOKS)
