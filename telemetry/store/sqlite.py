"""The embedded store: one SQLite file in WAL mode, one wide row per device and time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from sqlite3 import Connection, sqlite_version
from typing import Any, TypeVar

from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store.admission import admit
from telemetry.store.buckets import Buckets, Columns, aggregates, buckets, gauges, matches, named, order
from telemetry.store.interface import Column, Rejected, Spread, StoreError, Survey, Where
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, SINGLE, Gauge, answers, drawn, level_ns, spreads
from telemetry.store.sqlite_cells import FLEET_PREFIX, SQL_TYPES, Timed, cell_table
from telemetry.store.sqlite_file import Damaged, DatabaseFile, Full, Replaced
from telemetry.store.sqlite_range import raw_columns
from telemetry.store.sqlite_rollup import SETTLE_NS, Rollups, lay_out, mark
from telemetry.store.sqlite_rollup_reader import Reader, has_marks

_PRUNE_NS = 3600 * 10**9
_PRUNE_SERIES = 8
"""A deletion takes an hour of so many series at a time: about 30,000 rows, 0.1 s, so that writers and readers get their turns."""
_MOST = 2**63 - 1

T = TypeVar("T")

SYNCED_AFTER_S = 60.0
"""A write is not waited for until it is on the medium. Linux brings it there after 30 s (vm.dirty_expire_centisecs), looks for such
pages every 5 s, and the file's length follows within another 5 s (ext4's commit interval).
"""


def path_of(url: str) -> Path:
    """The file that `url` names. StoreError when it names none."""
    path = url.removeprefix("sqlite://")
    if path == url or not path or path.endswith("/"):
        raise StoreError.of("store.file.no_name", store=url)
    if path.startswith("//"):  # sqlite:////folder/store.db, as other programs write it
        path = "/" + path.lstrip("/")
    if "?" in path:
        raise StoreError.of("store.file.options", store=url.partition("?")[0])
    if path.lstrip("/").startswith("~"):
        raise StoreError.of("store.file.home", store=url, home=Path.home())
    if path.startswith("localhost/"):
        raise StoreError.of("store.file.host", store=url, path=path.removeprefix("localhost"))
    if "\0" in path or not _is_text(path):
        raise StoreError.of("store.file.no_name", store=url)
    return Path(path)


def _is_text(path: str) -> bool:
    """SQLite takes no other name of a file."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class SqliteStore:
    """A `Store` in one file, `sqlite:///path/to/store.db`. Threads and processes may share the file for reading and writing.

    Each measurement is a table of rows (series, time_ns, fields...) in the order of its primary key, so that one series over a time
    is one read; fields that the catalogue gains become columns when they are first written. Durable against a crash of the
    process; a power cut may take what was written within `durable_after_s`, which the spool sends again.
    """

    def __init__(self, url: str) -> None:
        path = path_of(url)
        self.url = url
        self.rolls_up = True
        self.durable_after_s = SYNCED_AFTER_S
        self._file = DatabaseFile(path, lay_out)
        self._rollups = Rollups(self._file)
        # what the writer knows of the file; valid for one generation of it, touched under its write lock only
        self._generation = -1
        self._columns: dict[str, frozenset[str]] = {}
        self._ids: dict[tuple[str, str], int] = {}

    def close(self) -> None:
        self._file.close()

    # --- writing

    def write(self, samples: Sequence[Sample]) -> list[Rejected]:
        admitted, refused = admit(samples)
        if admitted:
            try:
                self._write(admitted)
            except Damaged as error:
                self._file.set_aside(str(error))
                self._write(admitted)
            except Replaced:
                self._write(admitted)
        return refused

    def _write(self, samples: Sequence[Sample]) -> None:
        with self._file.writing() as connection:
            is_anew = self._generation != self._file.generation
            if is_anew:
                self._columns, self._ids = {}, {}
                self._generation = self._file.generation
            touched: set[tuple[int, int]] = set()
            for measurement, names, rows in self._batches(connection, samples):
                self._ensure_columns(connection, measurement, names)
                connection.executemany(_upsert(measurement, names), rows)
                if measurement not in SINGLE:
                    touched.update((row[0], row[1] // MINUTE_NS * MINUTE_NS) for row in rows)
            mark(connection, sorted(touched))
        if is_anew:  # who only reads takes none
            self._file.keep_reserve()

    def _batches(
        self, connection: Connection, samples: Iterable[Sample]
    ) -> Iterable[tuple[str, tuple[str, ...], list[list[Any]]]]:
        """Rows (series, time_ns, values) grouped by the columns they fill; two samples of one series and time keep their order."""
        groups: dict[tuple[str, tuple[str, ...]], list[list[Any]]] = {}
        placed: dict[tuple[int, int], tuple[str, tuple[str, ...]]] = {}
        for sample in samples:
            key = (sample.measurement, tuple(sample.fields))
            series = self._series_id(connection, sample.measurement, sample.tags)
            if placed.setdefault((series, sample.time_ns), key) != key:
                for (measurement, names), rows in groups.items():
                    yield measurement, names, rows
                groups, placed = {}, {(series, sample.time_ns): key}
            groups.setdefault(key, []).append([series, sample.time_ns, *sample.fields.values()])
        for (measurement, names), rows in groups.items():
            yield measurement, names, rows

    def _series_id(self, connection: Connection, measurement: str, tags: Mapping[str, str]) -> int:
        text = _tags_text(tags)
        known = self._ids.get((measurement, text))
        if known is not None:
            return known
        key = (measurement, text)
        connection.execute("INSERT OR IGNORE INTO series (measurement, tags) VALUES (?, ?)", key)
        row = connection.execute("SELECT id FROM series WHERE measurement = ? AND tags = ?", key).fetchone()
        self._ids[key] = int(row[0])
        return self._ids[key]

    def _ensure_columns(self, connection: Connection, measurement: str, names: Iterable[str]) -> None:
        if self._columns.get(measurement, frozenset()).issuperset(names):
            return
        fields = catalogue.MEASUREMENTS[measurement].fields
        have = _columns_of(connection, _table(measurement))
        if not have:
            columns = "".join(f', "{field.name}" {SQL_TYPES[field.type]}' for field in fields.values())
            connection.execute(
                f'CREATE TABLE "{_table(measurement)}" (series INTEGER NOT NULL, time_ns INTEGER NOT NULL{columns}, '
                "PRIMARY KEY (series, time_ns)) WITHOUT ROWID"
            )
            have = frozenset(fields)
        for name in names:
            if name not in have:
                connection.execute(
                    f'ALTER TABLE "{_table(measurement)}" ADD COLUMN "{name}" {SQL_TYPES[fields[name].type]}'
                )
        self._columns[measurement] = have | set(names)

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        try:
            return self._rollups.work(now_ns - SETTLE_NS, budget_s)
        except Damaged as error:
            self._file.set_aside(str(error))
            return False

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        removed = 0
        for measurement in catalogue.MEASUREMENTS:
            limit = before_ns.get(measurement, before_ns.get("*"))
            if limit is not None:
                removed += self._prune(measurement, limit, level_ns)
        self._file.keep_reserve()
        return removed

    def _prune(self, measurement: str, limit_ns: int, level_ns: int) -> int:
        table = cell_table(measurement, level_ns) if level_ns else _table(measurement)
        name = FLEET_PREFIX + measurement
        with self._file.reading() as connection:
            if not _columns_of(connection, table):
                return 0
            ids = [*self._series(connection, measurement, None), *self._series(connection, name, None)]
        is_source = measurement not in SINGLE and level_ns != QUARTER_NS
        removed, place = 0, -1
        while (oldest := self._oldest(table, ids, place)) is not None and oldest < limit_ns:
            place = min(oldest + _PRUNE_NS * max(1, level_ns // 10**9), limit_ns)
            if is_source:
                self._with_reserve(partial(self._rollups.finish, table, place))
            for first in range(0, len(ids), _PRUNE_SERIES):
                some = ids[first : first + _PRUNE_SERIES]
                removed += self._with_reserve(partial(self._delete, table, some, place))
        if is_source:
            self._with_reserve(partial(self._rollups.finish, table, limit_ns))
        return removed

    def _oldest(self, table: str, ids: Sequence[int], from_ns: int) -> int | None:
        """When the oldest row from `from_ns` on was taken."""
        with self._file.reading() as connection:
            oldest: int | None = connection.execute(
                f'SELECT min(t) FROM (SELECT (SELECT min(time_ns) FROM "{table}" '
                f"WHERE series = id AND time_ns >= ?) AS t FROM series WHERE id IN {_in(ids)})",
                (from_ns,),
            ).fetchone()[0]
        return oldest

    def _delete(self, table: str, ids: Sequence[int], before_ns: int) -> int:
        with self._file.writing() as connection:
            removed = connection.execute(
                f'DELETE FROM "{table}" WHERE series IN {_in(ids)} AND time_ns < ?', (before_ns,)
            ).rowcount
            if removed:
                connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
        self._file.give_way()
        return removed

    def _with_reserve(self, work: Callable[[], T]) -> T:
        """On a full disk even a deletion needs room, in the log: that of the reserve, and then what it freed itself."""
        for make_room in (self._file.shrink, self._file.spend_reserve):
            try:
                return work()
            except Full:
                make_room()
        done = work()
        self._file.shrink()
        return done

    def exists(self) -> bool:
        return self._file.path.exists()

    def prepare(self, keep_s: float = 0.0) -> None:
        pass  # opening has made it

    def survey(self) -> Survey:
        write_problem = ""
        try:
            with self._file.writing():
                pass
        except StoreError as error:
            write_problem = str(error)
        times: list[int] = []

        def read(connection: Connection) -> None:
            for measurement in catalogue.MEASUREMENTS:
                if self._readable(connection, measurement):
                    series = _in(self._series(connection, measurement, None))
                    for end in ("min", "max"):
                        times.extend(
                            row[0]
                            for row in connection.execute(
                                f'SELECT {end}(t) FROM (SELECT (SELECT {end}(time_ns) FROM "{_table(measurement)}" '
                                f"WHERE series = id) AS t FROM series WHERE id IN {series})"
                            )
                            if row[0] is not None
                        )

        self._read(read)
        path = self._file.path
        parts = [path.with_name(path.name + suffix) for suffix in ("", "-wal")]
        return Survey(
            f"SQLite {sqlite_version}",
            write_problem,
            sum(part.stat().st_size for part in parts if part.exists()),
            shutil.disk_usage(path.parent).free,
            min(times, default=None),
            max(times, default=None),
        )

    # --- reading

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        asked = named(measurement, fields)

        def read(connection: Connection) -> list[Sample]:
            names = [name for name in self._readable(connection, measurement) if name in asked]
            if not names:
                return []
            series = self._series(connection, measurement, where)
            rows = connection.execute(
                f"SELECT d.series, d.time_ns{_select(names)} FROM series AS s "
                f'JOIN "{_table(measurement)}" AS d ON d.series = s.id AND d.time_ns = '
                f'(SELECT max(time_ns) FROM "{_table(measurement)}" WHERE series = s.id) '
                f"WHERE s.id IN {_in(series)} AND d.time_ns >= ?",
                (since_ns,),
            )
            return [sample for sample in _to_samples(measurement, names, rows, series) if sample.fields]

        return sorted(self._read(read), key=lambda sample: order(sample.tags))

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        def read(connection: Connection) -> list[Sample]:
            names = self._readable(connection, measurement)
            if not names:
                return []
            series = self._series(connection, measurement, where)
            rows = connection.execute(
                f'SELECT series, time_ns{_select(names)} FROM "{_table(measurement)}" '
                f"WHERE series IN {_in(series)} AND time_ns >= ? AND time_ns < ? ORDER BY time_ns DESC LIMIT ?",
                (start_ns, min(end_ns, _MOST), -1 if limit is None else limit),
            )
            return _to_samples(measurement, names, rows, series)

        return sorted(self._read(read), key=lambda sample: (sample.time_ns, order(sample.tags)))

    def range(
        self,
        measurement: str,
        fields: Sequence[str],
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "auto",
        where: Where | None = None,
    ) -> list[Column]:
        chosen = aggregates(measurement, fields, aggregate)
        over = buckets(start_ns, end_ns, step_ns)

        def read(connection: Connection) -> list[Column]:
            columns = Columns(over, fields)
            have = self._readable(connection, measurement)
            series = self._series(connection, measurement, where) if have else {}
            left = {name: how for name, how in chosen.items() if name in have}
            for name, (how, cells) in self._rolled(connection, measurement, left, list(series), over).items():
                del left[name]
                for number, of_series in cells.items():
                    columns.add(series[number], name, drawn(how, of_series, over))
            for number, name, values in raw_columns(connection, _table(measurement), left, list(series), over):
                columns.add(series[number], name, values)
            return columns.answer()

        return self._read(read)

    def _rolled(
        self, connection: Connection, measurement: str, chosen: Mapping[str, str], series: Sequence[int], over: Buckets
    ) -> dict[str, tuple[str, dict[int, list[Timed]]]]:
        """field -> how, and the cells of each series: of the fields whose buckets can be drawn from cells."""
        level = level_ns(over.step_ns)
        kept = {name: how for name, how in chosen.items() if level and answers(measurement, name, how)}
        first_ns = over.first_ns - (over.lookback_ns if "rate" in kept.values() else 0)
        first_ns = first_ns // max(1, level) * level
        if not kept or not has_marks(connection):
            return {}
        wanted = [catalogue.field(measurement, name) for name in kept]
        cells = Reader(connection, measurement, wanted).cells(series, first_ns, over.end_ns, level)
        return {name: (how, cells.get(name, {})) for name, how in kept.items()}

    def spread(
        self,
        measurement: str,
        fields: Sequence[str],
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        where: Where | None = None,
    ) -> list[Spread]:
        wanted = gauges(measurement, fields)
        over = buckets(start_ns, end_ns, step_ns)
        level = level_ns(step_ns)

        def read(connection: Connection) -> list[Spread]:
            have = self._readable(connection, measurement)
            series = list(self._series(connection, measurement, where)) if have else []
            present = [field for field in wanted if field.name in have]
            if not level or not has_marks(connection):
                return _raw_spreads(connection, measurement, present, series, over)
            reader = Reader(connection, measurement, present)
            if not where:
                return spreads(reader.together(series, over.first_ns, over.end_ns, level), over)
            found = reader.cells(series, over.first_ns, over.end_ns, level)
            return spreads({name: [c for cells in found[name].values() for c in cells] for name in found}, over)

        return self._read(read)

    def series(self, measurement: str, *, since_ns: int = 0) -> list[Mapping[str, str]]:
        def read(connection: Connection) -> list[Mapping[str, str]]:
            if not self._readable(connection, measurement):
                return []
            series = self._series(connection, measurement, None)
            rows = connection.execute(
                f"SELECT id FROM series WHERE id IN {_in(series)} AND "
                f'(SELECT max(time_ns) FROM "{_table(measurement)}" WHERE series = id) >= ?',
                (since_ns,),
            )
            return [series[row[0]] for row in rows]

        return sorted(self._read(read), key=order)

    def _read(self, read: Callable[[Connection], T]) -> T:
        """One read transaction. A damaged file is set aside, where this user may, and the new one answers."""
        try:
            with self._file.reading() as connection:
                return read(connection)
        except Damaged as error:
            self._file.set_aside(str(error))
            with self._file.reading() as connection:
                return read(connection)

    def _readable(self, connection: Connection, measurement: str) -> list[str]:
        """The catalogue's fields that the table has; none when there is no table yet. ValueError for an unknown measurement."""
        if measurement not in catalogue.MEASUREMENTS:
            raise ValueError(f"unknown measurement {measurement!r}")
        have = _columns_of(connection, _table(measurement))
        return [name for name in catalogue.MEASUREMENTS[measurement].fields if name in have]

    def _series(self, connection: Connection, measurement: str, where: Where | None) -> dict[int, Mapping[str, str]]:
        found: dict[int, Mapping[str, str]] = {}
        for number, text in connection.execute("SELECT id, tags FROM series WHERE measurement = ?", (measurement,)):
            tags = _tags_of(text)
            if matches(tags, where):
                found[number] = tags
        return found


def _table(measurement: str) -> str:
    return f"raw_{measurement}"


def _tags_text(tags: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(tags.items())), ensure_ascii=False, separators=(",", ":"))


@lru_cache(maxsize=65536)
def _tags_of(text: str) -> Mapping[str, str]:
    try:
        tags: dict[str, str] = json.loads(text)
    except ValueError:
        raise Damaged(f"the tags of a series are damaged: {text[:80]!r}") from None
    return tags


def _columns_of(connection: Connection, table: str) -> frozenset[str]:
    rows = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
    return frozenset(str(row[1]) for row in rows) - {"series", "time_ns"}


def _upsert(measurement: str, names: Sequence[str]) -> str:
    columns = "".join(f', "{name}"' for name in names)
    merged = ", ".join(f'"{name}" = excluded."{name}"' for name in names)
    return (
        f'INSERT INTO "{_table(measurement)}" (series, time_ns{columns}) VALUES (?, ?{", ?" * len(names)}) '
        f"ON CONFLICT (series, time_ns) DO UPDATE SET {merged}"
    )


def _in(series: Iterable[int]) -> str:
    return f"({','.join(map(str, series))})"


def _select(names: Iterable[str]) -> str:
    return "".join(f', "{name}"' for name in names)


def _to_samples(
    measurement: str, names: Sequence[str], rows: Iterable[Sequence[Any]], series: Mapping[int, Mapping[str, str]]
) -> list[Sample]:
    return [
        Sample(
            measurement,
            series[row[0]],
            {name: value for name, value in zip(names, row[2:], strict=True) if value is not None},
            row[1],
        )
        for row in rows
        if row[0] in series  # always, unless the file is damaged
    ]


def _within(series: Iterable[int], over: Buckets) -> str:
    return f"series IN {_in(series)} AND time_ns >= {over.first_ns} AND time_ns < {over.end_ns}"


def _bucket(over: Buckets) -> str:
    return f"(time_ns - {over.first_ns}) / {over.step_ns}"


def _raw_spreads(
    connection: Connection, measurement: str, fields: Sequence[catalogue.Field], series: Iterable[int], over: Buckets
) -> list[Spread]:
    cells: dict[str, list[Timed]] = {}
    for field in fields:
        name = f'"{field.name}"'
        for bucket, *parts in connection.execute(
            f"SELECT {_bucket(over)} AS bucket, count({name}), avg({name}), min({name}), max({name}) "
            f'FROM "{_table(measurement)}" WHERE {_within(series, over)} AND {name} IS NOT NULL GROUP BY bucket'
        ):
            cells.setdefault(field.name, []).append((over.first_ns + bucket * over.step_ns, Gauge(*parts)))
    return spreads(cells, over)
