"""The pair chart: all lanes over one time axis, as the plain dict that plotly draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dashboard.fleet import PairNow
from dashboard.history import History
from dashboard.lanes import Curve, DrawnLane, drawn_lanes, throttle
from dashboard.lost import lost_throughput
from dashboard.marks import bands, event_marks
from dashboard.palette import Palette, palette
from dashboard.reasons import reason_rows, reason_traces
from dashboard.selection import Selection
from dashboard.units import number, zone_name
from telemetry.messages import say

Figure = dict[str, Any]

LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 186, 92, 40, 36
GAP_PX = 14
LEAST_PX, MOST_PX = 560, 900  # per 1.0 of the lanes' shares
AIM_PX = 600  # of all lanes together, where there are few
SMALL_PX = 80  # a lower lane gets three ticks
FONT = "Inter, 'Noto Sans', 'Noto Sans SC', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', system-ui, sans-serif"
CONFIG: Mapping[str, object] = {
    "displaylogo": False,
    "showSendToCloud": False,  # plotly's default would offer to upload the data
    "plotlyServerURL": "",
    "displayModeBar": False,
    "doubleClick": "autosize",
    "responsive": True,
    "scrollZoom": False,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane lies: its axis id ("" for the first), and its part of the height from the bottom, 0..1."""

    axis: str
    low: float
    high: float
    height_px: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def pair_chart(pair: PairNow, history: History, selection: Selection) -> Figure:
    """The figure. Times are epoch ms shifted to the viewer's zone, because plotly knows none; `layout.meta` says by how much."""
    colours, language = palette(selection.theme), selection.language
    lanes = drawn_lanes(pair, history, language)
    window = history.window
    offset_ms = selection.offset_s * 1000
    start_ms, step_ms = window.start_ns / 1e6 + offset_ms, window.step_ns / 1e6
    end_ms = window.end_ns / 1e6 + offset_ms
    reasons = throttle(history) if any(lane.name == "reasons" for lane in lanes) else {}
    rows = reason_rows(reasons)
    places, height_px = _places(lanes, len(rows))
    traces: list[Figure] = []
    layout: Figure = {
        "height": height_px + TOP_PX + BOTTOM_PX,
        "margin": {"l": LEFT_PX, "r": RIGHT_PX, "t": TOP_PX, "b": BOTTOM_PX},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11, "color": colours.ink},
        "showlegend": False,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "hoverlabel": {
            "namelength": -1,
            "bgcolor": colours.paper,
            "bordercolor": colours.grid,
            "font": {"family": FONT, "size": 12, "color": colours.ink},
        },
        "dragmode": "zoom",
        "uirevision": f"{pair.key}|{selection.range}",
        "meta": {"offset_ms": offset_ms, "lanes": _whereabouts(lanes, places)},
        "shapes": [],
        "annotations": [],
        "xaxis": _time_axis(colours, selection, start_ms, end_ms, places),
    }
    origin = (start_ms, step_ms)
    for lane, place in zip(lanes, places, strict=True):
        name = f"yaxis{place.axis}"
        if lane.name == "reasons":
            layout[name] = _axis(place, colours) | reason_rows_axis(rows, language, colours)
            traces += reason_traces(rows, reasons, place.axis, origin, language, colours)
            continue
        layout[name] = _axis(place, colours) | _range(lane)
        if lane.name == "pair":
            lost, shapes, notes = lost_throughput(lane, place.axis, origin, colours, language)
            traces += lost
            layout["shapes"] += shapes
            layout["annotations"] += notes
        traces += [_line(curve, place.axis, origin, colours) for curve in lane.curves]
        layout["annotations"] += _labels(lane, place, colours)
    layout["shapes"] += bands(history, offset_ms, colours)
    traces += event_marks(history, selection, layout, colours)
    if pair.simulated:
        layout["annotations"].append(_badge(language, colours))
    layout["annotations"].append(
        _note(zone_name(selection.zone, selection.offset_s), 0, 0, colours.dim, xshift=-8, yshift=-22, xanchor="right")
    )
    return {"data": traces, "layout": layout}


