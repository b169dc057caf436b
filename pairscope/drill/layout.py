"""How the rows of a view are laid out: names, then, now and the trend in columns that fit the width. What is cut is the oldest trend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from pairscope.drill.looks import BUCKETS, SPAN_NS, Row, sparkline

GAP, INDENT = 2, 2
LEAST_TREND = 12
LEAST_NAME = 20
"""Names get no column of their own where it would be narrower: each then stands above its numbers."""

BUCKET_MINUTES = SPAN_NS / 60e9 / BUCKETS


@dataclass(frozen=True, slots=True)
class Columns:
    """Widths in cells of a terminal; a Chinese character takes two."""

    name: int
    then: int
    now: int
    trend: int


def columns(rows: Sequence[Row], then: str, now: str, width: int) -> Columns:
    """Numbers are never cut and names not broken; what is left of `width` is the trend's, at most a letter a bucket."""
    then_wide = max(cell_len(text) for text in (then, *(row.then for row in rows)))
    now_wide = max(cell_len(text) for text in (now, *(row.now for row in rows)))
    room = width - then_wide - now_wide - 3 * GAP
    name = INDENT + max(cell_len(row.what) for row in rows)
    if name + LEAST_TREND > room:
        name = room - LEAST_TREND if room - LEAST_TREND >= LEAST_NAME else INDENT
    return Columns(name, then_wide, now_wide, max(0, min(BUCKETS, room - name)))


def laid_out(rows: Sequence[Row], width: int, said: Callable[..., str], *, plain: bool = False) -> Iterator[Text]:
    """The lines of a view, each place once above its rows. `said` gives the words of a head by key."""
    what, then, now = said("head.what"), said("head.then"), said("head.now")
    wide = columns(rows, then, now, width)
    trend = said("head.trend", minutes=round(wide.trend * BUCKET_MINUTES))
    if cell_len(trend) > wide.trend:
        trend = said("head.trend_short", minutes=round(wide.trend * BUCKET_MINUTES))
    named = _left(what, wide.name) if cell_len(what) <= wide.name else " " * wide.name
    yield Text(f"{named}{_numbers(then, now, wide)}{trend}".rstrip(), style="dim")
    for place, of_place in groupby(rows, key=lambda row: row.place):
        yield Text(place, style="bold")
        for row in of_place:
            name = " " * INDENT + row.what
            if cell_len(name) > wide.name:
                yield Text(name)
                name = ""
            line = Text(_left(name, wide.name) + _numbers(row.then, row.now, wide))
            line.append(sparkline(row.trend, plain=plain)[-wide.trend :] if wide.trend else "", style="cyan")
            yield line


def _numbers(then: str, now: str, wide: Columns) -> str:
    gap = " " * GAP
    return f"{gap}{_right(then, wide.then)}{gap}{_right(now, wide.now)}{gap}"


def _left(text: str, cells: int) -> str:
    return text + " " * max(0, cells - cell_len(text))


def _right(text: str, cells: int) -> str:
    return " " * max(0, cells - cell_len(text)) + text
