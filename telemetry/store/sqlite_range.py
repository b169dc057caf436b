"""Buckets drawn from raw samples in the embedded store: one walk over the rows for all fields, without sorting them.

The rows of a series lie in time order, so its buckets follow one another; grouping by a computed bucket number would have the
database sort every row first. So the buckets that hold something are listed (one seek each) in a table of the connection's own, and
joined with the rows in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import itemgetter, or_
from sqlite3 import Connection
from typing import Any

from telemetry.catalogue import Kind
from telemetry.store.buckets import Buckets
from telemetry.store.rollup import Cell, drawn, reduced

_VALUES: Mapping[str, str] = {
    "mean": "avg(d.{0})",
    "min": "min(d.{0})",
    "max": "max(d.{0})",
    "or": "group_concat(DISTINCT d.{0})",
    "last": "(SELECT l.{0} FROM {1} AS l WHERE l.series = f.series AND l.time_ns >= {2} AND l.time_ns < {3} "
    "AND l.{0} IS NOT NULL ORDER BY l.time_ns DESC LIMIT 1)",
}

Found = tuple[int, str, list[float | None]]
"""A series, a field, and its value in each bucket."""


def raw_columns(
    connection: Connection, table: str, chosen: Mapping[str, str], series: Sequence[int], over: Buckets
) -> Iterator[Found]:
    """Columns of raw samples; `chosen` says for each field how it is drawn together. Those without any value are left out."""
    if not series or not over.count:
        return
    at_once = {name: how for name, how in chosen.items() if how in _VALUES}
    if at_once:
        _list_filled(connection, table, series, over)
        rows = connection.execute(_joined(table, at_once, over))
        for number, of_series in groupby(rows, key=itemgetter(0)):
            _, places, *columns = zip(*of_series, strict=True)
            for (name, how), column in zip(at_once.items(), columns, strict=True):
                values = _values(how, places, column, over.count)
                if values is not None:
                    yield number, name, values
    for name, how in chosen.items():
        if how == "rate":
            for number, rates in _rates(connection, table, name, series, over):
                values = [None] * over.count
                for place, rate in rates.items():
                    values[place] = rate
                yield number, name, values


def _list_filled(connection: Connection, table: str, series: Iterable[int], over: Buckets) -> None:
    """Put (series, bucket number) of the buckets with a sample into the connection's table `filled`."""
    connection.execute(
        "CREATE TEMP TABLE IF NOT EXISTS filled (series INTEGER, place INTEGER, PRIMARY KEY (series, place)) WITHOUT ROWID"
    )
    connection.execute("DELETE FROM temp.filled")
    place = f"(t - {over.first_ns}) / {over.step_ns}"
    first = f"SELECT min(time_ns) FROM {_quoted(table)} AS d WHERE time_ns < {over.end_ns} AND d.series ="
    connection.execute(
        "WITH RECURSIVE first_of (series, t) AS ("
        f"SELECT id, ({first} s.id AND time_ns >= {over.first_ns}) FROM series AS s WHERE id IN {_in(series)} UNION ALL "
        f"SELECT series, ({first} first_of.series AND time_ns >= {over.first_ns} + ({place} + 1) * {over.step_ns}) "
        "FROM first_of WHERE t IS NOT NULL) "
        f"INSERT INTO temp.filled SELECT series, {place} FROM first_of WHERE t IS NOT NULL"
    )


def _joined(table: str, chosen: Mapping[str, str], over: Buckets) -> str:
    start, end = (f"{over.first_ns} + (f.place + {more}) * {over.step_ns}" for more in (0, 1))
    values = ", ".join(_VALUES[how].format(_quoted(name), _quoted(table), start, end) for name, how in chosen.items())
    if set(chosen.values()) == {"last"}:  # one seek a bucket
        return f"SELECT f.series, f.place, {values} FROM temp.filled AS f ORDER BY f.series, f.place"
    return (
        f"SELECT f.series, f.place, {values} FROM temp.filled AS f CROSS JOIN {_quoted(table)} AS d "
        f"ON d.series = f.series AND d.time_ns >= {start} AND d.time_ns < {end} GROUP BY f.series, f.place"
    )


def _values(how: str, places: Iterable[int], column: Iterable[Any], count: int) -> list[float | None] | None:
    values: list[float | None] = [None] * count
    some = False
    for place, value in zip(places, column, strict=True):
        if value is not None:
            values[place] = float(joined_bits(value) if how == "or" else value)
            some = True
    return values if some else None


def joined_bits(masks: str | int) -> int:
    """The OR of masks as `group_concat` lists them."""
    return reduce(or_, map(int, str(masks).split(",")))


def _rates(
    connection: Connection, table: str, name: str, series: Iterable[int], over: Buckets
) -> Iterator[tuple[int, dict[int, float]]]:
    """Two samples of one bucket are never too far apart for a rate, so each bucket is a cell, as if it were rolled up."""
    field = _quoted(name)
    rows = connection.execute(
        f"SELECT series, (time_ns - {over.first_ns}) / {over.step_ns} - (time_ns < {over.first_ns}), time_ns, {field} "
        f"FROM {_quoted(table)} WHERE series IN {_in(series)} AND time_ns >= {over.first_ns - over.lookback_ns} "
        f"AND time_ns < {over.end_ns} AND {field} IS NOT NULL ORDER BY series, time_ns"
    )
    for number, of_series in groupby(rows, key=itemgetter(0)):
        cells: list[tuple[int, Cell]] = []
        for place, points in groupby(of_series, key=itemgetter(1)):
            _, _, times, values = zip(*points, strict=True)
            cells.append((over.first_ns + place * over.step_ns, reduced(Kind.COUNTER, times, values)))
        rates = drawn("rate", cells, over)
        if rates:
            yield number, rates


def _quoted(name: str) -> str:
    return f'"{name}"'


def _in(series: Iterable[int]) -> str:
    return f"({','.join(map(str, series))})"
