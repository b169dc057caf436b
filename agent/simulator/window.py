"""The values of the last minute, kept sorted, so that a quantile costs nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW_S = 60.0


class Window:
    """Values with the time they were seen; those older than `seconds` drop out at `expire`."""

    __slots__ = ("_arrived", "_seconds", "_sorted", "total")

    def __init__(self, seconds: float = WINDOW_S) -> None:
        self._seconds = seconds
        self._arrived: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []
        self.total = 0.0

    def add(self, at_s: float, value: float) -> None:
        self._arrived.append((at_s, value))
        insort(self._sorted, value)
        self.total += value

    def expire(self, now_s: float) -> None:
        arrived, ordered = self._arrived, self._sorted
        oldest = now_s - self._seconds
        while arrived and arrived[0][0] < oldest:
            value = arrived.popleft()[1]
            del ordered[bisect_left(ordered, value)]
            self.total -= value
        if not arrived:
            self.total = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def mean(self) -> float:
        """Mean of the values; ZeroDivisionError when there are none."""
        return self.total / len(self._sorted)

    def quantile(self, share: float) -> float:
        """The value at `share` (0..1); IndexError when there are none."""
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]

    def clear(self) -> None:
        self._arrived.clear()
        self._sorted.clear()
        self.total = 0.0
