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
are drawn here, from raw samples, since a delivery that was repeated would count twice in the server's means; nor is anything rolled up
(`victoriametrics_rollup`).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlencode

from urllib3 import PoolManager, Timeout
from urllib3.exceptions import HTTPError

from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store import http_answer
from telemetry.store.admission import admit
from telemetry.store.buckets import Columns, aggregates, buckets, gauges, named, order
from telemetry.store.failure import VICTORIA_PROBE, is_victoria, one_line
from telemetry.store.influxql import impossible
from telemetry.store.interface import RARE_DAYS, Column, Rejected, Spread, StoreDown, StoreError, Survey, Where
from telemetry.store.rollup import Cell, spreads
from telemetry.store.victoriametrics_query import AHEAD_MS, DAY_MS, Query, known_measurement, spans
from telemetry.store.victoriametrics_ranges import draw, gathered
from telemetry.store.victoriametrics_rollup import SETTLE_NS, FleetCells, Marks
from telemetry.store.victoriametrics_series import MARK, MS, Tags, labels_problem, lines, merged, to_samples
from telemetry.store.victoriametrics_server import Server, parse

BATCH_SAMPLES = 5000
TIMEOUT = Timeout(connect=3.0, read=http_answer.READ_S)

_TAIL_S = 60.0
_TAIL_BYTES = 32 << 20
_LOOK_S = 20.0
_NEAR_MS = 10_000
_FLAG = re.compile(r'^flag\{name="(?P<name>[^"]+)", value="(?P<value>[^"]*)"', re.MULTILINE)


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
        self.durable_after_s = _TAIL_S
        verify = self._address.verify_tls
        self._pool: PoolManager | None = http_answer.bound(
            PoolManager(
                maxsize=8,
                timeout=TIMEOUT,
                retries=False,
                cert_reqs="CERT_REQUIRED" if verify else "CERT_NONE",
                ca_certs=self._address.ca_file,
            )
        )
        self._target = self._address.target
        self._answered = False
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._nonce = "0"  # another one after each flush, and never empty
        self._unflushed = False  # something of ours may not be readable yet
        self._tail: deque[tuple[float, bytes, frozenset[int]]] = deque()  # when, what, and the minutes that it touched
        self._looked_s = float("-inf")  # at when the server was started
        self._was_lost = False
        self._query = Query(
            self.url,
            self._address.db,
            self._ask,
            self._ready,
            lambda: self._nonce,
            lambda: self.server().is_deduplicating,
        )
        self._marks = Marks()
        self._fleet = FleetCells(self._query, self._post_lines, self._flush, self._oldest_ns)

    @property
    def rolls_up(self) -> bool:
        """Only where the server counts no sample twice."""
        return self.server().is_deduplicating

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
            raise StoreError.of("store.file.closed", store=self.url)
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
            with http_answer.bounded(http_answer.QUERIES if body is None else http_answer.WRITES):
                # credentials don't follow a redirection to elsewhere
                answer = pool.request(
                    method, f"{self._address.base}{path}{query}", body=sent, headers=headers, redirect=False
                )
        except (HTTPError, OSError) as error:
            failure = self._target.unreached(error, answered=self._answered)
            if isinstance(failure, StoreDown):
                self._was_lost, self._looked_s = True, float("-inf")
            raise failure from None
        self._answered = True
        text = answer.data.decode("utf-8", "replace")
        if 200 <= answer.status < 300:
            return text
        raise self._as_error(answer.status, _reason(text), answer.headers.get("Retry-After"))

    def _as_error(self, status: int, reason: str, after: str | None) -> Exception:
        if self._target.is_tls_wanted(reason):
            return self._target.error("tls_wanted", base=self._address.base, tls=self._target.tls)
        if status in (400, 413, 422):
            return _Refused(status, reason)
        has_credentials = bool(self._address.authorization)
        return self._target.answered(
            status, reason, has_credentials=has_credentials, grant="writing and reading", after=after
        )

    def _ask(self, path: str, form: Mapping[str, str]) -> str:
        """The text of an answer to a question."""
        try:
            return self._call(path, form)
        except _Refused as refused:
            raise self._target.error("query", reason=refused.reason) from None

    def server(self, *, again: bool = False) -> Server:
        """What the server is, asked once. StoreError for one that is no VictoriaMetrics."""
        if self._server is None or again:
            path, query = VICTORIA_PROBE
            try:
                is_ours = is_victoria(self._call(path, query))
            except _Refused:
                is_ours = False
            except StoreError as error:
                if error.values.get("status") != 404:
                    raise
                is_ours = False
            if not is_ours:
                raise self._target.error(
                    "is_influxdb" if self._is_influxdb() else "no_victoria", base=self._address.base
                )
            self._server = self._described()
        return self._server

    def _is_influxdb(self) -> bool:
        pool = self._pool
        if pool is None:
            return False
        try:
            with http_answer.bounded(http_answer.WRITES):
                return "X-Influxdb-Version" in pool.request("GET", f"{self._address.base}/ping").headers
        except (HTTPError, OSError):
            return False

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
        again = self._what_may_be_lost()
        unlike = merged(kept)
        for start in range(0, len(unlike), BATCH_SAMPLES):
            batch = unlike[start : start + BATCH_SAMPLES]
            marks, touched = self._marks.before(batch)
            refused += self._write(batch, marks, touched)
            self._marks.after(touched, self._post_lines)
        self._send_again(again)  # after what is new, which somebody may be looking at
        return refused

    def _problems(self, server: Server) -> Callable[[Sample], str]:
        """What the server would drop or cut without a word."""
        now_ms = time.time_ns() // MS
        oldest_ns = self._oldest_ns()
        newest_ns = (now_ms + AHEAD_MS) * MS

        def problem(sample: Sample) -> str:
            if sample.time_ns < oldest_ns:
                return f"older than the server keeps (-retentionPeriod={server.retention})"
            if sample.time_ns > newest_ns:
                return "more than two days ahead, which the server ignores"
            return labels_problem(tuple(sample.tags.items()))

        return problem

    def _oldest_ns(self) -> int:
        """Of what the server keeps."""
        retention_ms = self.server().retention_ms
        return 0 if retention_ms is None else time.time_ns() - retention_ms * MS

    def _write(self, samples: Sequence[Sample], marks: str, touched: frozenset[int]) -> list[Rejected]:
        """One request, and as few more as it takes to find what the server refuses."""
        body = _packed("".join(map(lines, samples)) + marks)
        try:
            self._post(body)
        except _Refused as refused:
            if len(samples) == 1:
                return [Rejected(samples[0], refused.reason)]
            half = len(samples) // 2
            return self._write(samples[:half], marks, touched) + self._write(samples[half:], marks, touched)
        with self._lock:
            self._tail.append((time.monotonic(), body, touched))
        return []

    def _post_lines(self, text: str) -> None:
        """Marks and cells, as they are."""
        try:
            self._post(_packed(text))
        except _Refused as refused:
            raise self._target.error("rollup", reason=refused.reason) from None

    def _post(self, body: bytes) -> None:
        query = f"?{urlencode({'db': self._address.db})}" if self._address.db else ""
        self._target.check_receipt(self._call("/write", body=body, query=query))
        self._unflushed = True

    def _what_may_be_lost(self) -> list[tuple[bytes, frozenset[int]]]:
        """What was acknowledged in the last minute, if the server was started anew, or may have been while it gave no answer.

        While nothing is answered, the minute before that stands still: an outage may be long.
        """
        now_s = time.monotonic()
        with self._lock:
            while self._tail and (
                (self._tail[0][0] < now_s - _TAIL_S and not self._was_lost)
                or sum(len(body) for _, body, _ in self._tail) > _TAIL_BYTES
            ):
                self._tail.popleft()
            if now_s - self._looked_s < _LOOK_S:
                return []
            before, kept = self.server().started_s, [(body, touched) for _, body, touched in self._tail]
        started_s = self.server(again=True).started_s
        is_anew = self._was_lost or started_s != before
        self._was_lost, self._looked_s = is_anew and bool(kept), now_s  # until it is sent
        return kept if is_anew else []

    def _send_again(self, kept: Sequence[tuple[bytes, frozenset[int]]]) -> None:
        """Copies do no harm. What fails here is tried again by the next write."""
        if not kept:
            return
        for body, _ in kept:
            self._post(body)
        touched = frozenset(start_ns for _, minutes in kept for start_ns in minutes)
        self._marks.after(touched, self._post_lines, again=True)
        self._was_lost = False

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        return self.rolls_up and self._fleet.work(now_ns - SETTLE_NS, budget_s)

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        """0 when nothing is that old. StoreError otherwise: the server deletes by its -retentionPeriod alone."""
        if level_ns:
            return 0
        for measurement in catalogue.MEASUREMENTS:
            limit = before_ns.get(measurement, before_ns.get("*"))
            if limit is not None and self._query.marks(measurement, 0, limit, None):
                raise self._target.error("keeps_all", retention=self.server().retention or "?")
        return 0

    def exists(self) -> bool:
        self.server()
        return True  # it has no databases

    def prepare(self, keep_s: float = 0.0) -> None:
        self.server()

    def survey(self) -> Survey:
        server = self.server(again=True)
        write_problem = ""
        try:
            self._post(_packed(""))
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
        elif retention_ms < RARE_DAYS * DAY_MS:
            advice.append("retention_short")
        return Survey(
            f"VictoriaMetrics {server.version}".rstrip(),
            write_problem,
            server.size_bytes,
            server.free_bytes,
            newest[1],
            newest[0],
            None if retention_ms is None else retention_ms / 1000,
            advice=tuple(advice),
        )

    def _end(self, query: str) -> int | None:
        """The time of the newest or the oldest sample of all."""
        until_ms = time.time_ns() // MS + AHEAD_MS
        names = "|".join(f"{name}_{MARK}" for name in catalogue.MEASUREMENTS)
        selector = f"{self._query.named(names)}[{until_ms - DAY_MS}ms]"
        return next((round(value * 1000) * MS for _, value in self._query.at(query.format(selector), until_ms)), None)

    # --- reading

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        known = known_measurement(measurement)
        asked = named(measurement, fields)
        if impossible(where):
            return []
        with self._target.reading():
            newest = {key: at_ms for key, (_, at_ms) in self._query.newest(measurement, since_ns, where).items()}
            found: list[Sample] = []
            for start_ms, end_ms in spans(newest.values(), near=_NEAR_MS):
                for key, device in self._query.read(known, asked, start_ms, end_ms, where).items():
                    at_ms = newest.get(key)
                    if at_ms is not None and start_ms <= at_ms <= end_ms and at_ms in device.marks:
                        found += to_samples(measurement, device, [at_ms], since_ns, 2**63)
            return sorted(found, key=lambda sample: order(sample.tags))

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        known = known_measurement(measurement)
        if impossible(where):
            return []
        with self._target.reading():
            if limit is not None:
                times = self._query.marks(measurement, start_ns, end_ns, where)
                start_ns = max(start_ns, times[-limit]) if 0 < limit <= len(times) else start_ns
            found: list[Sample] = []
            for device in self._query.read(known, known.fields, start_ns // MS, (end_ns - 1) // MS, where).values():
                found += to_samples(measurement, device, device.marks, start_ns, end_ns)
            found.sort(key=lambda sample: (sample.time_ns, order(sample.tags)))
            return found if limit is None else found[max(0, len(found) - limit) :]

    def series(self, measurement: str, *, since_ns: int = 0) -> list[Tags]:
        known_measurement(measurement)
        with self._target.reading():
            return sorted((tags for tags, _ in self._query.newest(measurement, since_ns, None).values()), key=order)

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
        with self._target.reading():
            if over.count and chosen and not impossible(where):
                draw(self._query, known_measurement(measurement), chosen, over, where, columns)
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
        cells: Mapping[str, list[tuple[int, Cell]]] = {}
        with self._target.reading():
            if over.count and names and not impossible(where):
                known = known_measurement(measurement)
                # cells are of the whole fleet
                cells = (
                    gathered(self._query, known, names, over, where)
                    if where
                    else self._fleet.gathered(known, names, over)
                )
            return spreads(cells, over)

    # --- what the server holds

    def _ready(self) -> None:
        """The server is ours, and what this store wrote is readable; it would be so by itself within a second or so."""
        self.server()
        if not self._unflushed:
            return
        with self._lock:
            if self._unflushed:
                self._unflushed = False
                try:
                    self._flush()
                except StoreDown:
                    self._unflushed = True
                    raise

    def _flush(self) -> None:
        try:
            self._call("/internal/force_flush")
        except StoreDown:
            raise
        except (StoreError, _Refused):
            pass  # a proxy or a key stands before it: then the second it is
        self._nonce = secrets.token_hex(4)


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode("utf-8"), compresslevel=1, mtime=0)


def _reason(text: str) -> str:
    """What the server says, on one line."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    text = re.sub(r'^remoteAddr: "[^"]*"; requestURI: [^;]*; ', "", text)
    return one_line(text)
