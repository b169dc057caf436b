"""Lost throughput: the area between what was spent and what was yielded, as the pair lane fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.lanes import DrawnLane
from dashboard.palette import Palette
from telemetry.messages import say

LABEL_SHARE = 0.12
"""The largest gap is named where there is room: over this part of the window, and `LABEL_PCT` high."""
LABEL_PCT = 9

Polygon = list[tuple[float, float]]
Parts = tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]


def lost_throughput(lane: DrawnLane, axis: str, origin: tuple[float, float], colours: Palette, language: str) -> Parts:
    """Traces, shapes and annotations: a line at 100 %, and the fill wherever utilisation lies above output.

    Nothing is filled where either is not known. `origin` is the first bucket's time and the step, both in ms.
    """
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "yref": f"y{axis}",
        "y0": 100,
        "y1": 100,
        "line": {"color": colours.dim, "width": 1, "dash": "dot"},
        "layer": "below",
    }
    output = next((curve for curve in lane.curves if curve.field == "output_pct"), None)
    util = next((curve for curve in lane.curves if curve.field == "util_pct"), None)
    if output is None or util is None:
        return [], [line], []
    polygons = gap_polygons(output.values, util.values)
    if not polygons:
        return [], [line], []
    xs: list[float | None] = []
    ys: list[float | None] = []
    for polygon in polygons:
        xs += [*(round(origin[0] + x * origin[1]) for x, _ in polygon), None]
        ys += [*(round(y, 1) for _, y in polygon), None]
    name = say("dashboard.chart.lost", language)
    fill = {
        "type": "scatter",
        "mode": "lines",
        "x": xs[:-1],
        "y": ys[:-1],
        "xaxis": "x",
        "yaxis": f"y{axis}",
        "fill": "toself",
        "fillcolor": colours.lost,
        "line": {"width": 0},
        "hoverinfo": "skip",
        "name": name,
    }
    label = label_place(output.values, util.values)
    notes = []
    if label is not None:
        notes.append(
            {
                "xref": "x",
                "x": origin[0] + origin[1] * label[0],
                "yref": f"y{axis}",
                "y": label[1],
                "text": name,
                "showarrow": False,
                "font": {"color": colours.text["temp"], "size": 13},
            }
        )
    return [fill], [line], notes


def label_place(output: Sequence[float | None], util: Sequence[float | None]) -> tuple[float, float] | None:
    """Bucket and % of where the name fits: in the middle of the stretch whose narrowest gap is the widest of all. None: nowhere."""
    gaps = [0.0 if o is None or u is None else u - o for o, u in zip(output, util, strict=True)]
    width = max(2, int(LABEL_SHARE * len(gaps)))
    starts = range(0, max(1, len(gaps) - width), max(1, width // 8))
    start = max(starts, key=lambda place: min(gaps[place : place + width], default=0.0))
    stretch = range(start, min(start + width, len(gaps)))
    if min((gaps[place] for place in stretch), default=0.0) < LABEL_PCT:
        return None
    low = max(value for place in stretch if (value := output[place]) is not None)
    high = min(value for place in stretch if (value := util[place]) is not None)
    return start + width / 2, (low + high) / 2


def gap_polygons(output: Sequence[float | None], util: Sequence[float | None]) -> list[Polygon]:
    """Closed outlines (bucket, %) of where `util` is above `output`, cut at the crossings and at every hole in either."""
    found: list[Polygon] = []
    top: Polygon = []
    bottom: Polygon = []

    def close() -> None:
        if len(top) > 1:
            found.append([*top, *reversed(bottom)])
        top.clear()
        bottom.clear()

    before: tuple[float, float] | None = None
    for place, (low, high) in enumerate(zip(output, util, strict=True)):
        if low is None or high is None:
            close()
            before = None
            continue
        if before is not None and (before[1] > before[0]) != (high > low):
            was, now = before[1] - before[0], high - low
            share = was / (was - now)
            level = before[0] + share * (low - before[0])
            top.append((place - 1 + share, level))
            bottom.append((place - 1 + share, level))
            if high <= low:
                close()
        if high > low:
            top.append((place, high))
            bottom.append((place, low))
        before = (low, high)
    close()
    return found
