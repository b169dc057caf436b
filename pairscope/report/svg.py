"""Line plots as SVG: panels under one time axis, with spans, an onset, and names at the ends of their lines.

Everything that can be told by colour is told by a pattern or a name as well. Texts are escaped; nothing in it runs or loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from dashboard.palette import LIGHT
from telemetry.catalogue import REACH
from telemetry.lineprotocol import printable
from telemetry.messages import say

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 920, 62, 170, 54, 50
PANEL, ROW, GAP = 118, 20, 40
MOST_POINTS = 360  # of a line: what a screen can show
FONT = "system-ui, 'Noto Sans', 'Noto Sans SC', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
SECOND = 10**9
_FINEST = 1e-300  # below it floats lose digits, and a quarter of the least one is none

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """`points` are (wall ns, value). A `name` is written at the line's end; `dash` is an SVG dash pattern."""

    name: str
    colour: str
    points: Points
    dash: str = ""
    width: float = 1.8


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    lines: tuple[Line, ...]
    least: float | None = 0.0  # the axis reaches at least from here
    most: float | None = None  # to here


@dataclass(frozen=True, slots=True)
class Rows:
    """Bars in rows, for what is on or off: (name, colour, spans of wall ns)."""

    title: str
    rows: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    time_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """`onset_ns` to `until_ns` is shaded, to the end where that is None; nothing is without an onset."""

    title: str
    describes: str
    start_ns: int
    end_ns: int
    panels: tuple[Panel | Rows, ...]
    onset_ns: int | None = None
    until_ns: int | None = None
    marks: tuple[Mark, ...] = ()
    note: str = ""  # such as "simulated"
    language: str = "en"


