"""Raw samples that an InfluxDB server draws into buckets itself: mean, least, largest, last, and of a mask which values there were.

What it does costs the server about half a microsecond a value, and twice as much when series are grouped, since it then makes the tags
of a series anew for every value; and one query keeps one of its cores busy. So a few series are asked for one by one, without groups,
and the fields in two requests at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from telemetry.store.buckets import Buckets, Columns
from telemetry.store.influxdb_http import InfluxServer
from telemetry.store.influxdb_series import each_alone, series_of
from telemetry.store.influxql import condition, identifier, tags_of
from telemetry.store.interface import Where

_FEW = 64  # series: the statements of more would be longer than what they save
_AT_ONCE = 2

_Asked = tuple[Mapping[str, str] | None, str]
"""The tags of the series it is of, or None for all that meet a condition; and the statement."""


def draw(
    server: InfluxServer,
    measurement: str,
    chosen: Mapping[str, str],
    over: Buckets,
    where: Where | None,
    columns: Columns,
) -> None:
    """Put the buckets of these fields into `columns`; `chosen` says how each is drawn."""
    if not chosen:
        return
    source, span = identifier(measurement), (over.first_ns, over.end_ns)
    alone = _alone(server, measurement, where)
    if alone is None:
        tails: list[_Asked] = [(None, f"{condition(span, where)} GROUP BY time({over.step_ns}ns), * fill(none)")]
    else:
        tails = [(tags, f"{condition(span, own)} GROUP BY time({over.step_ns}ns) fill(none)") for tags, own in alone]
    asked = [
        [(tags, f"SELECT {select} FROM {source} WHERE {tail}") for tags, tail in tails for select in _selects(share)]
        for share in _shares(chosen)
    ]
    for tags, answer in _answers(server, asked):
        for series in answer:
            _put(series, tags_of(series) if tags is None else tags, chosen, over, columns)


def _alone(server: InfluxServer, measurement: str, where: Where | None) -> list[tuple[Mapping[str, str], Where]] | None:
    """The series one by one, where they are few."""
    found = series_of(server, measurement, where) if server.generation() == 1 else None
    return each_alone(found.values()) if found is not None and len(found) <= _FEW else None


def _shares(chosen: Mapping[str, str]) -> list[dict[str, str]]:
    """The fields in parts that cost the server about the same; values that are told apart cost two means."""
    shares: list[dict[str, str]] = [{} for _ in range(min(_AT_ONCE, len(chosen)))]
    costs = [0] * len(shares)
    for name, how in sorted(chosen.items(), key=lambda item: item[1] != "or"):
        least = costs.index(min(costs))
        shares[least][name] = how
        costs[least] += 2 if how == "or" else 1
    return shares


def _selects(share: Mapping[str, str]) -> list[str]:
    plain = [f"{how}({identifier(name)}) AS {identifier(name)}" for name, how in share.items() if how != "or"]
    masks = [f"distinct({identifier(name)}) AS {identifier(name)}" for name, how in share.items() if how == "or"]
    return [*([", ".join(plain)] if plain else []), *masks]


def _answers(
    server: InfluxServer, asked: Sequence[Sequence[_Asked]]
) -> Iterable[tuple[Mapping[str, str] | None, list[dict[str, Any]]]]:
    if server.generation() != 1:
        return [(tags, server.query(statement)) for share in asked for tags, statement in share]
    if not any(asked):  # no series
        return []
    found = server.query_at_once([[statement for _, statement in share] for share in asked])
    return [
        (tags, answer)
        for share, answers in zip(asked, found, strict=True)
        for (tags, _), answer in zip(share, answers, strict=True)
    ]


def _put(
    series: Mapping[str, Any], tags: Mapping[str, str], chosen: Mapping[str, str], over: Buckets, columns: Columns
) -> None:
    for place, name in enumerate(series["columns"]):
        if name not in chosen:
            continue
        values: dict[int, float] = {}
        masks: dict[int, int] = {}
        for row in series["values"]:
            value, bucket = row[place], (row[0] - over.first_ns) // over.step_ns
            if value is None or not 0 <= bucket < over.count:
                continue
            if chosen[name] == "or":
                values[bucket] = masks[bucket] = masks.get(bucket, 0) | int(value)
            else:
                values[bucket] = value
        if values:
            column = columns.column(tags, name)
            for bucket, value in values.items():
                column[bucket] = float(value)
