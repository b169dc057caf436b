"""Sampler: one tick on the monotonic clock, one timestamp for all collectors, one record."""

from __future__ import annotations

import logging
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.clock import Clock, StepDetector, SystemClock, read_together
from agent.collectors import bmc, dcgm, exporter
from agent.collectors.amd import amd_collector
from agent.collectors.ascend import AscendCollector
from agent.collectors.clock_offset import EVERY_S as CLOCK_OFFSET_EVERY_S
from agent.collectors.clock_offset import ClockOffsetCollector
from agent.collectors.dialects.registry import DIALECTS
from agent.collectors.engine import EngineCollector
from agent.collectors.host import HostCollector
from agent.collectors.interface import Beside, Collector, Tags, Tick
from agent.collectors.nvidia import gpu_collector
from agent.collectors.pdu import PduCollector
from agent.collectors.rapl import RaplCollector
from agent.engine_ownership import THREADS_EVERY_S
from agent.merge import OCCURRENCES, merged
from agent.settings import AgentSettings
from agent.timing import ReaderTiming, kept_s, mig_kept_s
from agent.worker import Late, Worker
from telemetry import catalogue
from telemetry.messages import say
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)

Factory = Callable[[AgentSettings, Tags, Path | None], Collector | None]
"""Makes a collector for this host, or None where there is no such source. The path is a folder in which it may remember things
from run to run; None when it may not.
"""

COLLECTORS: Mapping[str, Factory] = {
    # one line a source (where two speak of one thing, the earlier line's word stands)
    "gpu": gpu_collector,
    "dcgm": lambda settings, tags, _memory: dcgm.DcgmCollector.of(settings, tags),
    "amd": amd_collector,
    "ascend": lambda settings, tags, _memory: AscendCollector.of(settings, tags),
    "host": lambda _settings, tags, _memory: HostCollector(tags),
    "rapl": lambda _settings, tags, _memory: RaplCollector(tags),
    "clock": lambda _settings, tags, _memory: ClockOffsetCollector(tags),
    "pdu": lambda settings, tags, _memory: PduCollector.of(settings, tags),
    "engine": lambda settings, tags, memory: EngineCollector.of(settings, tags, memory),
    "bmc": lambda settings, tags, memory: bmc.BmcCollector.of(settings, tags, memory),
}

DEPENDS_ON: Mapping[str, Sequence[str]] = {
    "gpu": ("nvml", "interval_s", "gpus_expected"),
    "host": (),
    "rapl": (),
    "clock": (),
    "engine": ("engines", "interval_s"),
    "pdu": ("pdus",),
    "bmc": ("bmc",),
    "dcgm": ("dcgm_url", "interval_s"),
    "amd": ("amd", "interval_s", "gpus_expected"),
    "ascend": ("ascend", "ascend_url", "interval_s"),
}
"""What of the settings, tags aside, a source is made from; a reload makes it anew when one of these changed. A source that is not
named here is made anew whenever anything changed.
"""

SLOW_FIELDS: Mapping[str, Mapping[str, float]] = {
    "gpu": {**kept_s(ReaderTiming()), **dcgm.KEPT},
    "mig": mig_kept_s(ReaderTiming()),
    "engine": {"proc_cpu_max_pct": 2.5 * THREADS_EVERY_S},
    "host": {"clock_offset_s": 2.5 * CLOCK_OFFSET_EVERY_S},
}
"""The fields that a collector doesn't read at every tick, and for how many seconds their last value stands."""


def slow_fields(settings: AgentSettings) -> Mapping[str, Mapping[str, float]]:
    """SLOW_FIELDS, and what the settings say: a probe's answer stands until the next one."""
    probed_s = max((engine.probe_every_s for engine in settings.engines), default=0.0)
    probe = dict.fromkeys(("probe_ok", "probe_s"), bmc.KEPT_PERIODS * probed_s) if probed_s else {}
    return {**SLOW_FIELDS, "engine": {**SLOW_FIELDS["engine"], **probe}}


def slow_measurements(settings: AgentSettings) -> dict[str, float]:
    """The measurements that are not read at every tick, and for how many seconds their last sample stands."""
    kept = {"mig": min(SLOW_FIELDS["mig"].values())}
    if settings.bmc is not None:
        kept |= dict.fromkeys(bmc.MEASUREMENTS, bmc.KEPT_PERIODS * settings.bmc.every_s)
    if settings.pdus:
        kept["circuit"] = bmc.KEPT_PERIODS * max(pdu.every_s for pdu in settings.pdus)
    if settings.dcgm_url:
        kept["mig"] = max(kept["mig"], exporter.KEPT_S)
    return kept


