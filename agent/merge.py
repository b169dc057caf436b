"""Merge: several sources that speak of one thing in one tick make one sample of it."""

from __future__ import annotations

from collections.abc import Iterable

from telemetry.sample import Sample

_OCCURRENCES = ("event", "verdict", "alert")

Key = tuple[str, object, int]


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each thing and time, in the order of their first. Where two sources say the same field, the earlier one
    stands: NVML reads a GPU itself, an exporter repeats it. A GPU is the same by its uuid, whatever index a source gives it.
    """
    found: dict[Key, Sample] = {}
    kept: list[Key | Sample] = []
    for sample in samples:
        if sample.measurement in _OCCURRENCES:
            kept.append(sample)
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
