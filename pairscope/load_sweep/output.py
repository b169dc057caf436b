"""A judged sweep as files and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pairscope.load_sweep import plot, table
from pairscope.load_sweep.knee import Judged, Point
from pairscope.load_sweep.wording import advice, rows
from pairscope.whole_file import CannotCopy, WholeFile, refuse_unless_new
from telemetry.lineprotocol import printable
from telemetry.messages import say

SUFFIXES = (".svg", ".md", ".csv")


def refuse_place(path: Path, *, force: bool, language: str) -> None:
    """CannotCopy before anything is measured, for what can't be written afterwards."""
    if path.suffix not in SUFFIXES:
        raise CannotCopy(say("load_sweep.mistake.suffix", language, path=path))
    refuse_unless_new(path, force=force, language=language)


def write(
    path: Path, judged: Judged | None, points: Sequence[Point], title: str, *, force: bool, language: str
) -> None:
    """By the file's suffix. `judged` is None for fewer than two points, which only a table can hold."""
    if path.suffix == ".csv":
        text = table.written(points)
    elif judged is None:
        raise CannotCopy(say("load_sweep.mistake.too_few", language, path=path))
    elif path.suffix == ".svg":
        text = plot.draw(judged, title, language)
    else:
        text = markdown(judged, title, language)
    with WholeFile(path, force=force, language=language) as file:
        file.write(text.encode("utf-8"))


def markdown(judged: Judged, title: str, language: str) -> str:
    heads, cells = rows(judged.points, language)
    lines = [f"# {printable(title)}", ""]
    first, *others = advice(judged, language)
    lines += [f"**{first}**", "", *(f"- {line}" for line in others), ""]
    heads = [head.replace("\n", " ") for head in heads]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---:|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines) + "\n"


def as_json(judged: Judged | None, points: Sequence[Point], language: str, **more: object) -> dict[str, object]:
    """What is not known is left out of a point."""
    told: dict[str, object] = {
        **more,
        "points": [{name: value for name, value in asdict(point).items() if value is not None} for point in points],
    }
    if judged is not None:
        told |= {
            "knee": asdict(judged.knee) if judged.knee else None,
            "recommended": judged.recommended,
            "decided_by": judged.decided_by,
            "limits": asdict(judged.limits),
            "caps": [asdict(cap) for cap in judged.caps],
            "unknown": list(judged.unknown),
            "advice": advice(judged, language),
        }
    return told
