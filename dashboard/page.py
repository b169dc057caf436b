"""The page's skeleton: what is there before the first look and stays. It holds no words; `filling` brings them."""

from __future__ import annotations

from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from dashboard.chart import CONFIG, FONT
from telemetry.messages import LANGUAGES

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
                [
                    html.Div(
                        dcc.Graph(id="chart", figure=EMPTY_FIGURE, config=dict(CONFIG)),
                        id="chart-frame",
                        role="img",
                        tabIndex="0",
                    ),
                    html.Div(id="glow", className="glow"),
                ],
                className="chart-stage",
            ),
            html.Div(id="breakdown", className="breakdown"),
        ],
        className="card chart-card",
        id="chart-card",
    )
    side = html.Aside(
        [
            html.H2(id="steps-title"),
            html.Div(id="steps", role="list"),
            html.Section(id="next", className="next"),
        ],
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
            html.Main(
                [
                    html.Div([chart, side], id="pair-view", className="pair-view", hidden=True),
                    html.Div(id="empty"),
                    html.Div([fleet, table], id="fleet-view"),
                ]
            ),
        ],
        className="page",
    )
    return dmc.MantineProvider(page, id="mantine", theme={"fontFamily": FONT}, defaultColorScheme="auto")
