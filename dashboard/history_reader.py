"""Reads a pair's window from the store, a part at a time, and remembers what it has read.

A live window moves a bucket at a time, so only its newest buckets are read again; the rest is read once more now and then, for
what came late. No look takes much longer than `BUDGET_S`: a long window is read newest first, and fills up over several looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dashboard.fleet import PairNow
from dashboard.history import STAGES, History, Series, Values, incidents, merged
from dashboard.selection import SECOND_NS, Window
from telemetry.pairs import LANES
from telemetry.sample import Sample
from telemetry.store import Column, Store, Where

SHARES = (
    # throttle reason, the counter of seconds spent in it
    ("hw_thermal", "throttle_hw_thermal_s"),
    ("sw_thermal", "throttle_sw_thermal_s"),
    ("sw_power_cap", "throttle_sw_power_s"),
    ("hw_power_brake", "throttle_hw_power_brake_s"),
    ("sync_boost", "throttle_sync_boost_s"),
)
STAGE_COUNTERS = {f"stage_{name}_s": name for name in STAGES}
EVENT_LIMIT = 60
ENGINE_EVENTS = ("deploy", "config", "restart", "oom")
TAIL_NS = 30 * SECOND_NS
"""What may still arrive late in the ordinary way: a few deliveries."""
AGAIN_EVERY_S = 60.0
AGAIN_SHARE = 0.05
"""Reading again never takes more of the time than this."""
BUDGET_S = 1.0
AGAIN_BUDGET_S = 0.1
FIRST_PART_NS = 900 * SECOND_NS
MOST_PARTS = 32
KEPT = 48


@dataclass(frozen=True, slots=True)
class _Question:
    measurement: str
    fields: tuple[str, ...]
    where: Where
    aggregate: str = "auto"


_SeriesKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # measurement, field, aggregate, tags


@dataclass(slots=True)
class _Kept:
    """`read_from_ns`: all from here on has been read at least once. `again_ns`: where the second reading stands, going back."""

    window: Window
    columns: dict[_SeriesKey, Values]
    read_from_ns: int
    again_ns: int
    again_done_s: float
    whole_s: float = 0.0  # what reading all of it took
    part_ns: int = FIRST_PART_NS


class HistoryReader:
    """One window of one pair at a time by one caller; different ones by different threads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._lock = threading.Lock()

    def read(self, pair: PairNow, window: Window) -> History:
        """StoreError as the store raises it; what was read before is kept."""
        key = (pair.key, pair.gpus, window.step_ns)
        questions = _questions(pair)
        with self._lock:
            before = self._kept.get(key)
        if before is not None and before.window.start_ns <= window.start_ns < before.window.end_ns:
            kept = _moved(before, window)
            tail_ns = (before.window.end_ns - TAIL_NS) // window.step_ns * window.step_ns
            tail_ns = max(window.start_ns, min(tail_ns, window.end_ns - window.step_ns))
            self._read_part(kept, questions, tail_ns, window.end_ns)
        else:
            kept = _Kept(window, {}, window.end_ns, window.start_ns, self._clock())
        self._go_back(kept, questions)
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = kept  # the newest last, so that the first is the one to forget
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return _history(kept, self._events(pair, window))

    def kept(self, pair: PairNow, window: Window) -> History | None:
        """What was read before, for when the store can't be; without its events."""
        with self._lock:
            kept = self._kept.get((pair.key, pair.gpus, window.step_ns))
        return _history(kept, []) if kept is not None else None

    def _go_back(self, kept: _Kept, questions: Sequence[_Question]) -> None:
        """Read what is unread, newest first; when all is, read it once more in small parts, each minute or later."""
        window, began_s = kept.window, self._clock()
        while kept.read_from_ns > window.start_ns:
            part = self._part(kept, kept.read_from_ns)
            self._timed(kept, questions, part, kept.read_from_ns)
            kept.read_from_ns, kept.again_ns = part, window.start_ns
            kept.again_done_s = self._clock()
            if self._clock() - began_s > BUDGET_S:
                return
        rest_s = max(AGAIN_EVERY_S, kept.whole_s / AGAIN_SHARE)
        if kept.again_ns <= window.start_ns and began_s - kept.again_done_s >= rest_s:
            kept.again_ns = window.end_ns
        while kept.again_ns > window.start_ns and self._clock() - began_s <= AGAIN_BUDGET_S:
            part = self._part(kept, kept.again_ns)
            self._timed(kept, questions, part, kept.again_ns)
            kept.again_ns, kept.again_done_s = part, self._clock()

    def _part(self, kept: _Kept, end_ns: int) -> int:
        step_ns = kept.window.step_ns
        return max(kept.window.start_ns, end_ns - max(1, kept.part_ns // step_ns) * step_ns)

    def _timed(self, kept: _Kept, questions: Sequence[_Question], start_ns: int, end_ns: int) -> None:
        began_s = self._clock()
        self._read_part(kept, questions, start_ns, end_ns)
        took_s = self._clock() - began_s
        if kept.read_from_ns > kept.window.start_ns:
            kept.whole_s += took_s
        if took_s < BUDGET_S / 4:
            kept.part_ns *= 2
        elif took_s > BUDGET_S:
            span_ns = kept.window.end_ns - kept.window.start_ns
            kept.part_ns = max(span_ns // MOST_PARTS, kept.part_ns // 2)

    def _read_part(self, kept: _Kept, questions: Sequence[_Question], start_ns: int, end_ns: int) -> None:
        """Put the buckets from `start_ns` to `end_ns` in place, as they are in the store now."""
        window = kept.window
        first, count = (start_ns - window.start_ns) // window.step_ns, (end_ns - start_ns) // window.step_ns
        fresh: dict[_SeriesKey, Values] = {}
        for question in questions:
            for column in self._store.range(
                question.measurement,
                question.fields,
                start_ns=start_ns,
                end_ns=end_ns,
                step_ns=window.step_ns,
                aggregate=question.aggregate,
                where=question.where,
            ):
                fresh[_key(question, column)] = column.values[:count]
        for key in {**kept.columns, **fresh}:
            values = kept.columns.setdefault(key, [None] * window.count)
            values[first : first + count] = fresh.get(key) or [None] * count

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


def _moved(before: _Kept, window: Window) -> _Kept:
    """What is kept, under the window that has moved on; its new buckets are empty."""
    skip = (window.start_ns - before.window.start_ns) // window.step_ns
    columns: dict[_SeriesKey, Values] = {}
    for key, values in before.columns.items():
        stay = values[skip : skip + window.count]
        columns[key] = stay + [None] * (window.count - len(stay))
    again_ns = max(before.again_ns, window.start_ns)
    read_from_ns = max(before.read_from_ns, window.start_ns)
    return _Kept(window, columns, read_from_ns, again_ns, before.again_done_s, before.whole_s, before.part_ns)


def _history(kept: _Kept, events: Sequence[Sample]) -> History:
    columns: dict[tuple[str, str], list[Series]] = {}
    shares: dict[str, list[Series]] = {}
    stages: dict[str, float] = {}
    verdicts: list[Series] = []
    reasons = {counter: reason for reason, counter in SHARES}
    for (measurement, name, aggregate, tags), values in kept.columns.items():
        if all(value is None for value in values):
            continue
        series = Series(dict(tags), values)
        if measurement == "verdict":
            verdicts.append(series)
        elif name in STAGE_COUNTERS:
            busy = sum(value for value in values if value is not None)
            stages[STAGE_COUNTERS[name]] = (
                stages.get(STAGE_COUNTERS[name], 0.0) + busy * kept.window.step_ns / SECOND_NS
            )
        elif aggregate == "rate":
            shares.setdefault(reasons[name], []).append(series)
        else:
            columns.setdefault((measurement, name), []).append(series)
    window = kept.window
    return History(
        window,
        {name: merged(several, window) for name, several in columns.items()},
        {name: merged(several, window) for name, several in shares.items()},
        stages,
        events,
        incidents(verdicts, window),
        kept.read_from_ns,
    )


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
    wanted["engine"].append("up")  # when it last answered
    wheres: dict[str, Where] = {"engine": engine, "pair": engine, "gpu": gpu}
    found = [
        _Question(measurement, tuple(names), wheres.get(measurement, node))
        for measurement, names in wanted.items()
        if (measurement != "gpu" or pair.gpus) and (measurement != "engine" or pair.key.engine)
    ]
    if pair.gpus:
        found.append(_Question("gpu", tuple(counter for _, counter in SHARES), gpu, "rate"))
    if pair.tells_stages:
        found.append(_Question("engine", tuple(STAGE_COUNTERS), engine, "rate"))
    found.append(_Question("verdict", ("confidence",), engine, "max"))
    return found


def _key(question: _Question, column: Column) -> _SeriesKey:
    return question.measurement, column.field, question.aggregate, tuple(sorted(column.tags.items()))
