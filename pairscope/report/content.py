"""What a report says, as data: every incident with its pair before and during, its evidence, its cost and what to do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from shlex import quote

from pairscope.report import source as origin
from pairscope.report.paired import Row, Source, paired, samples_of
from pairscope.report.settings import ReportSettings
from rules.coupling import coupling_of
from rules.course import Course, Incident, Struck, follow, incidents_of
from rules.evidence import Evidence
from rules.loss import gpu_hours, group_pace, money_per_hour, price_per_million
from rules.triage import JudgeSettings, walk
from rules.verdict import Cause, Diagnosis, Fix, Line, Number, StepReport, Verdict
from telemetry.catalogue import NOT_LIVE
from telemetry.sample import Sample

SECOND = 10**9
MOST_TOLD = 5
"""Incidents that are told in full; the others have their line in the table of all."""

MOST_EVENTS = 40
EVENTS_BEFORE_NS = 900 * SECOND
STRAGGLES = 0.9
"""A member's clock below this share of its group's median holds the group up (the same bar as for a stuck clock)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the timeline."""

    time_ns: int
    what: Line


@dataclass(frozen=True, slots=True)
class Cost:
    """What an incident costs, of all its pairs together. None: not known, or no price was given. Money in the price's currency."""

    loss_pct: float | None  # of the worst-hit pair
    tokens_per_s: float | None
    tokens: float | None
    gpu_hours: float | None
    known_s: float
    unknown_s: float
    money_per_hour: float | None
    money: float | None
    per_million_before: float | None
    per_million_during: float | None


@dataclass(frozen=True, slots=True)
class Told:
    """One incident as it is told. `source` holds the samples of its worst-hit pair."""

    incident: Incident
    rows: tuple[Row, ...]
    straggler: Line | None
    coupling: Line | None
    cost: Cost
    competing: tuple[Verdict, ...]
    timeline: tuple[Entry, ...]
    left_out: int  # entries of the timeline
    source: Source

    @property
    def worst(self) -> Struck:
        return self.incident.struck[0]

    @property
    def diagnosis(self) -> Diagnosis:
        return self.worst.spell.diagnosis

    @property
    def steps(self) -> Sequence[StepReport]:
        return self.diagnosis.steps

    @property
    def fixes(self) -> Sequence[Fix]:
        return self.incident.verdict.fixes

    @property
    def nvidia(self) -> bool:
        gpus = self.source.by_measurement.get("gpu", ())
        return any(sample.tags.get("uuid", "").startswith(("GPU-", "MIG-")) for sample in gpus)


@dataclass(frozen=True, slots=True)
class Report:
    source: str
    from_ns: int
    end_ns: int
    bad_lines: int
    settings: ReportSettings
    incidents: tuple[Incident, ...]
    told: tuple[Told, ...]
    others: tuple[Course, ...]  # pairs that are in no incident
    origins: frozenset[str]  # simulated, replay; empty when all is live
    file: str = ""  # that was read, or
    store: str = ""  # the one, without secrets


def report_of(
    source: origin.Source,
    settings: ReportSettings,
    preset: str,
    step_s: float = 5.0,
    tell: Callable[[int], None] = lambda _at_ns: None,
) -> Report:
    """Walk the samples as triage does and tell what stood. `tell` hears how far the walk is, in wall ns."""
    first_ns = source.samples[0].time_ns
    judged = JudgeSettings(preset=preset, step_s=step_s, history_s=(source.end_ns - first_ns) / SECOND + 1)
    courses = follow(walk(source.samples, source.end_ns, judged, source.clocks), tell)
    incidents = incidents_of(courses.values(), source.from_ns, source.end_ns)
    struck = {id(entry.course) for incident in incidents for entry in incident.struck}
    return Report(
        source=source.name,
        from_ns=source.from_ns,
        end_ns=source.end_ns,
        file=source.file,
        store=source.store,
        bad_lines=source.bad_lines,
        settings=settings,
        incidents=tuple(incidents),
        told=tuple(_told(incident, list(courses.values()), source, settings) for incident in incidents[:MOST_TOLD]),
        others=tuple(course for course in courses.values() if id(course) not in struck),
        origins=frozenset(c.last.subject.get("origin", "") for c in courses.values()) & NOT_LIVE,
    )


