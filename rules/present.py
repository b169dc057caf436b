"""A diagnosis as lines of plain text, in both languages; whoever prints it adds the colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rules.verdict import Diagnosis, Status, Verdict
from telemetry.catalogue import REPLAYED, SIMULATED
from telemetry.messages import say

MARKS = {Status.CONFIRMED: "●", Status.RULED_OUT: "✓", Status.SYMPTOM: "↳", Status.NO_DATA: "?"}
"""Five states, never told by colour alone."""


def present(diagnosis: Diagnosis, language: str = "en") -> list[str]:
    """The headline, the pair, the six steps in order with their evidence, then the verdicts with what to do."""
    lines = [_title(diagnosis, language), f"  {diagnosis.headline.text(language)}", *_output(diagnosis, language), ""]
    for report in diagnosis.steps:
        status = say(f"rules.status.{report.status}", language)
        lines.append(
            f"{MARKS[report.status]} {int(report.step)} {say(f'rules.step.{report.step}', language)}: {status}"
        )
        lines += [f"      {line.text(language)}" for line in report.evidence]
    for verdict in diagnosis.verdicts:
        lines += ["", *_verdict(verdict, language)]
    return lines


def present_all(diagnoses: Sequence[Diagnosis], language: str = "en", *, as_given: bool = False) -> list[str]:
    """Every pair, those with a verdict first unless `as_given`, a blank line between them."""
    if not diagnoses:
        return [say("rules.present.nothing", language)]
    ordered = diagnoses if as_given else sorted(diagnoses, key=lambda diagnosis: not diagnosis.verdicts)
    lines: list[str] = []
    for diagnosis in ordered:
        if lines:
            lines += ["", ""]
        lines += present(diagnosis, language)
    return lines


def _title(diagnosis: Diagnosis, language: str) -> str:
    if not diagnosis.at_ns:
        return say("rules.present.incident", language, name=diagnosis.subject.get("incident", "")).rstrip()
    names = [diagnosis.subject[name] for name in ("cluster", "rack", "node", "engine") if name in diagnosis.subject]
    title = say("rules.present.pair", language, place=" / ".join(names), when=_when(diagnosis.at_ns))
    return f"{title}   {not_live_mark(diagnosis.subject, language)}" if diagnosis.simulated else title


def not_live_mark(subject: Mapping[str, str], language: str) -> str:
    """What stands beside the name of a place that is simulated, or replayed from a recording."""
    key = REPLAYED if subject.get("origin") == REPLAYED else SIMULATED
    return say(f"rules.present.{key}", language)


def _output(diagnosis: Diagnosis, language: str) -> list[str]:
    if diagnosis.tokens_per_s is None or diagnosis.util_pct is None:
        return []
    effort = "GPU-Util" if any("gpu." in line.lane for step in diagnosis.steps for line in step.evidence) else "CPU"
    if diagnosis.expected_tokens_per_s is None or diagnosis.output_pct is None:
        return [
            "  "
            + say(
                "rules.present.output_only",
                language,
                tokens_per_s=diagnosis.tokens_per_s,
                effort=effort,
                util_pct=diagnosis.util_pct,
            )
        ]
    return [
        "  "
        + say(
            "rules.present.output",
            language,
            tokens_per_s=diagnosis.tokens_per_s,
            expected=diagnosis.expected_tokens_per_s,
            output_pct=diagnosis.output_pct,
            effort=effort,
            util_pct=diagnosis.util_pct,
        )
    ]


def _verdict(verdict: Verdict, language: str) -> list[str]:
    scope = say(f"rules.scope.{verdict.scope}", language)
    where = [verdict.subject[name] for name in ("rack", "node", "engine", "gpu") if name in verdict.subject]
    lines = [
        say(
            "rules.present.verdict" if where else "rules.present.verdict_told",
            language,
            cause=say(f"rules.cause.{verdict.cause}", language),
            step=int(verdict.step),
            confidence=verdict.confidence,
            scope=f"{scope} {' / '.join(where)}",
        ),
        f"  {verdict.summary.text(language)}",
    ]
    if verdict.since_ns is not None:
        lines.append(f"  {say('rules.present.since', language, when=_when(verdict.since_ns))}")
    lines += [f"    {line.text(language)}" for line in verdict.evidence]
    if verdict.fixes:
        lines.append(f"  {say('rules.present.fixes', language)}")
        lines += [f"    {fix.text(language)} ({say(f'rules.cost.{fix.cost}', language)})" for fix in verdict.fixes]
    return lines


def _when(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
