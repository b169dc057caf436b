"""The table of a batch sweep as CSV: read from elsewhere, and written by a sweep, in the same columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pairscope.load_sweep.knee import Point
from pairscope.whole_file import CannotCopy
from telemetry.catalogue import REACH
from telemetry.messages import say

MOST_BYTES = 1 << 20
MOST_BATCH = 1_000_000

COLUMNS: dict[str, tuple[str, float]] = {
    "batch": ("batch", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "ttft_ms": ("ttft_p50_s", 1e-3),
    "ttft_p50_ms": ("ttft_p50_s", 1e-3),
    "ttft_p95_ms": ("ttft_p95_s", 1e-3),
    "itl_p50_ms": ("itl_p50_s", 1e-3),
    "itl_p95_ms": ("itl_p95_s", 1e-3),
    "requests": ("requests", 1.0),
    "errors": ("errors", 1.0),
    "memory_pct": ("memory_pct", 1.0),
    "kv_used_pct": ("kv_used_pct", 1.0),
    "gpu_mem_used_pct": ("gpu_mem_used_pct", 1.0),
    "power_w": ("power_w", 1.0),
    "power_used_pct": ("power_used_pct", 1.0),
    "preemptions": ("preemptions", 1.0),
}
"""Column -> (field of Point, factor to its unit)."""

WHOLE = frozenset({"batch", "requests", "errors", "preemptions"})
SHARES = frozenset({"memory_pct", "kv_used_pct", "gpu_mem_used_pct"})
WRITTEN = tuple(name for name in COLUMNS if name != "ttft_ms")


def read_table(path: Path, language: str) -> list[Point]:
    """CannotCopy, in one line with the file and the line, for what is no such table."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CannotCopy(say("load_sweep.table.unreadable", language, path=path, reason=error.strerror)) from None
    if len(data) > MOST_BYTES:
        raise CannotCopy(say("load_sweep.table.long", language, path=path, most=MOST_BYTES))
    rows = csv.reader(io.StringIO(data.decode("utf-8-sig", errors="replace")))
    try:
        names = [name.strip().lower() for name in next(rows, [])]
        missing = [name for name in ("batch", "tokens_per_s") if name not in names]
        if missing:
            raise CannotCopy(
                say("load_sweep.table.column", language, path=path, name=missing[0], known=", ".join(COLUMNS))
            )
        points = [
            _point(names, row, lambda key, **told: _wrong(path, rows.line_num, key, language, **told))
            for row in rows
            if any(row)
        ]
    except csv.Error as error:
        raise CannotCopy(say("load_sweep.table.unreadable", language, path=path, reason=error)) from None
    batches = [point.batch for point in points]
    twice = next((batch for batch in batches if batches.count(batch) > 1), None)
    if twice is not None:
        raise CannotCopy(say("load_sweep.table.twice", language, path=path, batch=twice))
    if len(points) < 2:
        raise CannotCopy(say("load_sweep.table.few", language, path=path))
    return points


def written(points: Sequence[Point]) -> str:
    """The columns that anything is known of."""
    names = [name for name in WRITTEN if any(getattr(point, COLUMNS[name][0]) is not None for point in points)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for point in points:
        writer.writerow([_cell(name, getattr(point, COLUMNS[name][0])) for name in names])
    return out.getvalue()


def _cell(name: str, value: float | None) -> str:
    return "" if value is None else f"{value / COLUMNS[name][1]:.10g}" if name not in WHOLE else str(value)


def _wrong(path: Path, line: int, key: str, language: str, **told: object) -> CannotCopy:
    return CannotCopy(say(f"load_sweep.table.{key}", language, path=path, line=line, **told))


def _point(names: Sequence[str], row: Sequence[str], wrong: Callable[..., CannotCopy]) -> Point:
    told: dict[str, float] = {}
    for name, text in zip(names, row, strict=False):
        if name not in COLUMNS or not text.strip():
            continue
        field, factor = COLUMNS[name]
        value = _number(text)
        whole = name not in WHOLE or value == math.floor(value)
        least = 1.0 if name == "batch" else 0.0
        most = MOST_BATCH if name == "batch" else 100.0 if name in SHARES else REACH
        if not (whole and least <= value <= most) or (name == "tokens_per_s" and value == 0):
            raise wrong("cell", name=name, text=text.strip()[:40])
        told[field] = int(value) if name in WHOLE else value * factor
    for name in ("batch", "tokens_per_s"):
        if name not in told:
            raise wrong("cell", name=name, text="")
    return Point(batch=int(told.pop("batch")), **told)  # type: ignore[arg-type]  # whole where Point wants it


def _number(text: str) -> float:
    """-1, which no column takes, for what is no number."""
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0
