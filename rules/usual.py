"""What is usual for each field of a pair: its healthy readings over the last half hour and more, robustly."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence

KEPT = 120
"""Healthy readings kept for each field, one every `EVERY_S`: an hour."""

EVERY_S = 30.0
READY = 2


class Habit:
    """The healthy readings of one field, with their median and range."""

    __slots__ = ("_next", "_readings", "known")

    def __init__(self) -> None:
        self._readings = array("f")  # seven digits are what a reading has
        self._next = 0
        self.known: tuple[float, float, float] | None = None
        """(10th percentile, median, 90th percentile) once it was worked out, until the next reading."""

    def add(self, reading: float) -> None:
        if len(self._readings) < KEPT:
            self._readings.append(reading)
        else:
            self._readings[self._next] = reading
            self._next = (self._next + 1) % KEPT
        self.known = None

    @property
    def ready(self) -> bool:
        return len(self._readings) >= READY

    def range(self) -> tuple[float, float, float]:
        """(10th percentile, median, 90th percentile). ValueError when nothing was learned."""
        if self.known is None:
            ordered = sorted(self._readings)
            if not ordered:
                raise ValueError("nothing was learned yet")
            last = len(ordered) - 1
            middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
            self.known = (ordered[int(0.1 * last)], middle, ordered[math.ceil(0.9 * last)])
        return self.known

    def state(self) -> list[float]:
        return [float(f"{reading:.6g}") for reading in (*self._readings[self._next :], *self._readings[: self._next])]


class Usual:
    """lane -> source -> habit. One of these belongs to each pair."""

    def __init__(self) -> None:
        self._habits: dict[str, dict[str, Habit]] = {}

    def learn(self, readings: Mapping[tuple[str, str], float]) -> None:
        for (lane, source), reading in readings.items():
            self._habit(lane, source).add(reading)

    def _habit(self, lane: str, source: str) -> Habit:
        sources = self._habits.setdefault(lane, {})
        if source not in sources:
            sources[source] = Habit()
        return sources[source]

    def range(self, lane: str, source: str) -> tuple[float, float, float] | None:
        """(low, median, high) of the healthy readings; None while there are too few."""
        sources = self._habits.get(lane)
        habit = sources.get(source) if sources is not None else None
        if habit is None:
            return None
        return habit.known if habit.known is not None else habit.range() if habit.ready else None

    def medians(self, lane: str) -> list[float]:
        """The median of every source of a lane."""
        return [habit.range()[1] for habit in self._habits.get(lane, {}).values() if habit.ready]

    def state(self) -> dict[str, list[float]]:
        return {
            f"{lane}@{source}": habit.state()
            for lane, sources in self._habits.items()
            for source, habit in sources.items()
        }

    @staticmethod
    def of(state: Mapping[str, object]) -> Usual:
        """ValueError for anything that `state` could not have made."""
        usual = Usual()
        for name, readings in state.items():
            lane, at, source = name.partition("@")
            if not at or not isinstance(readings, list):
                raise ValueError(f"usual values of {name!r} can't be read")
            habit = usual._habit(lane, source)
            for reading in readings[-KEPT:]:
                if isinstance(reading, bool) or not isinstance(reading, int | float) or not math.isfinite(reading):
                    raise ValueError(f"usual value of {name!r} can't be {reading!r}")
                habit.add(float(reading))
        return usual


class PeerHabits:
    """What is usual among pairs of one kin: lane -> (lowest, median, highest) of their medians, worked out once a lane."""

    def __init__(self, peers: Sequence[Usual] = ()) -> None:
        self._peers = peers
        self._known: dict[str, tuple[float, float, float] | None] = {}

    def range(self, lane: str) -> tuple[float, float, float] | None:
        if lane not in self._known:
            medians = [median for peer in self._peers for median in peer.medians(lane)]
            self._known[lane] = (min(medians), statistics.median(medians), max(medians)) if medians else None
        return self._known[lane]
