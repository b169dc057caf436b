"""InfluxDB as the store: line protocol over HTTP in, InfluxQL out, the generation of the server found out by asking it.

Tested against a real 1.6 server. 2.x (writes to /api/v2/write, reads through the bucket's DBRP mapping) and 3.x are tested against
their documented contract only.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from influxdb_client import InfluxDBClient
from influxdb_client.rest import ApiException
from urllib3.exceptions import HTTPError
from urllib3.util import make_headers

from telemetry import catalogue, lineprotocol
from telemetry.catalogue import Kind
from telemetry.sample import Sample, Value
from telemetry.store.admission import admit
from telemetry.store.buckets import Buckets, Columns, aggregates, buckets, gauges, named, only, order, rates
from telemetry.store.influxdb_rollup import FLEET, SETTLE_NS, InfluxRollups, marks, runs
from telemetry.store.interface import Column, Rejected, Spread, StoreDown, StoreError, Survey, Where
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, Cell, Gauge, answers, drawn, level_ns, reduced, spreads

DEFAULT_PORT = 8086
BATCH_LINES = 5000
TIMEOUT_MS = (3_000, 20_000)  # to connect, to answer
_LONG_QUERY = 4000
_TYPE_CONFLICT = re.compile(
    r'field type conflict: input field "(?P<field>[^"]+)" on measurement "(?P<measurement>[^"]+)"'
)
_TOO_OLD = re.compile(r"beyond retention policy dropped=(\d+)")
TOKEN_VARIABLE = "PAIRSCOPE_STORE_TOKEN"  # noqa: S105  the name of a variable, not a secret


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how to be let in; made from influxdb://[user:password@]host[:port]/database[?options]."""

    base: str  # http://host:port/prefix
    shown: str  # the URL without secrets, for messages
    database: str
    org: str = ""
    verify_tls: bool = True
    ca_file: str | None = None
    authorization: str = dataclass_field(default="", repr=False)