SLOW_SOURCES: Mapping[str, float] = dict.fromkeys(("dcgm", "ascend"), exporter.KEPT_S)
"""The sources (field `source`) that don't speak in every tick, and for how many seconds their last sample stands."""

MISSED_SCRAPES = 2.5

SLOW_KINDS: Mapping[str, float] = {
    dialect.kind: MISSED_SCRAPES * dialect.scrape_every_s for dialect in DIALECTS if dialect.scrape_every_s
}
"""The kinds of engines that must not be asked at every tick, and for how many seconds stands what their metrics told."""


ANSWER_WITHIN_INTERVALS = 0.9
ANSWER_WITHIN_S = 1.0
"""A collector has this part of the interval, and no more than that; what comes later is left out of the tick."""

LATE_START_INTERVALS = 0.25
"""A tick that is due may start this much late; later than that it is skipped."""

LOG_EVERY_S = 60.0
OF_LATE_S = 300.0
"""So far back it is told how many ticks were missed."""

MANY_MISSED, MISSED_SHARE = 5, 0.05
"""Ticks of that time: fewer are a busy moment of the host, more are holes in what is judged. Own choice."""

NOTED_LIMIT = 1000


def collectors(settings: AgentSettings, memory: Path | None) -> list[Collector]:
    """The sources that this host has."""
    found = list(collectors_by_source(settings, memory, COLLECTORS).values())
    acquaint(found)
    return found


def collectors_by_source(settings: AgentSettings, memory: Path | None, names: Iterable[str]) -> dict[str, Collector]:
    """Those of the lines of COLLECTORS that are named, and that this host has."""
    made = ((name, COLLECTORS[name](settings, settings.tags, memory)) for name in COLLECTORS if name in set(names))
    return {name: collector for name, collector in made if collector is not None}


def acquaint(found: Sequence[Collector]) -> None:
    """Let those that look at others know which there are."""
    for collector in found:
        if isinstance(collector, Beside):
            collector.beside(found)


@dataclass(frozen=True, slots=True)
class Storage:
    """What the sampler reports of what happens to its samples after a tick."""

    lag_s: float | None = None
    spool_bytes: int | None = None
    dropped_total: int | None = None
    errors_total: int | None = None


@dataclass(slots=True)
class Place:
    """One collector, its thread, and what went wrong with it."""

    collector: Collector
    worker: Worker[Sequence[Sample]]
    tags: Tags  # of the host, as the collector knows them
    failures: int = 0
    logged_s: float = -math.inf
    answered_s: float | None = None  # monotonic time of the last tick to which it answered
    delivered_s: float | None = None  # of the last one in which it had something to say
    answered: int = 0  # number of the last tick to which it answered

    def fail(self, what: str, now_s: float) -> None:
        self.failures += 1
        if now_s - self.logged_s >= LOG_EVERY_S:
            self.logged_s = now_s
            log.warning("collector %s: %s (%d failures so far)", self.collector.name, what, self.failures)


@dataclass(frozen=True, slots=True)
class Change:
    """What a running sampler goes on with from its next tick. Sources that it has already go on undisturbed."""

    sources: Sequence[Collector]
    tags: Tags
    interval_s: float
    done: threading.Event


def misses_many(missed: int, due: int) -> bool:
    """Whether so many of the ticks that were due of late were missed that it should be told."""
    return missed >= MANY_MISSED and missed >= MISSED_SHARE * due


