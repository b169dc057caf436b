"""The report as data: what the Markdown says, with its numbers unrounded and its sentences in one language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pairscope import __version__
from pairscope.moment import iso
from pairscope.report.content import Report, Told, commands_of
from pairscope.report.markdown import checks_of, title_of
from pairscope.report.plots import Drawn
from pairscope.report.wording import quantity
from rules.course import Course, Incident
from rules.verdict import Line, Status, Verdict
from telemetry.messages import say

Plain = dict[str, object]


def as_json(report: Report, plots: Mapping[int, Sequence[Drawn]], language: str) -> Plain:
    """Times in ISO 8601, money in `currency`; null is: not known."""
    return {
        "version": __version__,
        "language": language,
        "title": title_of(report, language),
        "source": report.source,
        "from": iso(report.from_ns),
        "to": iso(report.end_ns),
        "not_live": sorted(report.origins),
        "bad_lines": report.bad_lines,
        "price_per_gpu_hour": report.settings.price_per_gpu_hour,
        "currency": report.settings.currency,
        "incidents": [
            _incident(incident)
            | (_told(report, report.told[place], plots.get(place, ()), language) if place < len(report.told) else {})
            for place, incident in enumerate(report.incidents)
        ],
        "other_pairs": [_other(course, language) for course in report.others],
    }


def _incident(incident: Incident) -> Plain:
    verdict = incident.verdict
    return {
        "cause": str(incident.cause),
        "step": int(verdict.step),
        "confidence": verdict.confidence,
        "scope": incident.scope,
        "subject": dict(incident.subject),
        "since": iso(incident.since_ns),
        "until": None if incident.until_ns is None else iso(incident.until_ns),
        "pairs": [
            {
                "subject": dict(struck.course.last.subject),
                "gpus": struck.gpus,
                "output_pct": struck.spell.diagnosis.output_pct,
                "util_pct": struck.spell.diagnosis.util_pct,
                "tokens_per_s": struck.spell.diagnosis.tokens_per_s,
                "expected_tokens_per_s": struck.spell.diagnosis.expected_tokens_per_s,
                "loss_tokens_per_s": struck.spell.verdict.loss_tokens_per_s,
                "lost_tokens": struck.lost.tokens,
            }
            for struck in incident.struck
        ],
    }


def _told(report: Report, told: Told, plots: Sequence[Drawn], language: str) -> Plain:
    cost = told.cost
    return {
        "summary": told.incident.verdict.summary.text(language),
        "loss": {
            "pct": cost.loss_pct,
            "tokens_per_s": cost.tokens_per_s,
            "tokens": cost.tokens,
            "gpu_hours": cost.gpu_hours,
            "known_s": cost.known_s,
            "unknown_s": cost.unknown_s,
            "money_per_hour": cost.money_per_hour,
            "money": cost.money,
            "price_per_million_before": cost.per_million_before,
            "price_per_million_during": cost.per_million_during,
        },
        "paired": [
            {
                "side": row.side,
                "lane": row.lane,
                "text": quantity(row, told.worst.gpus, language),
                "unit": row.unit,
                "before": row.before,
                "during": row.during,
                "change_pct": row.change_pct,
                "limit" if row.is_limit else "expected": row.expected,
            }
            for row in told.rows
        ],
        "evidence": _lines(told.incident.verdict.evidence, language),
        "straggler": told.straggler.text(language) if told.straggler else None,
        "coupling": told.coupling.text(language) if told.coupling else None,
        "ruled_out": _steps(told, Status.RULED_OUT, language),
        "no_data": _steps(told, Status.NO_DATA, language),
        "symptoms": _steps(told, Status.SYMPTOM, language),
        "competing": [_competing(verdict, language) for verdict in told.competing],
        "timeline": [{"time": iso(entry.time_ns), "text": entry.what.text(language)} for entry in told.timeline],
        "timeline_left_out": told.left_out,
        "fix": [{"cost": str(fix.cost), "text": fix.text(language)} for fix in told.fixes],
        "check": [sentence.replace("`", "") for sentence in checks_of(told, language)],
        "commands": commands_of(told, report.file, report.store),
        "plots": [plot.name for plot in plots],
    }


def _lines(lines: Sequence[Line], language: str) -> list[Plain]:
    return [{"text": line.text(language), "lane": line.lane, "values": dict(line.values)} for line in lines]


def _steps(told: Told, status: Status, language: str) -> list[Plain]:
    return [
        {
            "step": int(report.step),
            "text": say(f"rules.step.{report.step}", language),
            "because": [line.text(language) for line in report.told_as(status)],
        }
        for report in told.steps
        if report.status is status or report.told_as(status)
    ]


def _competing(verdict: Verdict, language: str) -> Plain:
    return {"cause": str(verdict.cause), "confidence": verdict.confidence, "summary": verdict.summary.text(language)}


def _other(course: Course, language: str) -> Plain:
    last = course.last
    return {
        "subject": dict(last.subject),
        "output_pct": last.output_pct,
        "tokens_per_s": last.tokens_per_s,
        "expected_tokens_per_s": last.expected_tokens_per_s,
        "state": last.headline.text(language),
    }
