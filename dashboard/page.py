"""The page: a skeleton without words, and what fills it for one viewer's look. The browser fetches the filling and sets it."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from dashboard.chart import CONFIG, FONT, pair_chart
from dashboard.empty import empty
from dashboard.fleet import Fleet, PairNow
from dashboard.fleet_map import cells, fleet_map, has_map
from dashboard.fleet_table import columns, rows
from dashboard.selection import RANGES, SECOND_NS, PairKey
from dashboard.settings import DashboardSettings
from dashboard.steps import do_next, steps
from dashboard.strip import strip, strip_of
from dashboard.units import duration, moment
from dashboard.view import View
from telemetry.messages import LANGUAGES, say

Filling = list[tuple[str, dict[str, Any]]]

LANGUAGE_NAMES = {"en": "EN", "zh": "中文"}
GRID_OPTIONS = {
    "rowHeight": 34,
    "headerHeight": 36,
    "suppressCellFocus": False,
    "suppressMovableColumns": True,
    "animateRows": False,
    "suppressColumnVirtualisation": True,
    "domLayout": "normal",
}
EMPTY_FIGURE: dict[str, Any] = {"data": [], "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}}}
SEPARATOR = "\x1f"


def skeleton() -> Any:
    """What is there before the first look, and stays."""
    controls = html.Div(
        [
            dmc.SegmentedControl(id="range", data=[], value=None, size="xs"),
            html.Button(id="zoomed", className="button zoomed", hidden=True),
            html.Button([html.Span(className="dot"), html.Span(id="age")], id="live", className="button live"),
            dmc.SegmentedControl(id="zone", data=[], value=None, size="xs"),
            dmc.SegmentedControl(
                id="language",
                data=[{"value": name, "label": LANGUAGE_NAMES[name]} for name in LANGUAGES],
                value=None,
                size="xs",
            ),
            html.Button("☾", id="theme", className="button theme"),
            html.A(id="csv", href="window.csv", className="button", download="pairscope.csv"),
            html.Button(id="copy", className="button"),
        ],
        className="controls",
        role="toolbar",
    )
    header = html.Header(
        [
            html.H1("PairScope", className="brand"),
            html.Nav(id="crumbs", className="crumbs"),
            dmc.Select(
                id="pair", data=[], value=None, size="xs", searchable=True, limit=200, allowDeselect=False, w=250
            ),
            html.Span(id="simulated", className="simulated", hidden=True),
            controls,
        ],
        className="header",
    )
    chart = html.Section(
        [
            html.Div(id="chart-head", className="card-head"),
            html.Div(
                dcc.Graph(id="chart", figure=EMPTY_FIGURE, config=dict(CONFIG)),
                id="chart-frame",
                role="img",
                tabIndex="0",
            ),
        ],
        className="card chart-card",
        id="chart-card",
    )
    side = html.Aside(
        [html.H2(id="steps-title"), html.Div(id="steps", role="list"), html.Section(id="next", className="next")],
        id="side",
        className="side",
    )
    fleet = html.Section(
        [
            html.H2(id="fleet-title"),
            html.Div(
                dcc.Graph(id="fleet", figure=EMPTY_FIGURE, config={**CONFIG, "displayModeBar": False}),
                id="fleet-frame",
                role="img",
            ),
        ],
        id="fleet-card",
        className="card",
        hidden=True,
    )
    table = html.Section(
        [
            html.H2(id="table-title"),
            dag.AgGrid(
                id="table",
                columnDefs=[],
                rowData=[],
                getRowId="params.data.id",
                defaultColDef={"sortable": True, "resizable": True, "suppressHeaderMenuButton": True},
                dashGridOptions=GRID_OPTIONS,
                rowClassRules={"row-selected": "params.data.selected", "row-silent": "params.data.silent"},
                style={"height": "106px", "width": "100%"},
            ),
        ],
        id="table-card",
        className="card",
        hidden=True,
    )
    page = html.Div(
        [
            header,
            html.Div(id="trouble"),
            html.Div(id="strip"),
            html.Div(id="announce", className="unseen", role="status", **{"aria-live": "polite"}),
            html.Main([html.Div([chart, side], id="pair-view", className="pair-view", hidden=True), fleet, table]),
            html.Div(id="empty"),
        ],
        className="page",
    )
    return dmc.MantineProvider(page, id="mantine", theme={"fontFamily": FONT}, defaultColorScheme="auto")


def fill(view: View, settings: DashboardSettings) -> tuple[Filling, dict[str, Any]]:
    """What each part of the skeleton shows, and what the browser itself must know: names, age, words for its own labels."""
    language = view.selection.language
    fleet, pair = view.fleet, view.pair
    filling = _header(view)
    filling.append(("trouble", {"children": _trouble(view)}))
    filling.append(("strip", {"children": strip(view, settings.stale_s)}))
    filling.append(("empty", {"children": empty(view, settings)}))
    shown = pair is not None and view.history is not None
    filling.append(("pair-view", {"hidden": not shown}))
    words = strip_of(view, settings.stale_s)
    verdict = f"{words.badge}: {words.text}" if words else ""
    filling.append(("announce", {"children": verdict}))
    if pair is not None and view.history is not None:
        stale = pair.age_s(view.now_ns) > settings.stale_s
        figure = pair_chart(pair, view.history, view.selection)
        label = say("dashboard.chart.label", language, pair=pair.key, verdict=verdict)
        filling += [
            ("chart", {"figure": figure, "style": {"height": f"{figure['layout']['height']}px"}}),
            ("chart-head", {"children": _chart_head(view, pair)}),
            ("chart-frame", {"aria-label": label}),
            ("chart-card", {"className": "card chart-card stale" if stale else "card chart-card"}),
            ("steps-title", {"children": say("dashboard.steps.title", language)}),
            ("steps", {"children": steps(view)}),
            ("next", {"children": do_next(view)}),
        ]
    filling += _fleet(view, fleet, settings)
    return filling, _meta(view, settings)


def _header(view: View) -> Filling:
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
        html.Span(say("dashboard.chart.hint", language), className="dim hint"),
    ]


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
    ]
    if has_map(fleet):
        _, _, placed, by_gpu = cells(fleet)
        bad = sum(pair.cause not in ("", "none") for pair in fleet.pairs.values())
        title = say(f"dashboard.fleet.{'title' if by_gpu else 'title_engines'}", language, count=len(placed))
        map_ = fleet_map(fleet, selection, chosen, settings.stale_s)
        simulated = any(pair.simulated for pair in fleet.pairs.values())
        filling += [
            (
                "fleet-title",
                {
                    "children": [
                        html.Span(title),
                        html.Span(say("dashboard.fleet.legend", language), className="dim"),
                        html.Span(say("dashboard.simulated.badge", language), className="simulated")
                        if simulated
                        else None,
                    ]
                },
            ),
            ("fleet", {"figure": map_, "style": {"height": f"{map_['layout']['height']}px"}}),
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
        "refresh_s": settings.refresh_s,
        "offset_ms": view.selection.offset_s * 1000,
        "words": {
            name: say(f"dashboard.header.{name}", language, age="{age}")
            if name in ("live", "paused", "no_answer")
            else say(f"dashboard.header.{name}", language)
            for name in ("live", "paused", "no_answer", "copied")
        }
        | {name: say(f"dashboard.unit.{name}", language, n="{n}") for name in ("s", "min", "h", "d")},
    }
