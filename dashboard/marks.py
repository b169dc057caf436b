"""What happened, on the chart: bands of incidents through all lanes, and markers of deploys, restarts and other events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dashboard.history import History
from dashboard.palette import Palette
from dashboard.selection import Selection
from dashboard.units import moment
from telemetry.catalogue import EVENT_KINDS
from telemetry.messages import say

BANDS = 20
LINES = 30
TEXT_LIMIT = 200
ROWS = 2
ROW_PX = 13
PLOT_PX = 640
"""The lanes' width on a small screen; on a wider one labels have more room between them."""
NARROW_PX, WIDE_PX = 6.4, 11.5
"""Of a letter in a label, and of a Chinese character."""
LAST_SHARE = 0.8
"""Right of it a label ends at its mark: it would else run out of the figure."""


def bands(history: History, offset_ms: int, colours: Palette) -> list[dict[str, Any]]:
    """One translucent rectangle for each incident, the newest ones."""
    return [
        {
            "type": "rect",
            "xref": "x",
            "x0": incident.start_ns / 1e6 + offset_ms,
            "x1": incident.end_ns / 1e6 + offset_ms,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "fillcolor": colours.band,
            "line": {"width": 0},
            "layer": "below",
        }
        for incident in history.incidents[-BANDS:]
    ]


@dataclass(frozen=True, slots=True)
class _Label:
    """Where a label stands: from `left` to `right`, in shares of the lanes' width; row 0 is the lowest."""

    text: str
    left: float
    right: float
    row: int


def _room(share: float, text: str, written: Sequence[_Label]) -> _Label | None:
    """The lowest row where the label overlaps no other; None when there is none, or the same words stand there already."""
    width = sum(NARROW_PX if ord(letter) < 0x2E80 else WIDE_PX for letter in text) / PLOT_PX
    left, right = (share, share + width) if share < LAST_SHARE else (share - width, share)
    near = [label for label in written if left < label.right and label.left < right]
    if any(label.text == text for label in near):
        return None
    taken = {label.row for label in near}
    free = next((row for row in range(ROWS) if row not in taken), None)
    return None if free is None else _Label(text, left, right, free)


def _above(x: float, text: str, colour: str, raised_px: int, anchor: str) -> dict[str, Any]:
    """A text above the lanes, at a time of its own."""
    return {
        "xref": "x",
        "x": x,
        "yref": "paper",
        "y": 1,
        "yanchor": "bottom",
        "yshift": raised_px,
        "xanchor": anchor,
        "xshift": {"left": -5, "right": 5}.get(anchor, 0),
        "text": escape(text),
        "showarrow": False,
        "borderpad": 0,
        "font": {"color": colour, "size": 11},
    }


def _dotted(x: float, colour: str) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": colour, "width": 1, "dash": "dot"},
        "layer": "below",
    }


def event_marks(
    history: History, selection: Selection, layout: dict[str, Any], colours: Palette
) -> list[dict[str, Any]]:
    """A dotted line and a label for each event, a red label at each incident's start; and the marker that tells of it on hover."""
    language, offset_ms = selection.language, selection.offset_s * 1000
    marks: list[tuple[int, str, str, bool]] = []  # time, label, words, is an incident
    for incident in history.incidents[-BANDS:]:
        cause = say_cause(incident.cause, language)
        label = f"{moment(incident.start_ns, selection.offset_s)[:5]} {cause}"
        marks.append((incident.start_ns, label, "", True))
    for event in list(history.events)[-LINES:]:
        kind = event.tags.get("kind", "")
        name = say(f"dashboard.event.{kind}", language) if kind in EVENT_KINDS else kind
        text = str(event.fields.get("text", ""))[:TEXT_LIMIT]
        marks.append((event.time_ns, f"◆ {name}", f"{name}: {text}" if text else name, False))
    marks.sort(key=lambda mark: (mark[3], mark[0]), reverse=True)  # where there is no room, the older label goes
    written: list[_Label] = []
    window = history.window
    for time_ns, label, _, incident_ in marks:
        x = time_ns / 1e6 + offset_ms
        share = (time_ns - window.start_ns) / max(1, window.end_ns - window.start_ns)
        colour = colours.problem if incident_ else colours.dim
        if incident_:
            layout["annotations"].append(_above(x, "▼", colour, 0, "center"))
        else:
            layout["shapes"].append(_dotted(x, colours.dim))
        place = _room(share, label, written)
        if place is not None:
            written.append(place)
            anchor = "left" if share < LAST_SHARE else "right"
            layout["annotations"].append(_above(x, label, colour, ROW_PX * (place.row + 1) - 3, anchor))
    told = [mark for mark in reversed(marks) if not mark[3]]
    if not told:
        return []
    top = layout["yaxis"].get("range", [0, 1])[1]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [time_ns / 1e6 + offset_ms for time_ns, *_ in told],
            "y": [top] * len(told),
            "xaxis": "x",
            "yaxis": "y",
            "text": [escape(words) for _, _, words, _ in told],
            "hovertemplate": "%{text}",
            "marker": {"symbol": "diamond", "size": 7, "color": colours.dim},
            "cliponaxis": False,
            "name": say("dashboard.chart.event", language),
        }
    ]


def say_cause(cause: str, language: str) -> str:
    """A cause as a label; one that a newer triage wrote is shown as it is."""
    try:
        words = say(f"rules.cause.{cause}", language)
    except KeyError:
        return cause
    return words[:1].upper() + words[1:]
