"""The newest sample of every series, also of those that have long been silent, without asking for a whole day at every look."""

from __future__ import annotations

from collections.abc import Sequence

from dashboard.selection import SECOND_NS
from telemetry.sample import Sample
from telemetry.store import Store

WHOLE_EVERY_NS = 60 * SECOND_NS
RECENT_NS = 120 * SECOND_NS
"""Longer than `WHOLE_EVERY_NS`: what was written since the whole was read is in here, unless it came late by a minute."""

_Series = tuple[tuple[str, str], ...]


class Heard:
    """By one caller at a time. What has fallen silent is read once a minute, what speaks each time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._whole: dict[str, tuple[int, dict[_Series, Sample]]] = {}

    def latest(
        self, measurement: str, *, now_ns: int, since_ns: int, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        """As `Store.latest`, with the same `fields` for a measurement each time."""
        recent_ns = now_ns - RECENT_NS
        at_ns, whole = self._whole.get(measurement, (0, {}))
        if not 0 <= now_ns - at_ns < WHOLE_EVERY_NS:
            whole = _by_series(self._store.latest(measurement, since_ns=since_ns, fields=fields))
            self._whole[measurement] = now_ns, whole
            return list(whole.values())
        recent = _by_series(self._store.latest(measurement, since_ns=max(since_ns, recent_ns), fields=fields))
        found = {key: sample for key, sample in whole.items() if sample.time_ns >= since_ns} | recent
        return list(found.values())


def _by_series(samples: Sequence[Sample]) -> dict[_Series, Sample]:
    return {tuple(sorted(sample.tags.items())): sample for sample in samples}
