"""VictoriaMetrics as the store: line protocol over HTTP in, /api/v1/export and MetricsQL out. Tested against a real 1.79 server.

How a sample is laid out as series is told in `victoriametrics_series`. What can't be had here, and how it shows:

- floats keep 12 significant digits;
- two samples of one series in the same millisecond are one: their fields are merged;
- of two different values of one field at one time one stays, not surely the later (of two texts likewise);
- samples are not deleted: there is one -retentionPeriod for all, and `prune` says so when something would have to go;
- what is older than that, or two days ahead, the server drops in silence: it is refused here;
- what the server acknowledged it may still lose when it is killed within some ten seconds: the writer keeps its last minute, and sends
  it again when the server was started anew or gave no answer for a while. What a writer wrote that is gone by then is lost.

What one store object wrote it also reads at once; others see it after about a second. No sample is ever carried on into a gap, and
neither -search.latencyOffset nor the response cache changes an answer. Without -dedup.minScrapeInterval=1ms on the server, ranges
are drawn here, from raw samples, since a delivery that was repeated would count twice in the server's means.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from urllib3 import PoolManager, Timeout, make_headers
from urllib3.exceptions import HTTPError, SSLError

from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store.admission import admit
from telemetry.store.buckets import Buckets, Columns, aggregates, buckets, gauges, matches, named, order, rates
from telemetry.store.interface import Column, Rejected, Spread, StoreDown, StoreError, Survey, Where
from telemetry.store.rollup import Cell, Gauge, spreads
from telemetry.store.victoriametrics_series import (
    MARK,
    MS,
    PART,
    RESERVED,
    TEXT,
    Device,
    Key,
    Tags,
    by_time,
    join_halves,
    joined,
    labels_problem,
    lines,
    merged,
    taken_apart,
    to_samples,
)

DEFAULT_PORT = 8428
BATCH_SAMPLES = 5000
TIMEOUT = Timeout(connect=3.0, read=20.0)
TOKEN_VARIABLE = "PAIRSCOPE_STORE_TOKEN"  # noqa: S105  the name of a variable, not a secret

DAY_MS = 86_400_000
AHEAD_MS = 2 * DAY_MS  # the server ignores what is further in the future
_ASIDE_MS = 1000 * DAY_MS
"""Ranges are asked as of so long ago with an offset back: on its newest 30 s the server would repeat earlier values otherwise."""
_TAIL_S = 60.0
_TAIL_BYTES = 32 << 20
_LOOK_S = 20.0
_POINTS = 10_000  # in one answer, of at most 30,000
_WINDOWS = 64
_NEAR_MS = 10_000
_LONGEST_SELECTOR = 8000
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r'^flag\{name="(?P<name>[^"]+)", value="(?P<value>[^"]*)"', re.MULTILINE)
_RETENTION = re.compile(r"(\d+(?:\.\d+)?)([hdwy]?)")
_RETENTION_MS = {"h": DAY_MS // 24, "d": DAY_MS, "w": 7 * DAY_MS, "y": 365 * DAY_MS, "": 31 * DAY_MS}
_SERVER_SIDE = {"mean": "avg_over_time", "min": "min_over_time", "max": "max_over_time", "last": "last_over_time"}
_SPREAD = ("sum(count_over_time({}))", "sum(sum_over_time({}))", "min(min_over_time({}))", "max(max_over_time({}))")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is; made from victoriametrics://[user:password@]host[:port][/prefix][?options]."""

    base: str  # http://host:port/prefix
    shown: str  # the URL without secrets, for messages
    db: str = ""  # the label `db` of all that is written and read, if any
    verify_tls: bool = True
    ca_file: str | None = None
    authorization: str = field(default="", repr=False)


