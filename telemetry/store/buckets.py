"""Time buckets and how a field is drawn together over one: the rules that every backend follows alike.

A bucket is [t, t+w) with t a multiple of w, labelled by its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Sample
from telemetry.store.interface import Column, Where

AGGREGATES = ("auto", "mean", "min", "max", "last", "rate", "or")
MAX_BUCKETS = 1_000_000
LOOKBACK_NS = 300 * 10**9
"""Two values of a counter that are further apart than this (or one bucket, if longer) say nothing about a rate."""

_AUTO = {Kind.GAUGE: "mean", Kind.COUNTER: "last", Kind.STATE: "max", Kind.MASK: "or"}


@dataclass(frozen=True, slots=True)
class Buckets:
    first_ns: int  # start of the first bucket
    step_ns: int
    count: int

    @property
    def end_ns(self) -> int:
        return self.first_ns + self.count * self.step_ns

    @property
    def lookback_ns(self) -> int:
        return max(LOOKBACK_NS, self.step_ns)


def buckets(start_ns: int, end_ns: int, step_ns: int) -> Buckets:
    """The buckets that cover [start_ns, end_ns). ValueError for a step that is not positive, or too many buckets."""
    if step_ns <= 0:
        raise ValueError(f"step of {step_ns} ns: must be positive")
    first = start_ns // step_ns
    count = max(0, -(-end_ns // step_ns) - first)
    if count > MAX_BUCKETS:
        raise ValueError(f"{count} buckets of {step_ns / 1e9:g} s: more than {MAX_BUCKETS}; use a longer step")
    return Buckets(first * step_ns, step_ns, count)


def aggregates(measurement: str, fields: Sequence[str], aggregate: str) -> dict[str, str]:
    """field -> mean, min, max, last, rate or or. ValueError for unknown names and for text."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate {aggregate!r}; use one of {', '.join(AGGREGATES)}")
    chosen: dict[str, str] = {}
    for name in fields:
        try:
            field = catalogue.field(measurement, name)
        except KeyError as error:
            raise ValueError(str(error.args[0])) from None
        if field.kind is Kind.TEXT:
            raise ValueError(f"{measurement}.{name} is text and has no range; read its samples")
        chosen[name] = _AUTO[field.kind] if aggregate == "auto" else aggregate
        if chosen[name] == "or" and field.type is not int:
            raise ValueError(f"{measurement}.{name} is not a whole number: its bits can't be joined")
    return chosen


def named(measurement: str, fields: Sequence[str] | None) -> list[str]:
    """The fields asked for; None stands for all of the measurement. ValueError for unknown names."""
    known = catalogue.MEASUREMENTS.get(measurement)
    if known is None:
        raise ValueError(f"unknown measurement {measurement!r}")
    if fields is None:
        return list(known.fields)
    for name in fields:
        if name not in known.fields:
            raise ValueError(f"{measurement} has no field {name!r}")
    return list(dict.fromkeys(fields))


def only(samples: Iterable[Sample], fields: Sequence[str]) -> list[Sample]:
    """The samples with no other fields, without those that have none of them."""
    kept = []
    for sample in samples:
        own = {name: sample.fields[name] for name in fields if name in sample.fields}
        if own:
            kept.append(replace(sample, fields=own))
    return kept


def gauges(measurement: str, fields: Sequence[str]) -> list[catalogue.Field]:
    """The catalogue's entries. ValueError for unknown names and for what is no gauge."""
    found = [catalogue.field(measurement, name) for name in aggregates(measurement, fields, "auto")]
    for field in found:
        if field.kind is not Kind.GAUGE:
            raise ValueError(f"{measurement}.{field.name} is a {field.kind}, not a gauge: it has no mean over devices")
    return found


def matches(tags: Mapping[str, str], where: Where | None) -> bool:
    """Whether a series' tags meet the conditions; an absent tag equals the empty text."""
    if not where:
        return True
    for name, wanted in where.items():
        value = tags.get(name, "")
        if value != wanted if isinstance(wanted, str) else value not in wanted:
            return False
    return True


def order(tags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The key that answers are sorted by: series by their tags."""
    return tuple(sorted(tags.items()))


def rates(points: Iterable[tuple[int, float]], over: Buckets) -> dict[int, float]:
    """bucket number -> growth per second of a counter, from (time_ns, value) in time order.

    A value counts for the bucket it lies in, with the time since the value before it, which may lie earlier; a value below the one
    before it was counted from zero. Points before the first bucket only serve as the value before.
    """
    grown: dict[int, float] = {}
    seconds: dict[int, float] = {}
    before: tuple[int, float] | None = None
    for time_ns, value in points:
        if before is not None and time_ns >= over.first_ns and 0 < time_ns - before[0] <= over.lookback_ns:
            bucket = (time_ns - over.first_ns) // over.step_ns
            grown[bucket] = grown.get(bucket, 0.0) + (value - before[1] if value >= before[1] else value)
            seconds[bucket] = seconds.get(bucket, 0.0) + (time_ns - before[0]) / 1e9
        before = (time_ns, value)
    return {bucket: grown[bucket] / seconds[bucket] for bucket in grown}


class Columns:
    """Columns under construction; those in which nothing was ever put are left out of the answer."""

    def __init__(self, over: Buckets, fields: Sequence[str]) -> None:
        self._over = over
        self._fields = {name: place for place, name in enumerate(dict.fromkeys(fields))}
        self._values: dict[tuple[tuple[tuple[str, str], ...], int], list[float | None]] = {}
        self._tags: dict[tuple[tuple[str, str], ...], Mapping[str, str]] = {}

    def put(self, tags: Mapping[str, str], field: str, bucket: int, value: float) -> None:
        if 0 <= bucket < self._over.count:
            self.column(tags, field)[bucket] = float(value)

    def column(self, tags: Mapping[str, str], field: str) -> list[float | None]:
        """One value a bucket, to be put in by the caller: at least one."""
        key = order(tags)
        column = self._values.get((key, self._fields[field]))
        if column is None:
            column = self._values[key, self._fields[field]] = [None] * self._over.count
            self._tags[key] = tags
        return column

    def add(self, tags: Mapping[str, str], field: str, values: Mapping[int, float] | list[float | None]) -> None:
        """A whole column at once: values by bucket number, or one for each bucket."""
        if isinstance(values, Mapping):
            column: list[float | None] = [None] * self._over.count
            for bucket, value in values.items():
                column[bucket] = float(value)
        else:
            column = values
        key = order(tags)
        if any(value is not None for value in column):
            self._values[key, self._fields[field]] = column
            self._tags[key] = tags

    def answer(self) -> list[Column]:
        names = list(self._fields)
        return [Column(self._tags[key], names[place], self._values[key, place]) for key, place in sorted(self._values)]
