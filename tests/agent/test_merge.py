"""Several sources that speak of one thing in one tick make one record of it."""

from __future__ import annotations

from agent.merge import merged
from telemetry.sample import Sample


def gpu(fields: dict[str, float], *, index: str = "0", uuid: str = "GPU-a", time_ns: int = 1) -> Sample:
    return Sample("gpu", {"node": "n", "gpu": index, "uuid": uuid}, fields, time_ns)


def test_two_sources_of_one_gpu_make_one_sample_and_the_earlier_one_has_the_last_word() -> None:
    found = merged([gpu({"util_pct": 98.0}), gpu({"util_pct": 12.0, "sm_active_pct": 61.0})])
    assert found == [gpu({"util_pct": 98.0, "sm_active_pct": 61.0})]


def test_a_gpu_is_known_by_its_uuid_whatever_index_an_exporter_gives_it() -> None:
    found = merged([gpu({"util_pct": 98.0}, index="1"), gpu({"sm_active_pct": 61.0}, index="0")])
    assert found == [gpu({"util_pct": 98.0, "sm_active_pct": 61.0}, index="1")]


def test_other_gpus_other_times_and_other_measurements_stay_apart() -> None:
    samples = [gpu({"util_pct": 1.0}), gpu({"util_pct": 2.0}, uuid="GPU-b"), gpu({"util_pct": 3.0}, time_ns=2)]
    assert merged(samples) == samples


def test_equal_events_are_as_many_as_happened() -> None:
    event = Sample("event", {"node": "n", "kind": "xid", "subject": "gpu0"}, {"code": 79}, 1)
    assert merged([event, event]) == [event, event]
