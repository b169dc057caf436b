"""What fills the page's skeleton for one viewer's look, part by part. The browser fetches it and sets it."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboard.breakdown import breakdown
from dashboard.chart import pair_chart
from dashboard.empty import empty
from dashboard.figures import of_when
from dashboard.fleet import Fleet, PairNow
from dashboard.fleet_map import cpu_hosts, fleet_map, gpu_count, has_map, is_by_gpu
from dashboard.fleet_table import columns, rows
from dashboard.header import header
from dashboard.selection import SECOND_NS
from dashboard.settings import DashboardSettings
from dashboard.steps import do_next, steps
from dashboard.strip import strip, strip_of
from dashboard.units import duration
from dashboard.view import View
from telemetry.messages import say

Filling = list[tuple[str, dict[str, Any]]]

BESIDE_NODES = 4
NODE_PX, FRAME_PX = 56, 150  # of the fleet map: a node, and what stands around


def fill(view: View, settings: DashboardSettings) -> tuple[Filling, dict[str, Any]]:
    """What each part of the skeleton shows, and what the browser itself must know: names, age, words for its own labels."""
    language = view.selection.language
    fleet, pair = view.fleet, view.pair
    filling = header(view)
    filling.append(("trouble", {"children": _trouble(view)}))
    filling.append(("strip", {"children": strip(view, settings.stale_s)}))
    filling.append(("empty", {"children": empty(view, settings)}))
    shown = pair is not None and view.history is not None
    stale = pair is not None and pair.age_s(view.now_ns) > settings.stale_s
    filling.append(("pair-view", {"hidden": not shown, "className": "pair-view stale" if stale else "pair-view"}))
    words = strip_of(view, settings.stale_s)
    verdict = f"{words.badge}: {words.text}" if words else ""
    filling.append(("announce", {"children": verdict}))
    if pair is not None and view.history is not None:
        figure = pair_chart(pair, view.history, view.selection)
        label = say("dashboard.chart.label", language, pair=pair.key, verdict=verdict)
        filling += [
            ("chart", {"figure": figure, "style": {"height": f"{figure['layout']['height']}px"}}),
            ("chart-head", {"children": _chart_head(view, pair)}),
            ("chart-frame", {"aria-label": label}),
            ("steps-title", {"children": _steps_title(view)}),
            ("steps", {"children": steps(view)}),
            ("next", {"children": do_next(view)}),
            ("breakdown", {"children": breakdown(view)}),
        ]
    filling += _fleet(view, fleet, settings)
    return filling, _meta(view, settings)


def _trouble(view: View) -> Any:
    """The store can't be read: said above everything, beside what was last read."""
    if not view.problem or view.fleet is None:
        return []
    language = view.selection.language
    age = duration((view.now_ns - view.fleet.at_ns) / SECOND_NS, language)
    return html.Div(
        [
            html.Span(say("dashboard.empty.store_title", language), className="strip-badge"),
            html.Span(
                f"{view.problem} · {say('dashboard.empty.store_stale', language, age=age)}", className="strip-words"
            ),
        ],
        className="strip strip-unknown",
        role="alert",
    )


def _chart_head(view: View, pair: PairNow) -> list[Any]:
    language = view.selection.language
    about = " · ".join(part for part in (pair.model, f"GPU {'+'.join(pair.gpus)}" if pair.gpus else "") if part)
    return [
        html.H2(say("dashboard.chart.title", language)),
        html.Span(f"{pair.key} · {about}" if about else str(pair.key), className="dim"),
        html.Span(say("dashboard.simulated.badge", language), className="simulated") if pair.simulated else None,
        html.Span(
            say(f"dashboard.chart.{'partial' if view.history and view.history.partial else 'hint'}", language),
            className="dim hint",
        ),
    ]


def _steps_title(view: View) -> list[Any]:
    when = of_when(view)
    title = say("dashboard.steps.title", view.selection.language)
    return [title, html.Span(when, className="figures-of") if when else None]


