"""Every field of the `gpu` measurement is the right number of the right GPU, in the right unit, and absent when there is none."""

from __future__ import annotations

import time

import pytest

from agent.timing import ReaderTiming
from telemetry.catalogue import GPU
from tests.agent.nvidia.conftest import EVERY_TICK, Host, events, gpus
from tests.doubles.nvml.scenario import DOUBLE, NOT_SUPPORTED, SINT, UINT, ULLONG

HOPPER = {
    "util_pct": 98.0,
    "mem_util_pct": 61.0,
    "sm_active_pct": 92.5,
    "tensor_active_pct": 11.25,
    "dram_active_pct": 67.125,
    "mem_used_bytes": 71000000512.0,
    "mem_total_bytes": 85520809984.0,
    "temp_c": 86.0,
    "mem_temp_c": 94.0,
    "temp_margin_c": 1.0,
    "temp_limit_c": 87.0,
    "power_w": 512.25,
    "power_limit_w": 650.0,
    "power_limit_default_w": 700.0,
    "power_limit_requested_w": 680.0,
    "sm_clock_mhz": 1290.0,
    "sm_clock_max_mhz": 1980.0,
    "mem_clock_mhz": 2619.0,
    "mem_clock_max_mhz": 2620.0,
    "pstate": 0,
    "throttle_reasons": 0x24,
    "pcie_gen": 4,
    "pcie_gen_max": 5,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "processes": 2,
    "state": 0,
    "energy_j": 7000000.5,
    "throttle_sw_power_s": 11.5,
    "throttle_sync_boost_s": 22.25,
    "throttle_sw_thermal_s": 418.2,
    "throttle_hw_thermal_s": 3.125,
    "throttle_hw_power_brake_s": 9.0000005,
    "pcie_replays_total": 7,
    "ecc_corrected_total": 31,
    "ecc_uncorrected_total": 2,
    "remapped_rows_total": 11,
    "remap_pending": 1,
    "remap_failed": 0,
    "xid_total": 0,
    "recovery_action": 1,
    "name": "NVIDIA H100 80GB HBM3",
    "driver": "570.124.06",
    "memory_kind": "device",
    "power_scope": "gpu",
    "source": "nvml",
}
AMPERE = {
    "util_pct": 43.0,
    "mem_util_pct": 17.0,
    "mem_used_bytes": 9000001536.0,
    "mem_total_bytes": 42949672960.0,
    "temp_c": 57.0,
    "mem_temp_c": 71.0,
    "temp_margin_c": 24.0,  # 95 - 71 of the memory is nearer than 85 - 57 of the core
    "temp_limit_c": 85.0,
    "mem_temp_limit_c": 95.0,
    "power_w": 187.5,
    "power_limit_w": 225.0,
    "power_limit_default_w": 250.0,
    "power_limit_requested_w": 230.0,
    "sm_clock_mhz": 1395.0,
    "sm_clock_max_mhz": 1410.0,
    "mem_clock_mhz": 1215.0,
    "mem_clock_max_mhz": 1216.0,
    "pstate": 2,
    "throttle_reasons": 0xC8,
    "fan_pct": 64.0,
    "pcie_gen": 3,
    "pcie_gen_max": 6,
    "pcie_width": 4,
    "pcie_width_max": 32,
    "pcie_tx_bytes_s": 3000 * 1024.0,
    "pcie_rx_bytes_s": 5000 * 1024.0,
    "processes": 1,
    "state": 0,
    "energy_j": 1234567.75,
    "throttle_sw_power_s": 1.000000001,
    "throttle_sync_boost_s": 2.000000002,
    "throttle_sw_thermal_s": 3.000000003,
    "throttle_hw_thermal_s": 4.000000004,
    "throttle_hw_power_brake_s": 5.000000005,
    "pcie_replays_total": 19,
    "ecc_corrected_total": 1001,
    "ecc_uncorrected_total": 4,
    "remapped_rows_total": 9,
    "remap_pending": 0,
    "remap_failed": 1,
    "xid_total": 0,
    "recovery_action": 2,
    "name": "NVIDIA A100-PCIE-40GB",
    "driver": "570.124.06",
    "memory_kind": "device",
    "power_scope": "gpu",
    "source": "nvml",
}

OF_EXPORTERS = {
    *("gr_active_pct", "nvlink_rx_bytes_s", "nvlink_tx_bytes_s", "throttle_thermal_s"),
    *("aicore_util_pct", "healthy", "link_up"),
}
"""What only an exporter tells."""


