"""The fleet at a glance: a heatmap of nodes by GPUs (or engines, where no GPU reports), coloured by % of expected output."""

from __future__ import annotations

from html import escape
from typing import Any

from dashboard.chart import FONT
from dashboard.fleet import Fleet, PairNow
from dashboard.marks import say_cause
from dashboard.palette import palette
from dashboard.selection import PairKey, Selection
from dashboard.units import number
from telemetry.messages import say

LOW_PCT, HIGH_PCT = 60, 120  # the ends of the colour scale; 100 is where it turns
LABELS = 16  # node names under the map, at most
FEWEST_NODES = 2


def has_map(fleet: Fleet) -> bool:
    return len(fleet.nodes) >= FEWEST_NODES


def cells(fleet: Fleet) -> tuple[list[str], list[str], dict[tuple[str, str], PairNow], bool]:
    """Nodes by rack and name; rows; the pair at (node, row); and whether rows are GPUs (else engines, numbered)."""
    pairs = sorted(fleet.pairs.values(), key=lambda pair: (pair.cluster, pair.rack, pair.key.node, pair.key.engine))
    nodes = list(dict.fromkeys(pair.key.node for pair in pairs))
    by_gpu = any(pair.gpus for pair in pairs)
    placed: dict[tuple[str, str], PairNow] = {}
    count: dict[str, int] = {}
    for pair in pairs:
        if by_gpu and pair.gpus:
            for gpu in pair.gpus:
                placed.setdefault((pair.key.node, gpu), pair)
        else:
            row = str(count.get(pair.key.node, 0))
            count[pair.key.node] = count.get(pair.key.node, 0) + 1
            placed.setdefault((pair.key.node, row), pair)
    rows = sorted(
        {row for _, row in placed}, key=lambda row: (not row.isdigit(), int(row) if row.isdigit() else 0, row)
    )
    return nodes, rows, placed, by_gpu


def fleet_map(fleet: Fleet, selection: Selection, chosen: PairKey | None, stale_s: float) -> dict[str, Any]:
    """The figure. A cell without a report, or without an expected value, is the grey of the background."""
    colours, language = palette(selection.theme), selection.language
    nodes, rows, placed, by_gpu = cells(fleet)
    levels: list[list[float | None]] = []
    texts: list[list[str]] = []
    names: list[list[list[str]]] = []
    for row in rows:
        pairs = [placed.get((node, row)) for node in nodes]
        levels.append([_level(pair, fleet, stale_s) for pair in pairs])
        texts.append([_words(pair, row if by_gpu else "", fleet, stale_s, language) for pair in pairs])
        names.append([[pair.key.node, pair.key.engine] if pair else ["", ""] for pair in pairs])
    every = max(1, -(-len(nodes) // LABELS))
    return {
        "data": [
            {
                "type": "heatmap",
                "z": levels,
                "x": list(range(len(nodes))),
                "y": list(range(len(rows))),
                "text": texts,
                "customdata": names,
                "hovertemplate": "%{text}<extra></extra>",
                "hoverongaps": True,
                "zmin": LOW_PCT,
                "zmax": HIGH_PCT,
                "colorscale": [list(stop) for stop in colours.scale],
                "xgap": 2 if len(nodes) < 80 else 1,
                "ygap": 2,
                "colorbar": {
                    "thickness": 10,
                    "outlinewidth": 0,
                    "tickvals": [60, 80, 100, 120],
                    "ticktext": ["60 %", "80 %", "100 %", "120 %"],
                    "tickfont": {"color": colours.dim, "size": 10},
                    "len": 1.1,
                },
            }
        ],
        "layout": {
            "height": min(260, max(84, 22 * len(rows))) + 34,
            "margin": {"l": 44, "r": 10, "t": 6, "b": 28},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 11, "color": colours.ink},
            "shapes": _unknown_cells(levels, colours.unknown) + _frame(chosen, nodes, rows, placed, colours.ink),
            "uirevision": "fleet",
            "dragmode": False,
            "hoverlabel": {"bgcolor": colours.paper, "font": {"family": FONT, "color": colours.ink}, "align": "left"},
            "xaxis": {
                "tickvals": list(range(0, len(nodes), every)),
                "ticktext": [escape(_short(node)) for node in nodes[::every]],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
                "range": [-0.5, len(nodes) - 0.5],
                "tickfont": {"color": colours.dim},
                "tickangle": 0,
            },
            "yaxis": {
                "title": {
                    "text": say("dashboard.fleet.gpu" if by_gpu else "dashboard.fleet.engine", language),
                    "font": {"color": colours.dim, "size": 11},
                    "standoff": 4,
                },
                "tickvals": list(range(len(rows))),
                "ticktext": [escape(row) for row in rows],
                "range": [-0.5, len(rows) - 0.5],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
                "tickfont": {"color": colours.dim},
            },
        },
    }


def _level(pair: PairNow | None, fleet: Fleet, stale_s: float) -> float | None:
    if pair is None or pair.output_pct is None or pair.age_s(fleet.at_ns) > stale_s:
        return None
    return round(pair.output_pct, 1)


def _short(node: str) -> str:
    return node if len(node) <= 14 else f"{node[:13]}…"


def _words(pair: PairNow | None, gpu: str, fleet: Fleet, stale_s: float, language: str) -> str:
    if pair is None:
        return ""
    place = escape(str(pair.key)) + (f" · GPU {escape(gpu)}" if gpu else "")
    if pair.simulated:
        place += f" · {say('dashboard.simulated.badge', language)}"
    if pair.age_s(fleet.at_ns) > stale_s:
        return f"{place}<br>{say('dashboard.fleet.no_report', language)}"
    output = (
        number(pair.output_pct, "%") if pair.output_pct is not None else say("dashboard.fleet.no_expected", language)
    )
    cause = f" · {escape(say_cause(pair.cause, language))}" if pair.cause else ""
    return f"{place}<br>{output}{cause}"


def _unknown_cells(levels: list[list[float | None]], colour: str) -> list[dict[str, Any]]:
    """One grey rectangle below each run of cells without a value: a heatmap draws nothing there."""
    shapes: list[dict[str, Any]] = []
    for row, line in enumerate(levels):
        start = None
        for place, level in enumerate([*line, 0.0]):
            if level is None and start is None:
                start = place
            elif level is not None and start is not None:
                shapes.append(_rectangle(start - 0.5, place - 0.5, row, colour))
                start = None
    return shapes


def _rectangle(left: float, right: float, row: float, colour: str) -> dict[str, Any]:
    return {
        "type": "rect",
        "xref": "x",
        "yref": "y",
        "x0": left + 0.04,
        "x1": right - 0.04,
        "y0": row - 0.46,
        "y1": row + 0.46,
        "fillcolor": colour,
        "line": {"width": 0},
        "layer": "below",
    }


def _frame(
    chosen: PairKey | None, nodes: list[str], rows: list[str], placed: dict[tuple[str, str], PairNow], colour: str
) -> list[dict[str, Any]]:
    """A line around the cells of the selected pair."""
    return [
        _rectangle(x - 0.5, x + 0.5, y, "rgba(0,0,0,0)") | {"line": {"color": colour, "width": 2}, "layer": "above"}
        for x, node in enumerate(nodes)
        for y, row in enumerate(rows)
        if (pair := placed.get((node, row))) is not None and pair.key == chosen
    ]
