"""The judgement of one incident that is told: the walk over the same steps, without times and without a past to learn from."""

from __future__ import annotations

from dataclasses import replace

from rules.evidence import Evidence
from rules.finding import Effect, effect_of, names_cause, summary
from rules.priors import priors
from rules.ranking import reports_of, verdicts_of, weigh
from rules.signals.evidence import evidence_of
from rules.signals.reading import Signals
from rules.steps import WALK
from rules.thresholds import Bar
from rules.verdict import Cause, Diagnosis, Line, Verdict

LEAST_CONFIDENCE = 0.3
GPU_CAUSES = frozenset((Cause.THERMAL, Cause.POWER, Cause.GPU_FAULT, Cause.PCIE_LINK))


def judge_signals(told: Signals, preset: str = "evidence") -> Diagnosis:
    """Which causes the signals speak for, most likely first; no verdict where nothing is wrong or nothing is known."""
    evidence, bar = evidence_of(told), Bar()
    weights = priors(preset)
    findings = {step: examine(evidence, bar) for step, examine in WALK.items()}
    effect = effect_of(evidence, bar)
    ranked = weigh([finding for found in findings.values() for finding in found], weights)
    subject = {"incident": told.name} if told.name else {}
    least = LEAST_CONFIDENCE
    verdicts = () if told.empty else verdicts_of(ranked, evidence, effect, {"engine": ""}, {}, least, least)
    verdicts = tuple(_as_told(verdict, evidence, effect, subject) for verdict in verdicts)
    ratio = evidence.output.output_ratio
    return Diagnosis(
        subject=subject,
        at_ns=0,
        steps=reports_of(findings, ranked, weights),
        verdicts=verdicts,
        headline=_headline(told, effect, verdicts),
        output_pct=None if ratio is None else 100 * ratio,
        util_pct=evidence.util_pct,
    )


def _as_told(verdict: Verdict, evidence: Evidence, effect: Effect, subject: dict[str, str]) -> Verdict:
    """Without a beginning, since none is told, and with the scope that the peers tell."""
    scope = verdict.scope
    if evidence.group.affected == "all":
        scope = "cluster"
    elif evidence.group.affected == "one" and verdict.cause in GPU_CAUSES:
        scope = "gpu"
    return replace(verdict, scope=scope, subject=subject, since_ns=None, summary=names_cause(verdict.cause, effect))


def _headline(told: Signals, effect: Effect, verdicts: tuple[Verdict, ...]) -> Line:
    if verdicts:
        return verdicts[0].summary
    if told.empty:
        return summary("nothing_known")
    return summary("told_unexplained") if effect.slow else summary("told_nothing")