@dataclass(slots=True)
class _Drawing:
    plot: Plot
    parts: list[str] = field(default_factory=list)

    def x(self, time_ns: int) -> float:
        span = max(1, self.plot.end_ns - self.plot.start_ns)
        share = (time_ns - self.plot.start_ns) / span
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        fill: str = LIGHT.ink,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}>{clean(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str, *, dash: str = "", width: float = 1.0
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"{dashed}/>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{fill}" fill-opacity="{opacity}"/>'
        )


def clean(text: str) -> str:
    return escape(printable(text))


def draw(plot: Plot) -> str:
    """The whole file. No panel: ValueError."""
    if not plot.panels:
        raise ValueError("a plot needs a panel")
    drawing = _Drawing(plot)
    heights = [PANEL if isinstance(panel, Panel) else ROW * len(panel.rows) for panel in plot.panels]
    total = TOP + sum(heights) + GAP * (len(heights) - 1) + BOTTOM + 10
    bottom = total - BOTTOM
    drawing.box(0, 0, WIDTH, total, LIGHT.paper)
    drawing.text(LEFT, 20, plot.title, size=15, bold=True)
    if plot.note:
        drawing.text(WIDTH - 14, 20, plot.note, anchor="end", fill=LIGHT.problem, bold=True)
    _time_axis(drawing, TOP, bottom)
    _shade(drawing, TOP, bottom)
    y = float(TOP)
    for panel, height in zip(plot.panels, heights, strict=True):
        if isinstance(panel, Panel):
            _panel(drawing, panel, y)
        else:
            _rows(drawing, panel, y)
        y += height + GAP
    _mark(drawing, TOP, bottom)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:.0f}" width="{WIDTH}" height="{total:.0f}" '
        f'role="img" font-family={quoteattr(FONT)}>'
    )
    about = f"<title>{clean(plot.title)}</title><desc>{clean(plot.describes)}</desc>"
    return "\n".join((head, about, *drawing.parts, "</svg>")) + "\n"


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round values from at or below `low` to at or above `high`, about `most` of them."""
    span = high - low
    if span < _FINEST:
        span = abs(high) if abs(high) > _FINEST else 1.0
    raw = span / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` points: of each bucket of time its lowest and its highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = max(1, (last - first) // (most // 2) + 1)
    buckets: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        buckets.setdefault((point[0] - first) // width, []).append(point)
    found: list[tuple[int, float]] = []
    for bucket in buckets.values():
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        found += sorted(ends)
    return found


def pieces(points: Points) -> list[list[tuple[int, float]]]:
    """Cut where readings are missing: at more than four times the usual distance, and at least 15 s."""
    if len(points) < 2:
        return [list(points)] if points else []
    apart = sorted(after[0] - before[0] for before, after in pairwise(points))
    most = max(4 * apart[len(apart) // 2], 15 * SECOND)
    found = [[points[0]]]
    for before, point in pairwise(points):
        if point[0] - before[0] > most:
            found.append([])
        found[-1].append(point)
    return found


def _time_axis(drawing: _Drawing, top: float, bottom: float) -> None:
    plot = drawing.plot
    span_s = max(1.0, (plot.end_ns - plot.start_ns) / SECOND)
    step = next(
        (step for step in TIME_STEPS_S if span_s / step <= 7), TIME_STEPS_S[-1] * math.ceil(span_s / 7 / 86_400)
    )
    form = "%m-%d %H:%M" if span_s > 86_400 else "%H:%M:%S" if step < 60 else "%H:%M"
    at = math.ceil(plot.start_ns / SECOND / step) * step
    while at * SECOND <= plot.end_ns:
        x = drawing.x(at * SECOND)
        drawing.line(x, top, x, bottom, LIGHT.grid)
        drawing.text(
            x, bottom + 16, datetime.fromtimestamp(at, UTC).strftime(form), anchor="middle", size=11, fill=LIGHT.dim
        )
        at += step
    day = datetime.fromtimestamp(plot.start_ns / 1e9, UTC).strftime("%Y-%m-%d")
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawing.text(
        middle, bottom + 34, say("report.plot.time", plot.language, day=day), anchor="middle", size=11, fill=LIGHT.dim
    )


def _shade(drawing: _Drawing, top: float, bottom: float) -> None:
    plot = drawing.plot
    if plot.onset_ns is None:
        return
    first, last = drawing.x(plot.onset_ns), drawing.x(plot.end_ns if plot.until_ns is None else plot.until_ns)
    drawing.box(first, top, last - first, bottom - top, LIGHT.problem, 0.06)


def _mark(drawing: _Drawing, top: float, bottom: float) -> None:
    """The onset above all panels, and events where there is room beside it."""
    plot = drawing.plot
    taken: list[tuple[float, float]] = []
    if plot.onset_ns is not None:
        x = drawing.x(plot.onset_ns)
        drawing.line(x, top - 6, x, bottom, LIGHT.problem, dash="5 3", width=1.5)
        when = datetime.fromtimestamp(plot.onset_ns / 1e9, UTC).strftime("%H:%M:%S")
        told = say("report.plot.onset", plot.language, when=when)
        drawing.text(x + 4, top - 18, told, size=11, fill=LIGHT.problem, bold=True)
        taken.append((x, x + 8 + 8 * _wide(told)))
    for mark in plot.marks:
        x = drawing.x(mark.time_ns)
        drawing.line(x, top - 4, x, bottom, LIGHT.dim, dash="1 3", width=1.2)
        drawing.parts.append(f'<path d="M{x - 4:.1f} {top - 4} h8 l-4 6 z" fill="{LIGHT.dim}"/>')
        end = x + 8 + 7 * _wide(mark.text)
        level = top - 18 if not any(x < right and end > left for left, right in taken) else 0
        if level and end < WIDTH:
            drawing.text(x + 4, level, mark.text, size=11, fill=LIGHT.dim)
            taken.append((x, end))


def _wide(text: str) -> int:
    """How many half-width letters `text` is about as wide as."""
    return sum(2 if ord(letter) > 0x2E7F else 1 for letter in text)


def _panel(drawing: _Drawing, panel: Panel, y: float) -> None:
    plot = drawing.plot
    shown = [
        (line, [(t, v) for t, v in line.points if plot.start_ns <= t <= plot.end_ns and abs(v) <= REACH])
        for line in panel.lines
    ]
    values = [value for _, points in shown for _, value in points]
    bounds = [bound for bound in (panel.least, panel.most) if bound is not None]
    low, high = min((*values, *bounds), default=0.0), max((*values, *bounds), default=1.0)
    marks = ticks(low, high)
    low, high = marks[0], marks[-1]

    def place(value: float) -> float:
        return y + PANEL - (value - low) / (high - low) * PANEL

    unit = panel.title if panel.title.endswith(panel.unit) else f"{panel.title}, {panel.unit}"
    drawing.text(LEFT, y - 6, unit, bold=True)
    for mark in marks:
        drawing.line(LEFT, place(mark), WIDTH - RIGHT, place(mark), LIGHT.grid)
        drawing.text(LEFT - 6, place(mark) + 4, f"{mark:,.10g}", anchor="end", size=11, fill=LIGHT.dim)
    drawing.line(LEFT, y, LEFT, y + PANEL, LIGHT.dim)
    names: list[tuple[float, str, str, str]] = []
    for line, points in shown:
        for piece in pieces(thinned(points)):
            path = " ".join(f"{drawing.x(t):.1f},{place(v):.1f}" for t, v in piece)
            dashed = f' stroke-dasharray="{line.dash}"' if line.dash else ""
            drawing.parts.append(
                f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="{line.width}" '
                f'stroke-linejoin="round"{dashed}/>'
            )
        if points and line.name:
            names.append((place(points[-1][1]), line.name, line.colour, line.dash))
    _names(drawing, names, y)


def _names(drawing: _Drawing, names: Iterable[tuple[float, str, str, str]], top: float) -> None:
    """At the lines' ends, moved apart where they would touch; each behind a piece of its line."""
    ordered = sorted(names)
    places = [max(entry[0], top + 6 + 15 * place) for place, entry in enumerate(ordered)]
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + 15)
    over = places[-1] - (top + PANEL) if places else 0.0
    for place in range(len(places) - 1, -1, -1):
        limit = top + PANEL - 15 * (len(places) - 1 - place)
        if over > 0:
            places[place] = min(places[place], limit)
    x = WIDTH - RIGHT + 6
    for (_, name, colour, dash), y in zip(ordered, places, strict=True):
        drawing.line(x, y, x + 20, y, colour, dash=dash, width=2.4)
        drawing.text(x + 25, y + 4, name, size=11, fill=LIGHT.ink)


def _rows(drawing: _Drawing, panel: Rows, y: float) -> None:
    plot = drawing.plot
    drawing.text(LEFT, y - 6, panel.title, bold=True)
    for place, (name, colour, spans) in enumerate(panel.rows):
        top = y + place * ROW
        drawing.line(LEFT, top + ROW - 2, WIDTH - RIGHT, top + ROW - 2, LIGHT.grid)
        for first, last in spans:
            if last < plot.start_ns or first > plot.end_ns:
                continue
            x = drawing.x(first)
            drawing.box(x, top + 3, max(drawing.x(last) - x, 1.5), ROW - 8, colour)
        drawing.text(WIDTH - RIGHT + 6, top + 14, name, size=11)
