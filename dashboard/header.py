"""The header: where the pair stands, the selector of pairs, and what a viewer can choose."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboard.fleet import Fleet
from dashboard.selection import RANGES, PairKey
from dashboard.units import moment
from dashboard.view import View
from telemetry.messages import say

SEPARATOR = "\x1f"
"""Between a node's and an engine's name in the id of a choice or a row; page.js knows it, too."""


def header(view: View) -> list[tuple[str, dict[str, Any]]]:
    """Properties of the header's parts, by their ids."""
    language, selection, pair = view.selection.language, view.selection, view.pair
    places = [pair.cluster, pair.rack] if pair else []
    crumbs: list[Any] = []
    for place in places:
        if place:
            crumbs += [html.Span(place), html.Span("/", className="slash")]
    zoomed = selection.zoomed
    return [
        ("crumbs", {"children": crumbs}),
        (
            "pair",
            {
                "data": _choices(view.fleet),
                "value": _choice(pair.key) if pair else None,
                "aria-label": say("dashboard.header.pair", language),
                "nothingFoundMessage": say("dashboard.header.no_match", language),
            },
        ),
        (
            "simulated",
            {
                "children": say("dashboard.simulated.badge", language),
                "title": say("dashboard.simulated.hint", language),
                "hidden": not (pair and pair.simulated),
            },
        ),
        (
            "range",
            {
                "data": [{"value": name, "label": say(f"dashboard.range.{name}", language)} for name in RANGES],
                "value": selection.range,
                "aria-label": say("dashboard.header.range", language),
            },
        ),
        (
            "zoomed",
            {
                "children": f"✕ {_span(view)}" if zoomed else "",
                "title": say("dashboard.header.unzoom", language),
                "hidden": not zoomed,
            },
        ),
        ("live", {"title": say("dashboard.header.live_hint", language)}),
        (
            "zone",
            {
                "data": [
                    {"value": "utc", "label": say("dashboard.header.utc", language)},
                    {"value": "local", "label": say("dashboard.header.local", language)},
                ],
                "value": "local" if selection.local else "utc",
                "aria-label": say("dashboard.header.zone", language),
            },
        ),
        ("language", {"value": language, "aria-label": say("dashboard.header.language", language)}),
        (
            "theme",
            {
                "children": "☀" if selection.theme == "dark" else "☾",
                "title": say("dashboard.header.theme", language),
                "aria-label": say("dashboard.header.theme", language),
            },
        ),
        (
            "csv",
            {
                "children": say("dashboard.header.csv", language),
                "title": say("dashboard.header.csv_hint", language),
            },
        ),
        ("copy", {"children": say("dashboard.header.copy", language)}),
    ]


def _span(view: View) -> str:
    offset_s, window = view.selection.offset_s, view.window
    return say(
        "dashboard.header.zoomed",
        view.selection.language,
        start=moment(window.start_ns, offset_s),
        end=moment(window.end_ns, offset_s),
    )


def _choice(key: PairKey) -> str:
    return f"{key.node}{SEPARATOR}{key.engine}"


def _choices(fleet: Fleet | None) -> list[dict[str, str]]:
    pairs = sorted(fleet.pairs, key=str) if fleet else []
    return [{"value": _choice(key), "label": str(key)} for key in pairs]
