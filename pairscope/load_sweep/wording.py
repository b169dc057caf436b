"""A judged sweep for people: its table, and the recommendation in words with its reasons and what was not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.table import Table

from pairscope.load_sweep.knee import Judged, Point, at, elasticity
from telemetry.messages import say

BAR = 12
"""Half-width letters of the longest bar of the chart in the terminal."""

Shown = Callable[[Point], str]


def _number(value: float | None, form: str = ".0f", factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:{form}}"


def _pair(one: float | None, other: float | None, factor: float, form: str = ".0f") -> str:
    if other is None:
        return _number(one, form, factor)
    return f"{_number(one, form, factor)} / {_number(other, form, factor)}"


COLUMNS: dict[str, Shown] = {
    "tokens": lambda point: f"{point.tokens_per_s:,.1f}",
    "ttft": lambda point: _pair(point.ttft_p50_s, point.ttft_p95_s, 1e3),
    "itl": lambda point: _pair(point.itl_p50_s, point.itl_p95_s, 1e3, ".1f"),
    "requests": lambda point: _number(point.requests),
    "errors": lambda point: _number(point.errors),
    "memory": lambda point: _number(point.memory_pct),
    "kv": lambda point: _number(point.kv_used_pct),
    "gpu_memory": lambda point: _number(point.gpu_mem_used_pct),
    "power": lambda point: _number(point.power_w),
    "power_share": lambda point: _number(point.power_used_pct),
    "preemptions": lambda point: _number(point.preemptions),
}
"""Name of a column (`load_sweep.column` has the words) -> what stands in it."""


def rows(points: Sequence[Point], language: str, *, short: bool = False) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, batch first; only columns that anything is known of, and the elasticity from the point before.

    `short`: without those that a narrow terminal has no room for, and that say only that all went well.
    """
    known = {name: shown for name, shown in COLUMNS.items() if any(shown(point) for point in points)}
    if short:
        known.pop("requests", None)
        for name in ("errors", "preemptions"):
            if all(getattr(point, name) in (0, None) for point in points):
                known.pop(name, None)
    heads = [say(f"load_sweep.column.{name}", language) for name in ("batch", *known, "elasticity")]
    gains = ["", *(f"{elasticity(before, after):.2f}" for before, after in pairwise(points))]
    cells = [
        [str(point.batch), *(shown(point) for shown in known.values()), gain]
        for point, gain in zip(points, gains, strict=True)
    ]
    return heads, cells


def table(points: Sequence[Point], language: str, recommended: int | None = None) -> Table:
    """With a bar for tokens/s, so that the bend is seen; the recommended batch, where it was measured, is marked."""
    heads, cells = rows(points, language, short=True)
    made = Table(box=None, pad_edge=False)
    for head in heads:
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    most = max((point.tokens_per_s for point in points), default=1.0)
    for point, row in zip(points, cells, strict=True):
        mark = " <-" if point.batch == recommended else ""
        made.add_row(*row, "█" * max(1, round(BAR * point.tokens_per_s / most)) + mark)
    return made


def advice(judged: Judged, language: str) -> list[str]:
    """The recommendation first, then where the knee lies, what else stood in the way, and what was not known."""
    return [
        _headline(judged, language),
        _knee(judged, language),
        *_reasons(judged, language),
        *_unknown(judged, language),
    ]


def _headline(judged: Judged, language: str) -> str:
    batch = judged.recommended
    if batch is None:
        return say("load_sweep.advice.none", language, batch=judged.points[0].batch)
    tokens = at(judged.points, batch, lambda point: point.tokens_per_s)
    ttft = at(judged.points, batch, lambda point: point.ttft_s)
    measured = any(point.batch == batch for point in judged.points)
    key = "recommended" if measured else "recommended_between"
    rate = f"{tokens or 0.0:,.{1 if (tokens or 0.0) < 100 else 0}f}"
    told = say(f"load_sweep.advice.{key}", language, batch=batch, tokens=rate)
    if ttft is not None:
        told += say("load_sweep.advice.with_ttft", language, ttft_ms=ttft * 1e3)
    return told


def _knee(judged: Judged, language: str) -> str:
    knee, least = judged.knee, judged.limits.elasticity
    if knee is None:
        last = elasticity(*judged.points[-2:])
        return say("load_sweep.advice.no_knee", language, batch=judged.points[-1].batch, elasticity=last, least=least)
    key = "falls" if knee.elasticity <= 0 else "start" if knee.at_start and knee.above > 1 else "knee"
    told = {"above": knee.above, "upto": knee.upto, "elasticity": knee.elasticity, "least": least}
    return say(f"load_sweep.advice.{key}", language, **told)


def _reasons(judged: Judged, language: str) -> list[str]:
    found = []
    for cap in judged.caps:
        limit = cap.limit * 1e3 if cap.what == "ttft" else cap.limit
        key = f"load_sweep.advice.{cap.what}" + ("" if cap.batch else "_always")
        found.append(say(key, language, limit=limit, batch=int(cap.batch)))
    first = next((point for point in judged.points if point.preemptions), None)
    if first is not None:
        found.append(say("load_sweep.advice.preempted", language, batch=first.batch, count=first.preemptions))
    return found


def _unknown(judged: Judged, language: str) -> list[str]:
    found = [say(f"load_sweep.unknown.{what}", language) for what in judged.unknown]
    if judged.limits.ttft_s is None:
        found.append(say("load_sweep.unknown.no_ttft_limit", language))
    return found