class Sampler:
    """Ticks every `interval_s` from its start, without drift. Each collector runs on its own thread: one that raises, or takes
    too long, costs its own samples and nobody else's. `sink` gets all samples of a tick at once.
    """

    def __init__(
        self,
        sources: Sequence[Collector],
        tags: Tags,
        sink: Callable[[Sequence[Sample]], None],
        *,
        interval_s: float = 1.0,
        clock: Clock | None = None,
        storage: Callable[[], Storage] = Storage,
        after_tick: Callable[[Tick], None] = lambda _tick: None,
        language: str = "en",
    ) -> None:
        self.missed = 0  # ticks that were due while an earlier one, or the machine, was busy
        self._gaps: deque[tuple[float, int]] = deque()  # when ticks were found to be missed, and how many
        self.last: Tick | None = None
        self.sink_errors = 0
        self.dropped = 0  # fields and samples that the catalogue does not hold
        self._tags = dict(tags)
        self._sink = sink
        self._interval_s = interval_s
        self._clock: Clock = clock or SystemClock()
        self._storage = storage
        self._after_tick = after_tick
        self._language = language
        self._steps = StepDetector()
        self._places = [_place(source, self._tags) for source in sources]
        self._change: Change | None = None
        self._noted: deque[Sample] = deque(maxlen=NOTED_LIMIT)
        self._number = 0
        self._complained_s = -math.inf

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set."""
        start_s = self._clock.monotonic_s()
        slot = 0
        interval_s = self._interval_s
        while not stop.is_set():
            self.tick()
            if interval_s != self._interval_s and self.last is not None:
                start_s, slot, interval_s = self.last.monotonic_s, 0, self._interval_s
            passed = (self._clock.monotonic_s() - start_s) / self._interval_s
            following = max(slot + 1, math.ceil(passed - LATE_START_INTERVALS))
            self._miss(following - slot - 1)
            slot = following
            wait_s = start_s + slot * self._interval_s - self._clock.monotonic_s()
            if wait_s > 0 and self._clock.wait(stop, wait_s):
                return

    def _miss(self, count: int) -> None:
        self.missed += count
        now_s = self._clock.monotonic_s()
        if count:
            self._gaps.append((now_s, count))
        while self._gaps and self._gaps[0][0] < now_s - OF_LATE_S:
            self._gaps.popleft()

    def missed_of_late(self) -> tuple[int, int]:
        """Ticks of the last five minutes that were missed, and that were due; after a longer stop all of them."""
        begin_s = self._clock.monotonic_s() - OF_LATE_S
        missed = sum(count for at_s, count in [*self._gaps] if at_s >= begin_s)
        due = min(round(OF_LATE_S / self._interval_s), self._number + self.missed)
        return min(missed, due), due

    def tick(self) -> list[Sample]:
        """One tick now: its samples, after the sink has had them."""
        self._take_over()
        began_s = time.perf_counter()
        tick = self._moment()
        samples = [*self.noted(), *self._clock_events(tick), *self._collect(tick)]
        samples = [kept for sample in merged(samples) if (kept := self._known(sample)) is not None]
        self.last = tick
        samples.append(self._report(tick, (time.perf_counter() - began_s) * 1000))
        try:
            self._sink(samples)
        except Exception as error:
            self.sink_errors += 1
            if tick.monotonic_s - self._complained_s >= LOG_EVERY_S:
                self._complained_s = tick.monotonic_s
                log.exception("the samples of this tick could not be kept: %s", error)
            return samples
        self._after_tick(tick)
        return samples

    def change(self, sources: Sequence[Collector], tags: Tags, interval_s: float) -> threading.Event:
        """Go on with these from the next tick; the event is set when that has come. Those that leave are not closed here."""
        self._change = Change(sources, dict(tags), interval_s, threading.Event())
        return self._change.done

    def note(self, kind: str, subject: str, text: str, detail: str = "") -> None:
        """An event for the next tick, dated now. From any thread."""
        fields: dict[str, Value] = {"text": text, "code": 0}
        if detail:
            fields["detail"] = detail
        tags = {**self._tags, "kind": kind, "subject": subject}
        self._noted.append(Sample("event", tags, fields, self._clock.wall_ns()))

    def keep(self, events: Sequence[Sample]) -> None:
        """Samples for the next tick that were taken outside of one."""
        self._noted.extend(events)

    def noted(self) -> list[Sample]:
        """What was noted and has not been in a tick, once."""
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def progress(self) -> dict[str, dict[str, float | None]]:
        """How many seconds ago each collector last answered to a tick, and last had something to say; None for never."""
        now_s = self._clock.monotonic_s()
        found: dict[str, dict[str, float | None]] = {}
        for place in self._places:
            ages = {"answered_age_s": _age(place.answered_s, now_s), "samples_age_s": _age(place.delivered_s, now_s)}
            other = found.get(place.collector.name)
            found[place.collector.name] = ages if other is None else _sooner(ages, other)
        return found

    def answered(self) -> list[tuple[Collector, int]]:
        """Each collector, and the number of the tick up to which all that it told of is in the ticks so far."""
        return [(place.collector, place.answered) for place in self._places]

    def close(self) -> None:
        for place in self._places:
            place.worker.close()
            place.collector.close()

    def errors(self) -> dict[str, int]:
        """Failed reads by collector name; a collector's own and those of running it."""
        found: dict[str, int] = {}
        for place in self._places:
            name = place.collector.name
            found[name] = found.get(name, 0) + place.collector.errors + place.failures
        return found

    def _take_over(self) -> None:
        change = self._change
        if change is None:
            return
        self._change = None
        present = {id(place.collector): place for place in self._places}
        places = [
            present.pop(id(source)) if id(source) in present else _place(source, change.tags)
            for source in change.sources
        ]
        for place in present.values():
            place.worker.close()
        self._places, self._tags, self._interval_s = places, dict(change.tags), change.interval_s
        change.done.set()

    def _retagged(self, place: Place, sample: Sample) -> Sample:
        """With the host's present tags, where its collector was made before they changed."""
        if place.tags == self._tags:
            return sample
        own = {name: value for name, value in sample.tags.items() if place.tags.get(name) != value}
        return replace(sample, tags={**self._tags, **own})

    def _moment(self) -> Tick:
        wall_ns, monotonic_s = read_together(self._clock)
        self._number += 1
        return Tick(self._number, wall_ns, monotonic_s)

    def _collect(self, tick: Tick) -> list[Sample]:
        samples: list[Sample] = []
        for place in self._places:  # what happened has its own time, and is told of late rather than never
            late = [sample for sample in place.worker.missed() or () if sample.measurement in OCCURRENCES]
            samples += [self._retagged(place, sample) for sample in late]
        started = [(place, _starts(place, tick)) for place in self._places]
        give_up_s = time.monotonic() + min(ANSWER_WITHIN_S, ANSWER_WITHIN_INTERVALS * self._interval_s)
        for place, is_running in started:
            if not is_running:
                continue
            try:
                answer = place.worker.take(tick, give_up_s - time.monotonic())
                place.answered_s, place.answered = tick.monotonic_s, tick.number
                if answer:
                    place.delivered_s = tick.monotonic_s
                samples += [self._retagged(place, sample) for sample in answer]
            except Late:
                place.fail("did not answer within its tick", tick.monotonic_s)
            except Exception as error:
                place.fail(f"{type(error).__name__}: {error}", tick.monotonic_s)
        return samples

    def _clock_events(self, tick: Tick) -> list[Sample]:
        step_s = self._steps.step_s(tick.time_ns, tick.monotonic_s)
        if step_s is None:
            return []
        text = say("agent.event.clock_step", self._language, step_s=step_s)
        log.warning("%s", text)
        tags = {**self._tags, "kind": "clock_step", "subject": "clock"}
        return [Sample("event", tags, {"text": text, "code": round(step_s * 1000)}, tick.time_ns)]

    def _known(self, sample: Sample) -> Sample | None:
        """The sample with only what the catalogue holds; None when nothing is left. What goes is counted."""
        problems = catalogue.problems(sample)
        if not problems:
            return sample
        self.dropped += len(problems)
        log.debug("%s: %s", sample.measurement, "; ".join(problems))
        fields = {
            name: value
            for name, value in sample.fields.items()
            if not catalogue.problems(replace(sample, fields={name: value}))
        }
        return replace(sample, fields=fields) if fields else None

    def _report(self, tick: Tick, tick_ms: float) -> Sample:
        """The `agent` measurement of this tick."""
        storage = self._storage()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        fields: dict[str, Value] = {
            "tick_ms": tick_ms,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "dropped_total": self.dropped + (storage.dropped_total or 0),
            "errors_delivery_total": self.sink_errors + (storage.errors_total or 0),
        }
        resident_bytes = _resident_bytes()
        if resident_bytes is not None:
            fields["rss_bytes"] = resident_bytes
        if storage.lag_s is not None:
            fields["lag_s"] = storage.lag_s
        if storage.spool_bytes is not None:
            fields["spool_bytes"] = float(storage.spool_bytes)
        known = catalogue.MEASUREMENTS["agent"].fields
        fields |= {f"errors_{name}_total": n for name, n in self.errors().items() if f"errors_{name}_total" in known}
        return Sample("agent", self._tags, fields, tick.time_ns)


def _place(source: Collector, tags: Tags) -> Place:
    return Place(source, Worker(f"collect-{source.name}", source.collect), tags)


def _starts(place: Place, tick: Tick) -> bool:
    """Whether the collector is at work for this tick; that it isn't costs nobody but itself."""
    try:
        is_running = place.worker.start(tick)
    except RuntimeError as error:  # this host has no thread left for us
        place.fail(str(error), tick.monotonic_s)
        return False
    if not is_running:
        place.fail("still busy with an earlier tick", tick.monotonic_s)
    return is_running


def _age(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else round(max(0.0, now_s - then_s), 3)


def _sooner(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of two collectors of one name: when both had answered, and when either had something to say."""
    answered = [ages["answered_age_s"] for ages in (one, other)]
    said = [age for ages in (one, other) if (age := ages["samples_age_s"]) is not None]
    return {
        "answered_age_s": None if None in answered else max(age for age in answered if age is not None),
        "samples_age_s": min(said, default=None),
    }


def _resident_bytes(proc: Path = Path("/proc")) -> float | None:
    """Resident memory of this process now (getrusage knows only the most it ever was); None where it can't be read."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # /proc is hidden, or no file can be opened any more
        return None
    return float(pages * resource.getpagesize())
