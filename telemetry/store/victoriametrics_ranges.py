"""Fields over time buckets, drawn by VictoriaMetrics where that comes to the same to the last bit, and from raw samples elsewhere.

The server joins no bits and knows other rules for a counter that begins anew. So it is asked for what shows that they don't matter:
the least, the largest and the number of distinct values of a mask, of which two make the OR; the ends of a counter in each bucket and
whether it ever fell. The buckets where they do matter are read raw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from telemetry.catalogue import Field, Kind, Measurement
from telemetry.store.buckets import Buckets, Columns, matches, rates
from telemetry.store.interface import Where
from telemetry.store.rollup import Cell, Counter, Gauge, drawn, reduced
from telemetry.store.victoriametrics_query import Query, aggregated, bucketed, says_all, spans, union
from telemetry.store.victoriametrics_series import EXACT, MARK, MS, ROLLUP, Key, Tags

_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "mean": ("avg_over_time",),
    "min": ("min_over_time",),
    "max": ("max_over_time",),
    "last": ("last_over_time",),
    "or": ("min_over_time", "max_over_time", "distinct_over_time"),
    "rate": ("first_over_time", "last_over_time", "tfirst_over_time", "tlast_over_time", "decreases_over_time"),
}
Parts = Mapping[str, Mapping[int, float]]
"""What the server drew of one series: function -> bucket -> value."""


def draw(
    query: Query, known: Measurement, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
) -> None:
    """Put field -> aggregate of all series into the columns."""
    if query.can_draw(over):
        _draw_there(query, known, chosen, over, where, columns)
    else:
        _draw_here(query, known, chosen, over, where, columns)


def _draw_there(
    query: Query, known: Measurement, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
) -> None:
    wide = _with_lookback(over) if "rate" in chosen.values() else over
    asked = []
    for how in sorted(set(chosen.values())):
        names = [name for name, wanted in chosen.items() if wanted == how] + ([MARK] if how == "rate" else [])
        asked.append(aggregated(_FUNCTIONS[how], bucketed(query.selector(known.name, names, where), wide)))
    found: dict[Key, tuple[Tags, dict[str, dict[str, dict[int, float]]]]] = {}
    prefix = f"{known.name}_"
    for series, places, values in query.drawn(union(asked), wide):
        if not matches(series.tags, where):
            continue
        name = series.name.removeprefix(prefix)
        if len(_FUNCTIONS[chosen.get(name, "rate")]) == 1:
            column = columns.column(series.tags, name)
            for place, value in zip(places, values, strict=True):
                column[place] = value
        else:
            _, by_name = found.setdefault(series.key, (series.tags, {}))
            by_name.setdefault(name, {}).setdefault(series.function, {}).update(zip(places, values, strict=True))
    _finish(query, known, chosen, over, wide, where, columns, found)


def _finish(
    query: Query,
    known: Measurement,
    chosen: Mapping[str, str],
    over: Buckets,
    wide: Buckets,
    where: Where | None,
    columns: Columns,
    found: Mapping[Key, tuple[Tags, Mapping[str, Parts]]],
) -> None:
    """Masks and rates: cells from what the server drew, and from raw samples where that isn't enough."""
    cells: dict[tuple[Key, str], dict[int, Cell]] = {}
    unsure: dict[tuple[Key, str], set[int]] = {}
    for key, (_, by_name) in found.items():
        for name, parts in by_name.items():
            if name != MARK:
                sure = _masks(parts) if chosen[name] == "or" else _counters(known.fields[name], parts, by_name[MARK])
                cells[key, name] = sure
                unsure[key, name] = {place for place in parts[_FUNCTIONS[chosen[name]][0]] if place not in sure}
    _add_raw(query, known, wide, where, unsure, cells)
    for (key, name), by_place in cells.items():
        timed = sorted((wide.first_ns + place * wide.step_ns, cell) for place, cell in by_place.items())
        for place, value in drawn(chosen[name], timed, over).items():
            columns.put(found[key][0], name, place, value)


