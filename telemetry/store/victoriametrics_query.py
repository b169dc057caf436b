"""Questions to VictoriaMetrics: which series are meant, their raw samples from an export, and what the server draws of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from telemetry import catalogue
from telemetry.store.buckets import Buckets, matches, order
from telemetry.store.influxql import storable
from telemetry.store.interface import StoreError, Where
from telemetry.store.victoriametrics_series import (
    MARK,
    MS,
    RESERVED,
    Device,
    Key,
    Series,
    Tags,
    by_time,
    identity,
    join_halves,
    joined,
    taken_apart,
)

DAY_MS = 86_400_000
AHEAD_MS = 2 * DAY_MS  # the server ignores what is further in the future
_ASIDE_MS = 1000 * DAY_MS
"""Ranges are asked as of so long ago with an offset back: on its newest 30 s the server would repeat earlier values otherwise."""
_POINTS = 10_000  # in one answer, of at most 30,000
_SPANS = 64
_LONGEST_SELECTOR = 8000
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUES = '},"values":['
"""Between the labels of an exported series and its values; within a label the quotation mark would have a backslash before it."""


def known_measurement(name: str) -> catalogue.Measurement:
    known = catalogue.MEASUREMENTS.get(name)
    if known is None:
        raise ValueError(f"unknown measurement {name!r}")
    return known


@dataclass(frozen=True, slots=True)
class Query:
    """One server, or one fleet's part of it. All methods raise StoreError."""

    url: str  # for messages
    db: str  # the label `db` of all that is meant
    ask: Callable[[str, Mapping[str, str]], str]  # path and form -> the text of the answer
    ready: Callable[[], None]  # makes what was written readable
    nonce: Callable[[], str]  # another text each time that something was
    deduplicates: Callable[[], bool]

    # --- which series

    def selector(self, measurement: str, names: Iterable[str], where: Where | None) -> str:
        """What at least the wanted series match; `matches` has the last word."""
        return self.named(f"{measurement}_({'|'.join(names)})", *(text for text in _conditions(where) if text))

    def named(self, name: str, *conditions: str) -> str:
        """The series whose whole names match.

        The server remembers for ten seconds which series met the very same conditions, and misses those that are new. So one condition,
        which all series meet, is another one after each flush.
        """
        self.ready()
        conditions = (f"__name__=~{quoted(name)}", f"db={quoted(self.db)}", *conditions)
        return "{" + ",".join(conditions) + f',nonce!="{self.nonce()}"}}'

    def newest(self, measurement: str, since_ns: int, where: Where | None) -> dict[Key, tuple[Tags, int]]:
        """The tags of each series that has a sample at or after `since_ns`, and the newest one's time in ms."""
        until_ms = time.time_ns() // MS + AHEAD_MS + 60_000
        window_ms = until_ms - max(since_ns // MS, DAY_MS) + 1  # the server can't think of times before 1970
        if window_ms <= 0:
            return {}
        selector = self.selector(measurement, [MARK], where)
        found: dict[Key, tuple[Tags, int]] = {}
        for labels, value in self.at(f"tlast_over_time({selector}[{window_ms}ms])", until_ms):
            tags, _ = taken_apart(measurement, labels)
            if matches(tags, where):
                found[order(tags)] = tags, round(value * 1000)
        edge_ms = since_ns // MS
        if since_ns % MS and any(at_ms == edge_ms for _, at_ms in found.values()):
            late = {order(tags) for tags, _ in self.marked(measurement, since_ns, since_ns + MS, where)}
            found = {key: (tags, t) for key, (tags, t) in found.items() if t != edge_ms or key in late}
        return found

    def at(self, query: str, at_ms: int) -> Iterator[tuple[Mapping[str, str], float]]:
        """(labels, value) of what the query has at a time."""
        text = self.ask("/api/v1/query", {"query": query, "time": moment(at_ms), "nocache": "1"})
        try:
            answer = json.loads(text)
            if answer["status"] != "success":
                raise ValueError("is no answer of a query")
            for series in answer["data"]["result"]:
                yield series["metric"], float(series["value"][1])
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise self._not_ours() from None

    def _not_ours(self) -> StoreError:
        return StoreError.of("store.failure.not_victoria", store=self.url)

    # --- raw samples

    def export(self, selector: str, start_ms: int, end_ms: int) -> Iterator[tuple[Series, list[Any], list[int]]]:
        """(series, values, times in ms), of both ends inclusive; a series may come several times, with copies of samples.

        The server neither merges nor sorts what it exports so, which takes a third of the time.
        """
        now_ms = time.time_ns() // MS
        start_ms, end_ms = max(0, start_ms), min(end_ms, now_ms + AHEAD_MS + DAY_MS)
        if start_ms > end_ms:
            return
        form = {"match[]": selector, "start": moment(start_ms), "end": moment(end_ms), "reduce_mem_usage": "1"}
        text = self.ask("/api/v1/export", form)
        try:
            for line in text.split("\n"):
                if line:
                    # most of a short answer is labels, the same ones each time
                    labels, _, rest = line.partition(_VALUES)
                    yield identity(labels + "}}"), *_sampled(rest)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._not_ours() from None

    def marked(self, measurement: str, start_ns: int, end_ns: int, where: Where | None) -> list[tuple[Tags, list[int]]]:
        """The tags of each series and the times of its samples in ns."""
        selector = self.selector(measurement, [MARK], where)
        marks: dict[Key, dict[int, int]] = {}
        tags_of: dict[Key, Tags] = {}
        for series, values, times in self.export(selector, start_ns // MS, (end_ns - 1) // MS):
            if matches(series.tags, where):
                tags_of[series.key] = series.tags
                by_time(times, values, int, marks.setdefault(series.key, {}))
        found = []
        for key, by_ms in marks.items():
            inside = [t * MS + ns for t, ns in by_ms.items() if start_ns <= t * MS + ns < end_ns]
            if inside:
                found.append((tags_of[key], inside))
        return found

    def marks(self, measurement: str, start_ns: int, end_ns: int, where: Where | None) -> list[int]:
        return sorted(t for _, times in self.marked(measurement, start_ns, end_ns, where) for t in times)

    def read(
        self, known: catalogue.Measurement, fields: Iterable[str], start_ms: int, end_ms: int, where: Where | None
    ) -> dict[Key, Device]:
        names = [MARK]
        for name in fields:
            names.append(name)
            if known.fields[name].type is int:
                names += [f"{name}_hi32", f"{name}_lo32"]
        devices: dict[Key, Device] = {}
        texts: dict[tuple[Key, str], dict[int, dict[str, str]]] = {}
        prefix = f"{known.name}_"
        for series, values, times in self.export(self.selector(known.name, names, where), start_ms, end_ms):
            if not matches(series.tags, where):
                continue
            device = devices.get(series.key)
            if device is None:
                device = devices[series.key] = Device(series.tags)
            name = series.name.removeprefix(prefix)
            field = known.fields.get(name)
            if name == MARK:
                by_time(times, values, int, device.marks)
            elif field is not None and field.type is str:
                heard = texts.setdefault((series.key, name), {})
                for at_ms in times:
                    parts = heard.setdefault(at_ms, {})
                    parts[series.part] = max(parts.get(series.part, ""), series.text)
            else:
                kind = int if field is None else field.type
                by_time(times, values, kind, device.values.setdefault(name, {}))
        for (key, name), heard in texts.items():
            whole = {at_ms: joined(parts) for at_ms, parts in heard.items()}
            devices[key].values[name] = {at_ms: text for at_ms, text in whole.items() if text is not None}
        for device in devices.values():
            join_halves(device)
        return devices

    # --- what the server draws

    def can_draw(self, over: Buckets) -> bool:
        """Whether the server's own arithmetic comes to the same: without copies of a sample, in whole milliseconds."""
        return over.step_ns % MS == 0 and over.first_ns // MS > _ASIDE_MS + DAY_MS and self.deduplicates()

    def drawn(self, query: str, over: Buckets) -> Iterator[tuple[Series, Sequence[int], list[float]]]:
        """(series, buckets, their values) of a query in which `bucketed` stands for the samples of one bucket."""
        step_ms, first_ms = over.step_ns // MS, over.first_ns // MS
        zero_ms = first_ms - _ASIDE_MS
        for start in range(0, over.count, _POINTS):
            end = min(start + _POINTS, over.count)
            form = {
                "query": query,
                "start": moment(zero_ms + start * step_ms),
                "end": moment(zero_ms + (end - 1) * step_ms),
                "step": f"{step_ms}ms",
                "nocache": "1",
            }
            for series, times_s, values in self._matrix(self.ask("/api/v1/query_range", form)):
                if len(values) == end - start:
                    yield series, range(start, end), values
                else:
                    yield series, [(round(float(at_s) * 1000) - zero_ms) // step_ms for at_s in times_s], values

    def _matrix(self, text: str) -> Iterator[tuple[Series, list[str], list[float]]]:
        """Each series of a range query's answer with its times as they are written and its values.

        Not by json.loads, which makes a list of each of the many pairs. Within a label no quotation mark stands bare.
        """
        head, _, result = text.partition('"result":[')
        if not head.startswith('{"status":"success"'):
            raise self._not_ours()
        try:
            for one in result.split('{"metric":')[1:]:
                labels, _, rest = one.partition(_VALUES)
                pairs, closed, _ = rest.partition("]]")
                flat = pairs[1:].replace('"],[', ",").replace('"', "").split(",")
                if not closed or len(flat) % 2:
                    raise ValueError("is no list of pairs")
                yield identity('{"metric":' + labels + "}}"), flat[::2], list(map(float, flat[1::2]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._not_ours() from None


def _sampled(rest: str) -> tuple[list[Any], list[int]]:
    """Values and times of an exported series, from what follows its labels; a short way for a single sample."""
    value, _, at = rest.partition('],"timestamps":[')
    if "," not in at and "n" not in value:
        with contextlib.suppress(ValueError):
            return [float(value)], [int(at[:-2])]
    found = json.loads('{"values":[' + rest)
    return found["values"], found["timestamps"]


def bucketed(selector: str, over: Buckets) -> str:
    """The samples of one bucket: a window of the server ends at its evaluation and holds that moment, (t-w, t]; ours are [t, t+w)."""
    step_ms = over.step_ns // MS
    return f"{selector}[{step_ms}ms] offset -{_ASIDE_MS + step_ms - 1}ms"


def aggregated(functions: Iterable[str], samples: str) -> str:
    """Several *_over_time in one pass; the label `rollup` of a result tells which it is."""
    listed = ",".join(f'"{function}"' for function in functions)
    return f"aggr_over_time(({listed}),{samples}) keep_metric_names"


def union(queries: Sequence[str]) -> str:
    return queries[0] if len(queries) == 1 else f"union({','.join(queries)})"


def says_all(where: Where | None) -> bool:
    """Whether a selector tells the server all the conditions."""
    return all(_conditions(where))


def _conditions(where: Where | None) -> Iterator[str]:
    """Each condition for the server, empty for one that it can't be told."""
    for name, wanted in (where or {}).items():
        values = storable(wanted)  # a lone surrogate is a "?" to the server
        condition = ""
        if _LABEL.fullmatch(name) is not None and name not in RESERVED:
            if len(values) == 1:
                condition = f"{name}={quoted(values[0])}"
            elif values and "" not in values:
                condition = f"{name}=~{quoted('|'.join(map(re.escape, values)))}"
        yield condition if len(condition) <= _LONGEST_SELECTOR else ""


def quoted(text: str) -> str:
    """A string of MetricsQL, which has the escapes of Go; those of JSON are among them."""
    return json.dumps(text, ensure_ascii=False)


def moment(at_ms: int) -> str:
    """A time as the server reads it: in floating seconds, cut to milliseconds; half of one more saves it from the one before."""
    whole = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03}5Z"


def spans(numbers: Iterable[int], near: int) -> list[tuple[int, int]]:
    """At most 64 spans (first, last) that hold all numbers, parted at the largest gaps of more than `near`."""
    ordered = sorted(set(numbers))
    if not ordered:
        return []
    gaps = sorted(
        ((later - sooner, place) for place, (sooner, later) in enumerate(itertools.pairwise(ordered), 1)),
        reverse=True,
    )
    cuts = sorted(place for gap, place in gaps[: _SPANS - 1] if gap > near)
    return [(ordered[start], ordered[end - 1]) for start, end in zip([0, *cuts], [*cuts, len(ordered)], strict=True)]