def _map_title(fleet: Fleet, language: str) -> str:
    """How many GPUs there are, and hosts without any; of a fleet without GPUs, how many engines."""
    if not is_by_gpu(fleet):
        return say("dashboard.fleet.title_engines", language, count=len(fleet.pairs))
    hosts = len(cpu_hosts(fleet))
    name = ("title", "title_host")[hosts] if hosts < 2 else "title_hosts"
    return say(f"dashboard.fleet.{name}", language, count=gpu_count(fleet), hosts=hosts)


def _fleet(view: View, fleet: Fleet | None, settings: DashboardSettings) -> Filling:
    language, selection = view.selection.language, view.selection
    if fleet is None or not fleet.pairs:
        return [("fleet-card", {"hidden": True}), ("table-card", {"hidden": True})]
    chosen = view.pair.key if view.pair else None
    filling: Filling = [
        ("table-card", {"hidden": False}),
        ("table-title", {"children": say("dashboard.table.title", language)}),
        (
            "table",
            {
                "columnDefs": columns(language),
                "rowData": rows(fleet, chosen, language, settings.stale_s),
                "style": {"height": f"{38 + 34 * min(12, len(fleet.pairs)) + 2}px", "width": "100%"},
            },
        ),
        ("fleet-card", {"hidden": not has_map(fleet)}),
        ("fleet-view", _beside(fleet)),
    ]
    if has_map(fleet):
        bad = sum(pair.cause not in ("", "none") for pair in fleet.pairs.values())
        map_ = fleet_map(fleet, selection, chosen, settings.stale_s)
        simulated = any(pair.simulated for pair in fleet.pairs.values())
        filling += [
            (
                "fleet-title",
                {
                    "children": [
                        html.Span(_map_title(fleet, language)),
                        html.Span(say("dashboard.fleet.legend", language), className="dim"),
                        html.Span(say("dashboard.simulated.badge", language), className="simulated")
                        if simulated
                        else None,
                    ]
                },
            ),
            ("fleet", {"figure": map_, "style": _map_size(fleet, map_)}),
            (
                "fleet-frame",
                {
                    "aria-label": say(
                        "dashboard.fleet.label",
                        language,
                        count=len(fleet.pairs),
                        nodes=len(fleet.nodes),
                        bad=bad,
                    )
                },
            ),
        ]
    return filling


def _beside(fleet: Fleet) -> dict[str, Any]:
    """A map of few nodes stands beside the table; a wide one above it."""
    count = len(fleet.nodes)
    if not has_map(fleet) or count > BESIDE_NODES:
        return {"className": "fleet-view", "style": {}}
    return {
        "className": "fleet-view beside",
        "style": {"gridTemplateColumns": f"{FRAME_PX + 20 + NODE_PX * max(count, 3)}px minmax(0, 1fr)"},
    }


def _map_size(fleet: Fleet, map_: dict[str, Any]) -> dict[str, str]:
    return {
        "height": f"{map_['layout']['height']}px",
        "width": "100%",
        "maxWidth": f"{FRAME_PX + NODE_PX * max(len(fleet.nodes), 3)}px",
    }


def _meta(view: View, settings: DashboardSettings) -> dict[str, Any]:
    """`age_s` is that of the newest sample of the pair's node; `words` are what the browser prints on its own."""
    language, pair = view.selection.language, view.pair
    if pair is None:
        title = say("dashboard.page.title_empty", language)
    else:
        title = say(f"dashboard.page.{'title_simulated' if pair.simulated else 'title'}", language, pair=pair.key)
    return {
        "node": pair.key.node if pair else None,
        "engine": pair.key.engine if pair else None,
        "range": view.selection.range,
        "tz": "local" if view.selection.local else "utc",
        "lang": language,
        "age_s": round(pair.age_s(view.now_ns), 1) if pair else None,
        "title": title,
        "trouble": bool(view.problem),
        "refresh_s": settings.refresh_s,
        "stale_s": settings.stale_s,
        "offset_ms": view.selection.offset_s * 1000,
        "words": {
            name: say(f"dashboard.header.{name}", language, age="{age}")
            if name != "copied"
            else say(f"dashboard.header.{name}", language)
            for name in ("live", "paused", "no_answer", "no_store", "copied")
        }
        | {name: say(f"dashboard.unit.{name}", language, n="{n}") for name in ("s", "min", "h", "d")},
    }
