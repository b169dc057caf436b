"""What is usual for each field of a pair: its healthy readings over the last half hour and more, robustly."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

KEPT = 120
"""Healthy readings kept for each field, one every `EVERY_S`: an hour."""

EVERY_S = 30.0
READY = 2


class Habit:
    """The healthy readings of one field, with their median and range."""

    __slots__ = ("_next", "_range", "_readings")

    def __init__(self) -> None:
        self._readings = array("d")
        self._next = 0
        self._range: tuple[float, float, float] | None = None

    def add(self, reading: float) -> None:
        if len(self._readings) < KEPT:
            self._readings.append(reading)
        else:
            self._readings[self._next] = reading
            self._next = (self._next + 1) % KEPT
        self._range = None

    @property
    def ready(self) -> bool:
        return len(self._readings) >= READY

    def range(self) -> tuple[float, float, float]:
        """(10th percentile, median, 90th percentile). ValueError when nothing was learned."""
        if self._range is None:
            ordered = sorted(self._readings)
            if not ordered:
                raise ValueError("nothing was learned yet")
            last = len(ordered) - 1
            middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
            self._range = (ordered[int(0.1 * last)], middle, ordered[math.ceil(0.9 * last)])
        return self._range

    def state(self) -> list[float]:
        return [float(f"{reading:.6g}") for reading in (*self._readings[self._next :], *self._readings[: self._next])]


class Usual:
    """(lane, source) -> habit. One of these belongs to each pair."""

    def __init__(self) -> None:
        self._habits: dict[tuple[str, str], Habit] = {}

    def learn(self, readings: Mapping[tuple[str, str], float]) -> None:
        for key, reading in readings.items():
            habit = self._habits.get(key)
            if habit is None:
                habit = self._habits[key] = Habit()
            habit.add(reading)

    def range(self, lane: str, source: str) -> tuple[float, float, float] | None:
        """(low, median, high) of the healthy readings; None while there are too few."""
        habit = self._habits.get((lane, source))
        return habit.range() if habit is not None and habit.ready else None

    def medians(self, lane: str) -> list[float]:
        """The median of every source of a lane."""
        return [habit.range()[1] for (name, _), habit in self._habits.items() if name == lane and habit.ready]

    def state(self) -> dict[str, list[float]]:
        return {f"{lane}@{source}": habit.state() for (lane, source), habit in self._habits.items()}

    @staticmethod
    def of(state: Mapping[str, object]) -> Usual:
        """ValueError for anything that `state` could not have made."""
        usual = Usual()
        for name, readings in state.items():
            lane, at, source = name.partition("@")
            if not at or not isinstance(readings, list):
                raise ValueError(f"usual values of {name!r} can't be read")
            habit = usual._habits[lane, source] = Habit()
            for reading in readings[-KEPT:]:
                if isinstance(reading, bool) or not isinstance(reading, int | float) or not math.isfinite(reading):
                    raise ValueError(f"usual value of {name!r} can't be {reading!r}")
                habit.add(float(reading))
        return usual
