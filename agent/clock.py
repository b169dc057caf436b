"""Clocks: monotonic time paces and divides, wall time dates; a step of the wall clock is noticed, never computed with."""

from __future__ import annotations

import threading
import time
from typing import Protocol

READ_SPREAD_S = 0.01
STEP_THRESHOLD_S = 0.25
"""A change of wall minus monotonic between two ticks beyond this is a step. NTP slews by at most 0.0005 s a second."""


class Clock(Protocol):
    """What the agent asks of time; tests pass their own."""

    def wall_ns(self) -> int: ...

    def monotonic_s(self) -> float: ...

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        """Sleep for `seconds` or until `stop` is set; whether it is set."""


class SystemClock:
    """The machine's clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        return stop.wait(seconds)


def read_together(clock: Clock) -> tuple[int, float]:
    """Wall ns and monotonic s of one moment. Read again when the process was held up between the two readings."""
    for _ in range(3):
        before = clock.monotonic_s()
        wall_ns = clock.wall_ns()
        after = clock.monotonic_s()
        if after - before < READ_SPREAD_S:
            break
    return wall_ns, (before + after) / 2


class StepDetector:
    """Notices a step of the wall clock by comparing its advance with the monotonic clock's."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def step_s(self, wall_ns: int, monotonic_s: float) -> float | None:
        """By how much the wall clock stepped since the last call (negative: back); None when it did not, or at first."""
        last, self._last = self._last, (wall_ns, monotonic_s)
        if last is None:
            return None
        step = (wall_ns - last[0]) / 1e9 - (monotonic_s - last[1])
        return step if abs(step) > STEP_THRESHOLD_S else None
