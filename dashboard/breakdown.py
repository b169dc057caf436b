"""Where an engine's time went over the window: one bar, a part for each stage of a token's way."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboard.history import STAGES
from dashboard.view import View
from telemetry.messages import say


def breakdown(view: View) -> list[Any]:
    """Empty where the engine does not time its stages, or did nothing in the window."""
    spent = view.history.stages if view.history is not None else {}
    known = [(name, spent[name]) for name in STAGES if spent.get(name)]
    whole = sum(seconds for _, seconds in known)
    if whole <= 0:
        return []
    language = view.selection.language
    shares = [(name, say(f"dashboard.breakdown.{name}", language), 100 * seconds / whole) for name, seconds in known]
    told = ", ".join(f"{title} {share:.0f} %" for _, title, share in shares)
    bar = [html.Span(className=f"part part-{name}", style={"width": f"{share:.2f}%"}) for name, _, share in shares]
    legend = [
        html.Li([html.Span(className=f"swatch part-{name}"), f"{title} ", html.B(_percent(share))])
        for name, title, share in shares
    ]
    return [
        html.H3(say("dashboard.breakdown.title", language)),
        html.Div(bar, className="breakdown-bar", role="img", **{"aria-label": told}),
        html.Ul(legend),
    ]


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 0.5 else "< 1 %"