def parse(url: str) -> Address:
    """StoreError names what is wrong. Options: db, token, token_file, ca_file, verify=0; victoriametricss:// means TLS."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    host = parts.hostname or ""
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise StoreError(f"store {host}: the port is not a number") from None
    prefix = parts.path.rstrip("/")
    name = f"[{host}]" if ":" in host else host
    shown = f"{parts.scheme}://{name}:{port}{prefix}"
    if not host:
        raise StoreError(f"store {shown}: names no host; use victoriametrics://host:{DEFAULT_PORT}")
    unknown = set(options) - {"db", "token", "token_file", "ca_file", "verify"}
    if unknown:
        raise StoreError(
            f"store {shown}: unknown option {', '.join(sorted(unknown))}; known are db, token, token_file, ca_file, verify"
        )
    db = options.get("db", "")
    ca_file = options.get("ca_file")
    if ca_file is not None and not os.access(ca_file, os.R_OK):
        raise StoreError(f"store {shown}: ca_file {ca_file}: can't be read")
    return Address(
        f"{'https' if parts.scheme == 'victoriametricss' else 'http'}://{name}:{port}{prefix}",
        shown + (f"?{urlencode({'db': db})}" if db else ""),
        db,
        options.get("verify", "1") not in ("0", "false", "no"),
        ca_file,
        _authorization(shown, options, parts.username, parts.password),
    )


def _authorization(shown: str, options: Mapping[str, str], user: str | None, password: str | None) -> str:
    if user:
        return make_headers(basic_auth=f"{unquote(user)}:{unquote(password or '')}")["authorization"]
    token = options.get("token") or os.environ.get(TOKEN_VARIABLE, "")
    if "token_file" in options:
        try:
            token = Path(options["token_file"]).read_text("utf-8").strip()
        except OSError as error:
            raise StoreError(f"store {shown}: token_file {options['token_file']}: {error.strerror}") from None
    return f"Bearer {token}" if token else ""


@dataclass(frozen=True, slots=True)
class Server:
    """What the server says of itself; empty and None where it doesn't, such as behind a proxy."""

    version: str = ""
    retention: str = ""  # as its flag is written: 1 (months), 30d
    dedup: str = ""  # 0s when it is off
    is_read_only: bool = False
    size_bytes: int | None = None
    free_bytes: int | None = None
    started_s: float | None = None

    @property
    def retention_ms(self) -> int | None:
        found = _RETENTION.fullmatch(self.retention)
        return round(float(found[1]) * _RETENTION_MS[found[2]]) if found else None

    @property
    def is_deduplicating(self) -> bool:
        return self.dedup not in ("", "0", "0s", "0ms")


