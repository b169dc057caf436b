"""BMC: power supplies, headroom, node power and cooling as this host's board management controller tells them, every half minute."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.interface import Finding, Tags, Tick
from agent.periodic import Periodic
from agent.power import headroom
from agent.power.changes import Change, Changes
from agent.power.fault import BmcFault, Trouble
from agent.power.plausible import plausible
from agent.power.readers import BmcReader, reader_of
from agent.power.reading import BmcReading
from agent.settings import AgentSettings, BmcTarget
from telemetry.catalogue import REDUNDANCY_STATES
from telemetry.messages import say
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)

SILENT_AFTER_PERIODS = 3
KEPT_PERIODS = 3
"""For how many of its periods the last value of a BMC is still the present one."""

MEASUREMENTS = ("psu", "power", "thermal")


@dataclass(frozen=True, slots=True)
class Visit:
    """What one visit brought: a reading, or why there is none."""

    reading: BmcReading | None = None
    fault: BmcFault | None = None


class BmcCollector:
    """`psu`, `power` and `thermal` at the tick in which a visit's answer was taken, never repeated; events for what changed.

    A BMC that gave nothing for three periods is reported once, and once when it is back.
    """

    name = "bmc"

    def __init__(self, tags: Tags, target: BmcTarget, reader: BmcReader, language: str = "en") -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._target = target
        self._reader = reader
        self._language = language
        self._periodic = Periodic("bmc", target.every_s, self._visit)
        self._changes = Changes(language)
        self._faults = 0
        self._visits = 0
        self._answered_s: float | None = None  # monotonic; of the first tick while nothing was read yet
        self._silent = False
        self._reading: BmcReading | None = None  # None after a visit that failed
        self._fault: BmcFault | None = None

    @classmethod
    def of(cls, settings: AgentSettings, tags: Tags, memory: Path | None = None) -> BmcCollector | None:
        """For the BMC of this host, if one is configured. `memory` is a folder that outlives the process."""
        if settings.bmc is None:
            return None
        return cls(tags, settings.bmc, reader_of(settings.bmc, settings.language, memory), settings.language)

    @property
    def pending(self) -> bool:
        return self._visits == 0 and self._periodic.failures == 0 and self._periodic.pending

    def collect(self, tick: Tick) -> Sequence[Sample]:
        if self._answered_s is None:
            self._answered_s = tick.monotonic_s
        visit = self._periodic.take(tick)
        samples: list[Sample] = []
        if visit is not None:
            self._visits += 1
            samples = self._taken(visit, tick)
        self.errors = self._faults + self._periodic.failures
        if not self._silent and tick.monotonic_s - self._answered_s >= SILENT_AFTER_PERIODS * self._target.every_s:
            self._silent = True
            samples.append(self._silent_event(tick))
        return samples

    def close(self) -> None:
        self._periodic.close()
        self._reader.close()

    def findings(self, language: str) -> Sequence[Finding]:
        if self._visits == 0:
            return (Finding("bmc", "warning", say("agent.bmc.finding.waiting", language, url=self._target.url)),)
        if self._fault is not None:
            return (self._fault_finding(self._fault, language),)
        if self._reading is None:
            return ()
        found = [Finding("bmc", "ok", self._summary(self._reading, language))]
        found += [
            Finding("bmc", "warning", say(f"agent.bmc.finding.{key}", language, **values), remedy)
            for key, values, remedy in self._shortcomings(self._reading, language)
        ]
        return [*found, *(Finding("bmc", "warning", problem) for problem in self._reading.problems)]

    def _visit(self, _tick: Tick) -> Visit:
        """On the worker's thread."""
        try:
            return Visit(plausible(self._reader.read()))
        except BmcFault as fault:
            return Visit(fault=fault)

    def _taken(self, visit: Visit, tick: Tick) -> list[Sample]:
        if visit.reading is None:
            self._faults += 1
            if visit.fault is not None and (self._fault is None or self._fault.trouble is not visit.fault.trouble):
                log.warning("bmc %s: %s", self._target.url, self._said(visit.fault, self._language))
            self._reading, self._fault = None, visit.fault
            return []
        if self._fault is not None:
            log.info("bmc %s answers again", self._target.url)
        self._reading, self._fault = visit.reading, None
        self._answered_s = tick.monotonic_s
        events = []
        if self._silent:
            self._silent = False
            events.append(self._event("bmc", Change(say("agent.bmc.event.back", self._language), "back", 0), tick))
        made = headroom.samples(visit.reading, self._target.redundancy, self._target.feed_b, self._tags, tick.time_ns)
        changes = self._changes.update(visit.reading, _redundancy(made))
        return [*made, *events, *(self._event("node", change, tick) for change in changes)]

    def _silent_event(self, tick: Tick) -> Sample:
        minutes = SILENT_AFTER_PERIODS * self._target.every_s / 60
        reason = self._said(self._fault, self._language) if self._fault else say("agent.bmc.fault.none", self._language)
        text = say("agent.bmc.event.silent", self._language, minutes=minutes, reason=reason)
        return self._event("bmc", Change(text, "silent", 0), tick)

    def _event(self, subject: str, change: Change, tick: Tick) -> Sample:
        tags = {**self._tags, "kind": "bmc", "subject": subject}
        fields: dict[str, Value] = {"text": change.text, "detail": change.detail, "code": change.code}
        return Sample("event", tags, fields, tick.time_ns)

    def _said(self, fault: BmcFault, language: str) -> str:
        sentence = say(f"agent.bmc.fault.{fault.trouble}", language)
        return f"{sentence} ({fault.reason})" if fault.reason else sentence

    def _fault_finding(self, fault: BmcFault, language: str) -> Finding:
        remedy = say(f"agent.bmc.remedy.{fault.trouble}", language)
        if fault.trouble is Trouble.UNTRUSTED and fault.fingerprint:
            remedy = say("agent.bmc.remedy.pin", language, fingerprint=fault.fingerprint)
        return Finding("bmc", "error", f"{self._target.url}: {self._said(fault, language)}", remedy)

    def _summary(self, reading: BmcReading, language: str) -> str:
        unknown = "?"
        return say(
            "agent.bmc.finding.ok",
            language,
            url=self._target.url,
            supplies=unknown if reading.supplies is None else len(reading.supplies),
            node_w=unknown if reading.node_w is None else f"{reading.node_w:.0f}",
            inlet_c=unknown if reading.inlet_c is None else f"{reading.inlet_c:.0f}",
        )

    def _shortcomings(self, reading: BmcReading, language: str) -> list[tuple[str, dict[str, object], str]]:
        """What is not as it should be in an answer: key of its sentence, values, remedy."""
        target = self._target
        found: list[tuple[str, dict[str, object], str]] = []
        if target.url.startswith("https:") and not target.verify_tls and not target.fingerprint_sha256:
            found.append(("unverified", {}, say("agent.bmc.remedy.unverified", language)))
        missing = _missing(reading)
        if missing:
            titles = [say(f"agent.bmc.value.{name}", language) for name in missing]
            found.append(("missing", {"values": ", ".join(titles)}, ""))
        names = [supply.name for supply in reading.supplies or ()]
        if target.redundancy == "A/B" and names and not set(names) & set(target.feed_b):
            remedy = say("agent.bmc.remedy.feed_b", language, names=", ".join(names))
            found.append(("feed_b", {}, remedy))
        fields = headroom.power_fields(reading, target.redundancy, target.feed_b)
        failed = [supply.name for supply in reading.supplies or () if supply.ok is False]
        if failed:
            remedy = say("agent.bmc.remedy.psu_failed", language)
            found.append(("psu_failed", {"names": ", ".join(failed)}, remedy))
        if fields.get("redundancy") in (headroom.LOST, headroom.DEGRADED):
            key = f"redundancy_{REDUNDANCY_STATES[int(fields['redundancy'])]}"
            found.append((key, {}, say("agent.bmc.remedy.redundancy", language)))
        return found


def _redundancy(samples: Sequence[Sample]) -> int | None:
    """The state that was written, if one was."""
    for sample in samples:
        if sample.measurement == "power" and "redundancy" in sample.fields:
            return int(sample.fields["redundancy"])
    return None


def _missing(reading: BmcReading) -> list[str]:
    """What a BMC usually tells and this one does not, by the names under `agent.bmc.value`."""
    supplies = reading.supplies
    missing = ["supplies"] if supplies is None else []
    if supplies and any(supply.capacity_w is None for supply in supplies):
        missing.append("capacity")
    if supplies and all(supply.output_w is None and supply.input_w is None for supply in supplies):
        missing.append("supply_power")
    missing += [name for name in ("node_w", "inlet_c", "exhaust_c") if getattr(reading, name) is None]
    if reading.fan_min_rpm is None and reading.fan_pct is None:
        missing.append("fans")
    return missing
