"""Each NVML error becomes the right state or an absent value, of that GPU or field alone, and passes when its cause does."""

from __future__ import annotations

import pytest

from agent.timing import GROUPS, ReaderTiming
from telemetry.catalogue import GPU_STATES
from telemetry.sample import Sample
from tests.agent.nvidia.conftest import Host, events, gpus, states
from tests.doubles.nvml.scenario import ULLONG

STATE = {name: number for number, name in enumerate(GPU_STATES)}


BOTH_OK = {"0001": STATE["ok"], "0002": STATE["ok"]}


@pytest.mark.parametrize("code", [9, 999])
def test_without_a_driver_there_is_no_gpu_and_it_is_found_when_it_comes(host: Host, code: int) -> None:
    host.scenario.state.init_code = code
    collector = host.collector()
    assert host.tick() == []
    assert host.tick() == []
    host.scenario.state.init_code = 0
    host.until(lambda samples: states(samples) == BOTH_OK)
    assert collector.errors == 0


def test_without_the_library_there_is_no_gpu_and_it_is_found_when_it_comes(host: Host) -> None:
    (host.folder / "libnvidia-ml.so.1").unlink()
    collector = host.collector()
    assert host.tick() == []
    reader = collector.reader_pid
    host.replace_library()
    host.until(lambda samples: states(samples) == BOTH_OK)
    assert (collector.errors, collector.reader_pid) == (0, reader)


def test_a_driver_that_is_absent_is_not_asked_at_every_tick(host: Host) -> None:
    host.scenario.state.init_code = 9
    host.collector(ReaderTiming(takeover_s=20.0, retry_s=3600.0))
    for _ in range(5):
        host.tick()
    assert host.scenario.state.init_calls == 1


