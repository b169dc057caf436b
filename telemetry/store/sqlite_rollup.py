"""Rollups in the embedded store: which cells are still to be drawn together, the work of doing so, and reading what was.

Every write leaves a mark at each minute that it touched, in the same transaction; a minute with a mark is read from raw samples, one
without from its cell. So late samples, repeats, a crash at any instant and days without rollups need no rule of their own.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby, islice
from operator import itemgetter, or_
from sqlite3 import Connection
from typing import Any, NamedTuple, cast

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Value
from telemetry.store.rollup import (
    MINUTE_NS,
    QUARTER_NS,
    SINGLE,
    Cell,
    Counter,
    Gauge,
    combined,
    fleet_fields,
    reduced,
)
from telemetry.store.sqlite_file import Damaged, DatabaseFile

SETTLE_NS = 5 * 10**9
"""A minute is drawn together this long after its end: its last samples are on their way until then."""

_MINUTE, _FLEET, _QUARTER = 1, 2, 3
"""What a mark asks for: the minute of a series, the minute of all series together, the quarter of a series."""
_MINUTES_AT_ONCE = 64  # about 0.05 s of one transaction, so that writers get their turns
_FLEETS_AT_ONCE = 4
_QUARTERS_AT_ONCE = 32
FLEET_PREFIX = "fleet:"
"""The series of all series together has this before its measurement's name, so that no reader takes it for a device."""
_MOST = 2**63 - 1
_SQL_TYPES: Mapping[type, str] = {float: "REAL", int: "INTEGER", str: "TEXT"}

Place = tuple[int, int]
"""A series and the start of a minute or quarter."""
Timed = tuple[int, Cell]
"""A cell and the start of its minute or quarter."""
Cells = dict[str, dict[int, list[Timed]]]
"""field -> series -> cells in time order."""

SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS pending (
        task INTEGER NOT NULL,
        series INTEGER NOT NULL,
        start_ns INTEGER NOT NULL,
        PRIMARY KEY (task, series, start_ns)
    ) WITHOUT ROWID
    """,
    # samples that were written before there were marks: at most one row, gone when all of them are marked
    "CREATE TABLE IF NOT EXISTS unmarked (from_ns INTEGER NOT NULL, to_ns INTEGER NOT NULL)",
    # cells before this time are final: what they were drawn from is no longer there
    "CREATE TABLE IF NOT EXISTS pruned (source TEXT PRIMARY KEY, to_ns INTEGER NOT NULL) WITHOUT ROWID",
)


def raw_table(measurement: str) -> str:
    return f"raw_{measurement}"


def cell_table(measurement: str, level_ns: int) -> str:
    return f"{'min1' if level_ns == MINUTE_NS else 'min15'}_{measurement}"


def lay_out(connection: Connection) -> None:
    """The tables of layout 2, beside the raw ones that may be there already. Part of the caller's transaction."""
    for statement in SCHEMA:
        connection.execute(statement)
    spans: list[tuple[int, int]] = []
    for measurement in catalogue.MEASUREMENTS:
        if measurement not in SINGLE and _columns(connection, raw_table(measurement)):
            # one seek a series, however many samples
            spans += connection.execute(
                f'SELECT min(a), max(b) FROM (SELECT (SELECT min(time_ns) FROM "{raw_table(measurement)}" WHERE series = id) AS a, '
                f'(SELECT max(time_ns) FROM "{raw_table(measurement)}" WHERE series = id) AS b FROM series WHERE measurement = ?)',
                (measurement,),
            ).fetchall()
    spans = [span for span in spans if span[0] is not None]
    if spans:
        whole = (min(a for a, _ in spans), max(b for _, b in spans) + 1)
        connection.execute("INSERT INTO unmarked VALUES (?, ?)", whole)


def mark(connection: Connection, minutes: Iterable[tuple[int, int]]) -> None:
    """Note (series, start_ns) as touched. Part of the transaction that touches them."""
    connection.executemany(f"INSERT OR IGNORE INTO pending VALUES ({_MINUTE}, ?, ?)", minutes)


