"""Process: whenever a signal comes, the daemon that it means hears of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOLD = """
import os, signal, sys
from telemetry.process import stop_event

stopping = stop_event()
with stopping._cond:  # as the main thread holds it when it is about to wait, or has just woken
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
stopping.wait()
print("ended")
"""


@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGINT", "SIGTERM", "SIGTERM"]])
def test_a_signal_is_heard_also_while_the_event_that_it_sets_is_being_waited_for(signals: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TOLD, *signals], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


FAILS_ONCE = """
import os, signal, threading
from telemetry.process import on_signals

first, second = threading.Event(), threading.Event()

def act():
    if not first.is_set():
        first.set()
        raise RuntimeError("no configuration")
    second.set()

on_signals(act, signal.SIGHUP)
os.kill(os.getpid(), signal.SIGHUP)
first.wait()
os.kill(os.getpid(), signal.SIGHUP)
print("heard" if second.wait(60) else "deaf")
"""


def test_a_signal_is_heard_after_one_that_failed() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS_ONCE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "heard\n"), ended.stderr
    assert "SIGHUP" in ended.stderr and "no configuration" in ended.stderr
