"""Ranges and spreads from InfluxDB: drawn by the server from raw samples, or from rollups where they reach."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.store.buckets import Buckets, Columns, aggregates, buckets, gauges, order, rates
from telemetry.store.influxdb_draw import draw
from telemetry.store.influxdb_http import InfluxServer, TooMuchAtOnce
from telemetry.store.influxdb_marks import Mark, runs
from telemetry.store.influxdb_rollup import FLEET, SHOWN_NS, InfluxRollups
from telemetry.store.influxql import condition, conditions, identifier, impossible, tags_of
from telemetry.store.interface import Column, Spread, Where
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS, Cell, Gauge, answers, drawn, level_ns, reduced, spreads

_DRAWN = 4096
_Key = tuple[tuple[str, str], ...]
_Cells = dict[str, dict[_Key, list[tuple[int, Cell]]]]


class InfluxRanges:
    def __init__(self, server: InfluxServer, rollups: InfluxRollups) -> None:
        self._server = server
        self._query = server.query
        self._rollups = rollups
        self._drawn: dict[
            tuple[str, str, int], tuple[int, Gauge]
        ] = {}  # by measurement, field and minute; with its mark

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
        if over.count and not impossible(where):
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
        if not level_ns(over.step_ns) or self._server.generation() != 1:
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
        try:
            self._range_raw_at_once(measurement, chosen, over, where, columns)
        except TooMuchAtOnce:
            for first, part in _halves(over):
                some = Columns(part, list(chosen))
                self._range_raw(measurement, chosen, part, where, some)
                for column in some.answer():
                    for bucket, value in enumerate(column.values, first):
                        if value is not None:
                            columns.put(column.tags, column.field, bucket, value)

    def _range_raw_at_once(
        self, measurement: str, chosen: Mapping[str, str], over: Buckets, where: Where | None, columns: Columns
    ) -> None:
        drawn_there = {name: how for name, how in chosen.items() if how != "rate"}
        draw(self._server, measurement, drawn_there, over, where, columns)
        for name, how in chosen.items():
            if how == "rate":
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

        last: tuple[Mapping[str, str], _Key] = ({}, ())

        def add(tags: Mapping[str, str], start_ns: int, cells: Mapping[str, Cell]) -> None:
            nonlocal last
            if tags is not last[0]:  # the next row of one series comes with the very same
                last = tags, order(tags)
            key = last[1]
            tags_of[key] = tags
            for name, cell in cells.items():
                found.setdefault(name, {}).setdefault(key, []).append((start_ns, cell))

        node_only = {"node": where["node"]} if where and "node" in where else None
        nodes = "".join(f" AND {condition}" for condition in conditions(node_only))
        rest = "".join(f" AND {condition}" for condition in conditions(where))
        is_open = {(mark.node, mark.start_ns) for mark in self._rollups.open("minute", *span, nodes)}
        minutes = [span]
        stale: set[tuple[str, int]] = set()
        if level == QUARTER_NS:
            stale = {(node, start_ns // QUARTER_NS * QUARTER_NS) for node, start_ns in is_open}
            stale |= {(mark.node, mark.start_ns) for mark in self._rollups.open("quarter", *span, nodes)}
            for tags, start_ns, _, cells in self._rollups.cells(level, measurement, fields, condition(span) + rest):
                if (tags.get("node", ""), start_ns) not in stale:
                    add(tags, start_ns, cells)
            minutes = runs([start_ns for _, start_ns in stale], QUARTER_NS)
        for part in minutes:
            for tags, start_ns, _, cells in self._rollups.cells(MINUTE_NS, measurement, fields, condition(part) + rest):
                node = tags.get("node", "")
                current = level == MINUTE_NS or (node, start_ns // QUARTER_NS * QUARTER_NS) in stale
                if current and (node, start_ns) not in is_open:
                    add(tags, start_ns, cells)
        for part in runs([start_ns for _, start_ns in is_open], MINUTE_NS):
            for field in fields:
                for tags, start_ns, cell in self._raw_cells(measurement, field, condition(part) + rest):
                    if (tags.get("node", ""), start_ns) in is_open:
                        add(tags, start_ns, {field.name: cell})
        return found, tags_of

    def _raw_cells(
        self, measurement: str, field: catalogue.Field, clause: str
    ) -> Iterator[tuple[Mapping[str, str], int, Cell]]:
        """Cells of minutes made from raw samples now, by the server where it can."""
        name, source = identifier(field.name), identifier(measurement)
        by_minute = f"FROM {source} WHERE {clause} GROUP BY time({MINUTE_NS}ns), * fill(none)"
        if field.kind is Kind.GAUGE:
            select = f"SELECT count({name}), mean({name}), min({name}), max({name}) {by_minute}"
            for series in self._query(select):
                for start_ns, *parts in series["values"]:
                    yield tags_of(series), start_ns, Gauge(*parts)
            return
        for series in self._query(f"SELECT {name} FROM {source} WHERE {clause} GROUP BY *"):
            for start_ns, rows in groupby(series["values"], key=lambda row: row[0] // MINUTE_NS * MINUTE_NS):
                times, values = zip(*rows, strict=True)
                yield tags_of(series), start_ns, reduced(field.kind, times, [field.type(value) for value in values])

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
        if not over.count or impossible(where):
            return []
        before = self._raw_part(over)
        if before.count:
            for field in wanted:
                cells[field.name] += self._cells_over(measurement, field.name, before, where)
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
        asked_ns = time.time_ns()
        marks = {mark.start_ns: mark for mark in self._rollups.open("fleet", *span)}
        is_open = marks.keys()
        minutes = [span]
        stale: set[int] = set()
        if level == QUARTER_NS:
            stale = {start_ns // QUARTER_NS * QUARTER_NS for start_ns in is_open}
            stale |= {mark.start_ns for mark in self._rollups.open("fleet_quarter", *span)}
            for _, start_ns, _, row in self._rollups.cells(level, name, fields, condition(span)):
                if start_ns not in stale:
                    for field, cell in row.items():
                        cells[field].append((start_ns, cell))
            minutes = runs(stale, QUARTER_NS)
        for part in minutes:
            for _, start_ns, _, row in self._rollups.cells(MINUTE_NS, name, fields, condition(part)):
                if start_ns not in is_open and (level == MINUTE_NS or start_ns // QUARTER_NS * QUARTER_NS in stale):
                    for field, cell in row.items():
                        cells[field].append((start_ns, cell))
        # where no raw sample has gone yet, the server may draw all series together
        raw_since_ns = self._rollups.raw_since_ns()
        fresh = [mark for mark in marks.values() if mark.start_ns >= raw_since_ns]
        for gauge in fields:
            cells[gauge.name] += self._fleet_minutes(measurement, gauge.name, fresh, asked_ns)
        older = is_open - {mark.start_ns for mark in fresh}
        for part in runs(older, MINUTE_NS):
            found, _ = self._gather(measurement, fields, None, part, MINUTE_NS)
            for field, of_series in found.items():
                cells[field] += [timed for several in of_series.values() for timed in several if timed[0] in older]

    def _fleet_minutes(
        self, measurement: str, name: str, marks: Sequence[Mark], asked_ns: int
    ) -> Iterator[tuple[int, Cell]]:
        """Cells of minutes from the raw samples of all series; nothing is drawn twice that nobody wrote to meanwhile."""
        if len(self._drawn) > _DRAWN:
            self._drawn.clear()
        missing: dict[int, Mark] = {}
        for mark in marks:
            at, cell = self._drawn.get((measurement, name, mark.start_ns), (None, None))
            if cell is not None and at == mark.at:
                yield mark.start_ns, cell
            else:
                missing[mark.start_ns] = mark
        for part in runs(missing, MINUTE_NS):
            for start_ns, cell in self._cells_of_all(measurement, name, condition(part), MINUTE_NS):
                if start_ns in missing:
                    yield start_ns, cell
                    mark = missing[start_ns]
                    if mark.written_ns < asked_ns - SHOWN_NS:
                        self._drawn[measurement, name, start_ns] = mark.at, cell

    def _cells_over(self, measurement: str, name: str, over: Buckets, where: Where | None) -> list[tuple[int, Gauge]]:
        try:
            clause = condition((over.first_ns, over.end_ns), where)
            return list(self._cells_of_all(measurement, name, clause, over.step_ns))
        except TooMuchAtOnce:
            return [cell for _, part in _halves(over) for cell in self._cells_over(measurement, name, part, where)]

    def _cells_of_all(self, measurement: str, name: str, clause: str, step_ns: int) -> Iterator[tuple[int, Gauge]]:
        """A gauge of all series together over each step, drawn by the server; at once where it may be asked twice."""
        name = identifier(name)
        tail = f"FROM {identifier(measurement)} WHERE {clause} GROUP BY time({step_ns}ns) fill(none)"
        parts = [f"SELECT count({name}), mean({name}) {tail}", f"SELECT min({name}), max({name}) {tail}"]
        if self._server.generation() != 1:
            parts = [f"SELECT count({name}), mean({name}), min({name}), max({name}) {tail}"]
        found: dict[int, list[Any]] = {}
        for (answer,) in self._server.query_at_once([[part] for part in parts]):
            for series in answer:
                for start_ns, *values in series["values"]:
                    found.setdefault(start_ns, []).extend(values)
        for start_ns, values in found.items():
            if len(values) == 4:  # what came between the two answers is there only half
                yield start_ns, Gauge(*values)

    def _range_rate(self, measurement: str, name: str, over: Buckets, where: Where | None, columns: Columns) -> None:
        for series in self._query(
            f"SELECT {identifier(name)} FROM {identifier(measurement)} "
            f"WHERE {condition((over.first_ns - over.lookback_ns, over.end_ns), where)} GROUP BY *"
        ):
            for bucket, rate in rates(((row[0], row[1]) for row in series["values"]), over).items():
                columns.put(tags_of(series), name, bucket, rate)


def _halves(over: Buckets) -> list[tuple[int, Buckets]]:
    """(number of its first bucket, buckets) of both. Of a single bucket that is too long already, the server's error."""
    if over.count < 2:
        raise
    half = over.count // 2
    later = Buckets(over.first_ns + half * over.step_ns, over.step_ns, over.count - half)
    return [(0, Buckets(over.first_ns, over.step_ns, half)), (half, later)]
