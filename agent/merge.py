"""Merge: several sources that speak of one thing in one tick make one sample of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from telemetry.sample import Sample

OCCURRENCES = ("event", "verdict", "alert")

APART_NS = 1_000_000
"""Events of one kind and subject in one tick are told this much apart: a store keeps one sample a series and time, one of them one a
millisecond.
"""

EVENTS_A_TICK = 32
"""Of one kind, subject and code. A log that is flooded with one error says no more by the thousandth; counters go on counting."""

Key = tuple[str, object, int]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each thing and time, in the order of their first. Where two sources say the same field, the earlier one
    stands: NVML reads a GPU itself, an exporter repeats it. A GPU is the same by its uuid, whatever index a source gives it.
    """
    found: dict[Key, Sample] = {}
    kept: list[Key | Sample] = []
    alike = Counter[tuple[Key, object]]()
    told = Counter[Key]()
    for sample in samples:
        if sample.measurement in OCCURRENCES:
            key, code = _key(sample), sample.fields.get("code")
            alike[key, code] += 1
            if alike[key, code] <= EVENTS_A_TICK:
                kept.append(replace(sample, time_ns=sample.time_ns + told[key] * APART_NS))
                told[key] += 1
            continue
        key = _key(sample)
        first = found.get(key)
        if first is None:
            found[key] = sample
            kept.append(key)
        else:
            tags = {**sample.tags, **first.tags}
            found[key] = Sample(first.measurement, tags, {**sample.fields, **first.fields}, first.time_ns)
    return [entry if isinstance(entry, Sample) else found[entry] for entry in kept]


def _key(sample: Sample) -> Key:
    uuid = sample.tags.get("uuid") if sample.measurement == "gpu" else None
    return (sample.measurement, uuid or tuple(sorted(sample.tags.items())), sample.time_ns)
