"""Samples from InfluxDB as they were written: the newest of each series, or all of a time.

The server shows the fields of a point one after the other, and a query that names some fields doesn't see a newer sample that has
none of them. So every sample is written with the number of its fields beside them: a row that has fewer is asked for once more, and a
row there is for every sample whatever is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from telemetry import catalogue, lineprotocol
from telemetry.sample import Sample, Value
from telemetry.store.buckets import named, only, order
from telemetry.store.influxdb_http import InfluxServer
from telemetry.store.influxdb_series import Key, series_of
from telemetry.store.influxql import condition, identifier, impossible, tags_of
from telemetry.store.interface import Where

COUNT = "sample_fields"
"""A field beside those of the catalogue: how many of them the sample was written with."""

_ALWAYS = lineprotocol.INT_MAX - 1
_FEW = 64  # series whose newest rows are asked for one series at a time; of more, all rows of the newest seconds cost a third
_REACH_S = (2.0, 30.0)  # those newest seconds: at least, at most
_AT_FIRST_S = 3.0
_STRAGGLERS = 0.05  # the share of series that is not waited for by a longer reach
_TICK_S = 1.2
_PAUSES_S = (0.01, 0.04, 0.15)  # before a row that lacks fields is asked for again


class _Row(NamedTuple):
    time_ns: int
    key: Key
    sample: Sample  # may have none of the fields asked for
    written: int | None  # how many it was written with; None of one by another writer, or while that doesn't show yet
    shown: int  # how many there are of those asked for


def counted(samples: Iterable[Sample]) -> list[Sample]:
    return [
        Sample(sample.measurement, sample.tags, {**sample.fields, COUNT: len(sample.fields)}, sample.time_ns)
        for sample in samples
    ]


class InfluxSamples:
    def __init__(self, server: InfluxServer) -> None:
        self._server = server
        self._reach_s: dict[str, float] = {}

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        names = named(measurement, fields)
        if impossible(where) or not names:
            return []
        of_series = series_of(self._server, measurement, where)
        span = (since_ns, _ALWAYS)
        if of_series is None or len(of_series) <= _FEW:
            found = self._newest_by_series(measurement, names if fields is not None else None, span, where)
        else:
            found = self._newest_of_many(measurement, names if fields is not None else None, span, where, of_series)
        if fields is not None and any(row.written is None for row in found.values()):
            # not all were written with a count: one that has none of the fields may be newer
            found = self._newest_by_series(measurement, None, span, where)
        newest = [found[key].sample for key in sorted(found)]
        return [sample for sample in newest if sample.fields] if fields is None else only(newest, names)

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        named(measurement, None)
        if impossible(where):
            return []
        end_ns = min(end_ns, _ALWAYS)
        tags: frozenset[str] = frozenset()
        tail = "GROUP BY *"
        if limit is not None:
            # not grouped: the limit then is one of the answer, not of each series, and the answer stays small
            tags = self._tag_names(measurement)
            tail = f"ORDER BY time DESC LIMIT {limit}"
        rows = self._whole(
            lambda from_ns: self._rows(measurement, None, (from_ns, end_ns), where, tail, tags),
            start_ns,
            True,
        )
        found = [row.sample for row in sorted(rows, key=itemgetter(0, 1)) if row.sample.fields]
        return found if limit is None else found[max(0, len(found) - limit) :]

    # --- the newest of each series

    def _newest_by_series(
        self, measurement: str, names: Sequence[str] | None, span: tuple[int, int], where: Where | None
    ) -> dict[Key, _Row]:
        """Asked of the server series by series, two rows each: what the one before had says what the newest may lack."""
        tail = "GROUP BY * ORDER BY time DESC LIMIT 2"
        rows = self._whole(
            lambda from_ns: self._rows(measurement, names, (from_ns, span[1]), where, tail, frozenset()),
            span[0],
            names is None,
        )
        return {row.key: row for row in rows}

    def _newest_of_many(
        self,
        measurement: str,
        names: Sequence[str] | None,
        span: tuple[int, int],
        where: Where | None,
        of_series: Mapping[Key, Mapping[str, str]],
    ) -> dict[Key, _Row]:
        """All rows of the newest seconds in one series, which costs the server least; then what none was seen of."""
        now_ns = time.time_ns()
        tags = self._tag_names(measurement)
        reach_s = self._reach_s.get(measurement, _AT_FIRST_S)
        rows = self._whole(
            lambda from_ns: self._rows(measurement, names, (from_ns, span[1]), where, "", tags),
            max(span[0], now_ns - round(reach_s * 1e9)),
            names is None,
        )
        found = {row.key: row for row in rows}
        silent = [tags for key, tags in of_series.items() if key not in found]
        if silent:
            nodes = {tags.get("node", "") for tags in silent}
            rest = where if len(nodes) > _FEW else {**(where or {}), "node": sorted(nodes)}
            found |= self._newest_by_series(measurement, names, span, rest)
        self._reach_s[measurement] = _reach_s([(now_ns - row.time_ns) / 1e9 for row in found.values()])
        return found

    def _tag_names(self, measurement: str) -> frozenset[str]:
        found = self._server.query(f"SHOW TAG KEYS FROM {identifier(measurement)}")
        return frozenset(row[0] for series in found for row in series["values"])

    # --- rows

    def _rows(
        self,
        measurement: str,
        names: Sequence[str] | None,
        span: tuple[int, int],
        where: Where | None,
        tail: str,
        ungrouped: Collection[str],
    ) -> list[_Row]:
        """In time order; of some fields, or of all. `ungrouped` are the tags that are to stand among the columns."""
        known = catalogue.MEASUREMENTS[measurement]
        if not ungrouped and self._server.generation() > 2:
            ungrouped = {*catalogue.COMMON_TAGS, *known.tags}  # some 3.x give tags as columns whatever is asked
        select = "*" if names is None else ", ".join(map(identifier, (*names, COUNT, *(ungrouped if not tail else ()))))
        found: list[_Row] = []
        head = f"SELECT {select} FROM {identifier(measurement)} WHERE"
        for series in self._server.query_over(span, lambda part: f"{head} {condition(part, where)} {tail}"):
            layout = _layout(series["columns"], known, ungrouped)
            shared = tags_of(series)
            seen: dict[tuple[Any, ...], tuple[Mapping[str, str], Key]] = {(): (shared, order(shared))}
            for row in series["values"]:
                own = tuple([row[place] for place, _ in layout.tags])
                if own not in seen:
                    mine = {**shared, **{name: row[place] for place, name in layout.tags if row[place]}}
                    seen[own] = mine, order(mine)
                tags, key = seen[own]
                fields = {name: type_(row[place]) for place, name, type_ in layout.fields if row[place] is not None}
                written = None if layout.written is None or row[layout.written] is None else int(row[layout.written])
                shown = len(fields) + sum(row[place] is not None for place in layout.others)
                found.append(_Row(row[0], key, Sample(measurement, tags, fields, row[0]), written, shown))
        return sorted(found, key=itemgetter(0))

    def _whole(self, ask: Callable[[int], list[_Row]], from_ns: int, every_field: bool) -> list[_Row]:
        """The rows since `from_ns`, in time order; those that don't show all of themselves yet are given some time to."""
        rows = ask(from_ns)
        for pause_s in _PAUSES_S:
            doubtful = _doubtful(rows, every_field)
            if not doubtful:
                break
            time.sleep(pause_s)
            again = ask(max(from_ns, doubtful[0].time_ns))
            merged = {(row.key, row.time_ns): row for row in (*rows, *again)}
            rows = sorted(merged.values(), key=itemgetter(0))
        return rows