def settled(host: Host, ticks: int = 5) -> dict[str, dict[str, object]]:
    """Fields by GPU after enough ticks for pairs of samples and for a limit to be seen several times."""
    host.collector()
    seen = {}
    for _ in range(ticks):
        seen = {name: dict(sample.fields) for name, sample in gpus(host.tick()).items()}
        time.sleep(0.12)  # GPM takes no pair closer than 100 ms
    return seen


def test_every_field_of_two_different_gpus_is_right(host: Host) -> None:
    seen = settled(host)
    rates = {name: seen["0001"].pop(name) for name in ("pcie_tx_bytes_s", "pcie_rx_bytes_s")}
    assert rates == {"pcie_tx_bytes_s": 0.0, "pcie_rx_bytes_s": 0.0}  # counters that stand still
    assert seen == {"0001": HOPPER, "0002": AMPERE}
    assert set(HOPPER) | set(AMPERE) == set(GPU.fields) - OF_EXPORTERS
    assert host.collectors[0].errors == 0


def test_the_two_gpus_of_the_double_differ_in_every_field() -> None:
    the_hosts = {"state", "xid_total", "driver", "memory_kind", "power_scope", "source"}
    alike = [name for name in HOPPER.keys() & AMPERE.keys() - the_hosts if HOPPER[name] == AMPERE[name]]
    assert alike == []


def test_samples_carry_index_uuid_the_hosts_tags_and_the_ticks_time(host: Host) -> None:
    host.collector()
    samples = host.tick()
    assert [dict(sample.tags) for sample in samples if sample.measurement == "gpu"] == [
        {"node": "n07", "rack": "r2", "gpu": "0", "uuid": "GPU-5c0a1e77-0001"},
        {"node": "n07", "rack": "r2", "gpu": "1", "uuid": "GPU-a9d3f210-0002"},
    ]
    assert {sample.time_ns for sample in samples} == {1_795_960_000_000_000_001}


@pytest.mark.parametrize("bit", range(63))
def test_every_throttle_bit_stays_where_it_is(bit: int, shared_host: Host) -> None:
    shared_host.scenario.gpu(0).reasons = 1 << bit
    shared_host.scenario.gpu(1).reasons = 0
    seen = gpus(shared_host.tick())
    assert (seen["0001"].fields["throttle_reasons"], seen["0002"].fields["throttle_reasons"]) == (1 << bit, 0)


def test_a_mask_of_all_ones_is_no_mask(host: Host) -> None:
    host.scenario.gpu(0).reasons = 2**64 - 1
    host.collector()
    assert "throttle_reasons" not in gpus(host.tick())["0001"].fields


def test_power_falls_back_from_average_to_instant_to_the_plain_call(host: Host) -> None:
    host.collector(EVERY_TICK)
    assert gpus(host.tick())["0001"].fields["power_w"] == 512.25
    host.scenario.refuse_field(0, 185)
    assert gpus(host.tick())["0001"].fields["power_w"] == 530.0
    host.scenario.refuse_field(0, 186)
    assert gpus(host.tick())["0001"].fields["power_w"] == 511.0
    host.scenario.refuse(0, "power_usage")
    assert "power_w" not in gpus(host.tick())["0001"].fields


def test_a_power_of_zero_is_a_blank(host: Host) -> None:
    host.scenario.field(0, 185, 0, UINT)
    host.collector()
    assert gpus(host.tick())["0001"].fields["power_w"] == 530.0


def test_limits_fall_back_to_the_plain_calls(host: Host) -> None:
    host.scenario.refuse_field(0, 189, 190, 192)
    host.scenario.refuse_field(0, 83)
    host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert fields["power_limit_w"] == 690.0
    assert fields["power_limit_requested_w"] == 695.0
    assert fields["power_limit_default_w"] == 699.0
    assert fields["energy_j"] == 7000000.111


def test_sub_degree_temperature_is_preferred_and_is_a_double(host: Host) -> None:
    host.scenario.field(0, 308, 84.625, DOUBLE)
    host.collector()
    assert gpus(host.tick())["0001"].fields["temp_c"] == 84.625


