"""The straggler: of an engine whose model is split, the rank that computes longer in every step, and that the others wait for."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rules.evidence import Evidence, RankEvidence
from rules.finding import line
from rules.thresholds import Bar
from rules.verdict import Line


@dataclass(frozen=True, slots=True)
class Straggler:
    """Seconds of a step. `gpu` is empty where it is not known which the rank's is."""

    rank: RankEvidence
    compute_s: float
    others_s: float  # median of what the others compute
    wait_s: float
    others_wait_s: float
    compared: bool  # what is usual for each of them is known, so that an old difference is none

    @property
    def line(self) -> Line:
        return line(
            "rank_slow" if self.rank.gpu else "rank_slow_anywhere",
            "rank.step_compute_mean_s",
            rank=self.rank.rank,
            gpu=self.rank.gpu,
            compute_ms=1000 * self.compute_s,
            others_ms=1000 * self.others_s,
            wait_ms=1000 * self.wait_s,
            others_wait_ms=1000 * self.others_wait_s,
        )


def told_ranks(evidence: Evidence) -> list[RankEvidence]:
    """Those of which both is read; one that makes no step tells neither."""
    return [rank for rank in evidence.ranks if rank.compute is not None and rank.wait is not None]


def straggler_of(evidence: Evidence, bar: Bar) -> Straggler | None:
    """None where no rank is slow, and where fewer than two are seen: one alone is neither slow nor quick.

    A rank that computes longer without the others waiting for it has more steps or another clock, and is none.
    """
    told = [
        (rank, rank.compute, rank.wait) for rank in evidence.ranks if rank.compute is not None and rank.wait is not None
    ]
    if len(told) < 2:
        return None
    slow, compute, wait = max(told, key=lambda entry: entry[1].value)
    others = [entry for entry in told if entry[0] is not slow]
    others_s = statistics.median(seen.value for _, seen, _ in others)
    others_wait_s = statistics.median(seen.value for _, _, seen in others)
    lag_s = compute.value - others_s
    if others_s <= 0 or not bar.reached("scheduling.rank_ratio", compute.value / others_s):
        return None
    if not bar.reached("scheduling.rank_waited", (others_wait_s - wait.value) / lag_s):
        return None
    usual = [seen.usual for _, seen, _ in others if seen.usual]
    compared = bool(compute.usual) and len(usual) == len(others)
    if compared and compute.usual:
        before = compute.usual / statistics.median(usual)
        if not bar.reached("scheduling.rank_grown", compute.value / others_s / before):
            return None
    return Straggler(slow, compute.value, others_s, wait.value, others_wait_s, compared)
