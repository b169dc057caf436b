"""Rollups on an InfluxDB 1.x server: written by us into retention policies of their own, since its own queries can't OR masks.

Every write carries marks of the minutes that it touched, one for its node and one for the fleet, and of the hours, in the same
request. A mark is `at`, a number of the write's own, and is settled when the one that rolled it up has written the same number as
`done`: whatever comes in between, from any number of writers and of processes that roll up, leaves it open. What is open is read from
raw samples. Only hours that are open are looked into, so that late samples are found without a look at all that there are.

What was written without marks, before there were any, is marked afterwards, a quarter of an hour at a time and the newest first;
until it is, it is read from raw samples too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

from telemetry import catalogue, lineprotocol
from telemetry.catalogue import Field
from telemetry.sample import Sample
from telemetry.store.buckets import order
from telemetry.store.influxdb_cells import PREFIXES, Row, columns, is_part, line, minutes, read
from telemetry.store.influxdb_fleet import FleetMinutes, Sums, add
from telemetry.store.influxdb_http import InfluxServer, Policy
from telemetry.store.influxdb_marks import HOUR_NS, MARKS, Mark, blocks, now_at, span_of
from telemetry.store.influxdb_samples import COUNT
from telemetry.store.influxql import identifier, literal, tags_of
from telemetry.store.interface import StoreError
from telemetry.store.rollup import (
    MINUTE_NS,
    QUARTER_NS,
    SINGLE,
    Cell,
    combined,
    fleet_fields,
)

POLICIES: Mapping[int, tuple[str, int]] = {MINUTE_NS: ("pairscope_1min", 90), QUARTER_NS: ("pairscope_15min", 730)}
"""The retention policy of each level, and the days that it is made with."""
SETTLE_NS = 20 * 10**9  # clocks of writers and this one may differ by so much without work being done twice
_OF_A_MINUTE = ("minute", "fleet")
FLEET = "fleet:"
FRESH_NS = 3600 * 10**9
"""Cells of this long are written without a look at what they replace."""
SHOWN_NS = 5 * 10**9
"""The points of one write come to light one after the other. Within this time they all have, and so it is not rolled up earlier."""
_REACHES_NS = (QUARTER_NS, 86_400 * 10**9, 40 * 86_400 * 10**9, 2**62)
"""How far back older samples are looked for, in turn."""
_NODES_AT_ONCE = 32
_NODES_OF_CELLS = 16
_ROWS_AT_ONCE = 20_000
_DENSE = 480.0  # rows of a node in a minute, where it isn't known: eight cards at 1 Hz

_Raw = Mapping[str, list[dict[str, Any]]]
Post = Callable[[Sequence[str], str], None]
"""Write lines into a retention policy; "" is the database's own."""


def days_of_levels(policies: Iterable[Policy]) -> tuple[float, float] | None:
    """How long the server keeps minutes and quarters, infinite for ever; None where a level has no policy yet."""
    days = {policy.name: policy.keeps_s / 86_400 or float("inf") for policy in policies}
    minutes, quarters = (days.get(name) for name, _ in POLICIES.values())
    return None if minutes is None or quarters is None else (minutes, quarters)


