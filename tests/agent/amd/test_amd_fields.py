"""Every field of two AMD GPUs that differ in all of them is what the library says; what it doesn't say is absent."""

from __future__ import annotations

import time

import pytest

from agent.amd_smi import codes
from agent.amd_smi.activity import Residency
from agent.timing import ReaderTiming
from tests.agent.amd.conftest import NEW, OLD, Host, gpus
from tests.doubles.amdsmi.scenario import CRITICAL, CURRENT, EDGE, HOTSPOT, NA16, NA32, NA64, VRAM

EXPECTED_NEW = {
    "source": "amd",
    "name": "AMD Instinct MI300X",
    "driver": "6.14.14",
    "state": 0,
    "util_pct": 97.0,
    "mem_util_pct": 58.0,
    "mem_total_bytes": 206_141_652_992.0,
    "mem_used_bytes": 150_000_000_256.0,
    "temp_c": 84.0,
    "temp_limit_c": 100.0,
    "temp_margin_c": 16.0,
    "mem_temp_c": 79.0,
    "mem_temp_limit_c": 105.0,
    "power_w": 612.0,
    "power_limit_w": 700.0,
    "power_limit_default_w": 750.0,
    "energy_j": 9150.0,
    "sm_clock_mhz": 1450.0,
    "sm_clock_max_mhz": 2100.0,
    "mem_clock_mhz": 1290.0,
    "mem_clock_max_mhz": 1300.0,
    "throttle_sw_power_s": 0.0,
    "throttle_sw_thermal_s": 0.0,
    "throttle_hw_thermal_s": 0.0,
    "pcie_gen": 4,
    "pcie_gen_max": 5,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "pcie_replays_total": 7,
    "ecc_corrected_total": 31,
    "ecc_uncorrected_total": 2,
    "processes": 2,
}
EXPECTED_OLD = {
    "source": "amd",
    "name": "AMD Instinct MI100",
    "driver": "6.3.6",
    "state": 0,
    "util_pct": 41.0,
    "mem_util_pct": 13.0,
    "mem_total_bytes": 32_752.0 * 2**20,
    "mem_used_bytes": 9001.0 * 2**20,
    "temp_c": 52.0,
    "temp_limit_c": 99.0,
    "temp_margin_c": 33.0,  # of the memory, which is nearer to its limit than edge and hotspot are to theirs
    "mem_temp_c": 61.0,
    "mem_temp_limit_c": 94.0,
    "power_w": 187.0,
    "power_limit_w": 250.0,
    "power_limit_default_w": 290.0,
    "energy_j": 15_500.0,
    "sm_clock_mhz": 1395.0,
    "sm_clock_max_mhz": 1502.0,
    "mem_clock_mhz": 1180.0,
    "mem_clock_max_mhz": 1200.0,
    "pcie_gen": 3,
    "pcie_gen_max": 6,
    "pcie_width": 4,
    "pcie_width_max": 32,
    "pcie_replays_total": 19,
    "ecc_corrected_total": 1005,
    "ecc_uncorrected_total": 4,
    "processes": 1,
}


def test_the_two_gpus_of_the_double_differ_in_every_field() -> None:
    same = {name for name in EXPECTED_OLD if EXPECTED_OLD[name] == EXPECTED_NEW[name]}
    assert same == {"source", "state"}


def test_every_field_of_two_different_gpus_is_right(host: Host) -> None:
    collector = host.collector()
    seen = gpus(host.tick())
    assert dict(seen[NEW].fields) == EXPECTED_NEW
    assert dict(seen[OLD].fields) == EXPECTED_OLD
    assert seen[NEW].tags == {"node": "n07", "rack": "r2", "gpu": "0", "uuid": host.scenario.gpu(0).uuid.decode()}
    assert seen[OLD].tags["gpu"] == "1"
    assert collector.errors == 0
    assert {uuid[-4:]: pids for uuid, pids in collector.pids_by_gpu.items()} == {NEW: (4141, 4242), OLD: (777,)}


def test_a_tick_without_slow_groups_reads_the_fast_fields_only(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0, memory_s=600.0, processes_s=600.0))
    host.tick()
    fast = {
        *("state", "util_pct", "mem_util_pct", "temp_c", "temp_margin_c", "mem_temp_c", "power_w"),
        *("power_limit_w", "energy_j", "sm_clock_mhz", "mem_clock_mhz"),
    }
    assert set(gpus(host.tick())[OLD].fields) == fast


