"""Lost throughput: the area between what was spent and what was yielded, as the pair lane fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dashboard.lanes import DrawnLane
from dashboard.palette import Palette
from telemetry.messages import say

LABEL_SHARE = 0.12
"""The widest gap is named when it is as wide as this part of the window, and `LABEL_PCT` high."""
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
    return [fill], [line], _label(max(polygons, key=_area), len(output.values), axis, origin, colours, name)


def _label(
    gap: Polygon, buckets: int, axis: str, origin: tuple[float, float], colours: Palette, name: str
) -> list[dict[str, Any]]:
    width = max(x for x, _ in gap) - min(x for x, _ in gap)
    if width <= LABEL_SHARE * buckets or _area(gap) / width <= LABEL_PCT:
        return []
    return [
        {
            "xref": "x",
            "x": origin[0] + origin[1] * sum(x for x, _ in gap) / len(gap),
            "yref": f"y{axis}",
            "y": sum(y for _, y in gap) / len(gap),
            "text": name,
            "showarrow": False,
            "font": {"color": colours.text["temp"], "size": 13},
        }
    ]


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


def _area(polygon: Polygon) -> float:
    pairs = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2
