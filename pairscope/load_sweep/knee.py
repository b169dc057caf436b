"""The knee of a batch sweep: up to how many requests at once more of them pay, and which limits are met before.

Everything rests on the elasticity of tokens/s to batch, d ln(tokens/s) / d ln(batch): 1 where twice the batch yields twice the
tokens, 0 where it yields none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

CAPS = ("ttft", "memory", "power", "errors")
FINE_SHARE = 4
"""A recommendation is rounded down to a power of two of at most this part of it: 43 -> 40, 22 -> 20, 7 -> 7."""

APART = 2.0
"""Batches closer than this factor are compared only where no other is left: 5 % of noise over a tenth more of batch looks like 0.5."""

LEAST_SPREAD_PCT = 2.0
"""Engines that take their memory at the start show the same share at every batch: less than this apart says nothing."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one batch (requests in flight at once) gave. None is not known; `tokens_per_s` is above zero."""

    batch: int
    tokens_per_s: float
    ttft_p50_s: float | None = None  # also of a table that names no percentile
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    requests: int | None = None  # that ended well
    errors: int | None = None
    memory_pct: float | None = None  # of a table that names no kind
    kv_used_pct: float | None = None
    gpu_mem_used_pct: float | None = None
    power_w: float | None = None
    power_used_pct: float | None = None  # of the cards' limit
    preemptions: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """That which a limit is held against: the 95th percentile where it is known."""
        return self.ttft_p50_s if self.ttft_p95_s is None else self.ttft_p95_s


@dataclass(frozen=True, slots=True)
class Limits:
    """`elasticity`: below it more requests at once don't pay. Headroom is what stays free of memory and of power."""

    elasticity: float = 0.3
    ttft_s: float | None = None
    memory_headroom_pct: float = 15.0
    power_headroom_pct: float = 15.0


@dataclass(frozen=True, slots=True)
class Knee:
    """It lies in (above, upto]; `at_start`: the smallest batch is past it already, so it may lie below. `elasticity` is that over it."""

    above: int
    upto: int
    elasticity: float
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit is met at `batch`, drawn straight between the two points beside it; 0 when the smallest batch is past it."""

    what: str
    limit: float
    batch: float


@dataclass(frozen=True, slots=True)
class Judged:
    """`recommended` is None when no batch keeps the limits; `unknown` are the CAPS that nothing was known of."""

    points: tuple[Point, ...]
    limits: Limits
    knee: Knee | None
    caps: tuple[Cap, ...]
    recommended: int | None
    unknown: tuple[str, ...]

    @property
    def decided_by(self) -> str:
        """The cap that the recommendation stops at, `knee`, or `range` when everything that was tried is fine."""
        wanted = _wanted(self.points, self.knee)
        lowest = min(self.caps, key=lambda cap: cap.batch, default=None)
        if lowest is not None and lowest.batch < wanted:
            return lowest.what
        return "knee" if self.knee else "range"


def judge(points: Sequence[Point], limits: Limits) -> Judged:
    """Points in any order, of different batches, at least two. ValueError for fewer."""
    ordered = tuple(sorted(points, key=lambda point: point.batch))
    if len({point.batch for point in ordered}) < len(ordered) or len(ordered) < 2:
        raise ValueError("a sweep needs at least two points of different batches")
    knee = find_knee(ordered, limits.elasticity)
    caps, unknown = _caps(ordered, limits)
    highest = min([_wanted(ordered, knee), *(cap.batch for cap in caps)])
    recommended = _round(highest, ordered) if highest >= ordered[0].batch else None
    return Judged(ordered, limits, knee, caps, recommended, unknown)


def elasticity(before: Point, after: Point) -> float:
    return math.log(after.tokens_per_s / before.tokens_per_s) / math.log(after.batch / before.batch)


def find_knee(points: Sequence[Point], least: float) -> Knee | None:
    """Behind the smallest batch from which no larger one pays: one slow point is no knee when a later one makes up for it.

    None where more still pays at the end.
    """
    for place, point in enumerate(points[:-1]):
        later = points[place + 1 :]
        told = [far for far in later if far.batch >= APART * point.batch] or later
        if all(elasticity(point, far) < least for far in told):
            after = next(far for far in later if elasticity(point, far) < least)
            return Knee(point.batch, after.batch, elasticity(point, after), at_start=place == 0)
    return None


def at(points: Sequence[Point], batch: float, value: Callable[[Point], float | None]) -> float | None:
    """`value` at a batch, drawn straight between the points beside it; None outside of what is known."""
    known = [(point.batch, found) for point in points if (found := value(point)) is not None]
    for place, found in known:
        if place == batch:
            return found
    for (low, before), (high, after) in pairwise(known):
        if low < batch < high:
            return before + (after - before) * (batch - low) / (high - low)
    return None


def memory_of(points: Sequence[Point]) -> Callable[[Point], float | None] | None:
    """What tells how full memory is: the KV cache where it is known, else the cards' memory where it moves with the batch."""
    readings: tuple[Callable[[Point], float | None], ...] = (
        lambda point: point.memory_pct,
        lambda point: point.kv_used_pct,
    )
    for reading in readings:
        if any(reading(point) is not None for point in points):
            return reading
    cards = [point.gpu_mem_used_pct for point in points if point.gpu_mem_used_pct is not None]
    if cards and max(cards) - min(cards) >= LEAST_SPREAD_PCT:
        return lambda point: point.gpu_mem_used_pct
    return None


def _wanted(points: Sequence[Point], knee: Knee | None) -> float:
    """The batch that throughput alone asks for: the middle of the knee's bounds, its lower one where tokens/s fall behind it."""
    if knee is None:
        return points[-1].batch
    if knee.at_start or knee.elasticity <= 0:
        return knee.above
    return (knee.above + knee.upto) / 2


def _round(batch: float, points: Sequence[Point]) -> int:
    """Down to a round number, but not below a measured one."""
    step = 1 << max(0, math.floor(math.log2(batch / FINE_SHARE)))
    return max(int(batch // step) * step, *(point.batch for point in points if point.batch <= batch))


def _caps(points: Sequence[Point], limits: Limits) -> tuple[tuple[Cap, ...], tuple[str, ...]]:
    asked: list[tuple[str, Callable[[Point], float | None] | None, float]] = [
        ("memory", memory_of(points), 100 - limits.memory_headroom_pct),
        ("power", lambda point: point.power_used_pct, 100 - limits.power_headroom_pct),
        ("errors", lambda point: point.errors, 0.0),
    ]
    if limits.ttft_s is not None:
        asked.insert(0, ("ttft", lambda point: point.ttft_s, limits.ttft_s))
    caps, unknown = [], []
    for what, value, limit in asked:
        if value is None or all(value(point) is None for point in points):
            unknown.append(what)
        elif (batch := _met_at(points, value, limit)) is not None:
            whole = max((point.batch for point in points if point.batch <= batch), default=0)
            caps.append(Cap(what, limit, whole if what == "errors" else batch))  # errors are not drawn between points
    return tuple(caps), tuple(unknown)


def _met_at(points: Sequence[Point], value: Callable[[Point], float | None], limit: float) -> float | None:
    """Where `value` first rises above `limit`."""
    before: tuple[int, float] | None = None
    for point in points:
        found = value(point)
        if found is None:
            continue
        if found > limit:
            if before is None:
                return 0.0
            return before[0] + (point.batch - before[0]) * (limit - before[1]) / (found - before[1])
        before = (point.batch, found)
    return None
