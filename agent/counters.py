"""Counters: rates on the monotonic clock from numbers that grow, restart and vanish. Never negative, never across a restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping


class Rate:
    """The rate of a counter that may consist of several series (one per label set, core or device).

    Each series is differenced by itself and only where both ends have it, so that a series that joins or leaves makes no
    jump. With `window_s` the rate is the mean over about that time, for counters that move only now and then.
    """

    def __init__(self, window_s: float = 0.0) -> None:
        self._window_s = window_s
        self._history: deque[tuple[float, dict[Hashable, float]]] = deque()

    def forget(self) -> None:
        """The source restarted or went away: what comes next is a first reading."""
        self._history.clear()

    def per_second(self, series: Mapping[Hashable, float], monotonic_s: float) -> float | None:
        """Growth a second since the reading `window_s` ago (or the last one); None at first, after a reset, or in no time."""
        current = dict(series)
        if not current:
            self.forget()
            return None
        if self._history and _shrank(self._history[-1][1], current):
            self.forget()
        history = self._history
        history.append((monotonic_s, current))
        while len(history) > 2 and monotonic_s - history[1][0] >= self._window_s:
            history.popleft()
        then_s, before = history[0]
        if monotonic_s <= then_s or monotonic_s - then_s < self._window_s:
            return None
        common = before.keys() & current.keys()
        if not common:
            return None
        return sum(current[key] - before[key] for key in common) / (monotonic_s - then_s)


def _shrank(before: Mapping[Hashable, float], current: Mapping[Hashable, float]) -> bool:
    return any(current[key] < value for key, value in before.items() if key in current)