def _told(incident: Incident, courses: Sequence[Course], source: origin.Source, settings: ReportSettings) -> Told:
    worst = incident.struck[0]
    coupling = coupling_of(incident, courses)
    own = samples_of(worst, source.samples)
    until_ns = source.end_ns if incident.until_ns is None else incident.until_ns
    rows = paired(worst, own, until_ns)
    entries = _timeline(incident, source.samples, until_ns)
    return Told(
        incident=incident,
        rows=rows,
        straggler=straggler(worst.spell.evidence),
        coupling=coupling.line() if coupling is not None else None,
        cost=cost_of(incident, rows, settings.price_per_gpu_hour),
        competing=worst.spell.diagnosis.verdicts[1:],
        timeline=tuple(entries[:MOST_EVENTS]),
        left_out=max(0, len(entries) - MOST_EVENTS),
        source=own,
    )


def cost_of(incident: Incident, rows: Sequence[Row], price: float | None) -> Cost:
    """Sums over the pairs; the price of a million tokens is that of the worst-hit pair, before and during."""
    verdicts = [struck.spell.verdict for struck in incident.struck]
    rates = [verdict.loss_tokens_per_s for verdict in verdicts if verdict.loss_tokens_per_s is not None]
    hours = [gpu_hours(struck.lost.share_s, struck.gpus) for struck in incident.struck]
    known = [each for each in hours if each is not None]
    money = [
        money_per_hour(v.loss_pct if v.loss_tokens_per_s is not None else None, s.gpus, price)
        for v, s in zip(verdicts, incident.struck, strict=True)
    ]
    wasted = [each for each in money if each is not None]
    tokens = next((row for row in rows if row.lane == "engine.tokens_per_s"), None)
    lost, gpus = incident.lost, incident.struck[0].gpus
    return Cost(
        loss_pct=verdicts[0].loss_pct,
        tokens_per_s=sum(rates) if rates else None,
        tokens=lost.tokens,
        gpu_hours=sum(known) if known else None,
        known_s=lost.known_s,
        unknown_s=lost.unknown_s,
        money_per_hour=sum(wasted) if wasted else None,
        money=sum(known) * price if known and price is not None else None,
        per_million_before=price_per_million(tokens.before if tokens else None, gpus, price),
        per_million_during=price_per_million(tokens.during if tokens else None, gpus, price),
    )


def straggler(evidence: Evidence) -> Line | None:
    """The member of a group whose clock holds the others up, and what that makes of the group beside cards that work alone."""
    clocks = {gpu.index: gpu.sm_clock.value for gpu in evidence.gpus if gpu.sm_clock is not None}
    if evidence.engine is None or len(clocks) < 2:
        return None
    middle = statistics.median_high(list(clocks.values()))
    if middle <= 0:
        return None
    paces = {index: min(clock / middle, 1.0) for index, clock in clocks.items()}
    slowest = min(paces, key=lambda index: paces[index])
    if paces[slowest] > STRAGGLES:
        return None
    members = list(paces.values())
    values: dict[str, Number] = {
        "gpu": slowest,
        "pace_pct": 100 * paces[slowest],
        "count": len(members),
        "alone_pct": 100 * (1 - group_pace(members, 1)),
        "group_pct": 100 * (1 - group_pace(members, len(members))),
    }
    return Line("report.group.straggler", values, "gpu.sm_clock_mhz")


