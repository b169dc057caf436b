"""What public monitors of GPUs got wrong, and what their users reported of NVML: here each is held right.

| public issue | what it is tested by |
|---|---|
| l9gpu 0.2.3: throttle bits shifted; azurehpc-health-checks#138 | each bit by its number; one that nobody knows is kept |
| l9gpu 0.2.3: XIDs from an NVLink counter, a missing constant swallowed | field 32 is no XID; a missing symbol costs its own field |
| l9gpu 0.2.3: milliwatts under the unit W | power in watts from every source |
| gpumedic 0.1.0, gpud#1003: PCI domain dropped | two GPUs that differ in the domain alone |
| l9gpu 0.2.3: the second version's memory call on an old library | the first version's call; a floor on nvidia-ml-py |
| dcgm-exporter: 9.2e18 for a blank | all bits set is absent |
| nvitop#139, #145; rossumai/nvgpu#6; pytorch/serve#1722 | one GPU's or field's failure costs itself only |
| gpud#215 | reasons of a card that refuses them, beside one that tells them |
| gpud#1183 | a symbol that an old driver lacks |
| nvitop#195; gpud#1170, #1084 | unified memory is never a total of 0 |
| gpud#351; nvidia_gpu_exporter#384 | row remapping: a consumer card, and one refusal is the last question |
| nvitop#79, #89, #94 | torn process records |
| nvitop#100 | a uuid of NUL bytes, of zeros, of junk |
| nvitop#134; pynvml#36; nvidia-docker#1483 | processes that a container may not see are untold, not none |
| dcgm-exporter#236 | a virtual GPU without a temperature |
| pynvml#28; HAMi-core#318; tensorflow#32881 | the key is the uuid, whatever the index |
| nvitop#176 | directions of PCIe are not exchanged |
| dcgm-exporter#662; DCGM#202, #303 | a busy GPU with zeros of profiling has none |
| dcgm-exporter#346, #589; telegraf#19405 | throttle times in seconds, beyond 32 bits |
| dcgm-exporter#250 | as many series as GPUs |
| zeus#45; DCGM#157 | power is the mean of a second where there is one |
| gpud#636, #1208 | a core's limit is not the memory's; the margin's offset is the card's own |
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agent.timing import ReaderTiming
from telemetry.catalogue import GPU_STATES
from tests.agent.nvidia.conftest import EVERY_TICK, Host, events, gpus, states
from tests.doubles.nvml.scenario import UINT, ULLONG

ROOT = Path(__file__).parents[3]

BITS = {
    "gpu idle": 0x1,
    "application clocks": 0x2,
    "software power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "hardware power brake": 0x80,
    "display clocks": 0x100,
    "board limit": 0x200,
    "reliability": 0x400,
    "one that nobody knows": 1 << 40,
}


@pytest.mark.parametrize("bit", BITS.values(), ids=BITS.keys())
def test_a_throttle_bit_keeps_its_number_beside_another_gpus(shared_host: Host, bit: int) -> None:
    shared_host.scenario.gpu(0).reasons, shared_host.scenario.gpu(1).reasons = bit, bit << 1
    seen = gpus(shared_host.tick())
    assert (seen["0001"].fields["throttle_reasons"], seen["0002"].fields["throttle_reasons"]) == (bit, bit << 1)


def test_reasons_that_one_card_refuses_are_absent_and_anothers_stand(host: Host) -> None:
    """gpud#215: what is not supported was asked for, and what is supported was not."""
    host.scenario.refuse(0, "event_reasons", "throttle_reasons")
    host.scenario.gpu(1).reasons = 0
    host.collector()
    seen = gpus(host.tick())
    assert "throttle_reasons" not in seen["0001"].fields
    assert seen["0002"].fields["throttle_reasons"] == 0


