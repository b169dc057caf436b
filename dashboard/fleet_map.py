"""The fleet at a glance: a heatmap of nodes by GPUs (or engines, where no GPU reports), coloured by % of expected output."""

from __future__ import annotations

from html import escape
from typing import Any

from dashboard.chart import FONT
from dashboard.fleet import Fleet, PairNow, by_number
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


def is_by_gpu(fleet: Fleet) -> bool:
    """Whether the map's rows are GPUs; else engines, numbered."""
    return any(pair.gpus for pair in fleet.pairs.values())


def gpu_count(fleet: Fleet) -> int:
    return len({(pair.key.node, gpu) for pair in fleet.pairs.values() for gpu in pair.gpus})


def cpu_hosts(fleet: Fleet) -> list[str]:
    """Nodes of which no pair has a GPU."""
    with_gpus = {pair.key.node for pair in fleet.pairs.values() if pair.gpus}
    return [node for node in fleet.nodes if node not in with_gpus]


def cells(fleet: Fleet, cpu: str) -> tuple[list[str], list[str], dict[tuple[str, str], PairNow]]:
    """Nodes by rack and name; rows from below; the pair at (node, row).

    Where rows are GPUs, pairs without one have rows of their own above them, named `cpu`.
    """
    pairs = sorted(fleet.pairs.values(), key=lambda pair: (pair.cluster, pair.rack, pair.key.node, pair.key.engine))
    nodes = list(dict.fromkeys(pair.key.node for pair in pairs))
    by_gpu = is_by_gpu(fleet)
    placed: dict[tuple[str, str], PairNow] = {}
    count: dict[str, int] = {}
    for pair in pairs:
        for gpu in pair.gpus:
            placed.setdefault((pair.key.node, gpu), pair)
        if not pair.gpus:
            before = count.get(pair.key.node, 0)
            count[pair.key.node] = before + 1
            row = str(before) if not by_gpu else cpu if not before else f"{cpu} {before + 1}"
            placed.setdefault((pair.key.node, row), pair)
    rows = sorted({row for _, row in placed}, key=by_number)
    return nodes, rows, placed


def fleet_map(fleet: Fleet, selection: Selection, chosen: PairKey | None, stale_s: float) -> dict[str, Any]:
    """The figure. A cell without a report, or without an expected value, is grey; where there is no GPU, there is no cell."""
    colours, language = palette(selection.theme), selection.language
    nodes, rows, placed = cells(fleet, say("dashboard.fleet.cpu", language))
    by_gpu = is_by_gpu(fleet)
    levels: list[list[float | None]] = []
    texts: list[list[str]] = []
    names: list[list[list[str]]] = []
    for row in rows:
        pairs = [placed.get((node, row)) for node in nodes]
        levels.append([_level(pair, fleet, stale_s) for pair in pairs])
        texts.append([_words(pair, row, fleet, stale_s, language) for pair in pairs])
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
            "shapes": _unknown_cells(nodes, rows, placed, levels, colours.unknown)
            + _frame(chosen, nodes, rows, placed, colours.ink),
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
    place = escape(str(pair.key)) + (f" · GPU {escape(gpu)}" if gpu in pair.gpus else "")
    if pair.simulated:
        place += f" · {say('dashboard.simulated.badge', language)}"
    if pair.age_s(fleet.at_ns) > stale_s:
        return f"{place}<br>{say('dashboard.fleet.no_report', language)}"
    output = (
        number(pair.output_pct, "%") if pair.output_pct is not None else say("dashboard.fleet.no_expected", language)
    )
    cause = f" · {escape(say_cause(pair.cause, language))}" if pair.cause else ""
    return f"{place}<br>{output}{cause}"


def _unknown_cells(
    nodes: list[str],
    rows: list[str],
    placed: dict[tuple[str, str], PairNow],
    levels: list[list[float | None]],
    colour: str,
) -> list[dict[str, Any]]:
    """One grey rectangle below each run of cells without a value: a heatmap draws nothing there."""
    shapes: list[dict[str, Any]] = []
    for y, (row, line) in enumerate(zip(rows, levels, strict=True)):
        unknown = [level is None and (node, row) in placed for node, level in zip(nodes, line, strict=True)]
        start = None
        for x, grey in enumerate([*unknown, False]):
            if grey and start is None:
                start = x
            elif not grey and start is not None:
                shapes.append(_rectangle(start - 0.5, x - 0.5, y, colour))
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
