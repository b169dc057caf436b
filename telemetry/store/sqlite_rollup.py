"""Rollups in the embedded store: which cells are still to be drawn together, and the work of doing so.

Every write leaves a mark at each minute that it touched, in the same transaction; a minute with a mark is read from raw samples, one
without from its cell. So late samples, repeats, a crash at any instant and days without rollups need no rule of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection
from typing import Any

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.store.rollup import (
    MINUTE_NS,
    QUARTER_NS,
    SINGLE,
    Cell,
    combined,
    fleet_fields,
    reduced,
)
from telemetry.store.sqlite_cells import (
    FLEET,
    FLEET_PREFIX,
    MINUTE,
    QUARTER,
    SQL_TYPES,
    Row,
    cell_table,
    columns_of,
    decode,
    encode,
    quarter_of,
    raw_table,
    selected,
)
from telemetry.store.sqlite_file import DatabaseFile

SETTLE_NS = 5 * 10**9
"""A minute is drawn together this long after its end: its last samples are on their way until then."""

_MINUTES_AT_ONCE = 64  # about 0.05 s of one transaction, so that writers get their turns
_FLEETS_AT_ONCE = 4
_QUARTERS_AT_ONCE = 32

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


def lay_out(connection: Connection) -> None:
    """The tables of layout 2, beside the raw ones that may be there already. Part of the caller's transaction."""
    for statement in SCHEMA:
        connection.execute(statement)
    spans: list[tuple[int, int]] = []
    for measurement in catalogue.MEASUREMENTS:
        if measurement not in SINGLE and columns_of(connection, raw_table(measurement)):
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
    connection.executemany(f"INSERT OR IGNORE INTO pending VALUES ({MINUTE}, ?, ?)", minutes)


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
        marks = self._due(MINUTE, until_ns - MINUTE_NS, _MINUTES_AT_ONCE)
        fleets: dict[str, int | None] = {}
        for series, start_ns, measurement in marks:
            fields = self._readable(raw_table(measurement))
            rows = self._connection.execute(
                f'SELECT time_ns{selected(fields)} FROM "{raw_table(measurement)}" '
                "WHERE series = ? AND time_ns >= ? AND time_ns < ? ORDER BY time_ns",
                (series, start_ns, start_ns + MINUTE_NS),
            ).fetchall()
            if not rows or self._final(raw_table(measurement), measurement, MINUTE_NS, series, start_ns):
                continue
            times, *columns = zip(*rows, strict=True)
            cells = {field: _reduced(field.kind, times, column) for field, column in zip(fields, columns, strict=True)}
            row = Row(series, start_ns, len(rows), times[0], times[-1])
            self._put(measurement, MINUTE_NS, row, {field: cell for field, cell in cells.items() if cell is not None})
            if measurement not in fleets:
                fleets[measurement] = self._fleet_id(measurement) if fleet_fields(measurement) else None
            self._mark(QUARTER, series, quarter_of(start_ns))
            if (fleet := fleets[measurement]) is not None:
                self._mark(FLEET, fleet, start_ns)
        self._done(MINUTE, marks)
        return bool(marks)

    def fleets(self, until_ns: int) -> bool:
        """The cells of one minute of all series to one."""
        marks = self._due(FLEET, until_ns - MINUTE_NS, _FLEETS_AT_ONCE)
        for fleet, start_ns, name in marks:
            measurement = name.removeprefix(FLEET_PREFIX)
            known = {field.name: field for field in self._readable(cell_table(measurement, MINUTE_NS))}
            fields = [known[field] for field in fleet_fields(measurement) if field in known]
            rows = self._connection.execute(
                f'SELECT series, time_ns, n, first_ns, last_ns{selected(fields)} FROM "{cell_table(measurement, MINUTE_NS)}" '
                "WHERE series IN (SELECT id FROM series WHERE measurement = ?) AND time_ns = ?",
                (measurement, start_ns),
            ).fetchall()
            self._combine(measurement, MINUTE_NS, (fleet, start_ns), fields, rows)
            self._mark(QUARTER, fleet, quarter_of(start_ns))
        self._done(FLEET, marks)
        return bool(marks)

    def quarters(self, until_ns: int) -> bool:
        """The cells of fifteen minutes to one of a quarter."""
        marks = self._due(QUARTER, until_ns - QUARTER_NS, _QUARTERS_AT_ONCE)
        for series, start_ns, name in marks:
            measurement = name.removeprefix(FLEET_PREFIX)
            source = cell_table(measurement, MINUTE_NS)
            fields = self._readable(source)
            rows = self._connection.execute(
                f'SELECT series, time_ns, n, first_ns, last_ns{selected(fields)} FROM "{source}" '
                "WHERE series = ? AND time_ns >= ? AND time_ns < ? ORDER BY time_ns",
                (series, start_ns, start_ns + QUARTER_NS),
            ).fetchall()
            if not self._final(source, measurement, QUARTER_NS, series, start_ns):
                self._combine(measurement, QUARTER_NS, (series, start_ns), fields, rows)
        self._done(QUARTER, marks)
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
                f"INSERT OR IGNORE INTO pending SELECT DISTINCT {MINUTE}, series, time_ns / {MINUTE_NS} * {MINUTE_NS} "
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
        decoded = [(Row(*row[:5]).absolute(), row[5:]) for row in rows]
        for number, field in enumerate(fields):
            several = [decode(field, row, values[number]) for row, values in decoded if values[number] is not None]
            if several:
                cells[field] = combined(field.kind, several)
        first, last = min(row.first_ns for row, _ in decoded), max(row.last_ns for row, _ in decoded)
        self._put(measurement, level_ns, Row(*place, sum(row.n for row, _ in decoded), first, last), cells)

    def _put(self, measurement: str, level_ns: int, row: Row, cells: Mapping[catalogue.Field, Cell]) -> None:
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
        if not have and not columns_of(self._connection, table):
            every = catalogue.MEASUREMENTS[measurement].fields.values()
            columns = "".join(f', "{field.name}" {SQL_TYPES[field.type]}' for field in every)
            self._connection.execute(
                f'CREATE TABLE "{table}" (series INTEGER NOT NULL, time_ns INTEGER NOT NULL, n INTEGER NOT NULL, '
                f"first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL{columns}, PRIMARY KEY (series, time_ns)) WITHOUT ROWID"
            )
            self._fields.pop(table, None)
            return
        for field in fields:
            if field.name not in have:
                self._connection.execute(f'ALTER TABLE "{table}" ADD COLUMN "{field.name}" {SQL_TYPES[field.type]}')
                self._fields.pop(table, None)

    def _readable(self, table: str) -> list[catalogue.Field]:
        """The catalogue's fields that a table has."""
        if table not in self._fields:
            measurement = table.split("_", 1)[1]
            have = columns_of(self._connection, table)
            self._fields[table] = [f for f in catalogue.MEASUREMENTS[measurement].fields.values() if f.name in have]
        return self._fields[table]

    def _fleet_id(self, measurement: str) -> int:
        key = (FLEET_PREFIX + measurement, "{}")
        self._connection.execute("INSERT OR IGNORE INTO series (measurement, tags) VALUES (?, ?)", key)
        found = self._connection.execute("SELECT id FROM series WHERE measurement = ? AND tags = ?", key).fetchone()
        return int(found[0])


def _reduced(kind: Kind, times_ns: Sequence[int], column: Sequence[Any]) -> Cell | None:
    absent = column.count(None)
    if absent == len(column):
        return None
    if absent:
        present = [(t, value) for t, value in zip(times_ns, column, strict=True) if value is not None]
        times_ns, column = [t for t, _ in present], [value for _, value in present]
    return reduced(kind, times_ns, column)