def test_an_older_driver_without_new_symbols_still_gives_what_it_can(host: Host) -> None:
    host.replace_library(
        without=(
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetTemperatureV",
            "nvmlDeviceGetMarginTemperature",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlGpmQueryDeviceSupport",
            "nvmlDeviceGetFanSpeed_v2",
        )
    )
    seen = settled(host)
    for name, expected in (("0001", HOPPER), ("0002", AMPERE)):
        for field in ("throttle_reasons", "temp_c", "processes", "fan_pct"):
            assert seen[name].get(field) == expected.get(field), (name, field)
    assert seen["0001"]["mem_used_bytes"] == 71000000512 + 549453824  # the first version counts the reserve in
    assert not {"sm_active_pct", "temp_margin_c", "temp_limit_c"} & seen["0001"].keys()
    assert seen["0002"]["temp_margin_c"] == 24.0
    assert host.collectors[0].errors == 0


def test_a_library_without_field_values_costs_only_what_they_alone_give(host: Host) -> None:
    host.replace_library(without=("nvmlDeviceGetFieldValues",))
    seen = settled(host)
    lost = {"mem_temp_c", *(name for name in HOPPER if name.startswith("throttle_") and name.endswith("_s"))}
    assert HOPPER.keys() - seen["0001"].keys() == {*lost, "temp_limit_c", "recovery_action"}
    assert seen["0001"]["power_w"] == 511.0
    assert seen["0001"]["pcie_tx_bytes_s"] == 1111 * 1024


def test_relative_thresholds_are_read_signed(host: Host) -> None:
    """An Ada card at 38 °C with margin 49, slowdown at -2 and no gpu-max offset slows down at 89 °C; valueType says unsigned."""
    gpu = host.scenario.gpu(0)
    gpu.temperature, gpu.margin = 38, 49
    host.scenario.refuse_field(0, 196)
    host.scenario.field(0, 194, 2**32 - 2, UINT)
    seen = settled(host)
    assert seen["0001"]["temp_limit_c"] == 89.0
    assert seen["0001"]["temp_margin_c"] == 49.0


def test_a_limit_follows_the_core_when_the_margin_is_the_memorys(host: Host) -> None:
    host.scenario.gpu(0).temperature, host.scenario.gpu(0).margin = 60, 27
    settled(host)
    host.scenario.gpu(0).temperature, host.scenario.gpu(0).margin = 75, 2  # the memory is nearer now
    for _ in range(5):
        fields = gpus(host.tick())["0001"].fields
    assert (fields["temp_limit_c"], fields["temp_margin_c"]) == (87.0, 2.0)


