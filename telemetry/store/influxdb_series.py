"""The series of an InfluxDB measurement, and what singles one out: a statement about one alone costs the server half as much a point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from telemetry import lineprotocol
from telemetry.store.buckets import order
from telemetry.store.influxdb_http import InfluxServer
from telemetry.store.influxql import conditions, identifier, impossible
from telemetry.store.interface import Where

Key = tuple[tuple[str, str], ...]


def series_of(server: InfluxServer, measurement: str, where: Where | None) -> dict[Key, Mapping[str, str]] | None:
    """All there are, living or not; None when the server doesn't say."""
    if server.generation() > 2:
        return None
    clause = " AND ".join(conditions(where))
    rows = server.query(f"SHOW SERIES FROM {identifier(measurement)}" + (f" WHERE {clause}" if clause else ""))
    try:
        found = [_tags_of_key(row[0]) for series in rows for row in series["values"]]
    except ValueError:
        return None
    return {order(tags): tags for tags in found}


def each_alone(found: Iterable[Mapping[str, str]]) -> list[tuple[Mapping[str, str], Where]] | None:
    """(tags, conditions that none of the others meets); None when a tag is of a kind that can't be put into a statement."""
    several = list(found)
    names = sorted({name for tags in several for name in tags})
    alone: list[tuple[Mapping[str, str], Where]] = [
        (tags, {name: tags.get(name, "") for name in names}) for tags in several
    ]
    return None if any(impossible(where) for _, where in alone) else alone


@lru_cache(maxsize=16384)
def _tags_of_key(key: str) -> Mapping[str, str]:
    return lineprotocol.decode(f"{key} x=1 1").tags