def _with_lookback(over: Buckets) -> Buckets:
    before = -(-over.lookback_ns // over.step_ns)
    return Buckets(over.first_ns - before * over.step_ns, over.step_ns, over.count + before)


def _masks(parts: Parts) -> dict[int, Cell]:
    """The OR of the buckets in which a mask had at most two values."""
    highs, counts = parts["max_over_time"], parts["distinct_over_time"]
    return {
        place: int(low) | int(highs[place])
        for place, low in parts["min_over_time"].items()
        if counts[place] <= 2 and low > -EXACT and highs[place] < EXACT
    }


def _counters(field: Field, parts: Parts, marks: Parts) -> dict[int, Cell]:
    """The cells of the buckets in which a counter never fell, and whose first and last samples have it: these' times are known."""
    firsts, lasts, begins, ends, falls = (parts[function] for function in _FUNCTIONS["rate"])
    first_ns, last_ns, first_ms, last_ms, _ = (marks[function] for function in _FUNCTIONS["rate"])
    number: type[int] | type[float] = int if field.type is int else float
    cells: dict[int, Cell] = {}
    for place, first in firsts.items():
        begin, end, last = begins[place], ends[place], lasts[place]
        if not falls[place] and first_ms.get(place) == begin and last_ms[place] == end and abs(last) < EXACT:
            cells[place] = Counter(
                round(begin * 1000) * MS + int(first_ns[place]),
                number(first),
                number(last) - number(first),
                round(end * 1000) * MS + int(last_ns[place]),
                number(last),
            )
    return cells


def _add_raw(
    query: Query,
    known: Measurement,
    over: Buckets,
    where: Where | None,
    unsure: Mapping[tuple[Key, str], Collection[int]],
    cells: Mapping[tuple[Key, str], dict[int, Cell]],
) -> None:
    names = sorted({name for (_, name), places in unsure.items() if places})
    step_ms, first_ms = over.step_ns // MS, over.first_ns // MS
    for first, last in spans((place for places in unsure.values() for place in places), near=1):
        begin_ms, end_ms = first_ms + first * step_ms, first_ms + (last + 1) * step_ms - 1
        for key, device in query.read(known, names, begin_ms, end_ms, where).items():
            for name in names:
                places = unsure.get((key, name), ())
                points = device.points(name, begin_ms * MS, (end_ms + 1) * MS) if places else []
                for place, held in _held(points, over).items():
                    if place in places:
                        times, values = zip(*held, strict=True)
                        cells[key, name][place] = reduced(known.fields[name].kind, times, values)


def _draw_here(
    query: Query, known: Measurement, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
) -> None:
    lookback_ns = over.lookback_ns if "rate" in chosen.values() else 0
    start_ns = over.first_ns - lookback_ns
    for device in query.read(known, chosen, start_ns // MS, (over.end_ns - 1) // MS, where).values():
        for name, how in chosen.items():
            if how == "rate":
                values = rates(device.points(name, start_ns, over.end_ns), over)
            else:
                held = _held(device.points(name, over.first_ns, over.end_ns), over)
                values = {place: _DRAW[how]([value for _, value in points]) for place, points in held.items()}
            for place, value in values.items():
                columns.put(device.tags, name, place, value)


# --- all series together


def gathered(
    query: Query, known: Measurement, names: Sequence[str], over: Buckets, where: Where | None
) -> dict[str, list[tuple[int, Cell]]]:
    """field -> (start_ns, cell) of gauges, from raw samples; of several cells of a bucket each is of one series."""
    if query.can_draw(over) and says_all(where):
        return _gathered_there(query, known, names, over, where)
    cells: dict[str, list[tuple[int, Cell]]] = {}
    for device in query.read(known, names, over.first_ns // MS, (over.end_ns - 1) // MS, where).values():
        for name in names:
            for place, points in _held(device.points(name, over.first_ns, over.end_ns), over).items():
                values = [value for _, value in points]
                cell = Gauge(len(values), math.fsum(values) / len(values), min(values), max(values))
                cells.setdefault(name, []).append((over.first_ns + place * over.step_ns, cell))
    return cells


def _gathered_there(
    query: Query, known: Measurement, names: Sequence[str], over: Buckets, where: Where | None
) -> dict[str, list[tuple[int, Cell]]]:
    samples = bucketed(query.selector(known.name, names, where), over)
    parted = {"sum": ("count_over_time", "sum_over_time"), "min": ("min_over_time",), "max": ("max_over_time",)}
    asked = [f"{over_all}({aggregated(each, samples)}) by (__name__,{ROLLUP})" for over_all, each in parted.items()]
    parts: dict[str, dict[str, dict[int, float]]] = {}
    for series, places, values in query.drawn(union(asked), over):
        of_name = parts.setdefault(series.name.removeprefix(f"{known.name}_"), {})
        of_name.setdefault(series.function, {}).update(zip(places, values, strict=True))
    cells: dict[str, list[tuple[int, Cell]]] = {}
    for name, by_function in parts.items():
        sums, lows, highs = (by_function[f"{part}_over_time"] for part in ("sum", "min", "max"))
        for place, count in by_function["count_over_time"].items():
            cell = Gauge(round(count), sums[place] / count, lows[place], highs[place])
            cells.setdefault(name, []).append((over.first_ns + place * over.step_ns, cell))
    return cells


def _held(points: Iterable[tuple[int, Any]], over: Buckets) -> dict[int, list[tuple[int, Any]]]:
    """bucket -> its points, in their order."""
    held: dict[int, list[tuple[int, Any]]] = {}
    first_ns, step_ns = over.first_ns, over.step_ns
    for point in points:
        held.setdefault((point[0] - first_ns) // step_ns, []).append(point)
    return held


def _join_bits(masks: Sequence[int]) -> float:
    joined = reduced(Kind.MASK, (), masks)
    assert isinstance(joined, int)
    return float(joined)


_DRAW: Mapping[str, Callable[[list[Any]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "or": _join_bits,
}