class Rollups:
    """The work on one file; any number of processes may do it at once, each piece is one transaction."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file

    def work(self, until_ns: int, budget_s: float) -> bool:
        """Draw together what ended by `until_ns`, for about `budget_s` of work; whether some of it is left for the next time."""
        spent_s = 0.0
        while True:
            began_s = time.monotonic()
            left = self._piece(until_ns)
            spent_s += time.monotonic() - began_s
            if not left or spent_s >= budget_s:
                return left
            self._file.give_way()

    def finish(self, source: str, to_ns: int) -> None:
        """Before what is older than `to_ns` leaves the table `source`: draw it together and let it stand from then on."""
        while self._piece(to_ns + QUARTER_NS):
            self._file.give_way()
        with self._file.writing() as connection:
            connection.execute(
                "INSERT INTO pruned VALUES (?, ?) ON CONFLICT (source) DO UPDATE SET to_ns = max(to_ns, excluded.to_ns)",
                (source, to_ns),
            )

    def _piece(self, until_ns: int) -> bool:
        """One transaction of work; False when there was nothing to do."""
        with self._file.writing() as connection:
            work = _Work(connection)
            return (
                work.minutes(until_ns) or work.fleets(until_ns) or work.quarters(until_ns) or work.mark_older(until_ns)
            )


class _Work:
    """What one transaction does and has looked up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pruned = dict(connection.execute("SELECT source, to_ns FROM pruned"))
        self._fields: dict[str, list[catalogue.Field]] = {}
        self._ready: set[str] = set()

    def minutes(self, until_ns: int) -> bool:
        """Raw samples to cells of a minute."""
        marks = self._due(_MINUTE, until_ns - MINUTE_NS, _MINUTES_AT_ONCE)
        fleets: dict[str, int | None] = {}
        for series, start_ns, measurement in marks:
            fields = self._readable(raw_table(measurement))
            rows = self._connection.execute(
                f'SELECT time_ns{_select(fields)} FROM "{raw_table(measurement)}" '
                "WHERE series = ? AND time_ns >= ? AND time_ns < ? ORDER BY time_ns",
                (series, start_ns, start_ns + MINUTE_NS),
            ).fetchall()
            if not rows or self._final(raw_table(measurement), measurement, MINUTE_NS, series, start_ns):
                continue
            times, *columns = zip(*rows, strict=True)
            cells = {field: _reduced(field.kind, times, column) for field, column in zip(fields, columns, strict=True)}
            row = _Row(series, start_ns, len(rows), times[0], times[-1])
            self._put(measurement, MINUTE_NS, row, {field: cell for field, cell in cells.items() if cell is not None})
            if measurement not in fleets:
                fleets[measurement] = self._fleet_id(measurement) if fleet_fields(measurement) else None
            self._mark(_QUARTER, series, _quarter(start_ns))
            if (fleet := fleets[measurement]) is not None:
                self._mark(_FLEET, fleet, start_ns)
        self._done(_MINUTE, marks)
        return bool(marks)

    def fleets(self, until_ns: int) -> bool:
        """The cells of one minute of all series to one."""
        marks = self._due(_FLEET, until_ns - MINUTE_NS, _FLEETS_AT_ONCE)
        for fleet, start_ns, name in marks:
            measurement = name.removeprefix(FLEET_PREFIX)
            known = {field.name: field for field in self._readable(cell_table(measurement, MINUTE_NS))}
            fields = [known[field] for field in fleet_fields(measurement) if field in known]
            rows = self._connection.execute(
                f'SELECT series, time_ns, n, first_ns, last_ns{_select(fields)} FROM "{cell_table(measurement, MINUTE_NS)}" '
                "WHERE series IN (SELECT id FROM series WHERE measurement = ?) AND time_ns = ?",
                (measurement, start_ns),
            ).fetchall()
            self._combine(measurement, MINUTE_NS, (fleet, start_ns), fields, rows)
            self._mark(_QUARTER, fleet, _quarter(start_ns))
        self._done(_FLEET, marks)
        return bool(marks)

    def quarters(self, until_ns: int) -> bool:
        """The cells of fifteen minutes to one of a quarter."""
        marks = self._due(_QUARTER, until_ns - QUARTER_NS, _QUARTERS_AT_ONCE)
        for series, start_ns, name in marks:
            measurement = name.removeprefix(FLEET_PREFIX)
            source = cell_table(measurement, MINUTE_NS)
            fields = self._readable(source)
            rows = self._connection.execute(
                f'SELECT series, time_ns, n, first_ns, last_ns{_select(fields)} FROM "{source}" '
                "WHERE series = ? AND time_ns >= ? AND time_ns < ? ORDER BY time_ns",
                (series, start_ns, start_ns + QUARTER_NS),
            ).fetchall()
            if not self._final(source, measurement, QUARTER_NS, series, start_ns):
                self._combine(measurement, QUARTER_NS, (series, start_ns), fields, rows)
        self._done(_QUARTER, marks)
        return bool(marks)

    def mark_older(self, until_ns: int) -> bool:
        """Mark a quarter's worth of samples from before there were marks, the oldest first."""
        span = self._connection.execute("SELECT from_ns, to_ns FROM unmarked").fetchone()
        if span is None or span[0] >= until_ns:
            return False
        slice_end_ns = (span[0] // QUARTER_NS + 1) * QUARTER_NS
        following: list[int] = []
        for measurement in catalogue.MEASUREMENTS:
            table = raw_table(measurement)
            if measurement in SINGLE or not self._readable(table):
                continue
            of_measurement = "SELECT id FROM series WHERE measurement = ?"
            self._connection.execute(
                f"INSERT OR IGNORE INTO pending SELECT DISTINCT {_MINUTE}, series, time_ns / {MINUTE_NS} * {MINUTE_NS} "
                f'FROM "{table}" WHERE series IN ({of_measurement}) AND time_ns >= ? AND time_ns < ?',
                (measurement, span[0], slice_end_ns),
            )
            following += self._connection.execute(
                f'SELECT min(t) FROM (SELECT (SELECT min(time_ns) FROM "{table}" WHERE series = id AND time_ns >= ?) AS t '
                f"FROM ({of_measurement}))",
                (slice_end_ns, measurement),
            ).fetchone()
        next_ns = min((t for t in following if t is not None), default=span[1])
        if next_ns < span[1]:
            self._connection.execute("UPDATE unmarked SET from_ns = ?", (next_ns,))
        else:
            self._connection.execute("DELETE FROM unmarked")
        return True

    def _due(self, task: int, last_ns: int, most: int) -> list[tuple[int, int, str]]:
        """(series, start_ns, measurement) of marks that start by `last_ns`."""
        return self._connection.execute(
            "SELECT p.series, p.start_ns, s.measurement FROM series AS s CROSS JOIN pending AS p "
            "ON p.task = ? AND p.series = s.id AND p.start_ns <= ? LIMIT ?",  # one seek a series, however many marks are later
            (task, last_ns, most),
        ).fetchall()

    def _mark(self, task: int, series: int, start_ns: int) -> None:
        self._connection.execute("INSERT OR IGNORE INTO pending VALUES (?, ?, ?)", (task, series, start_ns))

    def _done(self, task: int, marks: Iterable[tuple[int, int, str]]) -> None:
        self._connection.executemany(
            "DELETE FROM pending WHERE task = ? AND series = ? AND start_ns = ?",
            [(task, series, start_ns) for series, start_ns, _ in marks],
        )

    def _final(self, source: str, measurement: str, level_ns: int, series: int, start_ns: int) -> bool:
        """Whether the cell is there and some of what it was drawn from is not: then it stays as it is."""
        if start_ns >= self._pruned.get(source, 0):
            return False
        table = cell_table(measurement, level_ns)
        if not self._readable(table):
            return False
        found = self._connection.execute(
            f'SELECT 1 FROM "{table}" WHERE series = ? AND time_ns = ?', (series, start_ns)
        ).fetchone()
        return found is not None

    def _combine(
        self,
        measurement: str,
        level_ns: int,
        place: tuple[int, int],
        fields: Sequence[catalogue.Field],
        rows: Sequence[Sequence[Any]],
    ) -> None:
        if not rows:
            return
        cells: dict[catalogue.Field, Cell] = {}
        decoded = [(_Row(*row[:5]).absolute(), row[5:]) for row in rows]
        for number, field in enumerate(fields):
            several = [decode(field, row, values[number]) for row, values in decoded if values[number] is not None]
            if several:
                cells[field] = combined(field.kind, several)
        first, last = min(row.first_ns for row, _ in decoded), max(row.last_ns for row, _ in decoded)
        self._put(measurement, level_ns, _Row(*place, sum(row.n for row, _ in decoded), first, last), cells)

    def _put(self, measurement: str, level_ns: int, row: _Row, cells: Mapping[catalogue.Field, Cell]) -> None:
        table = cell_table(measurement, level_ns)
        self._ensure(table, measurement, cells)
        names = "".join(f', "{field.name}"' for field in cells)
        self._connection.execute(
            f'INSERT OR REPLACE INTO "{table}" (series, time_ns, n, first_ns, last_ns{names}) '
            f"VALUES (?, ?, ?, ?, ?{', ?' * len(cells)})",
            (
                row.series,
                row.start_ns,
                row.n,
                row.first_ns - row.start_ns,
                row.last_ns - row.start_ns,
                *(encode(field, row, cell) for field, cell in cells.items()),
            ),
        )

    def _ensure(self, table: str, measurement: str, fields: Iterable[catalogue.Field]) -> None:
        have = {field.name for field in self._readable(table)}
        if not have and not _columns(self._connection, table):
            every = catalogue.MEASUREMENTS[measurement].fields.values()
            columns = "".join(f', "{field.name}" {_SQL_TYPES[field.type]}' for field in every)
            self._connection.execute(
                f'CREATE TABLE "{table}" (series INTEGER NOT NULL, time_ns INTEGER NOT NULL, n INTEGER NOT NULL, '
                f"first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL{columns}, PRIMARY KEY (series, time_ns)) WITHOUT ROWID"
            )
            self._fields.pop(table, None)
            return
        for field in fields:
            if field.name not in have:
                self._connection.execute(f'ALTER TABLE "{table}" ADD COLUMN "{field.name}" {_SQL_TYPES[field.type]}')
                self._fields.pop(table, None)

    def _readable(self, table: str) -> list[catalogue.Field]:
        """The catalogue's fields that a table has."""
        if table not in self._fields:
            measurement = table.split("_", 1)[1]
            have = _columns(self._connection, table)
            self._fields[table] = [f for f in catalogue.MEASUREMENTS[measurement].fields.values() if f.name in have]
        return self._fields[table]

    def _fleet_id(self, measurement: str) -> int:
        key = (FLEET_PREFIX + measurement, "{}")
        self._connection.execute("INSERT OR IGNORE INTO series (measurement, tags) VALUES (?, ?)", key)
        found = self._connection.execute("SELECT id FROM series WHERE measurement = ? AND tags = ?", key).fetchone()
        return int(found[0])


class _Row(NamedTuple):
    """A row of cells: `n` raw samples, the first and the last at these times. In the table the times count from `start_ns`."""

    series: int
    start_ns: int
    n: int
    first_ns: int
    last_ns: int

    def absolute(self) -> _Row:
        return self._replace(first_ns=self.first_ns + self.start_ns, last_ns=self.last_ns + self.start_ns)


# A gauge that every sample had and that never moved is its number, and so is a counter; any other is packed.
_GAUGE = struct.Struct("<Iddd")
_COUNTERS = {int: struct.Struct("<qqqqq"), float: struct.Struct("<qqddd")}


def encode(field: catalogue.Field, row: _Row, cell: Cell) -> Value | bytes:
    if isinstance(cell, Gauge):
        plain = cell.n == row.n and cell.low == cell.high
        return cell.mean if plain else _GAUGE.pack(*cell)
    if isinstance(cell, Counter):
        plain = (
            not cell.grown and cell.first == cell.last and (cell.first_ns, cell.last_ns) == (row.first_ns, row.last_ns)
        )
        if plain:
            return cell.last
        times = (cell.first_ns - row.start_ns, cell.last_ns - row.start_ns)
        values = (cell.first, min(cell.grown, _MOST) if field.type is int else cell.grown, cell.last)
        return _COUNTERS[field.type].pack(*times, *values)
    return cell


def decode(field: catalogue.Field, row: _Row, value: Any) -> Cell:
    """Damaged for what `encode` never wrote."""
    try:
        if field.kind is Kind.GAUGE:
            return Gauge(*_GAUGE.unpack(value)) if type(value) is bytes else Gauge(row.n, value, value, value)
        if field.kind is Kind.COUNTER:
            if type(value) is not bytes:
                return Counter(row.first_ns, value, 0, row.last_ns, value)
            first_ns, last_ns, first, grown, last = _COUNTERS[field.type].unpack(value)
            return Counter(row.start_ns + first_ns, first, grown, row.start_ns + last_ns, last)
    except struct.error:
        raise Damaged(f"a cell of {field.name} is damaged") from None
    if not isinstance(value, field.type):
        raise Damaged(f"a cell of {field.name} is damaged")
    return cast("Cell", value)


def _reduced(kind: Kind, times_ns: Sequence[int], column: Sequence[Any]) -> Cell | None:
    absent = column.count(None)
    if absent == len(column):
        return None
    if absent:
        present = [(t, value) for t, value in zip(times_ns, column, strict=True) if value is not None]
        times_ns, column = [t for t, _ in present], [value for _, value in present]
    return reduced(kind, times_ns, column)


def _columns(connection: Connection, table: str) -> frozenset[str]:
    return frozenset(str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")'))


def _select(fields: Iterable[catalogue.Field]) -> str:
    return "".join(f', "{field.name}"' for field in fields)


# --- reading


def has_marks(connection: Connection) -> bool:
    """Not in a file of an older layout, which this user may only read."""
    return bool(_columns(connection, "pending"))


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
        raw = self._pending(_MINUTE, series, first_ns, end_ns)
        unmarked = max(self._unmarked[0], first_ns), min(self._unmarked[1], end_ns)

        def is_raw(place: Place) -> bool:
            return unmarked[0] <= place[1] < unmarked[1] or place in raw

        if level_ns == QUARTER_NS:
            stale = {(number, _quarter(start_ns)) for number, start_ns in raw}
            stale |= self._pending(_QUARTER, series, first_ns, end_ns)
            stale |= {(n, t) for t in range(_quarter(unmarked[0]), unmarked[1], QUARTER_NS) for n in series}
            self._add(found, QUARTER_NS, series, (first_ns, end_ns), lambda place: place not in stale)
            if stale:
                span = (min(start for _, start in stale), max(start for _, start in stale) + QUARTER_NS)
                among = {number for number, _ in stale}
                self._add(
                    found,
                    MINUTE_NS,
                    among,
                    span,
                    lambda place: (place[0], _quarter(place[1])) in stale and not is_raw(place),
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
                f"WHERE p.task = {_MINUTE} AND p.series IN {_in({number for number, _ in raw})} "
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
        stale = {start for _, start in self._pending(_MINUTE, series, first_ns, end_ns)}
        stale |= {start for _, start in self._pending(_FLEET, fleet, first_ns, end_ns)}
        stale |= set(range(max(first_ns, self._unmarked[0]), min(end_ns, self._unmarked[1]), MINUTE_NS))
        if level_ns == QUARTER_NS:
            quarters = {_quarter(start) for start in stale}
            quarters |= {start for _, start in self._pending(_QUARTER, fleet, first_ns, end_ns)}
            self._add(found, QUARTER_NS, fleet, (first_ns, end_ns), lambda place: place[1] not in quarters)
            minutes = (min(quarters), max(quarters) + QUARTER_NS) if quarters else (0, 0)
            self._add(
                found,
                MINUTE_NS,
                fleet,
                minutes,
                lambda place: place[1] not in stale and _quarter(place[1]) in quarters,
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
        have = _columns(self.connection, table)
        fields = [field for field in self.fields if field.name in have]
        if not fields or not series or span[0] >= span[1]:
            return
        places = [(number, field, found.setdefault(field.name, {})) for number, field in enumerate(fields, 5)]
        packed, unpack = bytes, _GAUGE.unpack
        for row in self.connection.execute(
            f'SELECT series, time_ns, n, first_ns, last_ns{_select(fields)} FROM "{table}" '
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
                if type(value) is packed and field.kind is Kind.GAUGE and len(value) == _GAUGE.size:
                    cell: Cell = Gauge._make(unpack(value))  # the usual case, in a third of the time
                else:
                    cell = decode(field, _Row(number, start_ns, n, start_ns + row[3], start_ns + row[4]), value)
                of_field.setdefault(number, []).append((start_ns, cell))

    def _add_raw(self, found: Cells, start: str, rows_of: str) -> None:
        """Cells of minutes that start at `start` from raw samples, drawn together by the database where it can."""
        have = _columns(self.connection, raw_table(self.measurement))
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


def _quarter(time_ns: int) -> int:
    return time_ns // QUARTER_NS * QUARTER_NS


def _in(series: Iterable[int]) -> str:
    return f"({','.join(map(str, series))})"