def test_throttle_time_of_each_cause_moves_its_own_counter(host: Host) -> None:
    causes = {
        74: "throttle_sw_power_s",
        76: "throttle_sync_boost_s",
        269: "throttle_sw_thermal_s",
        270: "throttle_hw_thermal_s",
        271: "throttle_hw_power_brake_s",
    }
    host.collector(EVERY_TICK)
    before = gpus(host.tick())["0001"].fields
    for number, fid in enumerate(causes, start=1):
        name = causes[fid]
        host.scenario.field(0, fid, round(float(before[name]) * 1e9) + number * 10**9, ULLONG)
    after = gpus(host.tick())["0001"].fields
    assert {name: round(float(after[name]) - float(before[name]), 6) for name in causes.values()} == {
        name: float(number) for number, name in enumerate(causes.values(), start=1)
    }


def test_a_throttle_counter_beyond_32_bits_is_seconds(host: Host) -> None:
    host.scenario.field(0, 269, 30 * 86_400 * 10**9, ULLONG)
    host.collector()
    assert gpus(host.tick())["0001"].fields["throttle_sw_thermal_s"] == 30 * 86_400.0


def test_a_count_of_nvlink_errors_is_no_xid(host: Host) -> None:
    host.scenario.field(0, 32, 7, ULLONG)
    host.collector()
    samples = host.tick()
    assert events(samples, "xid") == []
    assert gpus(samples)["0001"].fields["xid_total"] == 0


def test_a_library_without_events_costs_the_xid_count_and_nothing_else(host: Host) -> None:
    host.collector()
    whole = gpus(host.tick())["0001"].fields.keys()
    host.replace_library(without=("nvmlDeviceRegisterEvents",))
    host.collector()
    assert whole - gpus(host.tick())["0001"].fields.keys() == {"xid_total"}
    assert host.collectors[-1].errors == 0


def test_power_is_in_watts_from_every_source(host: Host) -> None:
    host.scenario.gpu(0).power_mw = host.scenario.gpu(0).enforced_mw = 612_000
    for fid in (185, 186, 190):
        host.scenario.field(0, fid, 612_000, UINT)
    host.collector()
    for source in (185, 186, None):
        fields = gpus(host.tick())["0001"].fields
        assert (fields["power_w"], fields["power_limit_w"]) == (612.0, 612.0)
        host.scenario.refuse_field(0, 190)
        if source is not None:
            host.scenario.refuse_field(0, source)


def test_power_is_the_mean_of_a_second_and_not_the_instants(host: Host) -> None:
    host.scenario.field(0, 185, 512_250, UINT)
    host.scenario.field(0, 186, 830_000, UINT)
    host.collector()
    assert gpus(host.tick())["0001"].fields["power_w"] == 512.25


def test_the_second_memory_call_falls_back_to_the_first(host: Host) -> None:
    host.replace_library(without=("nvmlDeviceGetMemoryInfo_v2",))
    host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert fields["mem_total_bytes"] == 85_520_809_984.0
    assert fields["mem_used_bytes"] == 71_000_000_512.0 + 549_453_824.0
    assert host.collectors[0].errors == 0


def test_the_binding_has_a_floor_that_knows_both_memory_calls_and_no_exact_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [wanted] = [name for name in project["dependencies"] if name.startswith("nvidia-ml-py")]
    assert "==" not in wanted
    floor = wanted.partition(">=")[2].split(",")[0]
    assert [int(part) for part in floor.split(".")] >= [12, 535]
    assert not [name for name in project["dependencies"] if name.split(">")[0].strip() == "pynvml"]


def test_two_gpus_of_one_bus_in_different_domains_stay_two(host: Host) -> None:
    first, second = host.scenario.gpu(0), host.scenario.gpu(1)
    assert (first.pci_bus, first.pci_device) == (second.pci_bus, second.pci_device)
    collector = host.collector()
    host.tick()
    assert [gpu.pci for gpu in collector._roster] == ["0008:01:00", "0009:01:00"]


@pytest.mark.parametrize(
    "feature", ["utilization", "clock", "memory_v2", "field_values", "pstate", "event_reasons", "ecc"]
)
@pytest.mark.parametrize("code", [3, 15, 999])
def test_one_query_that_fails_costs_its_gpu_at_most_and_never_the_other(host: Host, feature: str, code: int) -> None:
    host.collector()
    host.tick()
    host.scenario.refuse(0, feature, code=code)
    seen = gpus(host.tick())
    assert seen["0002"].fields["temp_c"] == 57.0
    assert seen["0001"].fields["state"] == (GPU_STATES.index("lost") if code == 15 else 0)
    assert (seen["0001"].fields.get("temp_c") == 86.0) == (code != 15)


