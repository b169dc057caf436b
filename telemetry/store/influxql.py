"""InfluxQL: names and texts put into a statement, conditions on tags and times, and the series of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from telemetry import lineprotocol
from telemetry.sample import Sample
from telemetry.store.interface import Where


class NoAnswer(ValueError):
    """What came is no answer to a statement, not even an error."""


def results(text: str) -> list[dict[str, Any]]:
    """The series of a /query answer. ValueError with the server's words when it holds an error, NoAnswer when it is none."""
    return each_result(text)[0]


def each_result(text: str) -> list[list[dict[str, Any]]]:
    """The series of every statement (at least one) of a /query answer. ValueError as `results`."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        raise NoAnswer from None
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or not results:
        error = answer.get("error") if isinstance(answer, dict) else None
        raise ValueError(str(error)) if error else NoAnswer
    return [_series(result) for result in results]


def _series(result: object) -> list[dict[str, Any]]:
    if isinstance(result, dict) and "error" in result:
        raise ValueError(str(result["error"]))
    series = result.get("series", []) if isinstance(result, dict) else None
    if not isinstance(series, list) or not all(map(_is_series, series)):
        raise NoAnswer
    return series


def _is_series(found: object) -> bool:
    """Whether it has columns and rows of them, with whole numbers for times; what else stands in a cell is for who asked."""
    if not isinstance(found, dict) or not isinstance(found.get("tags", {}), dict):
        return False
    columns, rows = found.get("columns"), found.get("values")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return False
    if not all(type(row) is list and len(row) == len(columns) for row in rows):
        return False
    return columns[:1] != ["time"] or all(type(row[0]) is int for row in rows)


def identifier(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def conditions(where: Where | None) -> Iterable[str]:
    """One for each tag, for a `where` that is not `impossible`."""
    for name, wanted in (where or {}).items():
        yield "(" + " OR ".join(f"{identifier(name)} = {literal(value)}" for value in storable(wanted)) + ")"


def impossible(where: Where | None) -> bool:
    """Whether nothing can meet it: a tag that is to have one of no values, or of values that no tag ever has."""
    return any(not storable(wanted) for wanted in (where or {}).values())


def storable(wanted: str | Iterable[str]) -> list[str]:
    """Without what no store takes as a tag; the server can't even read a statement with a line break in a text."""
    return [value for value in ([wanted] if isinstance(wanted, str) else wanted) if _may_be_tag(value)]


@lru_cache(maxsize=16384)
def _may_be_tag(value: str) -> bool:
    try:
        lineprotocol.encode(Sample("x", {"x": value}, {"x": 0}, 0))
    except ValueError:
        return False
    return True


def condition(span: tuple[int, int], where: Where | None = None) -> str:
    """Of the times `span[0] <= time < span[1]` and of tags."""
    return " AND ".join([f"time >= {span[0]} AND time < {span[1]}", *conditions(where)])


def tags_of(series: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: value for name, value in series.get("tags", {}).items() if value}
