"""What any store takes: the catalogue's names and types, values that line protocol can carry. One rule for every backend.

A field that is refused never takes the rest of its sample with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from telemetry import catalogue, lineprotocol
from telemetry.sample import Sample, Value
from telemetry.store.interface import Rejected


def admit(samples: Sequence[Sample]) -> tuple[list[Sample], list[Rejected]]:
    """(what is stored, what is refused). Ints of gauges become floats, whole floats of counters and states become ints.

    A refused sample is listed whole; of a sample with some refused fields, the refused ones are listed and the others stored.
    """
    admitted: list[Sample] = []
    refused: list[Rejected] = []
    for sample in samples:
        measurement = catalogue.MEASUREMENTS.get(sample.measurement)
        reason = _problem(sample) if measurement is not None else f"unknown measurement {sample.measurement!r}"
        if reason or measurement is None:
            refused.append(Rejected(sample, reason))
            continue
        good: dict[str, Value] = {}
        bad: dict[str, Value] = {}
        reasons: list[str] = []
        changed = False
        known = measurement.fields
        for name, value in sample.fields.items():
            field = known.get(name)
            if field is not None and type(value) is field.type and _writable(value):
                good[name] = value
                continue
            fitted = None if field is None else _fit(field, value)
            changed = True
            if fitted is None:
                bad[name] = value
                reasons.append(_why(field, name, value))
            else:
                good[name] = fitted
        if reasons or not good:
            refused.append(Rejected(_with(sample, bad), "; ".join(reasons) or "no fields"))
        if good:
            clean_tags = all(sample.tags.values())
            admitted.append(sample if not changed and clean_tags else _with(sample, good))
    return admitted, refused


def _with(sample: Sample, fields: dict[str, Value]) -> Sample:
    return Sample(sample.measurement, {k: v for k, v in sample.tags.items() if v}, fields, sample.time_ns)


def _problem(sample: Sample) -> str:
    """What is wrong with the sample as a whole; empty when nothing is."""
    try:
        reason = _tags_problem(sample.measurement, tuple(sample.tags.items()))
    except TypeError:
        reason = "its tags are not text"
    if not reason and not (isinstance(sample.time_ns, int) and 0 < sample.time_ns <= lineprotocol.INT_MAX):
        reason = f"time {sample.time_ns!r} is not a number of nanoseconds since 1970 within 64 bits"
    return reason


@lru_cache(maxsize=16384)
def _tags_problem(measurement: str, tags: tuple[tuple[str, str], ...]) -> str:
    try:
        lineprotocol.encode(Sample(measurement, dict(tags), {"x": 0}, 0))
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)
    return ""


def _writable(value: Value) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return lineprotocol.INT_MIN <= value <= lineprotocol.INT_MAX
    return lineprotocol.printable(value) == value


def _fit(field: catalogue.Field, value: object) -> Value | None:
    """`value` as the field's type when nothing is lost by it, else None."""
    fitted: Value | None = None
    if field.type is float and isinstance(value, float | int) and not isinstance(value, bool):
        try:
            fitted = float(value)
        except OverflowError:
            return None
    elif field.type is int and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        fitted = int(value)
    elif field.type is str and isinstance(value, str):
        fitted = str(value)
    return fitted if fitted is not None and _writable(fitted) else None


def _why(field: catalogue.Field | None, name: str, value: object) -> str:
    if field is None:
        return f"unknown field {name!r}"
    if isinstance(value, str) and field.type is str:
        return f"field {name!r} holds a control character"
    if isinstance(value, float) and not math.isfinite(value):
        return f"field {name!r} is {value}"
    if isinstance(value, int) and field.type is not str:
        return f"field {name!r} is beyond 64 bits" if not isinstance(value, bool) else f"field {name!r} is a bool"
    return f"field {name!r} is {type(value).__name__}, not {field.type.__name__}"