class _Refused(Exception):
    """The server refused a request for what is in it (400, 413, 422); the message is the server's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class VictoriaStore:
    """A `Store` on a VictoriaMetrics server, `victoriametrics://host:8428` (`victoriametricss://` with TLS). Thread-safe.

    A path is a prefix of all requests, as vmauth routes them. With `?db=NAME` several fleets share a server: all is written and
    read with the label `db`. Nothing is asked of the server before the first call, so that it may come up later.
    """

    def __init__(self, url: str) -> None:
        self._address = parse(url)
        self.url = self._address.shown
        self.rolls_up = False
        self.durable_after_s = _TAIL_S
        verify = self._address.verify_tls
        self._pool: PoolManager | None = PoolManager(
            maxsize=8,
            timeout=TIMEOUT,
            retries=False,
            cert_reqs="CERT_REQUIRED" if verify else "CERT_NONE",
            ca_certs=self._address.ca_file,
        )
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._unflushed = False  # something of ours may not be readable yet
        self._tail: deque[tuple[float, bytes]] = deque()  # what was acknowledged, and when
        self._looked_s = float("-inf")  # at when the server was started
        self._was_lost = False

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.clear()

    # --- HTTP

    def _call(
        self, path: str, form: Mapping[str, str] | None = None, *, body: bytes | None = None, query: str = ""
    ) -> str:
        """The text of a 2xx answer; everything else is StoreDown, StoreError or _Refused."""
        pool = self._pool
        if pool is None:
            raise StoreError(f"store {self.url}: is closed")
        headers = {"Authorization": self._address.authorization} if self._address.authorization else {}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            sent: bytes | None = urlencode(form, errors="replace").encode()
        else:
            sent = body
            if body is not None:
                headers["Content-Encoding"] = "gzip"
        method = "GET" if sent is None else "POST"
        try:
            # credentials don't follow a redirection to elsewhere
            answer = pool.request(
                method, f"{self._address.base}{path}{query}", body=sent, headers=headers, redirect=False
            )
        except SSLError as error:
            why = " ".join(str(error).split())[:300]
            raise StoreError(
                f"store {self.url}: TLS failed ({why}); check the certificate, or name its ca_file"
            ) from None
        except (HTTPError, OSError) as error:
            self._was_lost, self._looked_s = True, float("-inf")
            why = " ".join(str(error).split(": ", 1)[-1].split())[:300]
            raise StoreDown(
                f"store {self.url}: no answer from {self._address.base} ({why}); is the server running?"
            ) from None
        text = answer.data.decode("utf-8", "replace")
        if 200 <= answer.status < 300:
            return text
        raise self._as_error(answer.status, _reason(text), answer.headers.get("Retry-After"))

    def _as_error(self, status: int, reason: str, after: str | None) -> Exception:
        where = f"store {self.url}"
        if status == 401:
            return StoreError(
                f"{where}: the server refuses the credentials ({reason}); check the user and password, or the token"
            )
        if status == 403:
            return StoreError(
                f"{where}: the credentials do not allow this ({reason}); grant writing and reading to them"
            )
        if status in (400, 413, 422):
            return _Refused(status, reason)
        if 300 <= status < 500 and status not in (408, 429):
            return StoreError(f"{where}: HTTP {status} ({reason}); check host, port and path, or the kind of store")
        if "read-only" in reason or "readonly" in reason:
            return StoreDown(f"{where}: the server only reads ({reason}); free some of its disk")
        wait = f"; asked to wait {after} s" if after else ""
        return StoreDown(f"{where}: HTTP {status} ({reason}){wait}")

    def _ask(self, path: str, form: Mapping[str, str]) -> Any:
        """The `data` of an answer of the query API."""
        try:
            answer = json.loads(self._call(path, form))
            if not isinstance(answer, dict) or answer.get("status") != "success":
                raise ValueError("is no answer of a query")
            return answer["data"]
        except _Refused as refused:
            raise StoreError(f"store {self.url}: {refused.reason}") from None
        except (ValueError, KeyError):
            raise StoreError(
                f"store {self.url}: the answer is not that of VictoriaMetrics; check host and port, or the kind of store"
            ) from None

    def server(self, *, again: bool = False) -> Server:
        """What the server is, asked once. StoreError for one that is no VictoriaMetrics."""
        if self._server is None or again:
            try:
                # an operator that only MetricsQL has, so that a Prometheus or an InfluxDB is not taken for one
                answer = json.loads(self._call("/api/v1/query", {"query": "1 default 2"}))
                is_ours = answer["data"]["result"][0]["value"][1] == "1"
            except (_Refused, ValueError, KeyError, IndexError, TypeError):
                is_ours = False
            except StoreDown:
                raise
            except StoreError as error:
                if "HTTP 404" not in str(error):
                    raise
                is_ours = False
            if not is_ours:
                raise StoreError(
                    f"store {self.url}: does not answer as a VictoriaMetrics; check host, port and path, or the kind of store"
                )
            self._server = self._described()
        return self._server

    def _described(self) -> Server:
        try:
            text = self._call("/metrics")
        except (StoreError, _Refused):
            return Server()
        flags = {found["name"]: found["value"] for found in _FLAG.finditer(text)}
        version = re.search(r'^vm_app_version\{.*?short_version="([^"]*)"', text, re.MULTILINE)
        sizes = re.findall(r"^vm_data_size_bytes\{[^}]*\} (\S+)", text, re.MULTILINE)
        started = re.search(r"^process_start_time_seconds (\S+)", text, re.MULTILINE)
        free = re.findall(r"^vm_free_disk_space_bytes\{[^}]*\} (\S+)", text, re.MULTILINE)
        return Server(
            version[1] if version else "",
            flags.get("retentionPeriod", ""),
            flags.get("dedup.minScrapeInterval", ""),
            re.search(r"^vm_storage_is_read_only\{[^}]*\} 1$", text, re.MULTILINE) is not None,
            round(sum(map(float, sizes))) if sizes else None,
            round(float(free[0])) if free else None,
            float(started[1]) if started else None,
        )

    # --- writing

    def write(self, samples: Sequence[Sample]) -> list[Rejected]:
        admitted, refused = admit(samples)
        if not admitted:
            return refused
        kept: list[Sample] = []
        problem = self._problems(self.server())
        for sample in admitted:
            reason = problem(sample)
            if reason:
                refused.append(Rejected(sample, reason))
            else:
                kept.append(sample)
        self._send_again_what_may_be_lost()
        unlike = merged(kept)
        for start in range(0, len(unlike), BATCH_SAMPLES):
            refused += self._write(unlike[start : start + BATCH_SAMPLES])
        return refused

    def _problems(self, server: Server) -> Callable[[Sample], str]:
        """What the server would drop or cut without a word."""
        now_ms = time.time_ns() // MS
        retention_ms = server.retention_ms
        oldest_ns = 0 if retention_ms is None else (now_ms - retention_ms) * MS
        newest_ns = (now_ms + AHEAD_MS) * MS

        def problem(sample: Sample) -> str:
            if sample.time_ns < oldest_ns:
                return f"older than the server keeps (-retentionPeriod={server.retention})"
            if sample.time_ns > newest_ns:
                return "more than two days ahead, which the server ignores"
            return labels_problem(tuple(sample.tags.items()))

        return problem

    def _write(self, samples: Sequence[Sample]) -> list[Rejected]:
        """One request, and as few more as it takes to find what the server refuses."""
        body = gzip.compress("".join(map(lines, samples)).encode("utf-8"), compresslevel=1, mtime=0)
        try:
            self._post(body)
        except _Refused as refused:
            if len(samples) == 1:
                return [Rejected(samples[0], refused.reason)]
            half = len(samples) // 2
            return self._write(samples[:half]) + self._write(samples[half:])
        with self._lock:
            self._tail.append((time.monotonic(), body))
        return []

    def _post(self, body: bytes) -> None:
        self._call("/write", body=body, query=f"?{urlencode({'db': self._address.db})}" if self._address.db else "")
        self._unflushed = True

    def _send_again_what_may_be_lost(self) -> None:
        """All of the last minute, if the server was started anew, or may have been while it gave no answer; copies do no harm."""
        now_s = time.monotonic()
        with self._lock:
            while self._tail and (
                self._tail[0][0] < now_s - _TAIL_S or sum(len(body) for _, body in self._tail) > _TAIL_BYTES
            ):
                self._tail.popleft()
            if now_s - self._looked_s < _LOOK_S:
                return
            before, kept = self.server().started_s, list(self._tail)
        started_s = self.server(again=True).started_s
        if self._was_lost or started_s != before:
            for _, body in kept:
                self._post(body)
        self._was_lost, self._looked_s = False, now_s

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        return False

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        """0 when nothing is that old. StoreError otherwise: the server deletes by its -retentionPeriod alone."""
        if level_ns:
            return 0
        for measurement in catalogue.MEASUREMENTS:
            limit = before_ns.get(measurement, before_ns.get("*"))
            if limit is not None and self._marks(measurement, 0, limit, None):
                raise StoreError(
                    f"store {self.url}: samples of VictoriaMetrics are not deleted one by one; set its -retentionPeriod "
                    f"(now {self.server().retention or 'unknown'})"
                )
        return 0

    def exists(self) -> bool:
        self.server()
        return True  # it has no databases

    def prepare(self) -> None:
        self.server()

    def survey(self) -> Survey:
        server = self.server(again=True)
        write_problem = ""
        try:
            self._post(gzip.compress(b""))
        except (StoreError, _Refused) as error:
            write_problem = str(error)
        if server.is_read_only:
            write_problem = f"store {self.url}: the server only reads; free some of its disk"
        newest = [self._end("max(tlast_over_time({}))"), self._end("min(tfirst_over_time({}))")]
        retention_ms = server.retention_ms
        advice = []
        if server.dedup and not server.is_deduplicating:
            advice.append("dedup_off")
        elif server.is_deduplicating and server.dedup != "1ms":
            advice.append("dedup_long")
        if retention_ms is None:
            advice.append("retention_unknown")
        elif retention_ms < 90 * DAY_MS:
            advice.append("retention_short")
        return Survey(
            f"VictoriaMetrics {server.version}".rstrip(),
            write_problem,
            server.size_bytes,
            server.free_bytes,
            newest[1],
            newest[0],
            None if retention_ms is None else retention_ms / 1000,
            tuple(advice),
        )

    def _end(self, query: str) -> int | None:
        """The time of the newest or the oldest sample of all."""
        self._flush()
        until_ms = time.time_ns() // MS + AHEAD_MS
        names = "|".join(f"{name}_{MARK}" for name in catalogue.MEASUREMENTS)
        selector = f'{{__name__=~"{names}",db={_quoted(self._address.db)}}}[{until_ms - DAY_MS}ms]'
        form = {"query": query.format(selector), "time": _moment(until_ms), "nocache": "1"}
        found = self._ask("/api/v1/query", form)["result"]
        return round(float(found[0]["value"][1]) * 1000) * MS if found else None

    # --- reading

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        known = _known(measurement)
        asked = named(measurement, fields)
        newest = {order(tags): at_ms for tags, at_ms in self._newest(measurement, since_ns, where)}
        found: list[Sample] = []
        for start_ms, end_ms in _windows(newest.values()):
            for device in self._read(known, asked, start_ms, end_ms, where).values():
                at_ms = newest.get(order(device.tags))
                if at_ms is not None and start_ms <= at_ms <= end_ms and at_ms in device.marks:
                    found += to_samples(measurement, device, [at_ms], since_ns, 2**63)
        return sorted(found, key=lambda sample: order(sample.tags))

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        known = _known(measurement)
        if limit is not None:
            times = self._marks(measurement, start_ns, end_ns, where)
            start_ns = max(start_ns, times[-limit]) if 0 < limit <= len(times) else start_ns
        found: list[Sample] = []
        for device in self._read(known, known.fields, start_ns // MS, (end_ns - 1) // MS, where).values():
            found += to_samples(measurement, device, device.marks, start_ns, end_ns)
        found.sort(key=lambda sample: (sample.time_ns, order(sample.tags)))
        return found if limit is None else found[max(0, len(found) - limit) :]

    def series(self, measurement: str, *, since_ns: int = 0) -> list[Tags]:
        _known(measurement)
        return sorted((tags for tags, _ in self._newest(measurement, since_ns, None)), key=order)

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
        if over.count and chosen:
            if self._can_draw(over):
                for how, function in _SERVER_SIDE.items():
                    names = [name for name, wanted in chosen.items() if wanted == how]
                    if names:
                        self._range_there(measurement, names, function, over, where, columns)
                chosen = {name: how for name, how in chosen.items() if how not in _SERVER_SIDE}
            if chosen:
                self._range_here(measurement, chosen, over, where, columns)
        return columns.answer()

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
        names = [field.name for field in gauges(measurement, fields)]
        over = buckets(start_ns, end_ns, step_ns)
        cells: dict[str, list[tuple[int, Cell]]] = {}
        if over.count and names:
            draw = self._spread_there if self._can_draw(over) and self._says_all(where) else self._spread_here
            cells = draw(measurement, names, over, where)
        return spreads(cells, over)

    def _spread_there(
        self, measurement: str, names: Sequence[str], over: Buckets, where: Where | None
    ) -> dict[str, list[tuple[int, Cell]]]:
        cells: dict[str, list[tuple[int, Cell]]] = {}
        for name in names:
            drawn = [
                {bucket: value for _, bucket, value in self._drawn_there(measurement, [name], query, over, where)}
                for query in _SPREAD
            ]
            for bucket, count in drawn[0].items():
                total, low, high = (part[bucket] for part in drawn[1:])
                cell = Gauge(round(count), total / count, low, high)
                cells.setdefault(name, []).append((over.first_ns + bucket * over.step_ns, cell))
        return cells

    def _spread_here(
        self, measurement: str, names: Sequence[str], over: Buckets, where: Where | None
    ) -> dict[str, list[tuple[int, Cell]]]:
        cells: dict[str, list[tuple[int, Cell]]] = {}
        read = self._read(_known(measurement), names, over.first_ns // MS, (over.end_ns - 1) // MS, where)
        for device in read.values():
            for name in names:
                for bucket, values in _held(device.points(name, over.first_ns, over.end_ns), over).items():
                    cell = Gauge(len(values), math.fsum(values) / len(values), min(values), max(values))
                    cells.setdefault(name, []).append((over.first_ns + bucket * over.step_ns, cell))
        return cells

    def _can_draw(self, over: Buckets) -> bool:
        """Whether the server's own arithmetic comes to the same: without copies of a sample, in whole milliseconds."""
        return over.step_ns % MS == 0 and over.first_ns // MS > _ASIDE_MS + DAY_MS and self.server().is_deduplicating

    def _range_there(
        self,
        measurement: str,
        names: Sequence[str],
        function: str,
        over: Buckets,
        where: Where | None,
        columns: Columns,
    ) -> None:
        for labels, bucket, value in self._drawn_there(measurement, names, function + "({})", over, where):
            tags, name = taken_apart(measurement, labels)
            if matches(tags, where):
                columns.put(tags, name, bucket, value)

    def _drawn_there(
        self, measurement: str, names: Sequence[str], query: str, over: Buckets, where: Where | None
    ) -> Iterator[tuple[Mapping[str, str], int, float]]:
        """(labels, bucket, value) of a query, in which {} stands for the samples of one bucket."""
        step_ms, first_ms = over.step_ns // MS, over.first_ns // MS
        # a window ends at its evaluation and includes that moment: (t-w, t]; ours are [t, t+w)
        offset = f"[{step_ms}ms] offset -{_ASIDE_MS + step_ms - 1}ms"
        asked = query.format(self._selector(measurement, names, where) + offset)
        for start in range(0, over.count, _POINTS):
            last = min(start + _POINTS, over.count) - 1
            form = {
                "query": asked,
                "start": _moment(first_ms + start * step_ms - _ASIDE_MS),
                "end": _moment(first_ms + last * step_ms - _ASIDE_MS),
                "step": f"{step_ms}ms",
                "nocache": "1",
            }
            for series in self._ask("/api/v1/query_range", form)["result"]:
                for at_s, value in series["values"]:
                    bucket = (round(at_s * 1000) + _ASIDE_MS - first_ms) // step_ms
                    yield series["metric"], bucket, float(value)

    def _range_here(
        self, measurement: str, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
    ) -> None:
        known = _known(measurement)
        lookback_ns = over.lookback_ns if "rate" in chosen.values() else 0
        start_ns = over.first_ns - lookback_ns
        read = self._read(known, chosen, start_ns // MS, (over.end_ns - 1) // MS, where)
        for device in read.values():
            for name, how in chosen.items():
                points = device.points(name, start_ns if how == "rate" else over.first_ns, over.end_ns)
                drawn = rates(points, over) if how == "rate" else _drawn(points, how, over)
                for bucket, value in drawn.items():
                    columns.put(device.tags, name, bucket, value)

    # --- what the server holds

    def _flush(self) -> None:
        """Make what this store wrote readable; the server would do so by itself within a second or so."""
        if not self._unflushed:
            return
        with self._lock:
            if self._unflushed:
                self._unflushed = False
                try:
                    self._call("/internal/force_flush")
                except StoreDown:
                    self._unflushed = True
                    raise
                except (StoreError, _Refused):
                    pass  # a proxy or a key stands before it: then the second it is

    def _export(
        self, selector: str, start_ms: int, end_ms: int
    ) -> Iterator[tuple[dict[str, str], list[Any], list[int]]]:
        """(labels, values, times in ms) of each series."""
        now_ms = time.time_ns() // MS
        start_ms, end_ms = max(0, start_ms), min(end_ms, now_ms + AHEAD_MS + DAY_MS)
        if start_ms > end_ms:
            return
        try:
            text = self._call(
                "/api/v1/export", {"match[]": selector, "start": _moment(start_ms), "end": _moment(end_ms)}
            )
            lines = json.loads(f"[{text.strip().replace(chr(10), ',')}]")
            for line in lines:
                yield line["metric"], line["values"], line["timestamps"]
        except _Refused as refused:
            raise StoreError(f"store {self.url}: {refused.reason}") from None
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"store {self.url}: the answer to an export is not that of VictoriaMetrics") from None

    def _newest(self, measurement: str, since_ns: int, where: Where | None) -> list[tuple[Tags, int]]:
        """The tags of each series that has a sample at or after `since_ns`, and the newest one's time in ms."""
        until_ms = time.time_ns() // MS + AHEAD_MS + 60_000
        window_ms = until_ms - max(since_ns // MS, DAY_MS) + 1  # the server can't think of times before 1970
        if window_ms <= 0:
            return []
        form = {
            "query": f"tlast_over_time({self._selector(measurement, [MARK], where)}[{window_ms}ms])",
            "time": _moment(until_ms),
            "nocache": "1",
        }
        found = []
        for series in self._ask("/api/v1/query", form)["result"]:
            tags, _ = taken_apart(measurement, series["metric"])
            if matches(tags, where):
                found.append((tags, round(float(series["value"][1]) * 1000)))
        if since_ns % MS and any(at_ms == since_ns // MS for _, at_ms in found):
            late = {order(tags) for tags, _ in self._marked(measurement, since_ns, since_ns + MS, where)}
            found = [(tags, at_ms) for tags, at_ms in found if at_ms != since_ns // MS or order(tags) in late]
        return found

    def _marked(
        self, measurement: str, start_ns: int, end_ns: int, where: Where | None
    ) -> Iterator[tuple[Tags, list[int]]]:
        """The tags of each series and the times of its samples in ns."""
        selector = self._selector(measurement, [MARK], where)
        for labels, values, times in self._export(selector, start_ns // MS, (end_ns - 1) // MS):
            tags, _ = taken_apart(measurement, labels)
            marks = by_time(times, values, int)
            inside = [t * MS + ns for t, ns in marks.items() if start_ns <= t * MS + ns < end_ns]
            if inside and matches(tags, where):
                yield tags, inside

    def _marks(self, measurement: str, start_ns: int, end_ns: int, where: Where | None) -> list[int]:
        return sorted(t for _, times in self._marked(measurement, start_ns, end_ns, where) for t in times)

    def _selector(self, measurement: str, names: Iterable[str], where: Where | None) -> str:
        """What at least the wanted series match, those just written among them; `matches` has the last word."""
        self.server()
        self._flush()
        conditions = [f'__name__=~"{measurement}_({"|".join(names)})"', f"db={_quoted(self._address.db)}"]
        conditions += [text for text in self._conditions(where) if text]
        return "{" + ",".join(conditions) + "}"

    def _conditions(self, where: Where | None) -> Iterator[str]:
        """Each condition for the server, empty for one that it can't be told."""
        for name, wanted in (where or {}).items():
            values = [wanted] if isinstance(wanted, str) else list(wanted)
            condition = ""
            if _LABEL.fullmatch(name) is not None and name not in RESERVED:
                if len(values) == 1:
                    condition = f"{name}={_quoted(values[0])}"
                elif values and "" not in values:
                    condition = f"{name}=~{_quoted('|'.join(map(re.escape, values)))}"
            yield condition if len(condition) <= _LONGEST_SELECTOR else ""

    def _says_all(self, where: Where | None) -> bool:
        return all(self._conditions(where))

    def _read(
        self, known: catalogue.Measurement, fields: Iterable[str], start_ms: int, end_ms: int, where: Where | None
    ) -> dict[Key, Device]:
        names = [MARK]
        for name in fields:
            names.append(name)
            if known.fields[name].type is int:
                names += [f"{name}_hi32", f"{name}_lo32"]
        devices: dict[Key, Device] = {}
        texts: dict[tuple[Key, str], dict[int, dict[str, str]]] = {}
        for labels, values, times in self._export(self._selector(known.name, names, where), start_ms, end_ms):
            tags, name = taken_apart(known.name, labels)
            if not matches(tags, where):
                continue
            key = order(tags)
            device = devices.get(key)
            if device is None:
                device = devices[key] = Device(tags)
            if name == MARK:
                device.marks = by_time(times, values, int)
            elif name in known.fields and known.fields[name].type is str:
                heard = texts.setdefault((key, name), {})
                for at_ms in times:
                    parts = heard.setdefault(at_ms, {})
                    part = labels.get(PART, "")
                    parts[part] = max(parts.get(part, ""), labels.get(TEXT, ""))
            else:
                kind = known.fields[name].type if name in known.fields else int
                device.values[name] = by_time(times, values, kind)
        for (key, name), heard in texts.items():
            whole = {at_ms: joined(parts) for at_ms, parts in heard.items()}
            devices[key].values[name] = {at_ms: text for at_ms, text in whole.items() if text is not None}
        for device in devices.values():
            join_halves(device)
        return devices


def _known(measurement: str) -> catalogue.Measurement:
    known = catalogue.MEASUREMENTS.get(measurement)
    if known is None:
        raise ValueError(f"unknown measurement {measurement!r}")
    return known


def _reason(text: str) -> str:
    """What the server says, on one line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    text = re.sub(r'^remoteAddr: "[^"]*"; requestURI: [^;]*; ', "", text)
    return " ".join(text.split())[:300]


def _quoted(text: str) -> str:
    """A string of MetricsQL, which has the escapes of Go; those of JSON are among them."""
    return json.dumps(text, ensure_ascii=False)


def _moment(at_ms: int) -> str:
    """A time as the server reads it: in floating seconds, cut to milliseconds; half of one more saves it from the one before."""
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03}5Z"


def _windows(times: Iterable[int]) -> list[tuple[int, int]]:
    """At most _WINDOWS spans that hold all times, parted where the gaps are largest."""
    ordered = sorted(set(times))
    if not ordered:
        return []
    gaps = sorted(
        ((later - sooner, place) for place, (sooner, later) in enumerate(itertools.pairwise(ordered), 1)),
        reverse=True,
    )
    cuts = sorted(place for gap, place in gaps[: _WINDOWS - 1] if gap > _NEAR_MS)
    return [(ordered[start], ordered[end - 1]) for start, end in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]


def _drawn(points: Iterable[tuple[int, Any]], how: str, over: Buckets) -> dict[int, float]:
    """bucket number -> mean, min, max, last or the joined bits of its values, from (time_ns, value) in time order."""
    return {bucket: _DRAW[how](values) for bucket, values in _held(points, over).items()}


def _held(points: Iterable[tuple[int, Any]], over: Buckets) -> dict[int, list[Any]]:
    held: dict[int, list[Any]] = {}
    for time_ns, value in points:
        held.setdefault((time_ns - over.first_ns) // over.step_ns, []).append(value)
    return held


def _join_bits(masks: Iterable[int]) -> float:
    joined = 0
    for mask in masks:
        joined |= mask
    return float(joined)


_DRAW: Mapping[str, Callable[[list[Any]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
    "or": _join_bits,
}
