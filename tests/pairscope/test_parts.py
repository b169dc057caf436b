"""Parts: a child that dies is started again, a child that won't stop is killed, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pairscope.parts import RESTART_DELAY_S, Part, PartSpec, hear, last_line, reap, start, stop_all
from tests.processes import has_ended

READY = """
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.sendto(b"STATUS=loading\\nREADY=1", "\\0" + os.environ["NOTIFY_SOCKET"][1:])
time.sleep(600)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Callable[[str], Part]]:
    made: list[Part] = []

    def make(code: str) -> Part:
        spec = PartSpec("part", [sys.executable, "-c", code], dict(os.environ), tmp_path / "part.log")
        made.append(Part(spec))
        return made[-1]

    yield make
    stop_all(made, grace_s=0.1)


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_ready_and_status_are_heard(part: Callable[[str], Part]) -> None:
    one = part(READY)
    start(one, 0.0)
    until(lambda: hear(one))
    assert one.ready
    assert one.status == "loading"


def test_a_killed_part_is_reported_with_its_signal_and_restarted_at_once(part: Callable[[str], Part]) -> None:
    one = part(READY)
    start(one, 0.0)
    until(lambda: hear(one))
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    codes: list[int | None] = []
    until(lambda: (codes.append(reap(one, 100.0)) or codes[-1]) is not None)
    assert codes[-1] == -signal.SIGKILL
    assert not one.ready
    assert one.restart_at_s == 100.0 + RESTART_DELAY_S[0]


def test_restarts_of_a_part_that_keeps_dying_come_later_and_later(part: Callable[[str], Part]) -> None:
    one = part("raise SystemExit(3)")
    waits = []
    for attempt in range(4):
        start(one, float(attempt))
        codes: list[int | None] = []
        until(lambda codes=codes, attempt=attempt: (codes.append(reap(one, float(attempt))) or codes[-1]) is not None)
        assert codes[-1] == 3
        assert one.restart_at_s is not None
        waits.append(one.restart_at_s - attempt)
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]


def test_a_part_that_ignores_sigterm_is_killed_and_named(part: Callable[[str], Part]) -> None:
    one = part(STUBBORN)
    start(one, 0.0)
    until(lambda: last_line(one.spec.log) == "up")
    pid = one.pid
    assert pid is not None
    assert stop_all([one], grace_s=0.2) == ["part"]
    assert has_ended(pid)


def test_what_a_part_started_does_not_outlive_it(part: Callable[[str], Part]) -> None:
    one = part(GRANDCHILD)
    start(one, 0.0)
    until(lambda: last_line(one.spec.log).isdigit())
    grandchild = int(last_line(one.spec.log))
    assert not has_ended(grandchild)
    stop_all([one], grace_s=2.0)
    until(lambda: has_ended(grandchild))
