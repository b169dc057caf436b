"""Reading rollups of the embedded store: a minute with a mark from raw samples, one without from its cell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby, islice
from operator import itemgetter, or_
from sqlite3 import Connection
from typing import Any, cast

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.store.rollup import (
    MINUTE_NS,
    QUARTER_NS,
    Cell,
    Gauge,
    combined,
    reduced,
)
from telemetry.store.sqlite_cells import (
    FLEET,
    FLEET_PREFIX,
    MINUTE,
    PACKED_GAUGE,
    QUARTER,
    Cells,
    Place,
    Row,
    Timed,
    cell_table,
    columns_of,
    decode,
    quarter_of,
    raw_table,
    selected,
)


def has_marks(connection: Connection) -> bool:
    """Not in a file of an older layout, which this user may only read."""
    return bool(columns_of(connection, "pending"))


class Reader:
    """Cells of some fields of one measurement, inside one read transaction; `end_ns` is the end of the minutes that are read."""

    def __init__(self, connection: Connection, measurement: str, fields: Sequence[catalogue.Field]) -> None:
        self.connection = connection
        self.measurement = measurement
        self.fields = fields
        span = connection.execute("SELECT from_ns, to_ns FROM unmarked").fetchone() or (0, 0)
        self._unmarked = span[0] // MINUTE_NS * MINUTE_NS, -(-span[1] // MINUTE_NS) * MINUTE_NS

    def cells(self, series: Collection[int], first_ns: int, end_ns: int, level_ns: int) -> Cells:
        """The cells of each series that start in the span; where there is a mark, those of a minute made from raw samples now."""
        found: Cells = {}
        raw = self._pending(MINUTE, series, first_ns, end_ns)
        unmarked = max(self._unmarked[0], first_ns), min(self._unmarked[1], end_ns)

        def is_raw(place: Place) -> bool:
            return unmarked[0] <= place[1] < unmarked[1] or place in raw

        if level_ns == QUARTER_NS:
            stale = {(number, quarter_of(start_ns)) for number, start_ns in raw}
            stale |= self._pending(QUARTER, series, first_ns, end_ns)
            stale |= {(n, t) for t in range(quarter_of(unmarked[0]), unmarked[1], QUARTER_NS) for n in series}
            self._add(found, QUARTER_NS, series, (first_ns, end_ns), lambda place: place not in stale)
            if stale:
                span = (min(start for _, start in stale), max(start for _, start in stale) + QUARTER_NS)
                among = {number for number, _ in stale}
                self._add(
                    found,
                    MINUTE_NS,
                    among,
                    span,
                    lambda place: (place[0], quarter_of(place[1])) in stale and not is_raw(place),
                )
        else:
            self._add(found, MINUTE_NS, series, (first_ns, end_ns), lambda place: not is_raw(place))
        table = f'"{raw_table(self.measurement)}"'
        if raw:
            self._add_raw(
                found,
                "p.start_ns",
                f"FROM pending AS p CROSS JOIN {table} AS d ON d.series = p.series "
                f"AND d.time_ns >= p.start_ns AND d.time_ns < p.start_ns + {MINUTE_NS} "
                f"WHERE p.task = {MINUTE} AND p.series IN {_in({number for number, _ in raw})} "
                f"AND p.start_ns >= {first_ns} AND p.start_ns < {end_ns} "
                f"AND NOT (p.start_ns >= {unmarked[0]} AND p.start_ns < {unmarked[1]})",
            )
        if unmarked[0] < unmarked[1]:
            self._add_raw(
                found,
                f"d.time_ns / {MINUTE_NS} * {MINUTE_NS}",
                f"FROM {table} AS d WHERE d.series IN {_in(series)} AND d.time_ns >= {unmarked[0]} AND d.time_ns < {unmarked[1]}",
            )
        for of_field in found.values():
            for cells in of_field.values():
                cells.sort(key=itemgetter(0))
        return found

    def together(self, series: Collection[int], first_ns: int, end_ns: int, level_ns: int) -> dict[str, list[Timed]]:
        """field -> cells of all series (which must be all of the measurement) drawn together; for gauges."""
        row = self.connection.execute(
            "SELECT id FROM series WHERE measurement = ?", (FLEET_PREFIX + self.measurement,)
        ).fetchone()
        fleet = () if row is None else (int(row[0]),)
        found: Cells = {}
        stale = {start for _, start in self._pending(MINUTE, series, first_ns, end_ns)}
        stale |= {start for _, start in self._pending(FLEET, fleet, first_ns, end_ns)}
        stale |= set(range(max(first_ns, self._unmarked[0]), min(end_ns, self._unmarked[1]), MINUTE_NS))
        if level_ns == QUARTER_NS:
            quarters = {quarter_of(start) for start in stale}
            quarters |= {start for _, start in self._pending(QUARTER, fleet, first_ns, end_ns)}
            self._add(found, QUARTER_NS, fleet, (first_ns, end_ns), lambda place: place[1] not in quarters)
            minutes = (min(quarters), max(quarters) + QUARTER_NS) if quarters else (0, 0)
            self._add(
                found,
                MINUTE_NS,
                fleet,
                minutes,
                lambda place: place[1] not in stale and quarter_of(place[1]) in quarters,
            )
        else:
            self._add(found, MINUTE_NS, fleet, (first_ns, end_ns), lambda place: place[1] not in stale)
        several: dict[str, dict[int, list[Cell]]] = {}
        if stale:
            for name, of_series in self.cells(series, min(stale), max(stale) + MINUTE_NS, MINUTE_NS).items():
                for cells in of_series.values():
                    for start_ns, cell in cells:
                        if start_ns in stale:
                            several.setdefault(name, {}).setdefault(start_ns, []).append(cell)
        answer: dict[str, list[Timed]] = {}
        for field in self.fields:
            timed = [cell for cells in found.get(field.name, {}).values() for cell in cells]
            timed += [(t, combined(field.kind, cells)) for t, cells in several.get(field.name, {}).items()]
            answer[field.name] = sorted(timed, key=itemgetter(0))
        return answer

    def _pending(self, task: int, series: Collection[int], first_ns: int, end_ns: int) -> set[Place]:
        return set(
            self.connection.execute(
                f"SELECT series, start_ns FROM pending WHERE task = ? AND series IN {_in(series)} "
                "AND start_ns >= ? AND start_ns < ?",
                (task, first_ns, end_ns),
            )
        )

    def _add(
        self,
        found: Cells,
        level_ns: int,
        series: Collection[int],
        span: tuple[int, int],
        wanted: Callable[[Place], bool],
    ) -> None:
        table = cell_table(self.measurement, level_ns)
        have = columns_of(self.connection, table)
        fields = [field for field in self.fields if field.name in have]
        if not fields or not series or span[0] >= span[1]:
            return
        places = [(number, field, found.setdefault(field.name, {})) for number, field in enumerate(fields, 5)]
        packed, unpack = bytes, PACKED_GAUGE.unpack
        for row in self.connection.execute(
            f'SELECT series, time_ns, n, first_ns, last_ns{selected(fields)} FROM "{table}" '
            f"WHERE series IN {_in(series)} AND time_ns >= ? AND time_ns < ?",
            span,
        ):
            number, start_ns, n = row[:3]
            if not wanted((number, start_ns)):
                continue
            for place, field, of_field in places:
                value = row[place]
                if value is None:
                    continue
                if type(value) is packed and field.kind is Kind.GAUGE and len(value) == PACKED_GAUGE.size:
                    cell: Cell = Gauge._make(unpack(value))  # the usual case, in a third of the time
                else:
                    cell = decode(field, Row(number, start_ns, n, start_ns + row[3], start_ns + row[4]), value)
                of_field.setdefault(number, []).append((start_ns, cell))

    def _add_raw(self, found: Cells, start: str, rows_of: str) -> None:
        """Cells of minutes that start at `start` from raw samples, drawn together by the database where it can."""
        have = columns_of(self.connection, raw_table(self.measurement))
        fields = [field for field in self.fields if field.name in have]
        drawn = [field for field in fields if field.kind in _SQL_CELLS]
        if drawn:
            select = ", ".join(_SQL_CELLS[field.kind].format(f'd."{field.name}"') for field in drawn)
            places = [found.setdefault(field.name, {}) for field in drawn]
            for number, start_ns, *parts in self.connection.execute(
                f"SELECT d.series, {start} AS start, {select} {rows_of} GROUP BY d.series, start"
            ):
                rest = iter(parts)
                for field, of_field in zip(drawn, places, strict=True):
                    cell = _from_sql(field.kind, rest)
                    if cell is not None:
                        of_field.setdefault(number, []).append((start_ns, cell))
        for field in fields:
            if field.kind is Kind.COUNTER:
                of_field = found.setdefault(field.name, {})
                rows = self.connection.execute(
                    f'SELECT d.series, {start} AS start, d.time_ns, d."{field.name}" {rows_of} '
                    f'AND d."{field.name}" IS NOT NULL ORDER BY d.series, start, d.time_ns'
                )
                for (number, start_ns), points in groupby(rows, key=itemgetter(0, 1)):
                    _, _, times, values = zip(*points, strict=True)
                    of_field.setdefault(number, []).append((start_ns, reduced(field.kind, times, values)))


_SQL_CELLS: Mapping[Kind, str] = {
    Kind.GAUGE: "count({0}), avg({0}), min({0}), max({0})",
    Kind.STATE: "max({0})",
    Kind.MASK: "group_concat(DISTINCT {0})",
}


def _from_sql(kind: Kind, parts: Iterator[Any]) -> Cell | None:
    """The next cell of a row; None where no sample had the field."""
    if kind is Kind.GAUGE:
        gauge = Gauge(*islice(parts, 4))
        return gauge if gauge.n else None
    value = next(parts)
    if value is None or kind is Kind.STATE:
        return cast("int | None", value)
    return reduce(or_, (int(mask) for mask in str(value).split(",")))


def _in(series: Iterable[int]) -> str:
    return f"({','.join(map(str, series))})"
