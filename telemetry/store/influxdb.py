"""InfluxDB as the store: line protocol over HTTP in, InfluxQL out, the generation of the server found out by asking it.

Tested against a real 1.6 server. 2.x (writes to /api/v2/write, reads through the bucket's DBRP mapping) and 3.x are tested against
their documented contract only.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial

from telemetry import catalogue, lineprotocol
from telemetry.sample import Sample
from telemetry.store.admission import admit
from telemetry.store.buckets import aggregates, buckets, gauges, named
from telemetry.store.influxdb_bucket import keeps_s
from telemetry.store.influxdb_http import InfluxServer, Refused
from telemetry.store.influxdb_marks import marks
from telemetry.store.influxdb_range import InfluxRanges
from telemetry.store.influxdb_rollup import SETTLE_NS, InfluxRollups, days_of_levels
from telemetry.store.influxdb_samples import InfluxSamples, counted
from telemetry.store.influxql import condition, identifier
from telemetry.store.interface import RARE_DAYS, Column, Rejected, Spread, StoreError, Survey, Where

BATCH_LINES = 5000
_TYPE_CONFLICT = re.compile(
    r'field type conflict: input field "(?P<field>[^"]+)" on measurement "(?P<measurement>[^"]+)"'
)
_TOO_OLD = re.compile(r"beyond retention policy dropped=(\d+)")


class InfluxStore:
    """A `Store` on an InfluxDB server, `influxdb://host:8086/database` (`influxdbs://` with TLS). Thread-safe.

    Nothing is asked of the server before the first call, so that it may come up later. The database is created by the first write
    when this user may; until then it reads as empty. A 2.x bucket must exist.

    `prune` needs a server older than 2; of samples that another wrote it counts at least what every row of a series has in common.
    """

    def __init__(self, url: str) -> None:
        self.server = InfluxServer(url)
        self.url = self.server.url
        self.durable_after_s = 0.0  # each write is synced before it is acknowledged
        self._rollups = InfluxRollups(self.server, self._put)
        self._samples = InfluxSamples(self.server)
        self._ranges = InfluxRanges(self.server, self._rollups)

    @property
    def rolls_up(self) -> bool:
        """Only on 1.x: a bucket of 2.x and a database of 3.x have one retention."""
        return self.server.generation() == 1

    def exists(self) -> bool:
        return self.server.exists()

    def prepare(self, keep_s: float = 0.0) -> None:
        self.server.prepare(keep_s)

    def close(self) -> None:
        self.server.close()

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
        except Refused as refused:
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

    def _post(self, samples: Sequence[Sample]) -> None:
        own = marks(samples) if self.rolls_up else []
        self.server.write(lineprotocol.encode_many([*counted(samples), *own]))

    def _put(self, lines: Sequence[str], policy: str) -> None:
        """Rollups and their marks, as they are."""
        for start in range(0, len(lines), BATCH_LINES):
            try:
                self.server.write("\n".join(lines[start : start + BATCH_LINES]), policy)
            except Refused as refused:
                if _TOO_OLD.search(refused.reason) is None:  # what the policy would drop need not be kept
                    raise self.server.error("rollup", reason=refused.reason) from None

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        with self.server.reading():
            return self.rolls_up and self.exists() and self._rollups.work(now_ns - SETTLE_NS, budget_s)

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        """Of a level, the server drops by itself what is older than "*" says; it is told how long that is."""
        if level_ns:
            if self.rolls_up and "*" in before_ns and self.exists():
                self._rollups.keep(level_ns, (time.time_ns() - before_ns["*"]) / 86_400e9)
            return 0
        if self.rolls_up and self.exists():
            self._rollups.finish(max(before_ns.values(), default=0))
            self._rollups.let_go(max(before_ns.values(), default=0))
        removed = 0
        for measurement in catalogue.MEASUREMENTS:
            limit = before_ns.get(measurement, before_ns.get("*"))
            if limit is None:
                continue
            counts = self.server.query(
                f"SELECT count(*) FROM {identifier(measurement)} WHERE time < {limit} GROUP BY *"
            )
            gone = sum(max(n for n in row["values"][0][1:] if n is not None) for row in counts)
            if gone:
                self._delete(measurement, limit)
            removed += gone
        return removed

    def _delete(self, measurement: str, limit_ns: int) -> None:
        generation = self.server.generation()
        if generation != 1:
            raise self.server.error("no_deletion", generation=generation)
        self.server.query(f"DELETE FROM {identifier(measurement)} WHERE time < {limit_ns}")

    def survey(self) -> Survey:
        generation = self.server.generation()
        write_problem = ""
        try:
            if self.server.exists():  # else the first write will show
                self.server.write("")
        except Refused:
            pass  # of a request without a line: whoever gets as far may write
        except StoreError as error:
            write_problem = str(error)
        times: list[int] = []
        for measurement in catalogue.MEASUREMENTS:
            for tail in ("ASC", "DESC"):
                found = self.server.query_over((0, lineprotocol.INT_MAX - 1), partial(_outermost, measurement, tail))
                times += [row[0] for series in found for row in series["values"]]
        policies = self.server.policies() if generation == 1 else []
        main = next((policy for policy in policies if policy.is_default), None)
        retention_s = self._bucket_s() if generation == 2 else main.keeps_s if main else None
        return Survey(
            f"InfluxDB {self.server.version()}",
            write_problem,
            oldest_ns=min(times, default=None),
            newest_ns=max(times, default=None),
            retention_s=retention_s,
            rollup_days=days_of_levels(policies),
            policy=f"{identifier(main.name)} ON {identifier(self.server.address.database)}" if main else "",
            advice=_advice(generation, retention_s),
        )

    def _bucket_s(self) -> float | None:
        """How long the bucket keeps samples; 0 for ever."""
        try:
            bucket = self.server.bucket()
        except StoreError:  # these credentials may only write and read
            bucket = None
        return None if bucket is None else keeps_s(bucket)

    # --- reading

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        named(measurement, fields)
        with self.server.reading():
            return self._samples.latest(measurement, since_ns=since_ns, where=where, fields=fields)

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        named(measurement, None)
        with self.server.reading():
            return self._samples.samples(measurement, start_ns=start_ns, end_ns=end_ns, where=where, limit=limit)

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
        aggregates(measurement, fields, aggregate)
        buckets(start_ns, end_ns, step_ns)
        with self.server.reading():
            return self._ranges.range(
                measurement, fields, start_ns=start_ns, end_ns=end_ns, step_ns=step_ns, aggregate=aggregate, where=where
            )

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
        gauges(measurement, fields)
        buckets(start_ns, end_ns, step_ns)
        with self.server.reading():
            return self._ranges.spread(
                measurement, fields, start_ns=start_ns, end_ns=end_ns, step_ns=step_ns, where=where
            )


def _outermost(measurement: str, order: str, span: tuple[int, int]) -> str:
    return f"SELECT * FROM {identifier(measurement)} WHERE {condition(span)} ORDER BY time {order} LIMIT 1"


def _advice(generation: int, retention_s: float | None) -> tuple[str, ...]:
    if retention_s is None:
        return ("bucket_retention",) if generation > 1 else ()
    kind = "bucket" if generation > 1 else "policy"
    if retention_s == 0:
        return (f"{kind}_endless",)
    return (f"{kind}_short",) if retention_s < RARE_DAYS * 86_400 else ()


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
