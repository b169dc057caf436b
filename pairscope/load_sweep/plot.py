"""The plot of a batch sweep as SVG: tokens/s and TTFT over the batch, the knee shaded, the recommendation marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from xml.sax.saxutils import quoteattr

from dashboard.palette import LIGHT
from pairscope.load_sweep.knee import Judged, Point
from pairscope.load_sweep.wording import advice
from pairscope.report.svg import FONT, clean, ticks
from telemetry.messages import say

WIDTH, LEFT, RIGHT, TOP, PANEL, GAP, BOTTOM = 760, 70, 30, 78, 190, 46, 52

Lines = Sequence[tuple[str, str, str, Callable[[Point], float | None]]]
"""(name, colour, dash, value) of each line."""


def draw(judged: Judged, title: str, language: str) -> str:
    """The whole file. The batch is on a scale of doublings, on which a knee is seen as a bend wherever it lies."""
    panels: list[tuple[str, Lines]] = [
        ("tokens", [("", LIGHT.line["tokens"], "", lambda point: point.tokens_per_s)]),
    ]
    ttft: Lines = [
        ("p50", LIGHT.line["temp"], "", lambda point: _ms(point.ttft_p50_s)),
        ("p95", LIGHT.line["temp"], "5 3", lambda point: _ms(point.ttft_p95_s)),
    ]
    if any(value(point) is not None for *_, value in ttft for point in judged.points):
        panels.append(("ttft", ttft))
    height = TOP + len(panels) * PANEL + (len(panels) - 1) * GAP + BOTTOM
    parts = [f'<rect width="{WIDTH}" height="{height}" fill="{LIGHT.paper}"/>']
    parts.append(_text(LEFT, 22, title, size=15, bold=True))
    parts += _marks(judged, height - BOTTOM, language)
    for place, (name, lines) in enumerate(panels):
        parts += _panel(judged.points, say(f"load_sweep.plot.{name}", language), lines, TOP + place * (PANEL + GAP))
    for point in _apart(judged.points):
        parts.append(_text(_x(judged, point.batch), height - BOTTOM + 16, str(point.batch), anchor="middle", size=11))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, height - BOTTOM + 36, say("load_sweep.plot.batch", language), anchor="middle"))
    about = f"<title>{clean(title)}</title><desc>{clean(' '.join(advice(judged, language)))}</desc>"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family={quoteattr(FONT)}>'
    )
    return "\n".join((head, about, *parts, "</svg>")) + "\n"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _x(judged: Judged, batch: float) -> float:
    return _across(judged.points, batch)


def _across(points: Sequence[Point], batch: float) -> float:
    first, last = math.log(points[0].batch), math.log(points[-1].batch)
    return LEFT + (math.log(batch) - first) / (last - first) * (WIDTH - LEFT - RIGHT)


def _apart(points: Sequence[Point]) -> list[Point]:
    """Those whose numbers don't touch under the axis, the first one and the larger ones before."""
    found = [points[0]]
    for point in points[1:]:
        if _across(points, point.batch) - _across(points, found[-1].batch) > 6 * len(str(point.batch)) + 10:
            found.append(point)
    return found


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = LIGHT.ink, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{clean(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-dasharray="{dash or "none"}"/>'


def _marks(judged: Judged, bottom: float, language: str) -> list[str]:
    parts = []
    if judged.knee is not None:
        first, last = _x(judged, judged.knee.above), _x(judged, judged.knee.upto)
        place = f'x="{first:.1f}" y="{TOP}" width="{last - first:.1f}" height="{bottom - TOP:.1f}"'
        parts.append(f'<rect {place} fill="{LIGHT.problem}" fill-opacity="0.08"/>')
        told = say("load_sweep.plot.knee", language, above=judged.knee.above, upto=judged.knee.upto)
    else:
        told = say("load_sweep.plot.no_knee", language, batch=judged.points[-1].batch)
    parts.append(_text(WIDTH - RIGHT, 22, told, anchor="end", fill=LIGHT.problem))
    if judged.recommended is not None:
        x = _x(judged, judged.recommended)
        parts.append(_line(x, TOP - 8, x, bottom, LIGHT.ink, "4 3"))
        told = say("load_sweep.plot.recommended", language, batch=judged.recommended)
        anchor = "end" if x > WIDTH / 2 else "start"
        parts.append(_text(x, TOP - 24, told, anchor=anchor, bold=True))
    return parts


def _panel(points: Sequence[Point], title: str, lines: Lines, top: float) -> list[str]:
    values = [found for *_, value in lines for point in points if (found := value(point)) is not None]
    scale = ticks(0.0, max(values))
    parts = [_text(LEFT, top - 6, title, bold=True)]

    def y(value: float) -> float:
        return top + PANEL * (1 - value / scale[-1])

    for mark in scale:
        parts.append(_line(LEFT, y(mark), WIDTH - RIGHT, y(mark), LIGHT.grid))
        parts.append(_text(LEFT - 6, y(mark) + 4, f"{mark:,.10g}", anchor="end", size=11, fill=LIGHT.dim))
    for name, colour, dash, value in lines:
        places = [(_across(points, point.batch), y(found)) for point in points if (found := value(point)) is not None]
        parts += [_line(x1, y1, x2, y2, colour, dash) for (x1, y1), (x2, y2) in pairwise(places)]
        parts += [f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3" fill="{colour}"/>' for x, at in places]
        if places and name:
            parts.append(_text(places[-1][0] + 5, places[-1][1] + 4, name, size=11, fill=LIGHT.dim))
    return parts