def _places(lanes: Sequence[DrawnLane], reasons: int) -> tuple[list[Place], int]:
    """Lanes from top to bottom, in the shares that they ask for; the height of all in pixels."""
    total = sum(lane.share for lane in lanes) or 1.0
    scale = min(MOST_PX, max(LEAST_PX, AIM_PX / total))
    heights = [max(lane.share * scale, 17.0 * reasons if lane.name == "reasons" else 0.0) for lane in lanes]
    whole = sum(heights) + GAP_PX * max(0, len(lanes) - 1)
    places: list[Place] = []
    top = whole
    for number_, height in enumerate(heights):
        axis = "" if number_ == 0 else str(number_ + 1)
        places.append(Place(axis, max(0.0, (top - height) / whole), min(1.0, top / whole), height))
        top -= height + GAP_PX
    return places, math.ceil(whole)


def _whereabouts(lanes: Sequence[DrawnLane], places: Sequence[Place]) -> dict[str, list[float]]:
    """Field -> top and bottom of its lane in px from the figure's top, so that the page can point at what evidence speaks of."""
    whole = sum(place.height_px for place in places) + GAP_PX * max(0, len(places) - 1)
    found: dict[str, list[float]] = {}
    for lane, place in zip(lanes, places, strict=True):
        names = [f"{curve.measurement}.{curve.field}" for curve in lane.curves]
        for name in names or ["gpu.throttle_reasons"]:
            found.setdefault(name, [round(TOP_PX + (1 - edge) * whole) for edge in (place.high, place.low)])
    return found


def _time_axis(
    colours: Palette, selection: Selection, start_ms: float, end_ms: float, places: Sequence[Place]
) -> Figure:
    return {
        "type": "date",
        "range": [start_ms, end_ms],
        # a new span replaces the viewer's zoom; the same one keeps it
        "uirevision": f"{selection.pair}|{selection.range}|{selection.start_ms}|{selection.end_ms}|{selection.offset_s}",
        "anchor": "free",
        "position": 0,
        "gridcolor": colours.grid,
        "linecolor": colours.grid,
        "showline": True,
        "zeroline": False,
        "tickfont": {"color": colours.dim, "size": 11},
        "tickformatstops": [
            {"dtickrange": [None, 60_000], "value": "%H:%M:%S"},
            {"dtickrange": [60_000, 86_400_000], "value": "%H:%M"},
            {"dtickrange": [86_400_000, None], "value": "%m-%d"},
        ],
        "hoverformat": "%Y-%m-%d %H:%M:%S",
        "showspikes": True,
        "spikemode": "across",
        "spikesnap": "hovered data",
        "spikethickness": 1,
        "spikedash": "solid",
        "spikecolor": colours.dim,
        "nticks": 9,
    }


def _axis(place: Place, colours: Palette) -> Figure:
    return {
        "domain": [place.low, place.high],
        "anchor": "x",
        "fixedrange": True,
        "gridcolor": colours.grid,
        "zeroline": False,
        "nticks": 3 if place.height_px < SMALL_PX else 5,
        "tickfont": {"color": colours.dim, "size": 10},
    }


def reason_rows_axis(rows: Sequence[str], language: str, colours: Palette) -> Figure:
    """Row names in place of numbers; the first reason on top."""
    return {
        "range": [len(rows) - 0.5, -0.5],
        "tickmode": "array",
        "tickvals": list(range(len(rows))),
        "ticktext": [say(f"dashboard.reason.{name}", language) for name in rows],
        "showgrid": False,
        "tickfont": {"color": colours.ink, "size": 11},
    }


