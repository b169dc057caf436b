"""The walk, in its fixed order: what each step found, with its evidence and its odds; and below it what to do next."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboard.strip import said
from dashboard.view import View
from rules.verdict import Cost, Status, Step, StepReport
from telemetry.messages import say
from telemetry.pairs import LANES

SYMBOLS = {Status.CONFIRMED: "●", Status.SYMPTOM: "↳", Status.RULED_OUT: "✓", Status.NO_DATA: "?"}
NOT_CHECKED = "○"
EVIDENCE_LINES = 4
DRAWN = frozenset(f"{trace.measurement}.{trace.field}" for lane in LANES for trace in lane.traces)
COSTS = (Cost.SOFTWARE_CHEAP, Cost.OPERATIONS_CHEAP, Cost.HARDWARE_COSTLY)


def steps(view: View) -> list[Any]:
    """Six entries, whatever was found: what was excluded must be seen, too. Step 0, whether the numbers are true, is one line."""
    reports = {report.step: report for report in view.diagnosis.steps} if view.diagnosis else {}
    return [_step(step, reports.get(step), view.selection.language) for step in Step]


def _step(step: Step, report: StepReport | None, language: str) -> Any:
    status = str(report.status) if report else "not_checked"
    word = _word(step, report, language)
    symbol = SYMBOLS[report.status] if report else NOT_CHECKED
    lines = [(said(line, language), line.lane) for line in report.evidence] if report else []
    if not lines:
        lines = [(say("dashboard.steps.none" if report else "dashboard.steps.not_yet_text", language), "")]
    head = [
        html.Span(str(step), className="step-number"),
        html.H3(_title(step, language)),
        html.Span([html.Span(symbol, **{"aria-hidden": "true"}), f" {word}"], className="step-status"),
    ]
    body: list[Any] = [
        html.Ul(
            [_evidence(text, lane) for text, lane in lines[:EVIDENCE_LINES]],
            title="\n".join(text for text, _ in lines),
            className="step-evidence",
        )
    ]
    if report is not None and step is not Step.VALIDITY:
        body.append(_odds(report, language))
    small = " step-small" if step is Step.VALIDITY else ""
    return html.Div(
        [html.Div(head, className="step-head"), *body],
        className=f"step step-{status}{small}",
        role="listitem",
    )


def _evidence(text: str, lane: str) -> Any:
    """One sentence; where its lane is drawn, pointing at it lights the lane up."""
    name = "gpu.throttle_reasons" if lane.startswith("gpu.throttle_") else lane
    if name not in DRAWN:
        return html.Li(text)
    return html.Li(text, tabIndex="0", className="has-lane", **{"data-lane": name})


def _title(step: Step, language: str) -> str:
    return say("dashboard.steps.validity", language) if step is Step.VALIDITY else say(f"rules.step.{step}", language)


def _word(step: Step, report: StepReport | None, language: str) -> str:
    """The status in words. Of the numbers' validity one does not say that it is ruled out."""
    if report is None:
        return say("dashboard.steps.not_yet", language)
    if step is Step.VALIDITY and report.status is not Status.NO_DATA:
        return say(f"dashboard.steps.{'valid' if report.status is Status.RULED_OUT else 'doubtful'}", language)
    return say(f"rules.status.{report.status}", language)


def _odds(report: StepReport, language: str) -> Any:
    prior, posterior = 100 * report.prior, 100 * report.posterior
    return html.Div(
        [
            html.Span(say("dashboard.steps.prior", language, prior=prior), className="odds-prior"),
            html.Div(
                [
                    html.Div(className="odds-now", style={"width": f"{min(100.0, posterior):.0f}%"}),
                    html.Div(className="odds-mark", style={"left": f"{min(100.0, prior):.0f}%"}),
                ],
                className="odds-bar",
                role="img",
                **{"aria-label": say("dashboard.steps.bar", language, prior=prior, posterior=posterior)},
            ),
            html.Span(say("dashboard.steps.posterior", language, posterior=posterior), className="odds-posterior"),
        ],
        className="odds",
    )


def do_next(view: View) -> list[Any]:
    """The fixes of the likeliest verdict, cheapest first."""
    language = view.selection.language
    title = html.H3(say("dashboard.steps.next", language))
    fixes = view.diagnosis.verdicts[0].fixes if view.diagnosis and view.diagnosis.verdicts else ()
    if not fixes:
        return [title, html.P(say("dashboard.steps.next_none", language))] if view.diagnosis else []
    ordered = sorted(fixes, key=lambda fix: COSTS.index(fix.cost))
    return [
        title,
        html.Ol(
            [
                html.Li(
                    [
                        html.Span(said(fix, language)),
                        html.Span(say(f"rules.cost.{fix.cost}", language), className=f"cost cost-{fix.cost}"),
                    ]
                )
                for fix in ordered
            ]
        ),
    ]
