"""A clock that moves only when told to, or waited on."""

from __future__ import annotations

import threading


class FakeClock:
    """`wait` advances both clocks at once. `on_wait` runs at each wait and may step `wall_s` or set the stop event."""

    def __init__(self, wall_s: float = 1_796_000_000.0, monotonic_s: float = 500.0) -> None:
        self.wall_s = wall_s
        self.now_s = monotonic_s
        self.waits: list[float] = []

    def wall_ns(self) -> int:
        return round(self.wall_s * 1e9)

    def monotonic_s(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.wall_s += seconds
        self.now_s += seconds

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        self.advance(seconds)
        return stop.is_set()
