"""Throttle durations as DCGM's *_VIOLATION counters tell them, and the unit in which they are: nanoseconds or microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NANOSECONDS, MICROSECONDS = 1e-9, 1e-6
TOLERANCE = 1.05
SLACK_S = 60.0
"""An exporter's reading may be older than its answer by one of its intervals."""
STREAK = 3
"""So many readings in a row with a reason's bit set make a time in which the counter ran throughout."""
SHORTEST_STREAK_S = 10.0

REASONS: Mapping[str, int] = {
    "throttle_sw_power_s": 0x4,
    "throttle_sync_boost_s": 0x10,
    "throttle_thermal_s": 0x20 | 0x40,
}


@dataclass(slots=True)
class _Counter:
    changed_s: float
    value: float
    streak: int = 0
    streak_s: float = 0.0  # when it began
    streak_value: float = 0.0


class ViolationUnit:
    """Seconds of a counter whose unit must be found out. Exporters' own words for it have been wrong in both directions.

    No counter runs faster than the clock: what is more than the time that passed when read as microseconds is nanoseconds. It is
    microseconds where a reason stood in the mask throughout and the counter ran with the clock as microseconds. Until one of the
    two is shown only a counter at zero has a value. The unit is one for all GPUs of an exporter.
    """

    def __init__(self, uptime_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        self.scale: float | None = None
        self._uptime_s = uptime_s
        self._counters: dict[tuple[str, str], _Counter] = {}

    def seconds(self, gpu: str, values: Mapping[str, float], reasons: int | None, now_s: float) -> dict[str, float]:
        """The durations of one new reading, by field; those left out whose unit is unknown, or that can't be true."""
        possible = {name: self._weigh((gpu, name), value, reasons, now_s) for name, value in values.items()}
        found: dict[str, float] = {}
        for name, value in values.items():
            if value == 0:
                found[name] = 0.0
            elif self.scale is not None and possible[name]:
                found[name] = value * self.scale
        return found

    def _weigh(self, key: tuple[str, str], value: float, reasons: int | None, now_s: float) -> bool:
        """Take in one counter; whether its growth is possible in the present unit."""
        known = self._counters.get(key)
        if value * MICROSECONDS > (self._uptime_s() + SLACK_S) * TOLERANCE:
            self.scale = NANOSECONDS  # more microseconds than since this host started
        if known is None or value < known.value:
            self._counters[key] = _Counter(now_s, value)
            return True
        grown, most_s = value - known.value, (now_s - known.changed_s + SLACK_S) * TOLERANCE
        if grown * MICROSECONDS > most_s:
            self.scale = NANOSECONDS
        self._follow(known, value, reasons is not None and bool(reasons & REASONS[key[1]]), now_s)
        if grown > 0:
            known.changed_s, known.value = now_s, value
        return self.scale is None or grown * self.scale <= most_s

    def _follow(self, counter: _Counter, value: float, is_set: bool, now_s: float) -> None:
        if not is_set:
            counter.streak = 0
            return
        if counter.streak == 0:
            counter.streak_s, counter.streak_value = now_s, value
        counter.streak += 1
        span_s = now_s - counter.streak_s
        if self.scale is None and counter.streak > STREAK and span_s >= SHORTEST_STREAK_S:
            share = (value - counter.streak_value) * MICROSECONDS / span_s
            if 0.5 <= share <= 2.0:
                self.scale = MICROSECONDS
