"""PDUs: how loaded the circuits are that feed this host, over SNMP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from agent.collectors.interface import Finding, Tags, Tick
from agent.periodic import Periodic
from agent.power.pdu import PduReading, Phase, read_pdu, worst
from agent.power.snmp import SnmpTrouble, visit
from agent.settings import AgentSettings, PduTarget
from telemetry.messages import say
from telemetry.sample import Sample

log = logging.getLogger(__name__)

State = Literal["ok", "unrated", "silent", "unknown_host", "refused", "broken", "foreign", "empty"]
"""unrated: it answers, and nobody says what the breaker may carry. foreign: it is none of the known makes. empty: no phase's current."""

HUNG_DEADLINES = 3.0
"""A visit that is under way for this many deadlines is taken for one that found nobody."""


@dataclass(frozen=True, slots=True)
class Visited:
    """What one visit to a PDU brought."""

    state: State
    kind: str = ""
    phases: tuple[Phase, ...] = ()

    @property
    def answers(self) -> bool:
        return self.state in ("ok", "unrated")


def visit_pdu(target: PduTarget) -> Visited:
    """Ask the PDU for its phases; a rating or a voltage that the configuration gives goes before, or stands in for, the PDU's own."""
    try:
        reading: PduReading = visit(target, partial(read_pdu, kind=target.kind))
    except SnmpTrouble as trouble:
        return Visited(trouble.trouble)
    if not reading.kind:
        return Visited("foreign")
    phases = tuple(
        replace(phase, rating_a=target.rating_a or phase.rating_a, voltage_v=phase.voltage_v or target.voltage_v)
        for phase in reading.phases
    )
    if not phases:
        return Visited("empty", reading.kind)
    return Visited("ok" if all(phase.rating_a for phase in phases) else "unrated", reading.kind, phases)


@dataclass(slots=True)
class Place:
    """One PDU and what is known of it."""

    target: PduTarget
    circuit: str
    periodic: Periodic[Visited]
    visited: Visited | None = None
    lost: bool = field(default=False)


class PduCollector:
    """The `circuit` measurement: one sample for each PDU and visit, of the phase that is nearest to its breaker's limit.

    A PDU that stops answering makes one event, and one when it is back.
    """

    name = "pdu"

    def __init__(
        self,
        targets: Sequence[PduTarget],
        tags: Tags,
        *,
        language: str = "en",
        read: Callable[[PduTarget], Visited] = visit_pdu,
    ) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._language = language
        circuits = circuits_of(targets, tags.get("circuit"))
        self._places = [
            Place(target, circuit, Periodic(f"pdu-{target.name}", target.every_s, _job(read, target)))
            for target, circuit in zip(targets, circuits, strict=True)
        ]

    @classmethod
    def of(cls, settings: AgentSettings, tags: Tags) -> PduCollector | None:
        """None where no PDU is configured."""
        return cls(settings.pdus, tags, language=settings.language) if settings.pdus else None

    @property
    def pending(self) -> bool:
        return any(place.visited is None for place in self._places)

    def collect(self, tick: Tick) -> Sequence[Sample]:
        samples: list[Sample] = []
        for place in self._places:
            visited = place.periodic.take(tick)
            if visited is None and place.periodic.running_s(tick) > HUNG_DEADLINES * place.target.deadline_s:
                visited = None if place.lost else Visited("silent")
            if visited is not None:
                samples += self._samples(place, visited, tick)
        return samples

    def close(self) -> None:
        for place in self._places:
            place.periodic.close()

    def findings(self, language: str) -> Sequence[Finding]:
        return [_finding(place, place.visited, language) for place in self._places if place.visited is not None]

    def _samples(self, place: Place, visited: Visited, tick: Tick) -> list[Sample]:
        place.visited = visited
        self.errors += not visited.answers
        samples = self._event(place, visited, tick)
        phase = worst(visited.phases)
        if phase is not None:
            told = {
                "current_a": phase.current_a,
                "voltage_v": phase.voltage_v,
                "rating_a": phase.rating_a,
                "load_pct": phase.load_pct,
            }
            fields = {name: value for name, value in told.items() if value is not None}
            samples.append(Sample("circuit", {**self._tags, "circuit": place.circuit}, fields, tick.time_ns))
        return samples

    def _event(self, place: Place, visited: Visited, tick: Tick) -> list[Sample]:
        """One when it stops telling, one when it tells again."""
        if place.lost == (not visited.answers):
            return []
        place.lost = not visited.answers
        said = say("agent.pdu.event_back" if visited.answers else f"agent.pdu.{visited.state}", self._language)
        text = say("agent.pdu.event", self._language, pdu=place.target.name, said=said)
        log.warning("%s", text)
        tags = {**self._tags, "kind": "bmc", "subject": place.target.name}
        return [Sample("event", tags, {"text": text, "code": int(not visited.answers)}, tick.time_ns)]


def _job(read: Callable[[PduTarget], Visited], target: PduTarget) -> Callable[[Tick], Visited]:
    return lambda _tick: read(target)


def circuits_of(targets: Sequence[PduTarget], host: str | None) -> list[str]:
    """The circuit of each PDU: its own, else the host's, else its name. Two PDUs are never one circuit, because the samples of one
    would overwrite the other's: the later one goes by its name.
    """
    circuits: list[str] = []
    for target in targets:
        wanted = (target.circuit, host or "", target.name)
        circuits.append(next((circuit for circuit in wanted if circuit and circuit not in circuits), target.name))
    return circuits


def _finding(place: Place, visited: Visited, language: str) -> Finding:
    target = place.target
    source = say("agent.pdu.source", language, pdu=target.name)
    where = {"host": target.host, "port": target.port, "kind": visited.kind, "circuit": place.circuit}
    phase = worst(visited.phases)
    load = f"{phase.load_pct:.0f} %" if phase is not None and phase.load_pct is not None else "?"
    text = say(f"agent.pdu.{visited.state}", language, **where, phases=len(visited.phases), load=load)
    if visited.state == "ok":
        return Finding(source, "ok", text)
    level: Literal["warning", "error"] = "warning" if visited.answers else "error"
    secret = say("agent.pdu.user" if target.user else "agent.pdu.community", language)
    return Finding(source, level, text, say(f"agent.pdu.{visited.state}_remedy", language, secret=secret))