def test_a_driver_reload_makes_the_gpus_absent_and_then_well_again(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.state.init_code = 9
    host.scenario.reload_driver()
    samples = host.until(lambda samples: states(samples) == {"0001": STATE["absent"], "0002": STATE["absent"]})
    assert [sample.fields for sample in gpus(samples).values()] == [{"state": STATE["absent"]}] * 2
    host.scenario.field(0, 83, 17_000, ULLONG)  # counters begin again with the driver
    host.scenario.state.init_code = 0
    samples = host.until(lambda samples: states(samples) == BOTH_OK)
    assert gpus(samples)["0001"].fields["energy_j"] == 17.0


def test_a_reload_in_which_nothing_else_happens_is_survived(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.reload_driver()
    host.until(lambda samples: states(samples) == BOTH_OK and len(gpus(samples)["0001"].fields) > 30)


def test_a_version_mismatch_is_told_and_a_new_reader_loads_the_new_library(host: Host) -> None:
    collector = host.collector()
    host.tick()
    reader = collector.reader_pid
    host.scenario.state.driver_version = 2
    host.scenario.reload_driver()
    mismatch = {"0001": STATE["driver_mismatch"], "0002": STATE["driver_mismatch"]}
    seen: list[Sample] = []
    host.until(lambda samples: seen.extend(events(samples, "gpu_lost")) or states(samples) == mismatch)
    assert {(event.tags["subject"], event.fields["code"]) for event in seen if event.fields["code"] == 18} == {
        ("gpu0", 18),
        ("gpu1", 18),
    }
    assert states(host.tick()) == mismatch
    host.replace_library(version=2)
    host.until(lambda samples: states(samples) == BOTH_OK)
    assert collector.reader_pid != reader


def test_a_mismatch_from_the_start_is_left_when_the_new_library_is_there(host: Host) -> None:
    host.scenario.state.driver_version = 2
    host.collector()
    assert host.tick() == []
    host.replace_library(version=2)
    host.until(lambda samples: states(samples) == BOTH_OK)


@pytest.mark.parametrize(
    ("code", "state"),
    [(15, "lost"), (16, "reset_required"), (27, "absent"), (999, "lost"), (4, "no_permission"), (17, "no_permission")],
)
def test_a_gpu_that_fails_has_its_state_and_nothing_else_and_the_other_goes_on(
    host: Host, code: int, state: str
) -> None:
    host.collector()
    host.tick()
    host.scenario.gpu(0).fault = code
    told = []
    for _ in range(4):
        samples = host.tick()
        told += events(samples, "gpu_lost")
        assert gpus(samples)["0001"].fields == {"state": STATE[state]}
        assert gpus(samples)["0001"].tags["uuid"] == "GPU-5c0a1e77-0001"
        assert gpus(samples)["0002"].fields["util_pct"] == 43.0
    assert [(event.tags["subject"], event.fields["code"], event.fields["detail"]) for event in told] == [
        ("gpu0", code, "GPU-5c0a1e77-0001")
    ]
    host.scenario.gpu(0).fault = 0
    samples = host.until(lambda samples: states(samples) == BOTH_OK)
    assert gpus(samples)["0001"].fields["power_w"] == 512.25


def test_a_lost_gpu_costs_one_call_a_sweep(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0))
    host.tick()
    host.scenario.gpu(0).fault = 15
    before = sum(host.scenario.gpu(0).feature_calls)
    for _ in range(3):
        host.tick()
    assert sum(host.scenario.gpu(0).feature_calls) - before == 3


@pytest.mark.parametrize("code", [15, 999])
def test_a_gpu_whose_handle_is_lost_from_the_start_is_told_without_a_uuid(host: Host, code: int) -> None:
    host.scenario.refuse(0, "handle", code=code)
    host.collector()
    samples = host.tick()
    lost = [sample for sample in samples if sample.measurement == "gpu" and sample.tags["gpu"] == "0"]
    assert [dict(sample.fields) for sample in lost] == [{"state": STATE["lost"]}]
    assert "uuid" not in lost[0].tags
    assert gpus(samples)["0002"].fields["state"] == STATE["ok"]
    host.scenario.refuse(0, "handle", code=0)
    samples = host.until(lambda samples: states(samples) == BOTH_OK)
    assert len(gpus(samples)) == len([sample for sample in samples if sample.measurement == "gpu"]) == 2


def test_a_known_gpu_whose_handle_is_lost_keeps_its_uuid(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.gpu(0).fault = 15  # its handle, too, once the library is asked again
    for _ in range(30):
        samples = host.tick()
    assert states(samples) == {"0001": STATE["lost"], "0002": STATE["ok"]}
    assert len([sample for sample in samples if sample.measurement == "gpu"]) == 2


def test_a_gpu_that_vanishes_is_told_as_absent_and_the_one_that_moves_up_keeps_its_identity(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.move(1, 0)
    host.scenario.state.gpu_count = 1
    host.scenario.reload_driver()
    samples = host.until(lambda samples: states(samples) == {"0001": STATE["absent"], "0002": STATE["ok"]})
    assert gpus(samples)["0002"].tags["gpu"] == "0"
    assert gpus(samples)["0002"].fields["power_w"] == 187.5
    assert gpus(samples)["0001"].fields == {"state": STATE["absent"]}


@pytest.mark.parametrize("code", [3, 4, 6, 21, 25, 26])
def test_a_value_that_a_card_does_not_give_is_absent_and_no_error(host: Host, code: int) -> None:
    host.scenario.refuse(0, "utilization", "pstate", "ecc", code=code)
    host.scenario.refuse_field(0, 269, code=code)
    collector = host.collector()
    host.tick()
    seen = gpus(host.tick())
    absent = {
        "util_pct",
        "mem_util_pct",
        "pstate",
        "ecc_corrected_total",
        "ecc_uncorrected_total",
        "throttle_sw_thermal_s",
    }
    assert not absent & seen["0001"].fields.keys()
    assert absent < seen["0002"].fields.keys()
    assert seen["0001"].fields["temp_c"] == 86.0
    assert seen["0001"].fields["state"] == STATE["ok"]
    assert collector.errors == 0


@pytest.mark.parametrize(("code", "asked"), [(3, 1), (4, 1), (21, 5)])
def test_what_a_card_refuses_is_not_asked_again_and_what_it_has_not_just_now_is(
    host: Host, code: int, asked: int
) -> None:
    host.scenario.refuse(0, "utilization", code=code)
    host.collector()
    for _ in range(5):
        host.tick()
    assert host.scenario.calls(0, "utilization") == asked
    assert host.scenario.calls(1, "utilization") == 5


def test_what_a_card_refused_is_asked_again_after_a_while(host: Host) -> None:
    host.scenario.refuse(0, "utilization")
    host.scenario.refuse_field(0, 185)
    host.collector(ReaderTiming(takeover_s=20.0, reprobe_s=0.2))
    assert "util_pct" not in gpus(host.tick())["0001"].fields
    host.scenario.refuse(0, "utilization", code=0)
    host.scenario.refuse_field(0, 185, code=0)
    samples = host.until(lambda samples: "util_pct" in gpus(samples)["0001"].fields)
    assert gpus(samples)["0001"].fields["power_w"] == 512.25


def test_one_call_that_fails_is_counted_and_costs_its_own_field_only(host: Host) -> None:
    host.scenario.refuse(0, "utilization", code=999)
    host.scenario.refuse_field(0, 82, code=999)
    collector = host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert not {"util_pct", "mem_util_pct", "mem_temp_c"} & fields.keys()
    assert (fields["state"], fields["temp_c"], fields["energy_j"]) == (STATE["ok"], 86.0, 7000000.5)
    assert collector.errors == 2


def test_an_unknown_field_id_is_an_unsupported_one(host: Host) -> None:
    host.scenario.refuse_field(0, 308, 185, code=2)
    collector = host.collector()
    assert gpus(host.tick())["0001"].fields["power_w"] == 530.0
    assert collector.errors == 0


def test_an_unknown_field_id_that_fails_the_whole_call_is_found_and_left_out(host: Host) -> None:
    host.scenario.gpu(0).field_strict = 1
    host.scenario.refuse_field(0, 308, 192, code=2)
    collector = host.collector()
    for _ in range(3):
        fields = gpus(host.tick())["0001"].fields
        assert (fields["power_w"], fields["mem_temp_c"], fields["throttle_sw_power_s"]) == (512.25, 94.0, 11.5)
        assert (fields["power_limit_default_w"], fields["power_limit_requested_w"]) == (700.0, 695.0)
        assert fields["state"] == STATE["ok"]
    errors = collector.errors
    assert errors <= 6
    calls = host.scenario.calls(0, "field_values")
    host.tick()
    assert (collector.errors, host.scenario.calls(0, "field_values") - calls) == (
        errors,
        4,
    )  # fast, power and temperature limits, recovery action


def test_slow_groups_are_absent_from_the_ticks_that_do_not_read_them(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0))
    first = gpus(host.tick())
    second = gpus(host.tick())
    slow = {name for names in GROUPS.values() for name in names}
    later = {"temp_limit_c", "sm_active_pct", "tensor_active_pct", "dram_active_pct"}  # need several readings
    assert first["0001"].fields.keys() - second["0001"].fields.keys() == slow - later - {"fan_pct", "mem_temp_limit_c"}
    assert not slow & (second["0001"].fields.keys() | second["0002"].fields.keys())
    assert {"fan_pct", "mem_temp_limit_c", "temp_limit_c"} < first["0002"].fields.keys()
