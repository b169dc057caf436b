"""What happened, on the chart: bands of incidents through all lanes, and markers of deploys, restarts and other events."""

from __future__ import annotations

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
LABEL_SHARE = 0.07
"""Of the width: labels of marks that are nearer to each other than this would overlap, and only the first is written."""


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


def event_marks(
    history: History, selection: Selection, layout: dict[str, Any], colours: Palette
) -> list[dict[str, Any]]:
    """A dotted line and a label for each event, a red label at each incident's start; and the marker that tells of it on hover."""
    language, offset_ms = selection.language, selection.offset_s * 1000
    marks: list[tuple[int, str, str, bool]] = []  # time, label, words, is an incident
    for incident in history.incidents[-BANDS:]:
        cause = say_cause(incident.cause, language)
        label = f"▼ {moment(incident.start_ns, selection.offset_s)[:5]} {cause}"
        marks.append((incident.start_ns, label, "", True))
    for event in list(history.events)[-LINES:]:
        kind = event.tags.get("kind", "")
        name = say(f"dashboard.event.{kind}", language) if kind in EVENT_KINDS else kind
        text = str(event.fields.get("text", ""))[:TEXT_LIMIT]
        marks.append((event.time_ns, f"◆ {name}", f"{name}: {text}" if text else name, False))
    marks.sort(key=lambda mark: (not mark[3], mark[0]))
    written: list[float] = []
    window = history.window
    for time_ns, label, _, incident_ in marks:
        x = time_ns / 1e6 + offset_ms
        share = (time_ns - window.start_ns) / max(1, window.end_ns - window.start_ns)
        if not incident_:
            layout["shapes"].append(
                {
                    "type": "line",
                    "xref": "x",
                    "x0": x,
                    "x1": x,
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": colours.dim, "width": 1, "dash": "dot"},
                    "layer": "below",
                }
            )
        if all(abs(share - other) > LABEL_SHARE for other in written):
            written.append(share)
            layout["annotations"].append(
                {
                    "xref": "x",
                    "x": x,
                    "yref": "paper",
                    "y": 1,
                    "yanchor": "bottom",
                    "xanchor": "left" if share < 0.85 else "right",
                    "xshift": -5 if share < 0.85 else 5,
                    "text": escape(label),
                    "showarrow": False,
                    "font": {"color": colours.problem if incident_ else colours.dim, "size": 11},
                }
            )
    told = [mark for mark in marks if not mark[3]]
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
