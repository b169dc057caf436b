"""Counters: rates on the monotonic clock from numbers that grow, restart and vanish. Never negative, never across a restart."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping

KEEP_S = 600.0
"""The longest window of a rate."""

QUANTA = 20
"""A counter that is printed with few digits moves in jumps; over fewer than this many a rate would be mostly rounding."""


class Rate:
    """The rate of a counter that may consist of several series (one per label set, core or device).

    Each series is differenced by itself and only where both ends have it, so that a series that joins or leaves makes no
    jump. With `window_s` the rate is the mean over about that time, for counters that move only now and then. With
    `significant_digits` the window grows until the growth is worth QUANTA of the last digit, or to KEEP_S.
    """

    def __init__(self, window_s: float = 0.0, significant_digits: int = 0) -> None:
        self._window_s = window_s
        self._digits = significant_digits
        self._history: deque[tuple[float, dict[Hashable, float]]] = deque()

    def forget(self) -> None:
        """The source restarted or went away: what comes next is a first reading."""
        self._history.clear()

    def per_second(
        self, series: Mapping[Hashable, float], monotonic_s: float, window_s: float | None = None
    ) -> float | None:
        """Growth a second over the window (or since the last reading); None at first, after a reset, in no time, and until the
        window is filled. `window_s` makes this window another one than usual, of at most KEEP_S.
        """
        current = dict(series)
        if not current:
            self.forget()
            return None
        if self._history and _shrank(self._history[-1][1], current):
            self.forget()
        self._history.append((monotonic_s, current))
        asked_s = min(KEEP_S, self._window_s if window_s is None else window_s)
        self._trim(monotonic_s, asked_s)
        for then_s, before in reversed(self._history):
            passed_s = monotonic_s - then_s
            if passed_s <= 0 or passed_s < asked_s:
                continue
            common = before.keys() & current.keys()
            if not common or _shrank(before, current):
                return None  # a series that left came back smaller
            grown = sum(current[key] - before[key] for key in common)
            if passed_s >= KEEP_S or grown >= self._least(current):
                return grown / passed_s
        return None

    def _trim(self, monotonic_s: float, asked_s: float) -> None:
        history = self._history
        keep_s = KEEP_S if self._window_s > 0 or self._digits else asked_s
        while len(history) > 2 and monotonic_s - history[1][0] >= keep_s:
            history.popleft()

    def _least(self, current: Mapping[Hashable, float]) -> float:
        """The growth that is needed; 0 as long as the numbers are exact."""
        return QUANTA * max((_quantum(value, self._digits) for value in current.values()), default=0.0)


def _quantum(value: float, digits: int) -> float:
    """What one of the last digit is worth, where whole numbers don't fit into so many digits."""
    if not digits or value < 10.0**digits:
        return 0.0
    return float(10.0 ** (math.floor(math.log10(value)) - digits + 1))


def _shrank(before: Mapping[Hashable, float], current: Mapping[Hashable, float]) -> bool:
    return any(current[key] < value for key, value in before.items() if key in current)
