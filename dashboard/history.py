"""One pair over a window of time: its columns in uniform buckets, its events, and when triage named a cause.

A live window moves a bucket at a time, so only its newest buckets are read again; all of it now and then, for what came late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dashboard.fleet import PairNow
from dashboard.selection import SECOND_NS, Window
from telemetry.pairs import LANES
from telemetry.sample import Sample
from telemetry.store import Column, Store, Where

Values = list[float | None]
SHARES = (
    # throttle reason, the counter of seconds spent in it
    ("hw_thermal", "throttle_hw_thermal_s"),
    ("sw_thermal", "throttle_sw_thermal_s"),
    ("sw_power_cap", "throttle_sw_power_s"),
    ("hw_power_brake", "throttle_hw_power_brake_s"),
    ("sync_boost", "throttle_sync_boost_s"),
)
EVENT_LIMIT = 60
ENGINE_EVENTS = ("deploy", "config", "restart", "oom")
TAIL_NS = 30 * SECOND_NS
"""What may still arrive late in the ordinary way: a few deliveries."""
WHOLE_EVERY_S = 60.0
WHOLE_SHARE = 0.05
"""Reading the whole window again never takes more of the time than this."""
HOLE_S = 20  # triage speaks every 5 s
KEPT = 48


@dataclass(frozen=True, slots=True)
class Series:
    """One field of one device over the window."""

    tags: Mapping[str, str]
    values: Values


@dataclass(frozen=True, slots=True)
class Incident:
    """Buckets in a row in which triage named this cause."""

    cause: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class History:
    """`columns` by (measurement, field); `shares` is the part of each bucket (0..1) that each GPU spent in a throttle reason."""

    window: Window
    columns: Mapping[tuple[str, str], Sequence[Series]] = field(default_factory=dict)
    shares: Mapping[str, Sequence[Series]] = field(default_factory=dict)
    events: Sequence[Sample] = ()
    incidents: Sequence[Incident] = ()


@dataclass(frozen=True, slots=True)
class _Question:
    measurement: str
    fields: tuple[str, ...]
    where: Where
    aggregate: str = "auto"


_SeriesKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # measurement, field, aggregate, tags


@dataclass(slots=True)
class _Kept:
    window: Window
    columns: dict[_SeriesKey, Values]
    whole_at_s: float
    whole_took_s: float


class HistoryReader:
    """Reads windows of pairs from the store and remembers what it has read."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._lock = threading.Lock()

    def read(self, pair: PairNow, window: Window) -> History:
        """StoreError as the store raises it; what was read before is kept."""
        kept = self._columns((pair.key, pair.gpus, window.step_ns), _questions(pair), window)
        return _history(kept, window, self._events(pair, window))

    def kept(self, pair: PairNow, window: Window) -> History | None:
        """What was read before, for when the store can't be; without its events."""
        with self._lock:
            kept = self._kept.get((pair.key, pair.gpus, window.step_ns))
        return _history(kept.columns, kept.window, []) if kept is not None else None

    def _columns(
        self, key: tuple[object, ...], questions: Sequence[_Question], window: Window
    ) -> dict[_SeriesKey, Values]:
        now_s = self._clock()
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and not _continues(kept, window, now_s):
            kept = None
        if kept is None:
            columns = self._ask(questions, window)
            kept = _Kept(window, columns, now_s, self._clock() - now_s)
        else:
            start_ns = max(window.start_ns, (kept.window.end_ns - TAIL_NS) // window.step_ns * window.step_ns)
            start_ns = min(start_ns, window.end_ns - window.step_ns)
            tail = Window(start_ns, window.end_ns, window.step_ns)
            columns = _splice(kept, window, tail, self._ask(questions, tail))
            kept = _Kept(window, columns, kept.whole_at_s, kept.whole_took_s)
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = kept  # the newest last, so that the first is the one to forget
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return kept.columns

    def _ask(self, questions: Sequence[_Question], window: Window) -> dict[_SeriesKey, Values]:
        found: dict[_SeriesKey, Values] = {}
        for question in questions:
            for column in self._store.range(
                question.measurement,
                question.fields,
                start_ns=window.start_ns,
                end_ns=window.end_ns,
                step_ns=window.step_ns,
                aggregate=question.aggregate,
                where=question.where,
            ):
                found[_key(question, column)] = column.values[: window.count]
        return found

    def _events(self, pair: PairNow, window: Window) -> list[Sample]:
        """The node's events, without those of its other engines and GPUs."""
        events = self._store.samples(
            "event",
            start_ns=window.start_ns,
            end_ns=window.end_ns,
            where={"node": pair.key.node},
            limit=EVENT_LIMIT * 4,
        )
        return [event for event in events if _concerns(event, pair)][-EVENT_LIMIT:]


def _history(kept: Mapping[_SeriesKey, Values], window: Window, events: Sequence[Sample]) -> History:
    columns: dict[tuple[str, str], list[Series]] = {}
    shares: dict[str, list[Series]] = {}
    verdicts: list[Series] = []
    reasons = {counter: reason for reason, counter in SHARES}
    for (measurement, name, aggregate, tags), values in kept.items():
        if all(value is None for value in values):
            continue
        series = Series(dict(tags), values)
        if measurement == "verdict":
            verdicts.append(series)
        elif aggregate == "rate":
            shares.setdefault(reasons[name], []).append(series)
        else:
            columns.setdefault((measurement, name), []).append(series)
    return History(
        window,
        {name: merged(several, window) for name, several in columns.items()},
        {name: merged(several, window) for name, several in shares.items()},
        events,
        incidents(verdicts, window),
    )


def merged(several: Sequence[Series], window: Window) -> list[Series]:
    """One series a GPU (or one in all): a device whose other tags changed, say its rack or model, is still the same one.

    Where two have a value in one bucket, the one that goes on longer is right.
    """
    groups: dict[str, list[Series]] = {}
    for series in several:
        groups.setdefault(series.tags.get("gpu", ""), []).append(series)
    made: list[Series] = []
    for group in groups.values():
        group.sort(key=lambda series: max(i for i, value in enumerate(series.values) if value is not None))
        values: Values = [None] * window.count
        for series in group:
            values = [old if new is None else new for old, new in zip(values, series.values, strict=True)]
        made.append(Series(group[-1].tags, values))
    return made


def _concerns(event: Sample, pair: PairNow) -> bool:
    subject = event.tags.get("subject", "")
    if subject in ("", pair.key.node, pair.key.engine, *pair.gpus) or not pair.key.engine:
        return True
    return event.tags.get("kind") not in ENGINE_EVENTS and not subject.isdigit()


def _questions(pair: PairNow) -> list[_Question]:
    node: Where = {"node": pair.key.node}
    engine: Where = {**node, "engine": pair.key.engine}
    gpu: Where = {**node, "gpu": list(pair.gpus)}
    wanted: dict[str, list[str]] = {}
    for lane in LANES:
        for trace in lane.traces:
            names = wanted.setdefault(trace.measurement, [])
            if trace.field not in names:
                names.append(trace.field)
    wanted["gpu"].append("util_pct")  # the effort, until triage writes it
    wheres: dict[str, Where] = {"engine": engine, "pair": engine, "gpu": gpu}
    found = [
        _Question(measurement, tuple(names), wheres.get(measurement, node))
        for measurement, names in wanted.items()
        if (measurement != "gpu" or pair.gpus) and (measurement != "engine" or pair.key.engine)
    ]
    if pair.gpus:
        found.append(_Question("gpu", tuple(counter for _, counter in SHARES), gpu, "rate"))
    found.append(_Question("verdict", ("confidence",), engine, "max"))
    return found


def _key(question: _Question, column: Column) -> _SeriesKey:
    return question.measurement, column.field, question.aggregate, tuple(sorted(column.tags.items()))


def _continues(kept: _Kept, window: Window, now_s: float) -> bool:
    """Whether `window` overlaps what is kept closely enough to read its tail only."""
    patience_s = max(WHOLE_EVERY_S, kept.whole_took_s / WHOLE_SHARE)
    return kept.window.start_ns <= window.start_ns < kept.window.end_ns and now_s - kept.whole_at_s < patience_s


def _splice(kept: _Kept, window: Window, tail: Window, fresh: Mapping[_SeriesKey, Values]) -> dict[_SeriesKey, Values]:
    """The kept columns up to the tail, and the tail as it was read now."""
    skip = (window.start_ns - kept.window.start_ns) // window.step_ns
    stay = (tail.start_ns - window.start_ns) // window.step_ns
    spliced: dict[_SeriesKey, Values] = {}
    for key in {**kept.columns, **fresh}:
        old = kept.columns.get(key, [])[skip : skip + stay]
        old += [None] * (stay - len(old))
        new = fresh.get(key, [])
        spliced[key] = old + new + [None] * (tail.count - len(new))
    return spliced


def incidents(verdicts: Sequence[Series], window: Window) -> list[Incident]:
    """Runs of buckets with a verdict of one cause; a hole of up to three buckets or `HOLE_S` does not end a run."""
    patience = max(3, HOLE_S * SECOND_NS // window.step_ns)
    named: dict[str, set[int]] = {}
    for series in verdicts:
        places = {place for place, value in enumerate(series.values) if value is not None}
        named.setdefault(series.tags.get("cause", "none"), set()).update(places)
    found: list[Incident] = []
    for cause, buckets in named.items():
        if cause == "none":
            continue
        run: list[int] = []
        for place in (*sorted(buckets), None):
            if run and (place is None or place - run[-1] > patience):
                start_ns = window.start_ns + run[0] * window.step_ns
                found.append(Incident(cause, start_ns, window.start_ns + (run[-1] + 1) * window.step_ns))
                run = []
            if place is not None:
                run.append(place)
    return sorted(found, key=lambda incident: incident.start_ns)
