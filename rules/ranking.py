"""From findings to verdicts: what explains what, how likely each remaining cause is, and the report of every step.

Score = prior weight x likelihood ratio. A confirmed finding that another one explains, and that did not begin clearly before it, is
its symptom and never a verdict. Ties break by the order of the walk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rules.evidence import Evidence
from rules.finding import Effect, Finding, line, names, names_cause
from rules.loss import lost_tokens_per_s
from rules.priors import STEP_OF, Priors, Strength
from rules.straggler import straggler_of
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line, Status, Step, StepReport, Verdict

SLOWED = frozenset((Cause.MEMORY_KV, Cause.SCHEDULING, Cause.SOFTWARE, Cause.CONTENTION, Cause.STORAGE, Cause.HOST_CPU))
EXPLAINS: Mapping[Cause, frozenset[Cause]] = {
    # a slower engine holds its sequences longer: the queue and the KV pool rise, and a deploy nearby is chance
    Cause.GPU_FAULT: SLOWED | {Cause.THERMAL, Cause.POWER, Cause.PCIE_LINK, Cause.REQUEST_MIX, Cause.COLD_START},
    Cause.THERMAL: SLOWED,
    Cause.POWER: SLOWED,
    Cause.PCIE_LINK: SLOWED,
    # nothing moves: everything that is counted per token looks wrong
    Cause.SCHEDULING: frozenset((Cause.MEMORY_KV, Cause.REQUEST_MIX, Cause.SOFTWARE, Cause.STORAGE)),
    Cause.REQUEST_MIX: frozenset((Cause.MEMORY_KV, Cause.SCHEDULING)),
    Cause.MEMORY_KV: frozenset((Cause.SCHEDULING,)),
    Cause.HOST_CPU: frozenset((Cause.MEMORY_KV, Cause.STORAGE)),
    Cause.CONTENTION: frozenset((Cause.MEMORY_KV,)),
    Cause.SOFTWARE: frozenset((Cause.MEMORY_KV, Cause.SCHEDULING, Cause.COLD_START)),
    Cause.COLD_START: frozenset((Cause.MEMORY_KV, Cause.SCHEDULING, Cause.REQUEST_MIX, Cause.HOST_CPU, Cause.STORAGE)),
    Cause.STORAGE: frozenset((Cause.MEMORY_KV, Cause.COLD_START)),
    Cause.NETWORK: frozenset((Cause.SCHEDULING, Cause.REQUEST_MIX, Cause.COLD_START)),
}
LEAD_NS = 30 * 10**9
"""A finding that began this long before another is not its symptom."""

CHEAPEST_FIRST = tuple(Cost)
SUREST = 0.98
SCOPES: Mapping[Cause, str] = {
    Cause.THERMAL: "node",
    Cause.POWER: "node",
    Cause.GPU_FAULT: "node",
    Cause.PCIE_LINK: "node",
    Cause.CONTENTION: "node",
}


@dataclass(frozen=True, slots=True)
class Ranked:
    """A confirmed finding with what became of it: a root with its confidence, or a symptom of another cause."""

    finding: Finding
    score: float
    confidence: float
    symptom_of: Cause | None


def weigh(findings: Sequence[Finding], priors: Priors) -> list[Ranked]:
    """The confirmed findings, roots first, most likely first."""
    scored = [
        (finding, priors.weight[finding.cause] * priors.likelihood[finding.strength] * finding.support)
        for finding in findings
        if finding.status is Status.CONFIRMED and finding.strength is not None
    ]
    roots: dict[Cause, Cause | None] = {
        finding.cause: _root_of(finding, [other for other, _ in scored]) for finding, _ in scored
    }
    if scored and None not in roots.values():  # a chain that closes: the likeliest of it is the root
        roots[max(scored, key=lambda entry: entry[1])[0].cause] = None
    rivals = sum(score for finding, score in scored if roots[finding.cause] is None and not finding.alone)
    ranked = []
    for finding, score in scored:
        symptom_of = roots[finding.cause]
        against = score + priors.unknown if finding.alone else rivals + priors.unknown
        confidence = 0.0 if symptom_of is not None else min(score / against, SUREST)
        ranked.append(Ranked(finding, score, confidence, symptom_of))
    order = list(STEP_OF)
    return sorted(ranked, key=lambda r: (r.symptom_of is not None, -r.score, order.index(r.finding.cause)))


def _root_of(finding: Finding, all_found: Sequence[Finding]) -> Cause | None:
    for other in all_found:
        if other.cause is finding.cause or finding.cause not in EXPLAINS.get(other.cause, ()):
            continue
        if finding.strength is Strength.PROOF and other.strength is not Strength.PROOF:
            continue  # what says itself outright follows from nothing that is only likely
        if _outweighs(finding, other):
            continue
        if other.cause in EXPLAINS.get(finding.cause, ()):
            if _settles(other, finding):
                return other.cause
        elif not _leads(finding, other):
            return other.cause
    return None


def _outweighs(finding: Finding, other: Finding) -> bool:
    """Of two physical causes, the one with the stronger signs is no symptom of the other: a cap that is seen to bind explains a low
    clock, and a low clock does not explain the cap."""
    if STEP_OF[finding.cause] is not Step.PHYSICAL or STEP_OF[other.cause] is not Step.PHYSICAL:
        return False
    order = list(Strength)
    if finding.strength is None or other.strength is None:
        return False
    return order.index(finding.strength) < order.index(other.strength)


def _settles(first: Finding, second: Finding) -> bool:
    """Each could explain the other: the proven one does, else the one that began clearly before; else neither."""
    proofs = (first.strength is Strength.PROOF, second.strength is Strength.PROOF)
    return proofs == (True, False) or (proofs[0] == proofs[1] and _leads(first, second))


def _leads(first: Finding, second: Finding) -> bool:
    if first.since_ns is None or second.since_ns is None:
        return False
    return first.since_ns < second.since_ns - LEAD_NS


def verdicts_of(
    ranked: Sequence[Ranked],
    evidence: Evidence,
    effect: Effect,
    subject: Mapping[str, str],
    since: Mapping[Cause, int],
    least: float,
    least_rival: float,
    bar: Bar | None = None,
) -> tuple[Verdict, ...]:
    """The roots as verdicts, most likely first; `since` holds when each cause began as far as is remembered.

    None when no root reaches `least`. Beside one that does, those from `least_rival` on are told as well: a fault that a louder one
    outweighs is still named.
    """
    roots = [entry for entry in ranked if entry.symptom_of is None and entry.finding.summary is not None]
    if not any(entry.confidence >= least for entry in roots):
        return ()
    found = []
    for entry in roots:
        finding = entry.finding
        if entry.confidence < least_rival or finding.summary is None:
            continue
        scope, tags = _scope(finding, evidence, subject)
        symptoms = tuple(
            line("symptom", "", cause=str(other.finding.cause))
            for other in ranked
            if other.symptom_of is finding.cause and other.finding.summary is not None
        )
        found.append(
            Verdict(
                cause=finding.cause,
                step=STEP_OF[finding.cause],
                confidence=entry.confidence,
                loss_pct=effect.loss_pct,
                scope=scope,
                subject=tags,
                since_ns=since.get(finding.cause, finding.since_ns),
                evidence=(*finding.evidence, *_group_lines(finding, evidence, bar or Bar()), *symptoms),
                fixes=tuple(sorted(finding.fixes, key=lambda fix: CHEAPEST_FIRST.index(fix.cost))),
                summary=_summary(finding.cause, finding.summary, evidence, effect),
                loss_tokens_per_s=_lost(evidence),
                gpus=finding.gpus,
            )
        )
    return tuple(found)


def _summary(cause: Cause, said: Line, evidence: Evidence, effect: Effect) -> Line:
    """What the step says of its cause, unless that tells of a figure which nobody knows."""
    unknown = {
        name for name, known in (("loss_pct", effect.loss_pct), ("util_pct", evidence.util_pct)) if known is None
    }
    return names_cause(cause, effect) if unknown & said.values.keys() else said


def _group_lines(finding: Finding, evidence: Evidence, bar: Bar) -> tuple[Line, ...]:
    """Why one card's trouble is the engine's: every layer is split over the group, so its other members wait, and are not idle."""
    if not finding.gpus or len(finding.gpus) >= len(evidence.gpus) or evidence.engine is None:
        return ()
    if STEP_OF[finding.cause] is not Step.PHYSICAL:
        return ()
    waiting = [gpu.index for gpu in evidence.gpus if gpu.index not in finding.gpus]
    waits = line("group_waits", "gpu.sm_clock_mhz", gpus=names(finding.gpus), others=names(waiting))
    slow = straggler_of(evidence, bar)
    return (waits,) if slow is None or slow.rank.gpu not in finding.gpus else (waits, slow.line)


def _lost(evidence: Evidence) -> float | None:
    """Tokens/s below what is expected; not known of an engine that does not answer."""
    if evidence.engine is not None and evidence.engine.away:
        return None
    return lost_tokens_per_s(evidence.output.expected_tokens_per_s, evidence.output.tokens_per_s)


def _scope(finding: Finding, evidence: Evidence, subject: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    without_engine = {name: tag for name, tag in subject.items() if name != "engine"}
    if len(finding.gpus) == 1 and len(evidence.gpus) > 1:
        return "gpu", {**without_engine, "gpu": finding.gpus[0]}
    scope = finding.scope or SCOPES.get(finding.cause, "")
    if scope == "node" or "engine" not in subject:
        return "node", without_engine
    return "engine", subject


def reports_of(
    findings: Mapping[Step, Sequence[Finding]], ranked: Sequence[Ranked], priors: Priors
) -> tuple[StepReport, ...]:
    """One report a step, always all six. Confirmed beats symptom beats ruled out; no data only when nothing could be read."""
    by_cause = {entry.finding.cause: entry for entry in ranked}
    total = max(1.0, sum(entry.confidence for entry in ranked))
    reports = []
    for step in Step:
        here = findings.get(step, ())
        entries = [by_cause[finding.cause] for finding in here if finding.cause in by_cause]
        roots = [entry for entry in entries if entry.symptom_of is None]
        if roots:
            status, lines = Status.CONFIRMED, [found for entry in roots for found in entry.finding.evidence]
        elif entries:
            status = Status.SYMPTOM
            lines = [found for entry in entries for found in (_follows(entry), *entry.finding.evidence)]
        else:
            status = Status.NO_DATA
            if ranked and any(finding.status is Status.SYMPTOM for finding in here):
                status = Status.SYMPTOM
            elif any(finding.status in (Status.RULED_OUT, Status.SYMPTOM) for finding in here):
                status = Status.RULED_OUT
            lines = [found for finding in here if finding.status is status for found in finding.evidence]
            if status is Status.RULED_OUT:
                lines += [found for finding in here if finding.status is Status.SYMPTOM for found in finding.evidence]
                lines += [found for finding in here if finding.status is Status.NO_DATA for found in _unknown(finding)]
        posterior = sum(entry.confidence for entry in roots) / total
        reports.append(StepReport(step, status, _distinct(lines), priors.of_step(step), posterior))
    return tuple(reports)


def _follows(entry: Ranked) -> Line:
    return line("follows", "", cause=str(entry.symptom_of))


def _unknown(finding: Finding) -> Sequence[Line]:
    """A cause that had no data in a step that rules out others: it is named, so that nobody takes it for ruled out."""
    return (line("not_known", "", cause=str(finding.cause)), *finding.evidence) if finding.evidence else ()


def _distinct(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple({(entry.key, entry.lane, *entry.values.items()): entry for entry in lines}.values())


def all_no_data(reports: Sequence[StepReport], why: Line) -> tuple[StepReport, ...]:
    """The reports of a silent node: step 0 stands, the others can't know."""
    return tuple(
        report
        if report.step is Step.VALIDITY
        else replace(report, status=Status.NO_DATA, evidence=(why,), posterior=0.0)
        for report in reports
    )