class _Layout(NamedTuple):
    """Where in a row what stands."""

    tags: list[tuple[int, str]]
    fields: list[tuple[int, str, Callable[[Any], Value]]]
    written: int | None
    others: list[int]  # fields that this version doesn't know


def _layout(columns: Sequence[str], known: catalogue.Measurement, tags: Collection[str]) -> _Layout:
    found = _Layout([], [], columns.index(COUNT) if COUNT in columns else None, [])
    for place, name in enumerate(columns):
        if name in tags:
            found.tags.append((place, name))
        elif name in known.fields:
            found.fields.append((place, name, known.fields[name].type))
        elif name not in ("time", COUNT):
            found.others.append(place)
    return found


def _doubtful(rows: Sequence[_Row], every_field: bool) -> list[_Row]:
    """Rows (in time order) of which more was written than shows.

    When only some fields were asked for, that is taken for so of a row that lacks a field of the row before, when its count leaves
    room for that field.
    """
    found: list[_Row] = []
    before: dict[Key, _Row] = {}
    for row in rows:
        earlier = before.get(row.key)
        before[row.key] = row
        if row.written is None:
            doubt = earlier is not None and earlier.written is not None
        elif every_field:
            doubt = row.written > row.shown
        elif earlier is None or earlier.written is None:
            doubt = False
        else:
            lacking = len(earlier.sample.fields.keys() - row.sample.fields.keys())
            doubt = lacking > 0 and row.written > earlier.written - lacking
        if doubt:
            found.append(row)
    return found


def _reach_s(ages_s: Sequence[float]) -> float:
    """How far back the newest rows lie of nearly all series that are heard from, and a tick more."""
    living = sorted(age_s for age_s in ages_s if age_s < _REACH_S[1])
    if not living:
        return _AT_FIRST_S
    far_s = living[min(len(living) - 1, int(len(living) * (1 - _STRAGGLERS)))]
    return min(_REACH_S[1], max(_REACH_S[0], far_s + _TICK_S))