class InfluxRollups:
    """One server's rollups. `post` writes."""

    def __init__(self, server: InfluxServer, post: Post) -> None:
        self._server = server
        self._database = identifier(server.address.database)
        self._query = server.query
        self._post = post
        self._ready = False
        self._since_ns: int | None = None
        self._asked_s = float("-inf")
        self._gone_ns = 0
        self._policy_s: float | None = None
        self._told_ns = 0  # when `since_ns` was written down last
        self._measurements: list[str] = []
        self._fleet = FleetMinutes()
        self._counted = 0, 0, _DENSE  # hour, marks in it, rows of a node in a minute
        self._parts: dict[str, tuple[float, bool]] = {}

    # --- what is kept

    def since_ns(self) -> int | None:
        """From when on every sample has left its mark; None while nothing was ever rolled up. Asked at most once a minute."""
        if time.monotonic() - self._asked_s > 60:
            self._asked_s = time.monotonic()
            found = self._query(f"SELECT since, gone FROM {identifier(MARKS)} WHERE kind = 'began'")
            rows = [row for series in found for row in series["values"]]
            self._since_ns = min((int(row[1]) for row in rows if row[1] is not None), default=None)
            self._told_ns = max((row[0] for row in rows if row[1] is not None), default=0)
            self._gone_ns = max((int(row[2]) for row in rows if row[2] is not None), default=0)
            self._policy_s = self._server.policy_s()
        return self._since_ns

    def raw_since_ns(self) -> int:
        """From when on no raw sample has gone yet."""
        self.since_ns()
        return max(self._gone_ns, time.time_ns() - round(self._policy_s * 1e9) if self._policy_s else 0)

    def let_go(self, before_ns: int) -> None:
        """Note that raw samples from before go now."""
        self._gone_ns = max(self._gone_ns, before_ns)
        self._mark([Sample(MARKS, {"kind": "began"}, {"gone": self._gone_ns}, time.time_ns() // HOUR_NS * HOUR_NS)])

    def _tell(self, since_ns: int) -> None:
        """Written down anew now and then, as the server's policy lets old points go."""
        now_ns = time.time_ns()
        self._mark([Sample(MARKS, {"kind": "began"}, {"since": since_ns}, now_ns // HOUR_NS * HOUR_NS)])
        self._since_ns, self._told_ns = since_ns, now_ns

    def keep(self, level_ns: int, days: float) -> None:
        """The server drops cells of a level that are older than this; it works by whole shards, so a little later."""
        name, _ = POLICIES[level_ns]
        hours = max(1, round(days * 24))
        self._make_policies()
        self._query(f"ALTER RETENTION POLICY {identifier(name)} ON {self._database} DURATION {hours}h")

    def _make_policies(self) -> None:
        if not self._ready:
            for name, days in POLICIES.values():
                try:
                    self._query(
                        f"CREATE RETENTION POLICY {identifier(name)} ON {self._database} DURATION {days}d REPLICATION 1"
                    )
                except StoreError as error:
                    if "already exists" not in str(error) and "conflicts" not in str(error):
                        raise
            self._ready = True

    # --- rolling up

    def work(self, now_ns: int, budget_s: float) -> bool:
        """Draw together what ended by `now_ns`, for about `budget_s`; whether some of it is left."""
        deadline_s = time.monotonic() + budget_s
        self._make_policies()
        since_ns = self.since_ns()
        if since_ns is None:
            self._asked_s = float("-inf")  # ask anew
            since_ns = self.since_ns()
        if since_ns is None or time.time_ns() - self._told_ns > 6 * HOUR_NS:
            self._tell(now_ns if since_ns is None else since_ns)
        self._measurements = [
            row[0]
            for series in self._query("SHOW MEASUREMENTS")
            for row in series["values"]
            if row[0] in catalogue.MEASUREMENTS and row[0] not in SINGLE
        ]
        waiting = False
        for hour in sorted(self.open("hour", 0, now_ns), key=lambda mark: -mark.start_ns):
            fresh_ns = time.time_ns() - SHOWN_NS
            for roll, some in self._pieces(hour.start_ns, now_ns, fresh_ns, deadline_s):
                roll(some)
                self._mark([mark.settled() for mark in some])
                if time.monotonic() >= deadline_s:
                    return True
            waiting = self._leave(hour, now_ns, fresh_ns) or waiting
        if waiting:
            time.sleep(min(budget_s, 0.25))
            return True
        return self._reach_back()

    def _pieces(
        self, hour_ns: int, now_ns: int, fresh_ns: int, deadline_s: float
    ) -> Iterator[tuple[Callable[[Sequence[Mark]], None], list[Mark]]]:
        def due(kind: str, length_ns: int) -> list[Mark]:
            found = self.open(kind, hour_ns, min(hour_ns + HOUR_NS, now_ns - length_ns + 1))
            return [mark for mark in found if mark.written_ns <= fresh_ns]

        # the fleet's marks are looked up before its nodes', so that what is written meanwhile leaves them open
        fleet = due("fleet", MINUTE_NS)
        minutes = due("minute", MINUTE_NS)
        whole = self._whole_quarters(minutes, hour_ns, now_ns)
        for some, raw in self._ahead(self._portions(minutes), deadline_s):
            yield partial(self._minutes, whole, raw), some
        ready = [mark for mark in fleet if self._fleet.holds(mark.start_ns)]
        if ready:
            yield self._fleet_minutes, ready
        for some in blocks([mark for mark in fleet if mark not in ready], QUARTER_NS, _NODES_OF_CELLS):
            yield self._fleet_minutes, some
        # opened by the above, whose cells are all there
        for some in blocks(
            self.open("quarter", hour_ns, min(hour_ns + HOUR_NS, now_ns - QUARTER_NS + 1)), QUARTER_NS, _NODES_OF_CELLS
        ):
            yield self._quarters, some
        some = self.open("fleet_quarter", hour_ns, min(hour_ns + HOUR_NS, now_ns - QUARTER_NS + 1))
        if some:
            yield self._quarters, some

    def _whole_quarters(self, minutes: Iterable[Mark], hour_ns: int, now_ns: int) -> set[tuple[str, int]]:
        """(node, start_ns) of quarters that have ended and of which every minute that has a mark is among these."""
        these = Counter((mark.node, _quarter(mark.start_ns)) for mark in minutes)
        if not any(start_ns <= now_ns - QUARTER_NS for _, start_ns in these):
            return set()
        known = self._minute_marks((hour_ns, hour_ns + HOUR_NS))
        all_there_are = Counter((node, _quarter(start_ns)) for start_ns, nodes in known.items() for node in nodes)
        return {
            place for place, count in these.items() if count == all_there_are[place] and place[1] <= now_ns - QUARTER_NS
        }

    def _minute_marks(self, span: tuple[int, int]) -> dict[int, dict[str, int]]:
        """start_ns -> node -> mark, open or not."""
        found: dict[int, dict[str, int]] = {}
        for series in self._query(
            f"SELECT at FROM {identifier(MARKS)} WHERE kind = 'minute' AND {_time(*span)} GROUP BY node"
        ):
            node = tags_of(series).get("node", "")
            for start_ns, at in series["values"]:
                if at is not None:
                    found.setdefault(start_ns, {})[node] = int(at)
        return found

    def _portions(self, minutes: Sequence[Mark]) -> list[list[Mark]]:
        """Marks that one query each answers, all of a node's of one quarter together."""
        density = self._rows_a_minute(minutes)
        starts = [mark.start_ns for mark in minutes]
        length_ns = max(starts) - min(starts) + MINUTE_NS if starts else 0
        if density * length_ns / MINUTE_NS * _NODES_AT_ONCE > _ROWS_AT_ONCE:
            length_ns = min(length_ns, QUARTER_NS)
            nodes = _ROWS_AT_ONCE / (density * length_ns / MINUTE_NS)
            return list(blocks(minutes, QUARTER_NS, max(1, min(_NODES_AT_ONCE, int(nodes)))))
        return list(blocks(minutes, HOUR_NS, _NODES_AT_ONCE))

    def _ahead(self, portions: Sequence[list[Mark]], deadline_s: float) -> Iterator[tuple[list[Mark], _Raw]]:
        """Each with its raw samples, which the server looks up while those of the one before are drawn together.

        Not of one that the deadline will leave for another time.
        """
        with ThreadPoolExecutor(1) as reader:
            coming: Future[_Raw] | None = None
            one_takes_s = 0.0
            for place, some in enumerate(portions, 1):
                raw = coming.result() if coming is not None else self._raw(some)
                began_s = time.monotonic()
                is_next = place < len(portions) and began_s + one_takes_s < deadline_s
                coming = reader.submit(self._raw, portions[place]) if is_next else None
                yield some, raw
                one_takes_s = time.monotonic() - began_s

    def _raw(self, some: Sequence[Mark]) -> _Raw:
        """measurement -> raw samples of each series, those of these minutes and maybe of others between them."""
        where = f"{_time(*span_of(some))}{_nodes({mark.node for mark in some})}"
        return {
            measurement: self._query(f"SELECT * FROM {identifier(measurement)} WHERE {where} GROUP BY *")
            for measurement in self._measurements
        }

    def _rows_a_minute(self, some: Sequence[Mark]) -> float:
        """How many raw samples a node has in a minute, about; of other writers' samples it is not known beforehand."""
        if not some or not self._measurements:
            return _DENSE
        nodes, (first_ns, end_ns) = {mark.node for mark in some}, span_of(some)
        size = len(nodes) * (end_ns - first_ns) / MINUTE_NS
        if size * _DENSE <= _ROWS_AT_ONCE:
            return _DENSE
        hour_ns, marks, density = self._counted
        if hour_ns != first_ns // HOUR_NS * HOUR_NS or len(some) >= marks:  # else these are what was left of those
            where = f"{_time(first_ns, end_ns)}{_nodes(nodes)}"
            counts = self._server.query_each(
                [
                    f"SELECT count({identifier(COUNT)}) FROM {identifier(name)} WHERE {where}"
                    for name in self._measurements
                ]
            )
            density = sum(row[1] for found in counts for series in found for row in series["values"]) / size or _DENSE
        self._counted = first_ns // HOUR_NS * HOUR_NS, len(some), density
        return density

    def _leave(self, hour: Mark, now_ns: int, fresh_ns: int) -> bool:
        """Settle the hour when nothing in it is open; whether something is that only needs a moment."""
        span = (hour.start_ns, hour.start_ns + HOUR_NS)
        left = [mark for kind in ("minute", "fleet", "quarter", "fleet_quarter") for mark in self.open(kind, *span)]
        if not left and hour.written_ns <= fresh_ns:
            self._mark([hour.settled()])
            return False
        due = [
            mark for mark in left if mark.start_ns <= now_ns - (MINUTE_NS if mark.kind in _OF_A_MINUTE else QUARTER_NS)
        ]
        return bool(due) or not left

    def _reach_back(self) -> bool:
        """Mark the newest quarter of an hour with samples from before there were marks; whether there was one."""
        since_ns = self.since_ns()
        assert since_ns is not None
        if since_ns <= 0:
            return False
        end_ns = -(-since_ns // QUARTER_NS) * QUARTER_NS
        newest_ns = None
        for reach_ns in _REACHES_NS:
            span = _time(max(0, since_ns - reach_ns), since_ns)
            newest_ns = max((at_ns for name in self._measurements for at_ns in self._newest(name, span)), default=None)
            if newest_ns is not None:
                break
        if newest_ns is None:
            self._tell(0)
            return False
        start_ns = _quarter(newest_ns)
        end_ns = min(end_ns, start_ns + QUARTER_NS)
        nodes = {""} | {
            row[1]
            for series in self._query('SHOW TAG VALUES WITH KEY = "node"')
            if series["name"] in self._measurements
            for row in series["values"]
        }
        known = self._query(
            f"SELECT at FROM {identifier(MARKS)} WHERE kind = 'minute' AND {_time(start_ns, end_ns)} GROUP BY node"
        )
        marked = {(tags_of(series).get("node", ""), row[0]) for series in known for row in series["values"]}
        at = now_at(SHOWN_NS + 10**6)  # what it stands for has long come to light
        minutes = range(start_ns, end_ns, MINUTE_NS)
        made = [
            Mark("minute", node, minute, at).opened()
            for node in sorted(nodes)
            for minute in minutes
            if (node, minute) not in marked
        ]
        made += [Mark("fleet", "", minute, at).opened() for minute in minutes]
        self._mark([*made, Mark("hour", "", start_ns // HOUR_NS * HOUR_NS, at).opened()])
        self._tell(start_ns)
        return True

    def _newest(self, measurement: str, span: str) -> list[int]:
        newest = self._query(f"SELECT * FROM {identifier(measurement)} WHERE {span} ORDER BY time DESC LIMIT 1")
        return [row[0] for series in newest for row in series["values"]]

    def finish(self, before_ns: int) -> None:
        """Draw together all that is older, before it goes."""
        while self.work(before_ns + QUARTER_NS, 60.0):
            pass

    def open(self, kind: str, first_ns: int, end_ns: int, nodes: str = "") -> list[Mark]:
        """The open marks that start in the span; `nodes` is a further condition."""
        return [
            Mark(kind, tags_of(series).get("node", ""), row[0], int(row[1]))
            for series in self._query(
                f"SELECT at FROM {identifier(MARKS)} WHERE kind = '{kind}' AND (open = 1 OR at != done) "
                f"AND {_time(first_ns, end_ns)}{nodes} GROUP BY node"
            )
            for row in series["values"]
            if row[1] is not None
        ]

    def _minutes(self, whole: Collection[tuple[str, int]], raw: _Raw, some: Sequence[Mark]) -> None:
        """Cells of the minutes, and of the quarters that are `whole` in them."""
        wanted: dict[str, set[int]] = {}
        for mark in some:
            wanted.setdefault(mark.node, set()).add(mark.start_ns)
        made: list[Row] = []
        quarters: list[Row] = []
        sums: Sums = {}
        for measurement, found in raw.items():
            fields, gauges = catalogue.MEASUREMENTS[measurement].fields, fleet_fields(measurement)
            for series in found:
                tags = tags_of(series)
                node = tags.get("node", "")
                rows = list(minutes(series, fields, wanted.get(node, ())))
                for start_ns, n, cells in rows:
                    made.append(Row(MINUTE_NS, measurement, tags, start_ns, n, cells))
                    if gauges:
                        add(sums, start_ns, measurement, cells, gauges)
                for start_ns, several in groupby(rows, key=lambda row: _quarter(row[0])):
                    if (node, start_ns) in whole:
                        parts = [(n, cells) for _, n, cells in several]
                        quarters.append(_joined(QUARTER_NS, measurement, tags, start_ns, parts, fields))
        span = span_of(some)
        kept = self._put(MINUTE_NS, made, span)
        of_kept = {(node, _quarter(start_ns)) for node, start_ns in kept}
        self._put(QUARTER_NS, [q for q in quarters if (q.tags.get("node", ""), q.start_ns) not in of_kept], span)
        places = {(mark.node, _quarter(mark.start_ns)) for mark in some}
        self._open("quarter", {place for place in places if place not in whole or place in of_kept})
        changed = {start_ns for _, start_ns in kept}
        self._fleet.put([(mark.node, mark.start_ns, mark.at) for mark in some], sums, changed)

    def _fleet_minutes(self, some: Sequence[Mark]) -> None:
        made: list[Row] = []
        rest: list[Mark] = []
        known = self._minute_marks((min(m.start_ns for m in some), max(m.start_ns for m in some) + MINUTE_NS))
        for mark in some:
            together = self._fleet.take(mark.start_ns, known.get(mark.start_ns, {}))
            if together is None:
                rest.append(mark)
            else:
                made += [
                    Row(MINUTE_NS, FLEET + measurement, {}, mark.start_ns, 0, gauges)
                    for measurement, gauges in together.items()
                ]
        for part in blocks(rest, QUARTER_NS, _NODES_OF_CELLS):
            made += self._fleet_from_cells(part)
        self._put(MINUTE_NS, made, None)
        self._open("fleet_quarter", {("", _quarter(mark.start_ns)) for mark in some})

    def _fleet_from_cells(self, some: Sequence[Mark]) -> Iterator[Row]:
        span = (min(mark.start_ns for mark in some), max(mark.start_ns for mark in some) + MINUTE_NS)
        wanted = {mark.start_ns for mark in some}
        for measurement in self._measurements:
            known = catalogue.MEASUREMENTS[measurement].fields
            fields = [known[name] for name in fleet_fields(measurement)]
            several: dict[int, dict[str, list[Cell]]] = {}
            for _, start_ns, _, cells in self.cells(MINUTE_NS, measurement, fields, _time(*span)) if fields else ():
                if start_ns in wanted:
                    for name, cell in cells.items():
                        several.setdefault(start_ns, {}).setdefault(name, []).append(cell)
            for start_ns, by_name in several.items():
                whole = {name: combined(known[name].kind, cells) for name, cells in by_name.items()}
                yield Row(MINUTE_NS, FLEET + measurement, {}, start_ns, 0, whole)

    def _quarters(self, some: Sequence[Mark]) -> None:
        made: list[Row] = []
        fleet = some[0].kind == "fleet_quarter"
        span = (min(mark.start_ns for mark in some), max(mark.start_ns for mark in some) + QUARTER_NS)
        wanted = {(mark.node, mark.start_ns) for mark in some}
        where = _time(*span) + ("" if fleet else _nodes({mark.node for mark in some}))
        for measurement in self._measurements:
            known = catalogue.MEASUREMENTS[measurement].fields
            name = FLEET + measurement if fleet else measurement
            several: dict[tuple[Any, int], list[tuple[int, dict[str, Cell]]]] = {}
            tags_of: dict[Any, Mapping[str, str]] = {}
            for tags, start_ns, n, cells in self.cells(MINUTE_NS, name, list(known.values()), where, with_samples=True):
                if (tags.get("node", ""), _quarter(start_ns)) in wanted:
                    key = order(tags)
                    tags_of[key] = tags
                    several.setdefault((key, _quarter(start_ns)), []).append((n, cells))
            for (key, start_ns), parts in several.items():
                made.append(_joined(QUARTER_NS, name, tags_of[key], start_ns, parts, known))
        self._put(QUARTER_NS, made, None if fleet else span)

    def _open(self, kind: str, places: Collection[tuple[str, int]]) -> None:
        if places:
            at = now_at()
            self._mark([Mark(kind, node, start_ns, at).opened() for node, start_ns in sorted(places)])

    def _put(self, level_ns: int, made: Sequence[Row], span: tuple[int, int] | None) -> set[tuple[str, int]]:
        """Write cells; one that is there from more samples than are left now stays as it is (raw samples only ever go when old).

        (node, start_ns) of those that stayed.
        """
        policy, _ = POLICIES[level_ns]
        kept: set[tuple[str, Any, int]] = set()
        first_ns = span[0] // level_ns * level_ns if span is not None else 0
        if span is not None and made and first_ns < time.time_ns() - FRESH_NS:
            counts = {(row.measurement, order(row.tags), row.start_ns): row.samples for row in made}
            nodes = _nodes({row.tags.get("node", "") for row in made})
            for measurement in {row.measurement for row in made}:
                for series in self._query(
                    f"SELECT samples FROM {self._source(level_ns, measurement)} "
                    f"WHERE {_time(first_ns, span[1])}{nodes} GROUP BY *"
                ):
                    for start_ns, n in series["values"]:
                        place = (measurement, order(tags_of(series)), start_ns)
                        if n is not None and n > counts.get(place, n):
                            kept.add(place)
        if kept:
            made = [row for row in made if (row.measurement, order(row.tags), row.start_ns) not in kept]
        self._post(list(map(line, made)), policy)
        return {(dict(tags).get("node", ""), start_ns) for _, tags, start_ns in kept}

    def _mark(self, samples: Iterable[Sample]) -> None:
        self._post(list(map(lineprotocol.encode, samples)), "")

    # --- reading

    def cells(
        self, level_ns: int, measurement: str, fields: Sequence[Field], where: str, *, with_samples: bool = False
    ) -> Iterator[tuple[Mapping[str, str], int, int, dict[str, Cell]]]:
        """(tags, start_ns, samples, field -> cell) of one level as they stand, with an InfluxQL condition.

        How many samples there were is 0 unless it is asked for: each column costs the server as much as another.
        """
        source = self._source(level_ns, measurement)
        by_part = self._has_parts(source)
        names = [identifier(name) for field in fields for name in columns(field, by_part=by_part)]
        select = ", ".join([*(["samples"] if with_samples else []), *names])
        for series in self._query(f"SELECT {select} FROM {source} WHERE {where} GROUP BY *"):
            tags = tags_of(series)
            for start_ns, samples, cells in read(series, fields):
                yield tags, start_ns, samples, cells

    def _has_parts(self, source: str) -> bool:
        """Whether an earlier version wrote cells there. Asked at most every ten minutes, as columns that are not there cost, too."""
        asked_s, found = self._parts.get(source, (float("-inf"), False))
        if not found and time.monotonic() - asked_s > 600:
            keys = self._query(f"SHOW FIELD KEYS FROM {source}")
            found = any(is_part(row[0]) for series in keys for row in series["values"])
            self._parts[source] = time.monotonic(), found
        return found

    def _source(self, level_ns: int, measurement: str) -> str:
        return f"{self._database}.{identifier(POLICIES[level_ns][0])}.{identifier(PREFIXES[level_ns] + measurement)}"


def _joined(
    level_ns: int,
    measurement: str,
    tags: Mapping[str, str],
    start_ns: int,
    parts: Sequence[tuple[int, Mapping[str, Cell]]],
    fields: Mapping[str, Field],
) -> Row:
    """The longer row of cells, out of (samples, cells) of the shorter ones in time order."""
    several: dict[str, list[Cell]] = {}
    for _, cells in parts:
        for name, cell in cells.items():
            several.setdefault(name, []).append(cell)
    whole = {name: combined(fields[name].kind, found) for name, found in several.items()}
    return Row(level_ns, measurement, tags, start_ns, sum(n for n, _ in parts), whole)


def _time(first_ns: int, end_ns: int) -> str:
    return f"time >= {first_ns} AND time < {end_ns}"


def _nodes(nodes: Iterable[str]) -> str:
    return f" AND ({' OR '.join(f'node = {literal(node)}' for node in sorted(nodes))})"


def _quarter(time_ns: int) -> int:
    return time_ns // QUARTER_NS * QUARTER_NS
