"""MIG: each instance's memory, processes and activity are its own; what is the whole card's alone is not made up for it.

dcgm-exporter#3, #105, #216 and gpu-monitoring-tools#152: the use of a card with MIG read 0 or 9.2e18; it is absent here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from agent.timing import ReaderTiming, mig_kept_s
from telemetry.catalogue import MIG
from telemetry.sample import Sample
from tests.agent.nvidia.conftest import Host, gpus
from tests.doubles.nvml.layout import NO_INSTANCE
from tests.doubles.nvml.scenario import add_mig

GIB, MIB = 2**30, 2**20


def migs(samples: Sequence[Sample]) -> dict[str, Sample]:
    """The mig samples by the last four characters of the instance's uuid."""
    return {sample.tags["mig"][-4:]: sample for sample in samples if sample.measurement == "mig"}


def settled(host: Host, ticks: int = 3) -> list[Sample]:
    samples: list[Sample] = []
    for _ in range(ticks):
        samples = host.tick()
        time.sleep(0.12)  # GPM takes no pair closer than 100 ms
    return samples


def test_every_field_of_two_different_instances_is_right(host: Host) -> None:
    add_mig(host.scenario, 0)
    host.collector()
    seen = {name: dict(sample.fields) for name, sample in migs(settled(host)).items()}
    assert seen == {
        "aaaa": {
            "mem_used_bytes": 3.0 * GIB,
            "mem_total_bytes": 8.0 * GIB,
            "sm_active_pct": 11.5,
            "tensor_active_pct": 21.25,
            "dram_active_pct": 31.75,
            "gr_active_pct": 41.125,
            "processes": 1,
            "profile": "3g.40gb",
        },
        "bbbb": {
            "mem_used_bytes": 15.0 * GIB,
            "mem_total_bytes": 40.0 * GIB,
            "sm_active_pct": 15.5,
            "tensor_active_pct": 25.25,
            "dram_active_pct": 35.75,
            "gr_active_pct": 45.125,
            "processes": 5,
            "profile": "1g.10gb",
        },
    }
    assert set(seen["aaaa"]) == set(MIG.fields)
    assert host.collectors[0].errors == 0


def test_an_instance_is_told_with_its_cards_index_and_uuid(host: Host) -> None:
    add_mig(host.scenario, 1)
    host.collector()
    tags = dict(migs(host.tick())["aaaa"].tags)
    assert tags == {
        "node": "n07",
        "rack": "r2",
        "gpu": "1",
        "uuid": "GPU-a9d3f210-0002",
        "mig": "MIG-7d20f1c4-aaaa",
    }


def test_what_the_whole_card_does_not_tell_is_absent_and_the_rest_of_it_goes_on(host: Host) -> None:
    add_mig(host.scenario, 0)
    host.collector()
    fields = gpus(settled(host))["0001"].fields
    assert not {"util_pct", "mem_util_pct", "remapped_rows_total"} & fields.keys()
    assert (fields["power_w"], fields["temp_c"], fields["sm_active_pct"], fields["state"]) == (512.25, 86.0, 92.5, 0)


def test_the_processes_of_the_instances_are_the_cards_and_known_by_its_instances(host: Host) -> None:
    add_mig(host.scenario, 0)
    host.scenario.refuse(0, "processes_v3", "processes_v2")
    collector = host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert fields["processes"] == 6
    known = collector.gpu_processes[0]
    assert known.pids == (9010, 9050, 9051, 9052, 9053, 9054)
    assert known.migs == ("MIG-7d20f1c4-aaaa", "MIG-7d20f1c4-bbbb")


def test_instances_come_and_go_and_one_that_is_destroyed_is_no_lost_gpu(host: Host) -> None:
    add_mig(host.scenario, 0)
    host.collector(ReaderTiming(memory_s=0.0, processes_s=0.0, names_s=0.3, takeover_s=20.0))
    assert set(migs(host.tick())) == {"aaaa", "bbbb"}
    host.scenario.gpu(10).gpu_instance = NO_INSTANCE
    host.scenario.gpu(10).fault = 15
    samples = host.tick()
    assert (set(migs(samples)), gpus(samples)["0001"].fields["state"]) == ({"aaaa"}, 0)
    host.scenario.gpu(10).gpu_instance, host.scenario.gpu(10).fault = 6, 0
    samples = host.until(lambda samples: set(migs(samples)) == {"aaaa", "bbbb"})
    host.scenario.gpu(0).mig_mode = 0
    host.until(lambda samples: not migs(samples))


def test_activity_of_a_gpu_instance_that_two_share_is_given_to_neither(host: Host) -> None:
    """Two compute instances in one GPU instance: its activity is of both together (dcgm-exporter#151: each got the whole's)."""
    add_mig(host.scenario, 0)
    host.scenario.gpu(10).gpu_instance = 1
    host.collector()
    seen = migs(settled(host))
    assert "sm_active_pct" not in seen["aaaa"].fields
    assert "sm_active_pct" not in seen["bbbb"].fields
    assert seen["bbbb"].fields["mem_total_bytes"] == 40.0 * GIB


def test_a_driver_without_the_call_by_instance_is_asked_by_the_instances_handle(host: Host) -> None:
    add_mig(host.scenario, 0)
    host.replace_library(without=("nvmlGpmMigSampleGet",))
    host.scenario.refuse(8, "gpm_sample", code=0)
    host.collector()
    seen = migs(settled(host))
    assert seen["aaaa"].fields["sm_active_pct"] == 11.5
    assert "sm_active_pct" not in seen["bbbb"].fields


def test_an_instance_is_not_in_every_tick_and_stands_until_its_next_reading(host: Host) -> None:
    add_mig(host.scenario, 0)
    timing = ReaderTiming(takeover_s=20.0, memory_s=600.0)
    host.collector(timing)
    assert set(migs(host.tick())) == {"aaaa", "bbbb"}
    assert migs(host.tick()) == {}
    kept = mig_kept_s(ReaderTiming())
    assert set(kept) == set(MIG.fields)
    assert min(kept.values()) >= 2 * ReaderTiming().memory_s
