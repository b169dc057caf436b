"""Cells of rollups as points of an InfluxDB server, written and read, and cells of minutes out of rows of raw samples.

A cell of a gauge (mean, least, largest, number of values; shorter where they are one) or of a counter (last, first, growth, times of the
first and the last since the start; or the value and its time) is one text, so that it is written and read as a whole: the server merges
a point with what is there, and each field costs it a cursor a series. A cell of a state, mask or text is the value itself. Earlier
versions wrote a field for each part; those are read where there is no text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from telemetry import lineprotocol
from telemetry.catalogue import Field, Kind
from telemetry.sample import Sample, Value
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, Cell, Counter, Gauge, reduced

PREFIXES = {MINUTE_NS: "1min:", QUARTER_NS: "15min:"}
_TEXT = ":cell"
_PARTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.GAUGE: ("", ":min", ":max", ":n"),
    Kind.COUNTER: ("", ":first", ":grown", ":first_at", ":last_at"),
}


class Row(NamedTuple):
    """The cells of one series over one minute or quarter."""

    level_ns: int
    measurement: str
    tags: Mapping[str, str]
    start_ns: int
    samples: int
    cells: Mapping[str, Cell]


def line(row: Row) -> str:
    """The row's point in line protocol. Its numbers need none of the care that a text does, and there are many."""
    parts: list[str] = []
    plain: dict[str, Value] = {"samples": row.samples}
    for name, cell in row.cells.items():
        if isinstance(cell, Gauge):
            n, mean, low, high = cell
            rest = f" {low!r} {high!r} {n}" if low != high else "" if n == 1 else f" {n}"
            parts.append(f',{name}{_TEXT}="{mean!r}{rest}"')
        elif isinstance(cell, Counter):
            parts.append(f',{name}{_TEXT}="{_counted(cell, row.start_ns)}"')
        elif isinstance(cell, int):
            parts.append(f",{name}={cell}i")
        else:
            plain[name] = cell
    sample = Sample(PREFIXES[row.level_ns] + row.measurement, row.tags, plain, row.start_ns)
    whole, _, time = lineprotocol.encode(sample).rpartition(" ")
    return f"{whole}{''.join(parts)} {time}"


def _counted(cell: Counter, start_ns: int) -> str:
    first_at, last_at = cell.first_ns - start_ns, cell.last_ns - start_ns
    if first_at == last_at:
        return f"{cell.last!r} {last_at}"
    return f"{cell.last!r} {cell.first!r} {cell.grown!r} {first_at} {last_at}"


def columns(field: Field, *, by_part: bool) -> list[str]:
    """The fields that a cell is read from; `by_part` with those of earlier versions."""
    if field.kind not in _PARTS:
        return [field.name]
    return [field.name + _TEXT, *([field.name + part for part in _PARTS[field.kind]] if by_part else ())]


def is_part(name: str) -> bool:
    """Whether it is a field that an earlier version wrote a part of a cell to."""
    return name.endswith((_PARTS[Kind.GAUGE][-1], _PARTS[Kind.COUNTER][-1]))


def read(series: Mapping[str, Any], fields: Sequence[Field]) -> Iterator[tuple[int, int, dict[str, Cell]]]:
    """(start_ns, samples, field -> cell) of each row; 0 samples where they were not asked for."""
    place = {name: number for number, name in enumerate(series["columns"])}
    sources = [(f, place[columns(f, by_part=False)[0]], _places_of_parts(f, place)) for f in fields]
    samples = place.get("samples")
    for row in series["values"]:
        start_ns: int = row[0]
        cells: dict[str, Cell] = {}
        for field, whole, parts in sources:
            if row[whole] is not None:
                cells[field.name] = _of_text(field, start_ns, row[whole]) if field.kind in _PARTS else row[whole]
            elif parts and None not in (several := [row[number] for number in parts]):
                cells[field.name] = _of_parts(field, start_ns, several)
        yield start_ns, (row[samples] or 0) if samples is not None else 0, cells


def _places_of_parts(field: Field, place: Mapping[str, int]) -> list[int]:
    names = columns(field, by_part=True)[1:]
    return [place[name] for name in names] if all(name in place for name in names) else []


def _of_text(field: Field, start_ns: int, text: str) -> Cell:
    parts: list[Any] = text.split(" ")
    if field.kind is Kind.GAUGE:
        if len(parts) < 3:
            mean, n = parts[0], parts[1] if len(parts) > 1 else 1
            parts = [mean, mean, mean, n]
    elif len(parts) == 2:
        last, at = parts
        parts = [last, last, 0, at, at]
    return _of_parts(field, start_ns, parts)


def _of_parts(field: Field, start_ns: int, parts: Sequence[Any]) -> Cell:
    if field.kind is Kind.GAUGE:
        mean, low, high, n = parts
        return Gauge(int(n), float(mean), float(low), float(high))
    last, first, grown, first_at, last_at = parts
    number: type[int] | type[float] = int if field.type is int else float
    return Counter(start_ns + int(first_at), number(first), number(grown), start_ns + int(last_at), number(last))


def minutes(
    series: Mapping[str, Any], fields: Mapping[str, Field], wanted: Collection[int]
) -> Iterator[tuple[int, int, dict[str, Cell]]]:
    """(start_ns, rows, field -> cell) of the minutes wanted, out of the raw rows of one series in time order."""
    if not series["values"]:
        return
    times, *others = zip(*series["values"], strict=True)
    present = [
        (fields[name], values)
        for name, values in zip(series["columns"][1:], others, strict=True)
        if name in fields and any(value is not None for value in values)
    ]
    end = 0
    while end < len(times):
        start_ns, begin = times[end] // MINUTE_NS * MINUTE_NS, end
        end = bisect_left(times, start_ns + MINUTE_NS, begin)
        if start_ns in wanted:
            at = times[begin:end]
            cells = {field.name: _cell(field, at, values[begin:end]) for field, values in present}
            yield start_ns, end - begin, {name: cell for name, cell in cells.items() if cell is not None}


def _cell(field: Field, times: Sequence[int], values: Sequence[Any]) -> Cell | None:
    if None in values:
        known = [value is not None for value in values]
        times, values = list(compress(times, known)), list(compress(values, known))
    return reduced(field.kind, times, list(map(field.type, values))) if values else None