def test_a_margin_that_never_moves_off_zero_is_not_believed(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.temperature, gpu.margin, gpu.reasons = 40, 0, 0
    host.collector()
    assert "temp_margin_c" not in gpus(host.tick())["0001"].fields
    gpu.margin = -3
    assert "temp_margin_c" not in gpus(host.tick())["0001"].fields
    gpu.margin = 12
    assert gpus(host.tick())["0001"].fields["temp_margin_c"] == 12.0
    gpu.margin = -1
    assert gpus(host.tick())["0001"].fields["temp_margin_c"] == -1.0


def test_a_margin_below_zero_is_believed_while_heat_holds_the_clock_down(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.temperature, gpu.margin, gpu.reasons = 88, -1, 0x20
    host.collector()
    assert gpus(host.tick())["0001"].fields["temp_margin_c"] == -1.0


def test_pcie_rates_come_from_the_byte_counters_and_not_across_a_reset(host: Host) -> None:
    scenario = host.scenario
    host.collector()
    assert "pcie_tx_bytes_s" not in gpus(host.tick())["0001"].fields
    scenario.field(0, 197, 5_000_000_000 + 4_000_000, ULLONG)
    scenario.field(0, 198, 8_000_000_000 + 1_000_000, ULLONG)
    fields = gpus(host.tick())["0001"].fields
    assert fields["pcie_tx_bytes_s"] == pytest.approx(4 * fields["pcie_rx_bytes_s"])
    assert fields["pcie_rx_bytes_s"] > 0
    scenario.field(0, 197, 1000, ULLONG)
    fields = gpus(host.tick())["0001"].fields
    assert "pcie_tx_bytes_s" not in fields
    assert fields["pcie_rx_bytes_s"] == 0.0


def test_byte_counters_make_the_slow_throughput_call_unnecessary(host: Host) -> None:
    settled(host, 2)
    assert (host.scenario.calls(0, "pcie_throughput"), host.scenario.calls(1, "pcie_throughput")) == (0, 4)


@pytest.mark.parametrize(("fid", "kind", "field"), [(82, UINT, "mem_temp_c"), (74, ULLONG, "throttle_sw_power_s")])
def test_a_blank_of_all_ones_is_absent(host: Host, fid: int, kind: int, field: str) -> None:
    host.scenario.field(0, fid, 2**32 - 1 if kind == UINT else 2**64 - 1, kind)
    host.collector()
    assert field not in gpus(host.tick())["0001"].fields


def test_a_number_with_all_bits_set_is_none(host: Host) -> None:
    card = host.scenario.gpu(1)  # the one that answers by plain calls
    host.scenario.refuse_field(1, *range(320))
    for name in (
        "gpu_util",
        "mem_util",
        "fan",
        "pcie_gen",
        "pcie_gen_max",
        "pcie_width",
        "pcie_width_max",
        "pcie_replays",
    ):
        setattr(card, name, 2**32 - 1)
    for name in (
        "power_mw",
        "enforced_mw",
        "requested_mw",
        "default_mw",
        "pcie_tx_kib",
        "pcie_rx_kib",
        "remap_corrected",
    ):
        setattr(card, name, 2**32 - 1)
    for name in ("reasons", "mem_total", "mem_used", "energy_mj", "ecc_corrected", "ecc_uncorrected"):
        setattr(card, name, 2**64 - 1)
    for kind in range(4):
        card.clock[kind] = card.clock_max[kind] = 2**32 - 1
    for kind in range(8):
        card.threshold[kind] = 2**32 - 1
    card.temperature, card.pstate = -1, 2**32 - 1
    card.process_count = 0
    host.collector()
    host.tick()
    fields = gpus(host.tick())["0002"].fields
    assert set(fields) - {"temp_c"} == {"state", "source", "name", "driver", "xid_total", "processes"}


def test_implausible_numbers_are_absent(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.gpu_util, gpu.temperature, gpu.pstate, gpu.mem_used = 101, 255, 32, gpu.mem_total + 1
    gpu.pcie_gen, gpu.pcie_width = 0, 0
    host.scenario.field(0, 83, -5, SINT)
    host.scenario.field(0, 74, -5, SINT)
    host.scenario.refuse(0, "energy")
    host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert (
        not {
            "energy_j",
            "throttle_sw_power_s",
            "util_pct",
            "temp_c",
            "pstate",
            "mem_used_bytes",
            "pcie_gen",
            "pcie_width",
        }
        & fields.keys()
    )
    assert fields["mem_util_pct"] == 61.0


def test_a_consumer_cards_answer_to_row_remapping_is_not_believed(host: Host) -> None:
    host.scenario.gpu(0).brand = 5
    host.scenario.gpu(0).name = b"NVIDIA GeForce RTX 4090"
    host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert not {"remapped_rows_total", "remap_pending", "remap_failed"} & fields.keys()
    assert fields["ecc_corrected_total"] == 31


def test_unified_memory_is_the_hosts_only_on_a_device_known_to_share_it(host: Host) -> None:
    host.scenario.refuse(0, "memory", "memory_v2")
    host.scenario.refuse(1, "memory", "memory_v2")
    host.scenario.gpu(0).name = b"NVIDIA GB10"
    host.collector()
    seen = gpus(host.tick())
    assert seen["0001"].fields["mem_total_bytes"] > seen["0001"].fields["mem_used_bytes"] > 0
    assert "mem_total_bytes" not in seen["0002"].fields


def test_gpm_needs_two_samples_and_reads_the_mean_between_them(host: Host) -> None:
    host.collector()
    assert "sm_active_pct" not in gpus(host.tick())["0001"].fields
    host.scenario.gpu(0).gpm_sm = 12.5
    time.sleep(0.12)
    assert gpus(host.tick())["0001"].fields["sm_active_pct"] == 52.5
    time.sleep(0.12)
    assert gpus(host.tick())["0001"].fields["sm_active_pct"] == 12.5


def test_gpm_metrics_that_fail_are_absent(host: Host) -> None:
    host.scenario.gpu(0).gpm_code = NOT_SUPPORTED
    assert not {"sm_active_pct", "dram_active_pct", "tensor_active_pct"} & settled(host, 3)["0001"].keys()


def test_equal_xids_are_counted_each_and_told_as_events(host: Host) -> None:
    host.collector()
    host.scenario.xid(1, 79)  # before the reader listens: NVML doesn't deliver it
    host.tick()
    for code in (31, 31, 79):
        host.scenario.xid(1, code)
    host.scenario.xid(0, 1234, kind=2)  # not an XID event
    told = events(host.tick(), "xid")
    assert [(event.tags["subject"], event.fields["code"]) for event in told] == [
        ("gpu1", 31),
        ("gpu1", 31),
        ("gpu1", 79),
    ]
    assert str(told[2].fields["text"]).startswith("XID 79: GPU has fallen off the bus; restart the machine")
    assert told[2].fields["detail"] == "GPU-a9d3f210-0002"
    seen = gpus(host.tick())
    assert (seen["0001"].fields["xid_total"], seen["0002"].fields["xid_total"]) == (0, 3)


def test_a_card_without_xid_events_has_no_xid_count(host: Host) -> None:
    host.scenario.refuse(0, "register_events")
    host.collector()
    seen = gpus(host.tick())
    assert "xid_total" not in seen["0001"].fields
    assert seen["0002"].fields["xid_total"] == 0


def test_the_processes_of_each_gpu_are_known_by_their_ids(host: Host) -> None:
    collector = host.collector()
    host.tick()
    assert collector.pids_by_gpu == {"GPU-5c0a1e77-0001": (4141, 4242), "GPU-a9d3f210-0002": (777,)}
    assert [(gpu.index, gpu.uuid, gpu.pids) for gpu in collector.gpu_processes] == [
        (0, "GPU-5c0a1e77-0001", (4141, 4242)),
        (1, "GPU-a9d3f210-0002", (777,)),
    ]


def test_a_superchip_that_tells_only_its_modules_power_says_so(host: Host) -> None:
    host.scenario.refuse_field(0, 185, 186)
    host.scenario.refuse(0, "power_usage")
    host.scenario.gpu(0).module_average_mw, host.scenario.gpu(0).module_instant_mw = 903_000, 911_000
    host.collector(EVERY_TICK)
    seen = gpus(host.tick())
    assert (seen["0001"].fields["power_w"], seen["0001"].fields["power_scope"]) == (903.0, "module")
    assert (seen["0002"].fields["power_w"], seen["0002"].fields["power_scope"]) == (187.5, "gpu")
    host.scenario.gpu(0).module_average_mw = 0
    assert gpus(host.tick())["0001"].fields["power_w"] == 911.0


def test_a_memory_limit_is_learnt_while_the_margin_is_the_memorys(host: Host) -> None:
    """T.Limit counts down to the nearer of two limits: that it is the memory's shows while it follows the memory alone."""
    gpu = host.scenario.gpu(0)
    host.collector()
    for memory in (80, 82, 84, 83, 85, 86, 88, 90):
        gpu.temperature, gpu.margin = 60, 99 - memory
        host.scenario.field(0, 82, memory, UINT)
        fields = gpus(host.tick())["0001"].fields
    assert fields["mem_temp_limit_c"] == 102.0  # 99 where the margin is 0, and three more by field 195


def test_no_memory_limit_is_made_of_a_margin_that_is_the_cores(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    host.collector()
    for core in (60, 62, 64, 63, 65, 66, 68, 70, 71, 72):
        gpu.temperature, gpu.margin = core, 87 - core
        host.scenario.field(0, 82, core + 10, UINT)  # it warms and cools with the core
        fields = gpus(host.tick())["0001"].fields
    assert "mem_temp_limit_c" not in fields
    assert fields["temp_limit_c"] == 87.0


def test_the_link_is_told_beside_what_it_is_judged_by(host: Host) -> None:
    """A link's generation drops on an idle card: whoever judges it needs use and state of the same moment."""
    host.collector(ReaderTiming(takeover_s=20.0))
    samples = [gpus(host.tick())["0001"].fields for _ in range(7)]
    with_link = [fields for fields in samples if "pcie_gen" in fields]
    assert with_link
    assert all({"pcie_width", "util_pct", "pstate"} <= fields.keys() for fields in with_link)


def test_words_are_told_now_and_then_and_when_they_change(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0))
    words = {"name", "driver", "memory_kind", "power_scope", "source"}
    assert words <= gpus(host.tick())["0001"].fields.keys()
    assert not words & gpus(host.tick())["0001"].fields.keys()
    host.scenario.refuse_field(0, 185, 186)
    host.scenario.refuse(0, "power_usage")
    host.scenario.gpu(0).module_average_mw = 903_000
    assert gpus(host.tick())["0001"].fields["power_scope"] == "module"
    assert not words & gpus(host.tick())["0001"].fields.keys()
