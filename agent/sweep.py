"""Sweep: every source read once, without spool, store or hosted engines, for a person who wants to see what there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.collectors.interface import Collector, Examined, Finding
from agent.sampler import SLOW_FIELDS, Sampler, collectors
from agent.settings import AgentSettings
from telemetry.messages import say
from telemetry.sample import Sample

LONGEST_INTERVAL_S = 1.0
SETTLE_S = 3.0
"""A collector that can't say whether it is still at it gets so long to deliver something."""

_NAME_TAG = {"gpu": "uuid", "mig": "mig", "engine": "engine", "psu": "psu", "circuit": "circuit"}


@dataclass(frozen=True, slots=True)
class Sweep:
    """`samples`: the newest of each thing, after the events; `findings`: how each source is; `waiting`: those that never ended
    their first reading.
    """

    samples: Sequence[Sample]
    findings: Sequence[Finding]
    waiting: Sequence[str]


def sweep(
    settings: AgentSettings, *, wait_s: float, progress: Callable[[Sequence[str]], None] = lambda _: None
) -> Sweep:
    """Read until every source has answered, `wait_s` at most, but twice at least, since rates need two readings.

    `progress` hears the names of the sources that are still waited for. Nothing is kept, hosted or delivered.
    """
    settings = replace(
        settings,
        interval_s=min(settings.interval_s, LONGEST_INTERVAL_S),
        engines=tuple(replace(engine, command=None) for engine in settings.engines),
    )
    sources = collectors(settings, None)
    sampler = Sampler(
        sources, settings.tags, lambda _samples: None, interval_s=settings.interval_s, language=settings.language
    )
    try:
        seen = _Seen()
        began_s = time.monotonic()
        seen.take(sampler.tick())
        while True:
            time.sleep(settings.interval_s)
            seen.take(sampler.tick())
            passed_s = time.monotonic() - began_s
            waiting = [source.name for source in sources if _is_waited_for(source, seen, passed_s)]
            if not waiting or passed_s >= wait_s:
                break
            progress(waiting)
        failures = sampler.errors()
        findings = [
            finding
            for source in sources
            for finding in _findings(source, seen, failures.get(source.name, 0), settings.language)
        ]
        late = [
            Finding(name, "warning", say("doctor.source.late", settings.language, wait_s=wait_s)) for name in waiting
        ]
        return Sweep([*seen.events, *seen.things.values()], [*findings, *late], waiting)
    finally:
        sampler.close()


class _Seen:
    """What the ticks brought so far."""

    def __init__(self) -> None:
        self.events: list[Sample] = []
        self.things: dict[tuple[str, str], Sample] = {}
        self.measurements: set[str] = set()

    def take(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.measurement == "event":
                self.events.append(sample)
                continue
            self.measurements.add(sample.measurement)
            # not all tags are a name: an engine's model is known a tick later than the engine
            thing = (sample.measurement, sample.tags.get(_NAME_TAG.get(sample.measurement, ""), ""))
            self.things[thing] = _with_slow_fields(self.things.get(thing), sample)


def _with_slow_fields(before: Sample | None, now: Sample) -> Sample:
    """What is not read at every tick stands until the next reading, unless the device is out or the engine down."""
    if before is None or now.fields.get("state", 0) != 0 or 0 in (before.fields.get("up"), now.fields.get("up")):
        return now
    if now.measurement == "engine":  # some must not be asked at every tick
        return replace(now, fields={**before.fields, **now.fields})
    slow = SLOW_FIELDS.get(now.measurement, {})
    standing = {name: value for name, value in before.fields.items() if name in slow}
    return replace(now, fields={**standing, **now.fields})


def _is_waited_for(source: Collector, seen: _Seen, passed_s: float) -> bool:
    if isinstance(source, Examined):
        return source.pending
    return source.name not in seen.measurements and passed_s < SETTLE_S


def _findings(source: Collector, seen: _Seen, failures: int, language: str) -> Sequence[Finding]:
    """What the source says of itself; one that doesn't is judged by what it delivered."""
    if isinstance(source, Examined):
        try:
            return source.findings(language)
        except Exception as error:  # a defect of one source must not hide the others
            text = say("doctor.source.silent", language, reason=f"{type(error).__name__}: {error}")
            return [Finding(source.name, "error", text)]
    if source.name in seen.measurements:
        return [Finding(source.name, "ok", say("doctor.source.delivers", language))]
    if failures:
        return [Finding(source.name, "error", say("doctor.source.fails", language, count=failures))]
    return [Finding(source.name, "absent", say("doctor.source.absent", language))]
