"""Incarnation: notices that another process answers at the same address, though no scrape failed between."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

from agent.collectors.dialects.dialect import START_FAMILIES, UPTIME_FAMILIES
from agent.exposition import Exposition

SAME_START_S = 1.0
"""Start times closer than this are one start, told twice with rounding."""

UPTIME_MARGIN_S = 3.0

FELL = 2
"""So many counters that are smaller than before are a restart where nothing tells the start; one alone may be a defect."""


class Turn(Enum):
    """Who answers, compared with the last time."""

    SAME = "same"
    NEW = "new"  # another process than ever before: a restart
    OTHER = "other"  # one that has answered before: several share the address, and each tells its own numbers only


class Incarnation:
    """Judges by start time, uptime and restart token, and, where none of them is told, by counters that fell together."""

    def __init__(self) -> None:
        self._starts: deque[float | str] = deque(maxlen=64)  # newest last; as many servers may share an address
        self._uptime: tuple[float, float] | None = None  # uptime as told, monotonic s at which it was told
        self._counters: dict[str, float] = {}

    def turn(
        self,
        exposition: Exposition,
        monotonic_s: float,
        token: str = "",
        counters: Mapping[str, float] | None = None,
    ) -> Turn:
        """`token` changes with the process and means nothing else; `counters` are totals by field."""
        last, self._counters = self._counters, dict(counters or {})
        turn = self._by_start(token or start_time_s(exposition))
        if self._uptime_broke(_uptime_s(exposition), monotonic_s) and turn is Turn.SAME:
            turn = Turn.NEW
        if turn is Turn.SAME and not token and start_time_s(exposition) is None:
            fell = sum(1 for name, value in self._counters.items() if value < last.get(name, value))
            turn = Turn.NEW if fell >= FELL else turn
        return turn

    def _by_start(self, start: float | str | None) -> Turn:
        if start is None:
            return Turn.SAME
        known = next((known for known in self._starts if _same(known, start)), None)
        newest = self._starts[-1] if self._starts else None
        if known is None:
            self._starts.append(start)
            return Turn.SAME if newest is None else Turn.NEW
        if known == newest:
            return Turn.SAME
        self._starts.remove(known)
        self._starts.append(known)
        return Turn.OTHER

    def _uptime_broke(self, uptime_s: float | None, monotonic_s: float) -> bool:
        last, self._uptime = self._uptime, None if uptime_s is None else (uptime_s, monotonic_s)
        if uptime_s is None or last is None:
            return False
        # an answer may be late by the deadline, hence the margin where uptime grew, but by too little
        return uptime_s < last[0] or uptime_s - last[0] < monotonic_s - last[1] - UPTIME_MARGIN_S


def _same(one: float | str, other: float | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return abs(one - other) <= SAME_START_S


def _uptime_s(exposition: Exposition) -> float | None:
    return next((value for name in UPTIME_FAMILIES if (value := exposition.value(name)) is not None), None)


def start_time_s(exposition: Exposition) -> float | None:
    """When the engine's process started (wall time), from its start time or from the oldest `_created` of its families."""
    for name in START_FAMILIES:
        value = exposition.value(name)
        if value is not None:
            return value
    created = [
        min(family.values())
        for name, family in exposition.series.items()
        if name.endswith("_created") and not name.startswith(("python_", "http_")) and family
    ]
    return min(created, default=None)
