"""Two scrapes of an engine's double become fields, by the way that the collector takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.collectors.dialects.registry import detect
from agent.collectors.engine_readings import EngineReadings
from agent.exposition import parse
from telemetry.catalogue import ENGINE
from telemetry.sample import Value

WALL_S = 1_796_000_000.0

Read = Callable[..., tuple[str, dict[str, Value]]]


@pytest.fixture
def read() -> Read:
    """`read(before, after, seconds)`: the kind and the fields of the later scrape. The last text may be one of many."""

    def both(*texts: str | bytes, every_s: float = 10.0, ranks: int | None = None) -> tuple[str, dict[str, Value]]:
        dialect = detect(parse(texts[-1]))
        assert dialect is not None
        readings = EngineReadings(dialect)
        fields: dict[str, Value] = {}
        for number, text in enumerate(texts):
            plain = dialect.plain(parse(text))
            fields = readings.read(plain, 100.0 + number * every_s, WALL_S, ranks=ranks)
        assert fields.keys() <= ENGINE.fields.keys()
        assert {name: type(value) for name, value in fields.items()} == {n: ENGINE.fields[n].type for n in fields}
        return dialect.kind, fields

    return both
