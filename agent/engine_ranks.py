"""Engine ranks: what each process of a model that is split over several says of its steps, its own work apart from its waiting."""

from __future__ import annotations

from collections.abc import Mapping

from agent.exposition import Exposition
from telemetry.catalogue import REACH
from telemetry.sample import Value

MOST = 1024
_STEPS = "pairscope_rank_steps_total"
_SECONDS = {"compute": "pairscope_rank_compute_seconds_total", "wait": "pairscope_rank_wait_seconds_total"}


class RankReadings:
    """The fields of the measurement `rank`, by rank. Means are over the steps since the last reading."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, float]] = {}

    def read(self, exposition: Exposition | None) -> dict[str, dict[str, Value]]:
        """Nothing where the model is whole, or its engine tells nothing of ranks."""
        now = {} if exposition is None else _counters(exposition)
        fields = {rank: self._fields(rank, counters) for rank, counters in now.items()}
        self._before = now
        return fields

    def _fields(self, rank: str, now: Mapping[str, float]) -> dict[str, Value]:
        fields: dict[str, Value] = {}
        if "steps" in now:
            fields["steps_total"] = int(now["steps"])
        fields |= {f"{name}_s": now[name] for name in _SECONDS if name in now}
        before = self._before.get(rank, {})
        steps = now.get("steps", 0.0) - before.get("steps", float("inf"))
        if steps <= 0:  # no step, none known before, or a restart
            return fields
        for name in _SECONDS:
            spent = now.get(name, -1.0) - before.get(name, float("inf"))
            if spent >= 0:
                fields[f"step_{name}_mean_s"] = spent / steps
        return fields


def _counters(exposition: Exposition) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, family in {"steps": _STEPS, **_SECONDS}.items():
        for labels, value in exposition.series.get(family, {}).items():
            rank = dict(labels).get("rank", "")
            known = rank in found or len(found) < MOST
            if rank.isascii() and rank.isdigit() and len(rank) <= 6 and known and 0 <= value <= REACH:
                found.setdefault(rank, {})[name] = value
    return found
