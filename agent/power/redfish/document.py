"""Document: one JSON answer of a BMC, and what can be taken from it when anything may stand anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

ROWS_LIMIT = 128
"""Entries of a list that are looked at. A node has tens of sensors, fans and supplies."""

TEXT_LIMIT = 128
PATH_LIMIT = 512

_NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d{1,12})?", re.ASCII)
_PATH = re.compile(r"/(?!/)[\x21-\x7e]*", re.ASCII)

NOTHING: Json = {}


class NotADocument(ValueError):
    """The body is not one JSON object."""


def parse(body: bytes) -> Json:
    """NotADocument for anything but a JSON object that the parser takes (it refuses nesting beyond its depth)."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotADocument(type(error).__name__) from None
    if not isinstance(parsed, dict):
        raise NotADocument(type(parsed).__name__)
    return parsed


def table(value: object) -> Json:
    """The object itself; an empty one for anything else."""
    return value if isinstance(value, dict) else NOTHING


def rows(value: object) -> list[Json]:
    """The objects of a list, as many as are looked at."""
    return [entry for entry in value[:ROWS_LIMIT] if isinstance(entry, dict)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A finite number, also one that is written as a string; None for null, "N/A", NaN, true and the rest."""
    if isinstance(value, str):
        value = float(value) if len(value) <= 32 and _NUMBER.fullmatch(value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive(value: object) -> float | None:
    """A number above 0: where 0 is how a BMC says that it does not know."""
    found = number(value)
    return found if found is not None and found > 0 else None


def reading(value: object) -> float | None:
    """The number of a sensor excerpt ({"Reading": 42.5}), or of a bare number."""
    return number(value.get("Reading")) if isinstance(value, dict) else number(value)


def text(value: object) -> str:
    return value.strip()[:TEXT_LIMIT] if isinstance(value, str) else ""


def link(value: object) -> str | None:
    """The path that a reference ({"@odata.id": "/redfish/v1/..."}) leads to on the same BMC; None for any other address."""
    target = value.get("@odata.id") if isinstance(value, dict) else value
    if not isinstance(target, str) or len(target) > PATH_LIMIT or not _PATH.fullmatch(target):
        return None
    return target.partition("#")[0] or None


def state(document: Json) -> str:
    """Status.State, "" where it is not told."""
    return text(table(document.get("Status")).get("State"))


def health(document: Json) -> str:
    status = table(document.get("Status"))
    return text(status.get("Health")) or text(status.get("HealthRollup"))


def is_present(document: Json) -> bool:
    return state(document) != "Absent"


def is_measuring(document: Json) -> bool:
    """Whether a sensor's number means something. What has no Status is taken to."""
    return state(document) in ("", "Enabled", "StandbySpare", "StandbyOffline", "Quiesced", "Updating")
