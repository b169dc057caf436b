"""The lane of throttle reasons: one heatmap whose rows are reasons, as strong as the share of the time spent in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dashboard.history import Values
from dashboard.palette import Palette
from telemetry.messages import say
from telemetry.pairs import THROTTLE_REASONS

ALWAYS = 4
"""The reasons that are judged come first in THROTTLE_REASONS and always have their row; others only when they occur."""
FAINTEST = 0.35


def reason_rows(reasons: Mapping[str, Values]) -> list[str]:
    """The reasons that get a row, top to bottom."""
    if not reasons:
        return []
    names = [name for _, name in THROTTLE_REASONS]
    return [
        name
        for place, name in enumerate(names)
        if place < ALWAYS or any(share is not None and share > 0 for share in reasons.get(name, ()))
    ]


def reason_traces(
    rows: Sequence[str],
    reasons: Mapping[str, Values],
    axis: str,
    origin: tuple[float, float],
    language: str,
    colours: Palette,
) -> list[dict[str, Any]]:
    """The heatmap, and an unseen line that carries its words into the common tooltip.

    One heatmap holds rows of different colours: row k's shares lie in k..k+1 of the scale, and what is not known above all.
    """
    count = len(rows)
    top = count + 1
    order = [name for _, name in THROTTLE_REASONS]
    scale: list[list[object]] = []
    for place, name in enumerate(rows):
        colour = colours.reasons[order.index(name)]
        scale.append([place / top, _mixed(colour, FAINTEST)])
        scale.append([(place + 0.999) / top, _mixed(colour, 1.0)])
    scale += [[count / top, _mixed(colours.unknown, 0.5)], [1.0, _mixed(colours.unknown, 0.5)]]
    cells = [[_level(place, share, count) for share in reasons.get(name, ())] for place, name in enumerate(rows)]
    titles = [say(f"dashboard.reason.{name}", language) for name in rows]
    words = [_words(titles, [reasons[name][i] for name in rows], language) for i in range(len(cells[0]))]
    common = {"x0": origin[0], "dx": origin[1], "xaxis": "x", "yaxis": f"y{axis}"}
    return [
        {
            "type": "heatmap",
            **common,
            "z": cells,
            "y": list(range(count)),
            "zmin": 0,
            "zmax": top,
            "colorscale": scale,
            "showscale": False,
            "hoverinfo": "skip",
            "ygap": 3,
            "name": "",
        },
        {
            "type": "scatter",
            "mode": "lines",
            **common,
            "y": [(count - 1) / 2] * len(words),
            "text": words,
            "line": {"width": 0, "color": colours.line["temp"]},
            "opacity": 0,
            "hovertemplate": "%{text}",
            "name": say("dashboard.chart.throttle", language),
        },
    ]


def _level(row: int, share: float | None, count: int) -> float | None:
    if share is None:
        return count + 0.5
    return round(row + 0.002 + 0.99 * share, 3) if share > 0 else None


def _words(titles: Sequence[str], shares: Sequence[float | None], language: str) -> str:
    if all(share is None for share in shares):
        return say("dashboard.chart.unknown", language)
    seen = [
        f"{title} {100 * share:.0f} %"
        for title, share in zip(titles, shares, strict=True)
        if share is not None and share > 0
    ]
    return ", ".join(seen) or say("dashboard.chart.no_throttle", language)


def _mixed(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {opacity})"
