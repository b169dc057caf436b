"""Minutes of the whole fleet as they come together while its nodes are rolled up, so that no cell has to be read again for them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from telemetry.store.rollup import Cell, Gauge

_MINUTES = 1000

_Sum = tuple[int, float, float, float]  # values, their sum, the least and the largest
Sums = dict[int, dict[str, dict[str, _Sum]]]
"""By the start of a minute, measurement and field."""


def add(sums: Sums, start_ns: int, measurement: str, cells: Mapping[str, Cell], names: Iterable[str]) -> None:
    """The gauges of one series in one minute, as far as they are among `names`."""
    of_minute = sums.setdefault(start_ns, {}).setdefault(measurement, {})
    for name in names:
        cell = cells.get(name)
        if isinstance(cell, Gauge):
            n, mean, low, high = cell
            _join(of_minute, name, (n, mean * n, low, high))


def _join(sums: dict[str, _Sum], name: str, more: _Sum) -> None:
    if name in sums:
        n, total, low, high = sums[name]
        more = n + more[0], total + more[1], min(low, more[2]), max(high, more[3])
    sums[name] = more


@dataclass(slots=True)
class _Minute:
    marks: dict[str, int] = field(default_factory=dict)  # of each node that is in it
    sums: dict[str, dict[str, _Sum]] = field(default_factory=dict)


class FleetMinutes:
    """What this process knows of minutes whose fleet is not rolled up yet."""

    def __init__(self) -> None:
        self._minutes: dict[int, _Minute] = {}
        self._lock = threading.Lock()

    def put(self, marks: Iterable[tuple[str, int, int]], sums: Sums, without: Collection[int]) -> None:
        """(node, start_ns, mark) of what was rolled up, with the sums of all of it; some minutes are not as the sums say."""
        with self._lock:
            for node, start_ns, at in marks:
                minute = self._minutes.setdefault(start_ns, _Minute())
                again = node in minute.marks  # and its old share can't be taken out
                minute.marks[node] = -1 if again or start_ns in without else at
            for start_ns, of_minute in sums.items():
                for measurement, by_name in of_minute.items():
                    known = self._minutes[start_ns].sums.setdefault(measurement, {})
                    for name, more in by_name.items():
                        _join(known, name, more)
            for start_ns in sorted(self._minutes)[: max(0, len(self._minutes) - _MINUTES)]:
                del self._minutes[start_ns]

    def holds(self, start_ns: int) -> bool:
        return start_ns in self._minutes

    def take(self, start_ns: int, marks: Mapping[str, int]) -> dict[str, dict[str, Gauge]] | None:
        """The gauges of each measurement, when they are of just these marks of all nodes; None else. Either way they are forgotten."""
        with self._lock:
            minute = self._minutes.pop(start_ns, None)
        if minute is None or minute.marks != marks:
            return None
        return {
            measurement: {
                name: Gauge(n, low if low == high else total / n, low, high)
                for name, (n, total, low, high) in by_name.items()
            }
            for measurement, by_name in minute.sums.items()
            if by_name
        }
