"""Histograms: what happened within a window, from cumulative buckets at its two ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.exposition import Exposition, Labels


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts at ascending upper bounds; the last bound is infinity and its count is the number of observations."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float  # sum of the observed values

    @property
    def count(self) -> float:
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """Exact, unlike any quantile."""
        return self.total / self.count if self.count > 0 else None

    def quantile(self, share: float) -> float | None:
        """Linear within its bucket, as Prometheus' histogram_quantile; so it is never finer than the bucket.

        In the first bucket the lower end is taken as 0; beyond the last finite bound that bound is the answer, which is then
        too small. None where fewer than `needed(share)` observations say too little about that quantile.
        """
        if self.count < needed(share):
            return None
        rank = share * self.count
        position = next(index for index, count in enumerate(self.counts) if count >= rank)
        if math.isinf(self.bounds[position]):
            return self.bounds[position - 1] if position else None
        lower = self.bounds[position - 1] if position else min(0.0, self.bounds[0])
        below = self.counts[position - 1] if position else 0.0
        within = self.counts[position] - below
        return lower + (self.bounds[position] - lower) * ((rank - below) / within if within > 0 else 1.0)


def needed(share: float) -> int:
    """How many observations a quantile needs: with fewer than 1 / (1 - share) it is only the maximum under another name."""
    return max(5, math.ceil(1 / (1 - share) - 1e-9))


def gather(exposition: Exposition, name: str) -> tuple[frozenset[Labels], Histogram] | None:
    """The family `name` summed over its label sets (ranks, models), and which those are; None where it is absent or broken.

    Label sets with different bounds are added at the bounds that all of them share, where cumulative counts are exact.
    """
    buckets: dict[Labels, dict[float, float]] = {}
    for labels, count in exposition.series.get(f"{name}_bucket", {}).items():
        bound = _bound(labels)
        if bound is not None:
            buckets.setdefault(tuple(pair for pair in labels if pair[0] != "le"), {})[bound] = count
    sums = exposition.series.get(f"{name}_sum", {})
    owners = frozenset(labels for labels, own in buckets.items() if math.inf in own and labels in sums)
    if not owners:
        return None
    shared = sorted(set.intersection(*(set(buckets[labels]) for labels in owners)))
    counts = tuple(sum(buckets[labels][bound] for labels in owners) for bound in shared)
    return owners, Histogram(tuple(shared), counts, sum(sums[labels] for labels in owners))


class Window:
    """The last `span_s` seconds of one histogram."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._history: deque[tuple[float, frozenset[Labels], Histogram]] = deque()

    def forget(self) -> None:
        self._history.clear()

    def add(self, owners: frozenset[Labels], histogram: Histogram, monotonic_s: float) -> None:
        """The newest reading. A restart, a change of label sets or of bounds starts the window anew."""
        if self._history:
            _, last_owners, last = self._history[-1]
            if last_owners != owners or last.bounds != histogram.bounds or histogram.count < last.count:
                self.forget()
        history = self._history
        history.append((monotonic_s, owners, histogram))
        while len(history) > 2 and monotonic_s - history[1][0] >= self._span_s:
            history.popleft()

    def recent(self, span_s: float | None = None) -> Histogram | None:
        """What was observed within the last `span_s` (default: the whole window, or what there is of it)."""
        if len(self._history) < 2:
            return None
        newest_s, _, newest = self._history[-1]
        oldest = self._history[0][2]
        if span_s is not None:
            for then_s, _, histogram in self._history:
                if newest_s - then_s < span_s:
                    break
                oldest = histogram
        counts = _monotone([now - then for now, then in zip(newest.counts, oldest.counts, strict=True)])
        total = newest.total - oldest.total
        return None if counts is None or total < 0 else Histogram(newest.bounds, counts, total)


def _bound(labels: Labels) -> float | None:
    text: Mapping[str, str] = dict(labels)
    try:
        bound = float(text["le"])
    except (KeyError, ValueError):
        return None
    return None if math.isnan(bound) else bound


def _monotone(counts: Sequence[float]) -> tuple[float, ...] | None:
    """Cumulative counts that never fall. One observation of disorder (buckets read while one was being made) is mended; more
    than that means that the two ends don't belong together: None.
    """
    mended: list[float] = []
    highest = 0.0
    for count in counts:
        if count < highest - 1:
            return None
        highest = max(highest, count)
        mended.append(highest)
    return tuple(mended)