@pytest.mark.parametrize(
    "symbol",
    [
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlGpmQueryDeviceSupport",
        "nvmlEventSetCreate",
    ],
)
def test_a_symbol_that_an_old_driver_lacks_is_no_error(host: Host, symbol: str) -> None:
    host.replace_library(without=(symbol,))
    collector = host.collector()
    assert states(host.tick()) == {"0001": 0, "0002": 0}
    assert collector.errors == 0


def test_memory_that_is_not_told_is_never_a_total_of_zero(host: Host) -> None:
    host.scenario.gpu(0).mem_total = host.scenario.gpu(0).mem_used = host.scenario.gpu(0).mem_reserved = 0
    host.scenario.refuse(1, "memory", "memory_v2")
    host.collector()
    for sample in gpus(host.tick()).values():
        assert not {"mem_total_bytes", "mem_used_bytes", "memory_kind"} & sample.fields.keys()


def test_row_remapping_is_asked_once_of_a_card_that_refuses_it(host: Host) -> None:
    """In a guest with a virtual GPU each question was a line in the kernel's log."""
    host.scenario.refuse(0, "remapped_rows")
    host.collector(EVERY_TICK)
    for _ in range(4):
        host.tick()
    assert (host.scenario.calls(0, "remapped_rows"), host.scenario.calls(1, "remapped_rows")) == (1, 4)
    assert EVERY_TICK.reprobe_s >= 3600


