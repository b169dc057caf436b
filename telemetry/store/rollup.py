"""Rollups: what is kept of a field over a minute or a quarter of an hour, so that longer buckets come out as if from raw samples.

A gauge keeps its count, mean, least and largest; a counter its first and last value with their times and how much it grew between
them, so that a rate goes on across cells and over resets; a state its largest, a mask the OR of all, a text its last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from operator import gt, or_
from typing import NamedTuple

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.store.buckets import Buckets
from telemetry.store.interface import Spread

MINUTE_NS = 60 * 10**9
QUARTER_NS = 900 * 10**9
LEVELS_NS = (MINUTE_NS, QUARTER_NS)

SINGLE = frozenset({"event", "alert"})
"""Measurements of single happenings, which are kept as they are and not drawn together."""

_ANSWERS: Mapping[Kind, frozenset[str]] = {
    Kind.GAUGE: frozenset({"mean", "min", "max"}),
    Kind.COUNTER: frozenset({"last", "rate"}),
    Kind.STATE: frozenset({"max"}),
    Kind.MASK: frozenset({"or"}),
    Kind.TEXT: frozenset(),
}


class Gauge(NamedTuple):
    n: int  # values
    mean: float
    low: float
    high: float


class Counter(NamedTuple):
    """`grown` is the growth from the first value to the last; what follows a reset was counted from zero."""

    first_ns: int
    first: float
    grown: float
    last_ns: int
    last: float


Cell = Gauge | Counter | int | str
"""One field over one minute or quarter; of a state, mask or text it is the value itself."""


def level_ns(step_ns: int) -> int:
    """The longest cells that buckets of `step_ns` can be drawn from; 0 when only raw samples will do."""
    return next((level for level in reversed(LEVELS_NS) if step_ns % level == 0), 0)


def answers(measurement: str, field: str, how: str) -> bool:
    """Whether cells of the field hold what aggregate `how` needs; else only raw samples do."""
    return measurement not in SINGLE and how in _ANSWERS[catalogue.field(measurement, field).kind]


def fleet_fields(measurement: str) -> list[str]:
    """The fields that are also kept over all series of a measurement together: its gauges."""
    if measurement in SINGLE:
        return []
    return [field.name for field in catalogue.MEASUREMENTS[measurement].fields.values() if field.kind is Kind.GAUGE]


def reduced(kind: Kind, times_ns: Sequence[int], values: Sequence[float | int | str]) -> Cell:
    """The cell of values (at least one) in time order."""
    if kind is Kind.TEXT:
        return str(values[-1])
    numbers: Sequence[float] = values  # type: ignore[assignment]  # only a text's values are not numbers
    if kind is Kind.GAUGE:
        low, high = min(numbers), max(numbers)
        return Gauge(len(numbers), low if low == high else sum(numbers) / len(numbers), low, high)
    if kind is Kind.COUNTER:
        first, last = numbers[0], numbers[-1]
        grown: float = last - first
        if any(map(gt, numbers, numbers[1:])):
            grown = sum(growth(before, after) for before, after in pairwise(numbers))
        return Counter(times_ns[0], first, grown, times_ns[-1], last)
    if kind is Kind.STATE:
        return int(max(numbers))
    masks: Iterable[int] = set(numbers)  # type: ignore[arg-type]
    return reduce(or_, masks)


def growth(before: float, after: float) -> float:
    """How much a counter grew; one that is lower than before began at zero again."""
    return after - before if after >= before else after


def combined(kind: Kind, cells: Sequence[Cell]) -> Cell:
    """One cell of several (at least one) of one field, in time order; gauges, states and masks in any order."""
    if len(cells) == 1 or kind is Kind.TEXT:
        return cells[-1]
    if kind is Kind.GAUGE:
        gauges: Sequence[Gauge] = cells  # type: ignore[assignment]  # by their kind, here and below
        n = sum(cell.n for cell in gauges)
        low, high = min(cell.low for cell in gauges), max(cell.high for cell in gauges)
        mean = low if low == high else sum(cell.mean * cell.n for cell in gauges) / n
        return Gauge(n, mean, low, high)
    if kind is Kind.COUNTER:
        counters: Sequence[Counter] = cells  # type: ignore[assignment]
        first, last = counters[0], counters[-1]
        grown = sum(cell.grown for cell in counters)
        grown += sum(growth(before.last, after.first) for before, after in pairwise(counters))
        return Counter(first.first_ns, first.first, grown, last.last_ns, last.last)
    numbers: Sequence[int] = cells  # type: ignore[assignment]
    return max(numbers) if kind is Kind.STATE else reduce(or_, numbers)


def drawn(how: str, cells: Iterable[tuple[int, Cell]], over: Buckets) -> dict[int, float]:
    """bucket number -> value, from (start_ns, cell) of one field of one series in time order.

    Cells must not straddle buckets. Those before the first bucket only serve as the value before, for a rate.
    """
    if how == "rate":
        return _rates((cell for _, cell in cells if isinstance(cell, Counter)), over)
    found: dict[int, list[Cell]] = {}
    for start_ns, cell in cells:
        if over.first_ns <= start_ns < over.end_ns:
            found.setdefault((start_ns - over.first_ns) // over.step_ns, []).append(cell)
    return {bucket: _value(how, several) for bucket, several in found.items()}


def spreads(cells: Mapping[str, Iterable[tuple[int, Cell]]], over: Buckets) -> list[Spread]:
    """Gauges over the buckets, from cells of all series in any order; a field without any is left out."""
    found: list[Spread] = []
    for name, of_field in cells.items():
        several: dict[int, list[Cell]] = {}
        for start_ns, cell in of_field:
            if over.first_ns <= start_ns < over.end_ns:
                several.setdefault((start_ns - over.first_ns) // over.step_ns, []).append(cell)
        if several:
            spread = Spread(name, [None] * over.count, [None] * over.count, [None] * over.count)
            for bucket, some in several.items():
                whole = combined(Kind.GAUGE, some)
                assert isinstance(whole, Gauge)
                spread.mean[bucket], spread.low[bucket], spread.high[bucket] = whole.mean, whole.low, whole.high
            found.append(spread)
    return found


def _value(how: str, cells: Sequence[Cell]) -> float:
    kind = Kind.MASK if how == "or" else _KINDS.get(type(cells[0]), Kind.STATE)
    cell = combined(kind, cells)
    if isinstance(cell, Gauge):
        return {"mean": cell.mean, "min": cell.low, "max": cell.high}[how]
    return float(cell.last if isinstance(cell, Counter) else cell)


_KINDS: Mapping[type, Kind] = {Gauge: Kind.GAUGE, Counter: Kind.COUNTER}


def _rates(cells: Iterable[Counter], over: Buckets) -> dict[int, float]:
    """The rule of `buckets.rates`: what happens inside a cell never reaches further back than a bucket is long."""
    grown: dict[int, float] = {}
    seconds: dict[int, float] = {}
    before: Counter | None = None
    for cell in cells:
        if over.first_ns <= cell.first_ns < over.end_ns:
            bucket = (cell.first_ns - over.first_ns) // over.step_ns
            more, passed_ns = cell.grown, cell.last_ns - cell.first_ns
            if before is not None and 0 < cell.first_ns - before.last_ns <= over.lookback_ns:
                more += growth(before.last, cell.first)
                passed_ns += cell.first_ns - before.last_ns
            if passed_ns:
                grown[bucket] = grown.get(bucket, 0.0) + more
                seconds[bucket] = seconds.get(bucket, 0.0) + passed_ns / 1e9
        before = cell
    return {bucket: grown[bucket] / seconds[bucket] for bucket in grown}