def _range(lane: DrawnLane) -> Figure:
    """A range that leaves room, holds the limits, and starts at zero where zero says something."""
    values = [value for curve in lane.curves for value in curve.values if value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if lane.name == "pair":
        floor = max(0.0, math.floor((low - 4) / 10) * 10)
        return {"range": [min(60.0, floor), min(200.0, max(110.0, math.ceil((high + 4) / 10) * 10))]}
    if lane.curves[0].unit == "%":
        return {"range": [min(0.0, low) - 3, max(100.0, high) + 3], "tickvals": [0, 50, 100]}
    if lane.name in ("temperature", "inlet", "clock"):
        room = max(1.0, 0.12 * (high - low))
        return {"range": [low - room, high + room]}
    return {"range": [0 - 0.04 * max(high, 1), 1.12 * max(high, 1)]}


def _line(curve: Curve, axis: str, origin: tuple[float, float], colours: Palette) -> Figure:
    limit = curve.role == "limit"
    first = curve.role == "tokens" and curve.field == "output_pct"
    colour = colours.problem if limit and curve.field == "temp_limit_c" else colours.line[curve.role]
    line: Figure = {"color": colour, "width": 2.4 if first else 1.1 if limit else 1.5}
    if limit:
        line["dash"] = "dash"
    trace: Figure = {
        "type": "scatter",
        "mode": "lines",
        "x0": origin[0],
        "dx": origin[1],
        "y": [None if value is None else _rounded(value) for value in curve.values],
        "xaxis": "x",
        "yaxis": f"y{axis}",
        "name": curve.title if not curve.which else f"{curve.title} ({curve.which})",
        "line": line,
        "connectgaps": False,
        "hovertemplate": f"%{{y:,.5~r}}{_unit(curve)}",
    }
    if curve.role == "queue":
        trace |= {"fill": "tozeroy", "fillcolor": _faint(colour)}
    return trace


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.25)"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _labels(lane: DrawnLane, place: Place, colours: Palette) -> list[Figure]:
    """What the lane shows, on its left; what it reads now, on its right."""
    large = lane.name == "pair"
    names: list[str] = []
    readings: list[str] = []
    for curve in lane.curves:
        colour = colours.text[curve.role]
        if curve.role == "limit":
            names.append(_span(f"┄ {curve.title}", colour, 10))
            continue
        title = f"{curve.title}{_unit(curve)}"
        names.append(_span(f"<b>{title}</b>" if large else title, colour))
        if curve.which:
            names.append(_span(curve.which, colours.dim, 10))
        reading = number(curve.last, curve.unit if curve.unit == "%" else _unit(curve).strip())
        readings.append(_span(f"<b>{reading}</b>", colour if curve.last is not None else colours.dim))
    label = _note("<br>".join(names), 0, place.middle, colours.ink, xshift=-44, xanchor="right", align="right")
    now = _note("<br>".join(readings), 1, place.middle, colours.ink, xshift=8, xanchor="left", align="left")
    now["font"] = {"color": colours.ink, "size": 19 if large else 13}
    label["font"] = {"color": colours.ink, "size": 12 if large else 11}
    return [label, now]


def _unit(curve: Curve) -> str:
    """The unit, unless the title says it."""
    return "" if not curve.unit or curve.unit in curve.title else f" {curve.unit}"


def _span(text: str, colour: str, size: int = 0) -> str:
    style = f"color:{colour}" + (f";font-size:{size}px" if size else "")
    return f'<span style="{style}">{text}</span>'


def _badge(language: str, colours: Palette) -> Figure:
    """Above the names of the lanes, where no line can run through it."""
    text = f"<b>{escape(say('dashboard.simulated.badge', language))}</b>"
    note = _note(text, 0, 1, colours.on_simulated, xshift=-44, yshift=8, xanchor="right")
    return note | {"yanchor": "bottom", "bgcolor": colours.simulated, "borderpad": 3}


def _note(text: str, x: float, y: float, colour: str, **more: object) -> Figure:
    return {
        "xref": "paper",
        "yref": "paper",
        "x": x,
        "y": y,
        "text": text,
        "showarrow": False,
        "font": {"color": colour, "size": 11},
        **more,
    }