def parse(url: str) -> Address:
    """StoreError names what is missing. Options: org, token, token_file, ca_file, verify=0; influxdbs:// means TLS."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise StoreError(f"store {parts.hostname}: the port is not a number") from None
    prefix, _, database = parts.path.rpartition("/")
    database = unquote(database)
    host = parts.hostname or ""
    shown = f"{parts.scheme}://{host}:{port}{prefix}/{database}"
    if not host or not database:
        raise StoreError(f"store {shown}: needs influxdb://host:{port}/database")
    unknown = set(options) - {"org", "token", "token_file", "ca_file", "verify"}
    if unknown:
        raise StoreError(
            f"store {shown}: unknown option {', '.join(sorted(unknown))}; known are org, token, token_file, ca_file, verify"
        )
    token = options.get("token") or os.environ.get(TOKEN_VARIABLE, "")
    if "token_file" in options:
        try:
            token = Path(options["token_file"]).read_text("utf-8").strip()
        except OSError as error:
            raise StoreError(f"store {shown}: token_file {options['token_file']}: {error.strerror}") from None
    authorization = f"Token {token}" if token else ""
    if parts.username:
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = make_headers(basic_auth=credentials)["authorization"]
    scheme = "https" if parts.scheme == "influxdbs" else "http"
    name = f"[{host}]" if ":" in host else host
    return Address(
        f"{scheme}://{name}:{port}{prefix}",
        shown,
        database,
        options.get("org", ""),
        options.get("verify", "1") not in ("0", "false", "no"),
        options.get("ca_file"),
        authorization,
    )


class _Refused(Exception):
    """The server refused a batch for what is in it (400, 413, 422); the message is the server's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class InfluxStore:
    """A `Store` on an InfluxDB server, `influxdb://host:8086/database` (`influxdbs://` with TLS). Thread-safe.

    Nothing is asked of the server before the first call, so that it may come up later. The database is created by the first write
    when this user may; until then it reads as empty. A 2.x bucket must exist.

    `prune` counts at least what every row of a series has in common, and needs a server older than 3.
    """

    def __init__(self, url: str) -> None:
        self._address = parse(url)
        self.url = self._address.shown
        self._client: InfluxDBClient | None = InfluxDBClient(
            self._address.base,
            token="",
            timeout=TIMEOUT_MS,
            verify_ssl=self._address.verify_tls,
            ssl_ca_cert=self._address.ca_file,
            retries=False,
        )
        self.durable_after_s = 0.0  # each write is synced before it is acknowledged
        self._version: tuple[int, int] | None = None
        self._is_there = False  # the database of a 1.x server was seen
        self._rollups = InfluxRollups(self._address.database, self._query, self._put)

    @property
    def rolls_up(self) -> bool:
        """Only on 1.x: a bucket of 2.x and a database of 3.x have one retention."""
        return self._generation() == 1

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # --- HTTP

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: bytes | None = None,
        form: Mapping[str, str] | None = None,
    ) -> tuple[str, Mapping[str, str]]:
        """(text, headers) of a 2xx answer; everything else is StoreDown, StoreError or _Refused."""
        client = self._client
        if client is None:
            raise StoreError(f"store {self.url}: is closed")
        headers = {"Accept": "application/json"}
        if self._address.authorization:
            headers["Authorization"] = self._address.authorization
        if body is not None:
            headers |= {"Content-Type": "text/plain; charset=utf-8", "Content-Encoding": "gzip"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            # not preloaded: the library then hands over the response itself, which no other thread can replace
            response = client.api_client.call_api(
                path,
                method,
                query_params=dict(query),
                header_params=headers,
                body=body,
                post_params=dict(form) if form is not None else None,
                _preload_content=False,
                _return_http_data_only=True,
            )
            return response.data.decode("utf-8", "replace"), response.headers
        except ApiException as error:
            raise self._as_store_error(error) from None
        except (HTTPError, OSError) as error:
            why = str(getattr(error, "reason", None) or error).split(": ", 1)[-1]
            raise StoreDown(
                f"store {self.url}: no answer from {self._address.base} ({why}); is the server running?"
            ) from None

    def _as_store_error(self, error: ApiException) -> Exception:
        where = f"store {self.url}"
        if error.status in (0, None):
            return StoreError(
                f"{where}: TLS failed ({' '.join(str(error.reason).split())}); check the certificate, or name its ca_file"
            )
        reason = _reason(error)
        if error.status == 401:
            return StoreError(
                f"{where}: the server refuses the credentials ({reason}); check the user and password, or the token"
            )
        if error.status == 403:
            return StoreError(
                f"{where}: the credentials do not allow this ({reason}); grant read and write on {self._address.database}"
            )
        if error.status == 404:
            return StoreError(f"{where}: not found ({reason}); create {self._address.database!r}, or check the name")
        if error.status in (400, 413, 422):
            return _Refused(error.status, reason)
        after = (error.headers or {}).get("Retry-After")
        wait = f"; asked to wait {after} s" if after else ""
        return StoreDown(f"{where}: HTTP {error.status} ({reason}){wait}", after)

    def _generation(self) -> int:
        """1, 2 or 3; asked once. StoreError for a server that is no InfluxDB."""
        version = self._version  # another thread may void it meanwhile
        if version is None:
            try:
                _, headers = self._call("GET", "/ping", {})
            except _Refused as refused:
                raise StoreError(f"store {self.url}: is no InfluxDB ({refused.reason})") from None
            told = next((v for k, v in headers.items() if k.lower() == "x-influxdb-version"), "")
            found = re.match(r"v?(\d+)\.(\d+)", told)
            if found is None:
                raise StoreError(
                    f"store {self.url}: the server does not say that it is an InfluxDB; check host and port, or the kind of store"
                )
            version = self._version = int(found[1]), int(found[2])
        return version[0]

    def exists(self) -> bool:
        if self._generation() != 1:
            self._query("SHOW MEASUREMENTS LIMIT 1")  # says itself what to do about a missing bucket
            return True
        if not self._is_there:
            self._is_there = bool(self._query(f"SHOW RETENTION POLICIES ON {_identifier(self._address.database)}"))
        return self._is_there

    def prepare(self) -> None:
        if not self.exists():
            self._create_database()

    def _create_database(self) -> None:
        """On 1.x, for who is about to write: creating one that exists is no error."""
        name = self._address.database
        try:
            text, _ = self._call("POST", "/query", {"q": f"CREATE DATABASE {_identifier(name)}"})
            _results(text)
        except (_Refused, ValueError) as refused:
            raise StoreError(f"store {self.url}: can't create the database ({refused})") from None
        except StoreError as error:
            if "do not allow" not in str(error):
                raise
            raise StoreError(
                f"store {self.url}: there is no database {name!r}, and these credentials may not create it; let an administrator create it"
            ) from None

    def _query(self, query: str) -> list[dict[str, Any]]:
        """The series of one InfluxQL statement, times in ns."""
        generation = self._generation()
        parameters = {"db": self._address.database, "epoch": "ns"}
        if generation == 2 and self._address.org:
            parameters["org"] = self._address.org
        try:
            if len(query) > _LONG_QUERY or not query.startswith(("SELECT", "SHOW")):
                text, _ = self._call("POST", "/query", parameters, form={"q": query})
            else:
                text, _ = self._call("GET", "/query", {**parameters, "q": query})
            return _results(text)
        except (_Refused, ValueError) as error:
            reason = str(error)
            if "database not found" in reason or "retention policy not found" in reason:
                if generation == 1:
                    self._is_there = False
                    return []  # reading is no reason to make it
                raise StoreError(
                    f"store {self.url}: bucket {self._address.database!r} can't be read with InfluxQL; create it, or its DBRP mapping"
                ) from None
            raise StoreError(f"store {self.url}: {reason}") from None

    # --- writing

    def write(self, samples: Sequence[Sample]) -> list[Rejected]:
        admitted, refused = admit(samples)
        for start in range(0, len(admitted), BATCH_LINES):
            refused += self._write(admitted[start : start + BATCH_LINES])
        return refused

    def _write(self, samples: Sequence[Sample]) -> list[Rejected]:
        """One request, and as few more as it takes to find what the server refuses."""
        if not samples:
            return []
        try:
            self._post(samples)
            return []
        except _Refused as refused:
            conflict = _TYPE_CONFLICT.search(refused.reason)
            if conflict is not None:
                good, bad = _without_field(samples, conflict["measurement"], conflict["field"], refused.reason)
                if bad:
                    return bad + self._write(good)
            dropped = _TOO_OLD.search(refused.reason)
            if len(samples) == 1 or (dropped is not None and int(dropped[1]) >= len(samples)):
                return [Rejected(sample, refused.reason) for sample in samples]
            half = len(samples) // 2
            return self._write(samples[:half]) + self._write(samples[half:])

    def _post(self, samples: Sequence[Sample], retried: bool = False) -> None:
        lines = lineprotocol.encode_many(samples)
        if self._generation() == 1:
            path, query = "/write", {"db": self._address.database}
            lines += lineprotocol.encode_many(marks(samples))
        else:
            path, query = "/api/v2/write", {"bucket": self._address.database}
            if self._address.org:
                query["org"] = self._address.org
        try:
            self._call("POST", path, query, body=_packed(lines))
        except StoreError as error:
            if "database not found" not in str(error) or retried or self._generation() != 1:
                raise
            self._create_database()
            self._post(samples, retried=True)

    def _put(self, samples: Sequence[Sample], policy: str) -> None:
        """Rollups and their marks, as they are."""
        query = {"db": self._address.database} | ({"rp": policy} if policy else {})
        for start in range(0, len(samples), BATCH_LINES):
            lines = lineprotocol.encode_many(samples[start : start + BATCH_LINES])
            try:
                self._call("POST", "/write", query, body=_packed(lines))
            except _Refused as refused:
                if _TOO_OLD.search(refused.reason) is None:  # what the policy would drop need not be kept
                    raise StoreError(f"store {self.url}: refuses a rollup ({refused.reason})") from None

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        return self.rolls_up and self.exists() and self._rollups.work(now_ns - SETTLE_NS, budget_s)

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        """Of a level, the server drops by itself what is older than "*" says; it is told how long that is."""
        if level_ns:
            if self.rolls_up and "*" in before_ns and self.exists():
                self._rollups.keep(level_ns, (time.time_ns() - before_ns["*"]) / 86_400e9)
            return 0
        if self.rolls_up and self._rollups.since_ns() is not None:
            self._rollups.finish(max(before_ns.values(), default=0))
        removed = 0
        for measurement in catalogue.MEASUREMENTS:
            limit = before_ns.get(measurement, before_ns.get("*"))
            if limit is None:
                continue
            counts = self._query(f"SELECT count(*) FROM {_identifier(measurement)} WHERE time < {limit} GROUP BY *")
            gone = sum(max(n for n in row["values"][0][1:] if n is not None) for row in counts)
            if gone:
                self._delete(measurement, limit)
            removed += gone
        return removed

    def _delete(self, measurement: str, limit_ns: int) -> None:
        generation = self._generation()
        if generation != 1:
            raise StoreError(
                f"store {self.url}: samples of InfluxDB {generation} are not deleted one by one; set the retention of the bucket"
            )
        text, _ = self._call(
            "POST",
            "/query",
            {"db": self._address.database, "q": f"DELETE FROM {_identifier(measurement)} WHERE time < {limit_ns}"},
        )
        _results(text)

    def survey(self) -> Survey:
        generation = self._generation()
        major, minor = self._version or (generation, 0)
        write_problem = ""
        try:
            if generation == 1 and self.exists():  # else the first write will show
                self._call("POST", "/write", {"db": self._address.database}, body=gzip.compress(b""))
            elif generation != 1:
                query = {"bucket": self._address.database} | ({"org": self._address.org} if self._address.org else {})
                self._call("POST", "/api/v2/write", query, body=gzip.compress(b""))
        except _Refused:
            pass  # of a request without a line: whoever gets as far may write
        except StoreError as error:
            write_problem = str(error)
        times: list[int] = []
        for measurement in catalogue.MEASUREMENTS:
            for tail in ("", "DESC"):
                found = self._query(f"SELECT * FROM {_identifier(measurement)} ORDER BY time {tail or 'ASC'} LIMIT 1")
                times += [row[0] for series in found for row in series["values"]]
        retention_s = self._retention_s() if generation == 1 else None
        return Survey(
            f"InfluxDB {major}.{minor}",
            write_problem,
            oldest_ns=min(times, default=None),
            newest_ns=max(times, default=None),
            retention_s=retention_s,
            advice=("policy_endless",) if retention_s == 0 else () if generation == 1 else ("bucket_retention",),
        )

    def _retention_s(self) -> float | None:
        """How long the database's default policy keeps samples; 0 for ever."""
        for series in self._query(f"SHOW RETENTION POLICIES ON {_identifier(self._address.database)}"):
            places = {name: place for place, name in enumerate(series["columns"])}
            for row in series["values"]:
                if row[places["default"]]:
                    parts = re.findall(r"(\d+)([hms])", str(row[places["duration"]]))
                    return float(sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in parts))
        return None

    # --- reading

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        tail = "GROUP BY * ORDER BY time DESC LIMIT 1"
        newest = self._select(measurement, f"time >= {since_ns}", where, tail, by_time=False)
        return newest if fields is None else only(newest, named(measurement, fields))

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        last_ns = min(end_ns, lineprotocol.INT_MAX - 1)
        times = f"time >= {start_ns} AND time < {last_ns}"
        if limit is None:
            return self._select(measurement, times, where, "GROUP BY *", by_time=True)
        # not grouped: the limit then is one of the answer, not of each series, and the answer stays small
        tags = self._query(f"SHOW TAG KEYS FROM {_identifier(measurement)}")
        names = frozenset(row[0] for found in tags for row in found["values"])
        tail = f"ORDER BY time DESC LIMIT {limit}"
        return self._select(measurement, times, where, tail, by_time=True, ungrouped=names)

    def series(self, measurement: str, *, since_ns: int = 0) -> list[Mapping[str, str]]:
        return [sample.tags for sample in self.latest(measurement, since_ns=since_ns)]

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
        columns = Columns(over, fields)
        if over.count and not _impossible(where):
            kept = {name: how for name, how in chosen.items() if answers(measurement, name, how)}
            before = self._raw_part(over) if kept else over
            self._range_raw(
                measurement, {name: chosen[name] for name in chosen if name not in kept}, over, where, columns
            )
            self._range_raw(measurement, kept, before, where, columns)
            if before.count < over.count and kept:
                self._range_cells(measurement, kept, before.end_ns, over, where, columns)
        return columns.answer()

    def _raw_part(self, over: Buckets) -> Buckets:
        """The first buckets, from before the rollups began; all of them when the step is not of whole minutes."""
        if not level_ns(over.step_ns) or self._generation() != 1:
            return over
        since_ns = self._rollups.since_ns()
        if since_ns is None:
            return over
        count = -(-(since_ns + over.lookback_ns - over.first_ns) // over.step_ns)
        return Buckets(over.first_ns, over.step_ns, min(max(count, 0), over.count))

    def _range_raw(
        self, measurement: str, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
    ) -> None:
        if not over.count:
            return
        plain = {name: how for name, how in chosen.items() if how in ("mean", "min", "max", "last")}
        self._range_plain(measurement, plain, over, where, columns)
        for name, how in chosen.items():
            if how == "or":
                self._range_or(measurement, name, over, where, columns)
            elif how == "rate":
                self._range_rate(measurement, name, over, where, columns)

    def _range_cells(
        self,
        measurement: str,
        chosen: Mapping[str, str],
        from_ns: int,
        over: Buckets,
        where: Where | None,
        columns: Columns,
    ) -> None:
        level = level_ns(over.step_ns)
        fields = [catalogue.field(measurement, name) for name in chosen]
        first_ns = from_ns - (over.lookback_ns if "rate" in chosen.values() else 0)
        found, tags = self._gather(measurement, fields, where, (first_ns // level * level, over.end_ns), level)
        for name, of_series in found.items():
            for key, cells in of_series.items():
                for bucket, value in drawn(chosen[name], sorted(cells, key=itemgetter(0)), over).items():
                    if over.first_ns + bucket * over.step_ns >= from_ns:
                        columns.put(tags[key], name, bucket, value)

    def _gather(
        self,
        measurement: str,
        fields: Sequence[catalogue.Field],
        where: Where | None,
        span: tuple[int, int],
        level: int,
    ) -> tuple[_Cells, dict[_Key, Mapping[str, str]]]:
        """Cells of each series, where nothing is open; of open minutes from raw samples."""
        found: _Cells = {}
        tags_of: dict[_Key, Mapping[str, str]] = {}

        def add(tags: Mapping[str, str], start_ns: int, cells: Mapping[str, Cell]) -> None:
            key = order(tags)
            tags_of[key] = tags
            for name, cell in cells.items():
                found.setdefault(name, {}).setdefault(key, []).append((start_ns, cell))

        node_only = {"node": where["node"]} if where and "node" in where else None
        nodes = "".join(f" AND {condition}" for condition in _conditions(node_only))
        rest = "".join(f" AND {condition}" for condition in _conditions(where))
        is_open = {(mark.node, mark.start_ns) for mark in self._rollups.open("minute", *span, nodes)}
        minutes = [span]
        stale: set[tuple[str, int]] = set()
        if level == QUARTER_NS:
            stale = {(node, start_ns // QUARTER_NS * QUARTER_NS) for node, start_ns in is_open}
            stale |= {(mark.node, mark.start_ns) for mark in self._rollups.open("quarter", *span, nodes)}
            for tags, start_ns, _, cells in self._rollups.cells(level, measurement, fields, _times(span) + rest):
                if (tags.get("node", ""), start_ns) not in stale:
                    add(tags, start_ns, cells)
            minutes = runs([start_ns for _, start_ns in stale], QUARTER_NS)
        for part in minutes:
            for tags, start_ns, _, cells in self._rollups.cells(MINUTE_NS, measurement, fields, _times(part) + rest):
                node = tags.get("node", "")
                current = level == MINUTE_NS or (node, start_ns // QUARTER_NS * QUARTER_NS) in stale
                if current and (node, start_ns) not in is_open:
                    add(tags, start_ns, cells)
        for part in runs([start_ns for _, start_ns in is_open], MINUTE_NS):
            for field in fields:
                for tags, start_ns, cell in self._raw_cells(measurement, field, _times(part) + rest):
                    if (tags.get("node", ""), start_ns) in is_open:
                        add(tags, start_ns, {field.name: cell})
        return found, tags_of

    def _raw_cells(
        self, measurement: str, field: catalogue.Field, condition: str
    ) -> Iterator[tuple[Mapping[str, str], int, Cell]]:
        """Cells of minutes made from raw samples now, by the server where it can."""
        name, source = _identifier(field.name), _identifier(measurement)
        by_minute = f"FROM {source} WHERE {condition} GROUP BY time({MINUTE_NS}ns), * fill(none)"
        if field.kind is Kind.GAUGE:
            select = f"SELECT count({name}), mean({name}), min({name}), max({name}) {by_minute}"
            for series in self._query(select):
                for start_ns, *parts in series["values"]:
                    yield _tags(series), start_ns, Gauge(*parts)
            return
        for series in self._query(f"SELECT {name} FROM {source} WHERE {condition} GROUP BY *"):
            for start_ns, rows in groupby(series["values"], key=lambda row: row[0] // MINUTE_NS * MINUTE_NS):
                times, values = zip(*rows, strict=True)
                yield _tags(series), start_ns, reduced(field.kind, times, [field.type(value) for value in values])

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
        cells: dict[str, list[tuple[int, Cell]]] = {field.name: [] for field in wanted}
        if not over.count or _impossible(where):
            return []
        before = self._raw_part(over)
        for field in wanted if before.count else ():
            name = _identifier(field.name)
            for series in self._query(
                f"SELECT count({name}), mean({name}), min({name}), max({name}) FROM {_identifier(measurement)} "
                f"WHERE {_within(before, where)} GROUP BY time({over.step_ns}ns) fill(none)"
            ):
                cells[field.name] += [(time_ns, Gauge(*parts)) for time_ns, *parts in series["values"]]
        if before.count < over.count:
            span = before.end_ns, over.end_ns
            if where:
                found, _ = self._gather(measurement, wanted, where, span, level_ns(step_ns))
                for field_name, of_series in found.items():
                    cells[field_name] += [cell for several in of_series.values() for cell in several]
            else:
                self._add_fleet(cells, measurement, wanted, span, level_ns(step_ns))
        return spreads(cells, over)

    def _add_fleet(
        self,
        cells: Mapping[str, list[tuple[int, Cell]]],
        measurement: str,
        fields: Sequence[catalogue.Field],
        span: tuple[int, int],
        level: int,
    ) -> None:
        """Cells of all series together, where nothing is open; of open minutes those of each series."""
        name = FLEET + measurement
        is_open = {mark.start_ns for mark in self._rollups.open("fleet", *span)}
        minutes = [span]
        stale: set[int] = set()
        if level == QUARTER_NS:
            stale = {start_ns // QUARTER_NS * QUARTER_NS for start_ns in is_open}
            stale |= {mark.start_ns for mark in self._rollups.open("fleet_quarter", *span)}
            for _, start_ns, _, row in self._rollups.cells(level, name, fields, _times(span)):
                if start_ns not in stale:
                    for field, cell in row.items():
                        cells[field].append((start_ns, cell))
            minutes = runs(stale, QUARTER_NS)
        for part in minutes:
            for _, start_ns, _, row in self._rollups.cells(MINUTE_NS, name, fields, _times(part)):
                if start_ns not in is_open and (level == MINUTE_NS or start_ns // QUARTER_NS * QUARTER_NS in stale):
                    for field, cell in row.items():
                        cells[field].append((start_ns, cell))
        for part in runs(is_open, MINUTE_NS):
            found, _ = self._gather(measurement, fields, None, part, MINUTE_NS)
            for field, of_series in found.items():
                cells[field] += [timed for several in of_series.values() for timed in several if timed[0] in is_open]

    def _range_plain(
        self, measurement: str, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
    ) -> None:
        if not chosen:
            return
        select = ", ".join(f"{how}({_identifier(name)}) AS {_identifier(name)}" for name, how in chosen.items())
        for series in self._query(
            f"SELECT {select} FROM {_identifier(measurement)} WHERE {_within(over, where)} "
            f"GROUP BY time({over.step_ns}ns), * fill(none)"
        ):
            tags = _tags(series)
            places = [(place, name) for place, name in enumerate(series["columns"]) if name in chosen]
            for row in series["values"]:
                bucket = (row[0] - over.first_ns) // over.step_ns
                for place, name in places:
                    if row[place] is not None:
                        columns.put(tags, name, bucket, row[place])

    def _range_or(self, measurement: str, name: str, over: Buckets, where: Where | None, columns: Columns) -> None:
        for series in self._query(
            f"SELECT distinct({_identifier(name)}) FROM {_identifier(measurement)} WHERE {_within(over, where)} "
            f"GROUP BY time({over.step_ns}ns), * fill(none)"
        ):
            joined: dict[int, int] = {}
            for time_ns, mask in series["values"]:
                if mask is not None:
                    joined[time_ns] = joined.get(time_ns, 0) | int(mask)
            for time_ns, mask in joined.items():
                columns.put(_tags(series), name, (time_ns - over.first_ns) // over.step_ns, mask)

    def _range_rate(self, measurement: str, name: str, over: Buckets, where: Where | None, columns: Columns) -> None:
        for series in self._query(
            f"SELECT {_identifier(name)} FROM {_identifier(measurement)} "
            f"WHERE {_within(over, where, over.lookback_ns)} GROUP BY *"
        ):
            for bucket, rate in rates(((row[0], row[1]) for row in series["values"]), over).items():
                columns.put(_tags(series), name, bucket, rate)

    def _select(
        self,
        measurement: str,
        times: str,
        where: Where | None,
        tail: str,
        *,
        by_time: bool,
        ungrouped: frozenset[str] = frozenset(),
    ) -> list[Sample]:
        """`ungrouped` are the tags that stand among the columns, since `tail` does not group by them."""
        known = catalogue.MEASUREMENTS.get(measurement)
        if known is None:
            raise ValueError(f"unknown measurement {measurement!r}")
        if _impossible(where):
            return []
        conditions = " AND ".join([times, *_conditions(where)])
        found: list[Sample] = []
        for series in self._query(f"SELECT * FROM {_identifier(measurement)} WHERE {conditions} {tail}"):
            shared = _tags(series)
            places = [
                (place, name, known.fields[name].type)
                for place, name in enumerate(series["columns"])
                if name in known.fields
            ]
            own = [(place, name) for place, name in enumerate(series["columns"]) if name in ungrouped]
            for row in series["values"]:
                tags = {**shared, **{name: row[place] for place, name in own if row[place]}} if own else shared
                fields: dict[str, Value] = {
                    name: type_(row[place]) for place, name, type_ in places if row[place] is not None
                }
                if fields:
                    found.append(Sample(measurement, tags, fields, row[0]))
        return sorted(found, key=lambda sample: (sample.time_ns if by_time else 0, order(sample.tags)))


_Key = tuple[tuple[str, str], ...]
_Cells = dict[str, dict[_Key, list[tuple[int, Cell]]]]


def _packed(lines: str) -> bytes:
    return gzip.compress(lines.encode("utf-8"), compresslevel=1, mtime=0)


def _times(span: tuple[int, int]) -> str:
    return f"time >= {span[0]} AND time < {span[1]}"


def _reason(error: ApiException) -> str:
    """What the server says, on one line."""
    text = error.body or error.reason or ""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        plain = json.loads(text)
        text = plain.get("error") or plain.get("message") or text
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300]


def _results(text: str) -> list[dict[str, Any]]:
    """The series of a /query answer. ValueError with the server's words when it holds an error or is no such answer."""
    try:
        answer = json.loads(text)
    except ValueError:
        raise ValueError("the answer is not JSON") from None
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not results:
        error = answer.get("error") if isinstance(answer, dict) else None
        raise ValueError(str(error or "the answer holds no results"))
    if "error" in results[0]:
        raise ValueError(str(results[0]["error"]))
    series: list[dict[str, Any]] = results[0].get("series", [])
    return series


def _identifier(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _conditions(where: Where | None) -> Iterable[str]:
    for name, wanted in (where or {}).items():
        values = [wanted] if isinstance(wanted, str) else wanted
        yield "(" + " OR ".join(f"{_identifier(name)} = {_literal(value)}" for value in values) + ")"


def _impossible(where: Where | None) -> bool:
    return any(not isinstance(wanted, str) and not wanted for wanted in (where or {}).values())


def _within(over: Buckets, where: Where | None, lookback_ns: int = 0) -> str:
    times = f"time >= {over.first_ns - lookback_ns} AND time < {over.end_ns}"
    return " AND ".join([times, *_conditions(where)])


def _tags(series: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: value for name, value in series.get("tags", {}).items() if value}


def _without_field(
    samples: Sequence[Sample], measurement: str, name: str, reason: str
) -> tuple[list[Sample], list[Rejected]]:
    """The samples without one field of one measurement, and what was taken away."""
    good: list[Sample] = []
    bad: list[Rejected] = []
    for sample in samples:
        if sample.measurement != measurement or name not in sample.fields:
            good.append(sample)
            continue
        bad.append(Rejected(Sample(measurement, sample.tags, {name: sample.fields[name]}, sample.time_ns), reason))
        rest = {key: value for key, value in sample.fields.items() if key != name}
        if rest:
            good.append(Sample(measurement, sample.tags, rest, sample.time_ns))
    return good, bad
