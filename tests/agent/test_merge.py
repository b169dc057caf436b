"""Several sources that speak of one thing in one tick make one record of it."""

from __future__ import annotations

from pathlib import Path

from agent.merge import EVENTS_A_TICK, merged
from telemetry.sample import Sample
from telemetry.store import open_store


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


def xid(code: int, subject: str = "gpu0", time_ns: int = 1) -> Sample:
    return Sample("event", {"node": "n", "kind": "xid", "subject": subject}, {"code": code, "text": "XID"}, time_ns)


def test_equal_events_are_as_many_as_happened_in_the_store_too(tmp_path: Path) -> None:
    now_ns = 1_796_000_000 * 10**9
    found = merged([xid(79, time_ns=now_ns)] * 5 + [xid(79, "gpu1", now_ns)])
    assert len({(sample.tags["subject"], sample.time_ns) for sample in found}) == 6
    store = open_store(f"sqlite://{tmp_path / 'store.db'}")
    try:
        store.write(found)
        kept = store.samples("event", start_ns=now_ns, end_ns=now_ns + 10**9)
        assert sum(sample.tags["subject"] == "gpu0" for sample in kept) == 5
    finally:
        store.close()


def test_a_flood_of_one_event_is_bounded_and_hides_no_other() -> None:
    found = merged([*[xid(31)] * 10_000, xid(79), xid(79, "gpu1")])
    assert [sample.fields["code"] for sample in found] == [31] * EVENTS_A_TICK + [79, 79]
    assert len({(sample.tags["subject"], sample.time_ns) for sample in found}) == EVENTS_A_TICK + 2