def test_the_calls_that_sleep_are_never_made(host: Host) -> None:
    host.collector()
    for _ in range(3):
        host.tick()
    for index in (0, 1):
        assert host.scenario.calls(index, "metrics") == 3
        assert host.scenario.calls(index, "violation_status") == host.scenario.calls(index, "pci_throughput") == 0


def test_times_held_down_are_the_firmwares_shares_of_the_time_between_two_readings(host: Host) -> None:
    host.collector()
    began_s = time.monotonic()
    host.tick()
    time.sleep(0.05)
    host.scenario.run_firmware(0, 1000, ppt=500, prochot=125, socket_thm=10, vr_thm=250, hbm_thm=20)
    fields = gpus(host.tick())[NEW].fields
    passed_s = time.monotonic() - began_s
    held_s = float(fields["throttle_sw_power_s"])
    assert 0.025 <= held_s <= passed_s
    assert fields["throttle_hw_thermal_s"] == pytest.approx(held_s / 4)
    assert fields["throttle_sw_thermal_s"] == pytest.approx(held_s / 2)  # the longest of the three, which overlap
    host.scenario.run_firmware(0, 1000)
    again = gpus(host.tick())[NEW].fields
    assert again["throttle_sw_power_s"] == held_s


def residency(**accumulators: int | str) -> dict[str, int | str]:
    names = ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    return {f"{name}_residency_acc": accumulators.get(name, 0) for name in names} | {
        "accumulation_counter": accumulators["cycles"]
    }


def test_a_firmware_that_has_not_counted_on_leaves_its_time_to_the_next_reading() -> None:
    held = Residency()
    held.read(residency(cycles=100), 10.0)
    held.read(residency(cycles=100), 11.0)
    assert held.read(residency(cycles=200, ppt=50), 14.0)["throttle_sw_power_s"] == pytest.approx(2.0)


def test_a_firmware_that_starts_again_takes_nothing_back() -> None:
    held = Residency()
    held.read(residency(cycles=1000, ppt=0), 10.0)
    held.read(residency(cycles=2000, ppt=500), 12.0)
    fields = held.read(residency(cycles=5, ppt=1, prochot=3), 13.0)
    assert (fields["throttle_sw_power_s"], fields["throttle_hw_thermal_s"]) == (pytest.approx(1.0), 0.0)
    assert held.read(residency(cycles=105, ppt=26, prochot=3), 17.0)["throttle_sw_power_s"] == pytest.approx(2.0)


def test_a_reason_that_the_firmware_does_not_tell_is_absent_and_a_share_never_exceeds_the_time() -> None:
    held = Residency()
    held.read(residency(cycles=100, ppt=0, prochot="N/A"), 10.0)
    fields = held.read(residency(cycles=200, ppt=900, prochot="N/A"), 11.0)
    assert fields == {"throttle_sw_power_s": 1.0, "throttle_sw_thermal_s": 0.0}
    assert held.read({"accumulation_counter": "N/A"}, 12.0) == {}
    assert held.read(residency(cycles=0), 12.0) == {}


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [
        ("activity.gfx_activity", (NA16, NA32, 101), "util_pct"),
        ("activity.umc_activity", (NA16, NA32, 250), "mem_util_pct"),
        ("power.current_socket_power", (NA16, NA32, 0), "power_w"),
        ("power_cap.power_cap", (NA64, NA32, 0), "power_limit_w"),
        ("power_cap.default_power_cap", (NA64, 0), "power_limit_default_w"),
        ("energy", (NA64, 0), "energy_j"),
        ("energy_resolution", (0, float("nan"), float("inf")), "energy_j"),
        ("clock_mem.clk", (NA32, 0), "mem_clock_mhz"),
        ("clock_gfx.max_clk", (NA32, 0), "sm_clock_max_mhz"),
        ("memory_used", (NA64, 206_141_652_993), "mem_used_bytes"),
        ("pcie.pcie_metric.pcie_speed", (NA32, 0, 12_345), "pcie_gen"),
        ("pcie.pcie_metric.pcie_width", (NA16, 0), "pcie_width"),
        ("pcie.pcie_static.max_pcie_width", (NA16, 0), "pcie_width_max"),
        ("total_ecc.correctable_count", (NA64, NA32), "ecc_corrected_total"),
        ("metrics.accumulation_counter", (NA64,), "throttle_sw_power_s"),
        ("metrics.ppt_residency_acc", (NA64,), "throttle_sw_power_s"),
    ],
)
def test_sentinels_and_nonsense_are_absent(host: Host, path: str, values: tuple[float, ...], field: str) -> None:
    *parts, last = path.split(".")
    place = host.scenario.gpu(0)
    for part in parts:
        place = getattr(place, part)
    host.scenario.gpu(0).vram_usage.vram_total = 0
    host.collector()
    assert field in gpus(host.tick())[NEW].fields
    for value in values:
        setattr(place, last, value)
        seen = gpus(host.tick())[NEW].fields
        assert field not in seen, value
        assert seen["temp_c"] == 84.0


