"""A program that is run for its answer comes back by its deadline, whatever it does, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from agent.child import Program
from tests.processes import zombies


def wait_until(what: str, holds: object, limit_s: float = 90.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


def none_left(token: str) -> bool:
    """No process of this machine, a zombie neither, was started with the token in its arguments."""
    for process in psutil.process_iter(["cmdline"]):
        if token in (process.info["cmdline"] or []):
            return False
    return not zombies()


def test_an_answer_and_what_is_said_beside_it_come_apart() -> None:
    answer = Program("sh").run(["-c", "echo out; echo err >&2; exit 3"], 30)
    assert (answer.how, answer.code, answer.out, answer.err) == ("ended", 3, "out\n", "err\n")
    assert not answer.well


def test_a_program_that_is_not_there_is_an_answer() -> None:
    assert Program("no-such-program-here").run([], 30).how == "missing"


def test_a_program_sees_only_a_bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setenv("PAIRSCOPE_SECRET", "s3cret")
    out = Program("env").run([], 30, {"IPMI_PASSWORD": "given"}).out
    names = {line.partition("=")[0] for line in out.splitlines()}
    assert names == {"PATH", "LC_ALL", "IPMI_PASSWORD"}


def test_a_late_program_is_killed_with_its_children() -> None:
    token = f"late-{os.getpid()}"  # of this run of the tests, not of another on the same machine
    program = Program("sh")
    began_s = time.monotonic()
    answer = program.run(["-c", "echo before; trap '' TERM; sleep 600 & sleep 600; :", token], 0.3)
    assert (answer.how, answer.out) == ("late", "before\n")
    assert time.monotonic() - began_s < 60
    wait_until("a child was left", lambda: none_left(token))
    assert program.run(["-c", "echo again"], 30).out == "again\n"


def test_one_that_closes_its_output_and_stays_is_late() -> None:
    token = f"quiet-{os.getpid()}"
    answer = Program("sh").run(["-c", "exec >&- 2>&-; sleep 600", token], 0.3)
    assert answer.how == "late"
    wait_until("a child was left", lambda: none_left(token))


def test_one_whose_child_keeps_its_output_open_is_late_and_the_child_goes() -> None:
    length = f"601.{os.getpid()}"
    answer = Program("sh").run(["-c", f"sleep {length} & echo done"], 0.5)
    assert (answer.how, answer.out) == ("late", "done\n")
    wait_until("the grandchild was left", lambda: none_left(length))


def test_an_endless_answer_is_cut_at_its_limit() -> None:
    answer = Program("yes", limit_bytes=100_000).run([], 30)
    assert answer.how == "flood"
    assert len(answer.out) <= 100_000


def test_stop_ends_what_runs_and_lets_nothing_more_start() -> None:
    length = f"602.{os.getpid()}"
    program = Program("sleep")
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(program.run([length], 600).how))
    thread.start()
    wait_until("the program never started", lambda: not none_left(length))
    program.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert program.run(["0"], 30).how == "stuck"
    wait_until("a child was left", lambda: none_left(length))


def test_a_child_that_cannot_die_blocks_the_next_instead_of_joining_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that sits in a driver ignores SIGKILL; here the kill itself is held back."""
    kills: list[int] = []
    program = Program("sh")
    monkeypatch.setattr("agent.child.os.killpg", lambda pid, _signal: kills.append(pid))
    mark = tmp_path / "started"
    assert program.run(["-c", f"echo >> {mark}; sleep 603"], 0.3).how == "late"
    assert program.run(["-c", f"echo >> {mark}"], 0.3).how == "stuck"
    assert mark.read_text() == "\n"
    monkeypatch.undo()
    os.killpg(kills[0], signal.SIGKILL)
    wait_until("it never came back", lambda: program.run(["-c", "echo ok"], 30).out == "ok\n")