def test_torn_process_records_are_left_for_the_other_version_of_the_call(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.process_layout, gpu.process_count = 1, 3
    gpu.pids[0], gpu.pids[1], gpu.pids[2] = 4242, 4141, 4040
    collector = host.collector()
    assert gpus(host.tick())["0001"].fields["processes"] == 3
    assert collector.pids_by_gpu["GPU-5c0a1e77-0001"] == (4040, 4141, 4242)
    host.tick()
    assert host.scenario.calls(0, "processes_v3") == 2  # the two calls of the first tick


def test_torn_process_records_without_another_version_are_no_processes(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.process_layout, gpu.process_count = 1, 3
    host.scenario.refuse(0, "processes_v2")
    collector = host.collector()
    assert "processes" not in gpus(host.tick())["0001"].fields
    assert "GPU-5c0a1e77-0001" not in collector.pids_by_gpu


@pytest.mark.parametrize(
    "uuid", [b"", b"GPU-\0\0\0\0\0\0\0\0", b"GPU-00000000-0000-0000-0000-000000000000", b"\xff\xfe\xfd", b"GPU-a\nb"]
)
def test_a_uuid_that_is_none_gives_way_to_the_pci_address(host: Host, uuid: bytes) -> None:
    host.scenario.gpu(0).uuid = uuid
    host.collector()
    seen = {sample.tags["gpu"]: sample.tags["uuid"] for sample in host.tick() if sample.measurement == "gpu"}
    assert seen == {"0": "PCI-0008:01:00", "1": "GPU-a9d3f210-0002"}


def test_a_busy_gpu_without_processes_does_not_tell_them(host: Host) -> None:
    """In a container of its own process space the driver's list is empty."""
    gpu = host.scenario.gpu(0)
    collector = host.collector()
    host.tick()
    gpu.process_count = 0
    assert "processes" not in gpus(host.tick())["0001"].fields
    assert [known.pids for known in collector.gpu_processes] == [None, (777,)]
    gpu.gpu_util = 0
    assert gpus(host.tick())["0001"].fields["processes"] == 0
    assert [known.pids for known in collector.gpu_processes] == [(), (777,)]


def test_a_virtual_gpu_has_no_temperature_rather_than_zero(host: Host) -> None:
    host.scenario.refuse(0, "temperature", "temperature_v", "margin")
    host.scenario.refuse_field(0, 82, 308)
    host.collector()
    fields = gpus(host.tick())["0001"].fields
    assert not {"temp_c", "mem_temp_c", "temp_margin_c"} & fields.keys()
    assert fields["power_w"] == 512.25


def test_readings_follow_the_uuid_when_the_index_moves(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.move(1, 2)
    host.scenario.move(0, 1)
    host.scenario.move(2, 0)
    host.scenario.reload_driver()
    samples = host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})
    seen = gpus(samples)
    assert (seen["0001"].tags["gpu"], seen["0001"].fields["power_w"]) == ("1", 512.25)
    assert (seen["0002"].tags["gpu"], seen["0002"].fields["power_w"]) == ("0", 187.5)


def test_transmitted_and_received_are_not_exchanged(host: Host) -> None:
    host.collector()
    host.tick()
    fields = gpus(host.tick())["0002"].fields
    assert (fields["pcie_tx_bytes_s"], fields["pcie_rx_bytes_s"]) == (3000 * 1024.0, 5000 * 1024.0)


def test_profiling_that_is_all_zeros_on_a_busy_gpu_is_lost(host: Host) -> None:
    gpu = host.scenario.gpu(0)
    gpu.gpm_sm = gpu.gpm_tensor = gpu.gpm_dram = 0.0
    host.collector()
    host.until(lambda _samples: host.scenario.calls(0, "gpm_metrics") >= 1)
    active = {"sm_active_pct", "tensor_active_pct", "dram_active_pct"}
    assert not active & gpus(host.until(lambda _: host.scenario.calls(0, "gpm_metrics") >= 2))["0001"].fields.keys()
    gpu.gpu_util = 0
    samples = host.until(lambda samples: "sm_active_pct" in gpus(samples)["0001"].fields)
    assert {gpus(samples)["0001"].fields[name] for name in active} == {0.0}


def test_as_many_series_as_gpus(host: Host) -> None:
    for index in range(2, 8):
        host.scenario.move(0, index)
        host.scenario.gpu(index).uuid = f"GPU-5c0a1e77-100{index}".encode()
        host.scenario.gpu(index).temperature = 40 + index
    host.scenario.state.gpu_count = 8
    host.collector(ReaderTiming(takeover_s=20.0))
    seen = gpus(host.tick())
    assert len(seen) == 8
    assert [seen[f"100{index}"].fields["temp_c"] for index in range(2, 8)] == [40.0 + index for index in range(2, 8)]


def test_a_cores_limit_is_not_the_memorys(host: Host) -> None:
    host.scenario.gpu(1).threshold[2], host.scenario.gpu(1).threshold[3] = 105, 85
    host.collector()
    fields = gpus(host.tick())["0002"].fields
    assert (fields["temp_limit_c"], fields["mem_temp_limit_c"]) == (85.0, 105.0)


@pytest.mark.parametrize("offset", [-2, -3, 0])
def test_the_offset_of_the_slowdown_point_is_the_cards_own(host: Host, offset: int) -> None:
    """-2 on some parts, -3 on others: read, not tabled."""
    host.scenario.refuse_field(0, 196)
    host.scenario.field(0, 194, offset, 5)
    host.collector()
    for _ in range(5):
        fields = gpus(host.tick())["0001"].fields
    assert fields["temp_limit_c"] == 87.0 - offset


def test_an_enumeration_that_fails_ends_nothing_and_passes(host: Host) -> None:
    """gpud#1180: the agent ended at it."""
    host.collector()
    host.tick()
    host.scenario.state.count_code = 999
    host.scenario.reload_driver()
    lost = {"0001": GPU_STATES.index("lost"), "0002": GPU_STATES.index("lost")}
    host.until(lambda samples: states(samples) == lost)
    host.scenario.state.count_code = 0
    host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})


def test_a_container_that_loses_its_devices_says_so_of_every_gpu(host: Host) -> None:
    """nvidia-container-toolkit#48, #251, #1227: after a reload of systemd every call answers with an unknown error."""
    host.collector()
    host.tick()
    host.scenario.gpu(0).fault = host.scenario.gpu(1).fault = 999
    samples = host.tick()
    assert [event.fields["text"] for event in events(samples, "gpu_lost")] == [
        "GPU 0 lost: the driver reports an unknown error",
        "GPU 1 lost: the driver reports an unknown error",
    ]
    assert [dict(sample.fields) for sample in gpus(samples).values()] == [{"state": GPU_STATES.index("lost")}] * 2