def _timeline(incident: Incident, samples: Sequence[Sample], until_ns: int) -> list[Entry]:
    """Events of the struck nodes from a quarter of an hour before, the beginning, each change of verdict, and the end."""
    nodes = {struck.course.last.subject.get("node", "") for struck in incident.struck}
    first_ns = incident.since_ns - EVENTS_BEFORE_NS
    found = [Entry(incident.since_ns, Line("report.timeline.onset", {"cause": str(incident.cause)}))]
    for sample in samples:
        if (
            sample.measurement == "event"
            and sample.tags.get("node") in nodes
            and first_ns <= sample.time_ns <= until_ns
        ):
            found.append(Entry(sample.time_ns, _event(sample)))
    found += _changes(incident.struck[0], first_ns, until_ns)
    if incident.until_ns is not None:
        found.append(Entry(incident.until_ns, Line("report.timeline.over", {"cause": str(incident.cause)})))
    found.sort(key=lambda entry: entry.time_ns)
    distinct: list[Entry] = []
    for entry in found:
        if entry not in distinct[-20:]:
            distinct.append(entry)
    return distinct


def _event(sample: Sample) -> Line:
    values = {
        "kind": sample.tags.get("kind", ""),
        "node": sample.tags.get("node", ""),
        "subject": sample.tags.get("subject", ""),
        "text": str(sample.fields.get("text", ""))[:300],
    }
    return Line(
        "report.timeline.event" if values["subject"] != values["node"] else "report.timeline.node_event", values
    )


def _changes(struck: Struck, first_ns: int, until_ns: int) -> list[Entry]:
    found = []
    for before, after in pairwise(struck.course.moments):
        if after.cause is before.cause or not first_ns <= after.time_ns <= until_ns:
            continue
        if after.cause is None:
            found.append(Entry(after.time_ns, Line("report.timeline.no_verdict", {})))
        else:
            values: dict[str, Number] = {"cause": str(after.cause), "confidence": after.confidence}
            found.append(Entry(after.time_ns, Line("report.timeline.verdict", values)))
    return found


def named_gpu(told: Told) -> str | None:
    """The index of the one GPU that the incident is about, if it is about one."""
    index = told.incident.subject.get("gpu") or (told.straggler.values["gpu"] if told.straggler else None)
    return str(index) if index is not None else None


COMMANDS: dict[Cause, tuple[str, ...]] = {
    Cause.THERMAL: ("nvidia-smi {gpu}-q -d TEMPERATURE,PERFORMANCE",),
    Cause.POWER: ("nvidia-smi {gpu}-q -d POWER,PERFORMANCE", "ipmitool sdr type 'Power Supply'"),
    Cause.GPU_FAULT: ("nvidia-smi {gpu}-q -d ECC,ROW_REMAPPER,CLOCK,PERFORMANCE", "dmesg --ctime | grep -i xid"),
    Cause.PCIE_LINK: ("nvidia-smi {gpu}--query-gpu=index,pcie.link.gen.current,pcie.link.width.current --format=csv",),
    Cause.CONTENTION: ("nvidia-smi {gpu}--query-compute-apps=pid,name,used_memory --format=csv",),
    Cause.HOST_CPU: ("cat /proc/pressure/cpu",),
    Cause.STORAGE: ("cat /proc/pressure/io",),
    Cause.TELEMETRY: ("pairscope doctor",),
}
"""They only look, and change nothing. Those of nvidia-smi are told only of GPUs that are NVIDIA's."""


def commands_of(told: Told, file: str = "", store: str = "") -> list[str]:
    """How to look for oneself, on the node and from anywhere. A name that a shell would take for more than a name is left out."""
    gpu = named_gpu(told)
    chosen = f"-i {gpu} " if gpu is not None and gpu.isdigit() and len(gpu) < 4 else ""
    found = [
        command.format(gpu=chosen)
        for command in COMMANDS.get(told.incident.cause, ())
        if told.nvidia or not command.startswith("nvidia-smi")
    ]
    node = told.worst.course.last.subject.get("node", "")
    plain = node.isascii() and node[:1].isalnum() and node.replace("-", "").replace(".", "").replace("_", "").isalnum()
    if file.isprintable() and file:
        return [*found, f"pairscope triage {quote(file if not file.startswith('-') else f'./{file}')}"]
    look = f"pairscope triage --node {node}" if plain else "pairscope triage --all"
    return [*found, f"{look} --store {quote(store)}" if store.isprintable() and store else look]
