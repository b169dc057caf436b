"""What the page says when there is nothing to draw: why, and what to do about it."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboard.selection import NAME_LIMIT, SECOND_NS
from dashboard.settings import DashboardSettings
from dashboard.units import duration, moment
from dashboard.view import View
from telemetry.messages import say

ENGINE_EXAMPLE = '[[agent.engines]]\nname = "chat"\nurl = "http://127.0.0.1:8000"'


def empty(view: View, settings: DashboardSettings) -> list[Any]:
    """A card that teaches; nothing where everything can be drawn."""
    language = view.selection.language
    forget = duration(settings.forget_s, language)
    if view.fleet is None:
        return [_card("store", language, text=say("dashboard.empty.store_text", language, reason=view.problem))]
    if not view.fleet.pairs:
        return [
            _card(
                "nothing",
                language,
                text=say("dashboard.empty.nothing_text", language, age=forget),
                code="pairscope agent",
                more=say("dashboard.empty.nothing_more", language),
                more_code="pairscope up",
            )
        ]
    if view.pair is None:
        name = str(view.selection.pair)[:NAME_LIMIT]
        return [_card("gone", language, text=say("dashboard.empty.gone_text", language, age=forget), pair=name)]
    if view.history is not None and not view.history.columns:
        offset_s, window = view.selection.offset_s, view.window
        text = say(
            "dashboard.empty.window_text",
            language,
            pair=view.pair.key,
            start=moment(window.start_ns, offset_s, day=True),
            end=moment(window.end_ns, offset_s, day=True),
        )
        if view.pair.age_s(view.now_ns) <= settings.stale_s and not view.selection.zoomed:
            step = duration(window.step_ns / SECOND_NS, language)
            text = say("dashboard.empty.filling_text", language, pair=view.pair.key, step=step)
        return [_card("window", language, text=text)]
    if not view.pair.key.engine:
        text = say("dashboard.empty.engine_text", language)
        return [_card("engine", language, text=text, code=ENGINE_EXAMPLE, node=view.pair.key.node)]
    return []


def _card(
    name: str, language: str, *, text: str, code: str = "", more: str = "", more_code: str = "", **values: str
) -> Any:
    parts = [html.H2(say(f"dashboard.empty.{name}_title", language, **values)), html.P(text)]
    if code:
        parts.append(html.Pre(code))
    if more:
        parts += [html.P(more), html.Pre(more_code)]
    return html.Section(parts, className="card empty")
