"""The record that everything is made of: one device or engine, one moment, one set of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | int | str


@dataclass(frozen=True, slots=True)
class Sample:
    """One InfluxDB point.

    `fields` holds floats for gauges, ints for counters, masks, states and flags, str for text. A field that could not be
    read is left out: absent means unknown, never zero. `time_ns` is wall time in nanoseconds since the epoch; all samples of
    one tick carry the same one.
    """

    measurement: str
    tags: Mapping[str, str]
    fields: Mapping[str, Value]
    time_ns: int