def test_processes_that_are_told_no_more_are_unknown_and_not_those_of_before(host: Host) -> None:
    collector = host.collector()
    host.tick()
    host.scenario.refuse(0, "processes", code=codes.NO_PERM)
    assert "processes" not in gpus(host.tick())[NEW].fields
    assert {gpu.index: gpu.pids for gpu in collector.gpu_processes} == {0: None, 1: (777,)}


def test_a_temperature_of_a_sensor_that_is_not_there_is_absent(host: Host) -> None:
    host.collector()
    for celsius in (0, 65535, -40_001, 250):
        host.scenario.temperature(0, VRAM, CURRENT, celsius)
        host.scenario.temperature(0, HOTSPOT, CRITICAL, celsius)
        assert not {"mem_temp_c", "temp_limit_c"} & gpus(host.tick())[NEW].fields.keys()


def test_temperatures_in_thousandths_are_the_same_degrees(host: Host) -> None:
    host.scenario.temperature(0, HOTSPOT, CURRENT, 84_500)
    host.scenario.temperature(0, HOTSPOT, CRITICAL, 100_000)
    host.collector()
    fields = gpus(host.tick())[NEW].fields
    assert (fields["temp_c"], fields["temp_limit_c"], fields["temp_margin_c"]) == (84.5, 100.0, 15.5)


def test_an_edge_sensor_that_fails_for_a_tick_is_not_replaced_by_the_hotspot(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.temperature(1, EDGE, CURRENT, 52, code=30)
    seen = gpus(host.tick())[OLD].fields
    assert "temp_c" not in seen
    assert seen["temp_limit_c"] == 99.0


def test_a_clock_on_some_of_the_dies_is_the_mean_of_those(host: Host) -> None:
    clocks = host.scenario.gpu(0).metrics.current_gfxclks
    for die in (0, 1, 2):
        clocks[die] = 0 if die else NA16
    host.collector()
    assert gpus(host.tick())[NEW].fields["sm_clock_mhz"] == pytest.approx((1700 + 1300 + 1200) / 3)


def test_a_limit_in_watts_and_one_in_microwatts_are_told_apart(host: Host) -> None:
    host.scenario.gpu(0).power_cap.power_cap = 9_999
    host.scenario.gpu(1).power_cap.power_cap = 100_000_000
    host.collector()
    seen = gpus(host.tick())
    assert (seen[NEW].fields["power_limit_w"], seen[OLD].fields["power_limit_w"]) == (9_999.0, 100.0)


@pytest.mark.parametrize("uuid", ["", "00000000-0000-0000-0000-000000000000"])
def test_a_gpu_that_says_no_uuid_or_zeros_is_known_by_its_pci_address(host: Host, uuid: str) -> None:
    host.scenario.gpu(0).uuid = uuid.encode()
    host.collector()
    seen = {sample.tags["gpu"]: sample.tags["uuid"] for sample in gpus(host.tick()).values()}
    assert seen == {"0": "PCI-0000:83:00", "1": host.scenario.gpu(1).uuid.decode()}


def test_two_gpus_of_one_uuid_stay_two(host: Host) -> None:
    host.scenario.gpu(1).uuid = host.scenario.gpu(0).uuid
    host.collector()
    seen = {sample.tags["gpu"]: sample.fields["power_w"] for sample in gpus(host.tick()).values()}
    assert seen == {"0": 612.0, "1": 187.0}


def test_what_the_package_trips_over_costs_that_value_only(host: Host) -> None:
    host.scenario.gpu(0).asic.asic_serial = b"not hexadecimal"
    host.scenario.gpu(0).processes[0].name = b"\xff\xfe"
    host.scenario.gpu(1).asic.market_name = b"a\nb\x07c"
    collector = host.collector()
    seen = gpus(host.tick())
    assert not {"name", "processes"} & seen[NEW].fields.keys()
    assert seen[NEW].fields["power_w"] == 612.0
    assert seen[OLD].fields["name"] == "a b c"
    assert collector.errors == 1  # the processes; the name was asked before the GPU was read
