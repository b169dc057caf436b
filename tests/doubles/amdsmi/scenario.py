"""The hand on the double: writes the shared memory that the library answers from. Two GPUs that differ in every field."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from tests.doubles.amdsmi.layout import EVERY_FEATURE, FEATURES, METRICS, GpuState, State

NOT_SUPPORTED = 2
EDGE, HOTSPOT, VRAM = 0, 1, 2  # amdsmi_temperature_type_t
CURRENT, CRITICAL = 0, 5  # amdsmi_temperature_metric_t
NA16, NA32, NA64 = 2**16 - 1, 2**32 - 1, 2**64 - 1


class Scenario:
    """A mapped state file. `gpu(i)` are the raw numbers, in AMD's units."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(State)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.state = State.from_buffer(self._memory)
        for gpu in self.state.gpu:
            gpu.hang_feature = EVERY_FEATURE

    def gpu(self, index: int) -> Any:
        return self.state.gpu[index]

    def temperature(self, index: int, sensor: int, metric: int, celsius: int, code: int = 0) -> None:
        self.gpu(index).temperature[sensor * METRICS + metric] = celsius
        self.gpu(index).temperature_code[sensor * METRICS + metric] = code

    def refuse(self, index: int, *features: str, code: int = NOT_SUPPORTED) -> None:
        for feature in features:
            self.gpu(index).feature_code[FEATURES.index(feature)] = code

    def calls(self, index: int, feature: str) -> int:
        return int(self.gpu(index).feature_calls[FEATURES.index(feature)])

    def hang(self, index: int, feature: str | None = None) -> None:
        self.gpu(index).hang_feature = EVERY_FEATURE if feature is None else FEATURES.index(feature)
        self.gpu(index).hang = 1

    def release(self) -> None:
        """End every hang, so that nothing is left behind."""
        self.state.init_hang = 0
        for gpu in self.state.gpu:
            gpu.hang = 0

    def move(self, source: int, target: int) -> None:
        """The GPU of one index under another, as after the one before it is gone."""
        ctypes.memmove(
            ctypes.addressof(self.state.gpu[target]), ctypes.addressof(self.state.gpu[source]), ctypes.sizeof(GpuState)
        )

    def reload_driver(self) -> None:
        """What a driver reload does to those who hold the old connection."""
        self.state.generation += 1

    def run_firmware(self, index: int, cycles: int, **held: int) -> None:
        """Let the firmware count `cycles`, of which each reason held the clock down for its part."""
        metrics = self.gpu(index).metrics
        for reason, number in held.items():
            name = f"{reason}_residency_acc"
            setattr(metrics, name, getattr(metrics, name) + number)
        metrics.accumulation_counter += cycles


def blank_metrics(gpu: Any) -> None:
    """Every number of the metrics table at what means "not available"."""
    ctypes.memset(ctypes.addressof(gpu.metrics), 0xFF, ctypes.sizeof(gpu.metrics))


def add_mi300(scenario: Scenario, index: int, uuid: str = "f2ff74a1-0000-1000-8053-00000000aaa1") -> None:
    """An accelerator of many chiplets: no edge sensor, present power, a clock on each compute die, firmware accumulators."""
    gpu = scenario.gpu(index)
    gpu.uuid, gpu.bdf = uuid.encode(), (0x83 << 8)
    gpu.asic.market_name, gpu.asic.asic_serial = b"AMD Instinct MI300X", b"0xAAA1"
    gpu.driver.driver_version, gpu.driver.driver_name = b"6.14.14", b"amdgpu"
    gpu.activity.gfx_activity, gpu.activity.umc_activity, gpu.activity.mm_activity = 97, 58, 3
    gpu.memory_total, gpu.memory_used = 206_141_652_992, 150_000_000_256
    gpu.vram_usage.vram_total, gpu.vram_usage.vram_used = 196_592, 143_051
    scenario.temperature(index, EDGE, CURRENT, 0, NOT_SUPPORTED)
    scenario.temperature(index, EDGE, CRITICAL, 0, NOT_SUPPORTED)
    scenario.temperature(index, HOTSPOT, CURRENT, 84)
    scenario.temperature(index, HOTSPOT, CRITICAL, 100)
    scenario.temperature(index, VRAM, CURRENT, 79)
    scenario.temperature(index, VRAM, CRITICAL, 105)
    gpu.power.current_socket_power, gpu.power.average_socket_power = 612, NA16
    gpu.power_cap.power_cap, gpu.power_cap.default_power_cap = 700_000_000, 750_000_000
    gpu.power_cap.max_power_cap = 760_000_000
    gpu.energy, gpu.energy_resolution = 600_000_000, 15.25
    gpu.clock_gfx.clk, gpu.clock_gfx.max_clk = 1111, 2100
    gpu.clock_mem.clk, gpu.clock_mem.max_clk = 1290, 1300
    blank_metrics(gpu)
    for die, mhz in enumerate((1400, 1500, 1600, 1700, 1300, 1200)):
        gpu.metrics.current_gfxclks[die] = mhz
    gpu.metrics.accumulation_counter = 1_000_000
    gpu.metrics.ppt_residency_acc, gpu.metrics.prochot_residency_acc = 5000, 70
    gpu.metrics.socket_thm_residency_acc, gpu.metrics.vr_thm_residency_acc = 600, 50
    gpu.metrics.hbm_thm_residency_acc = 900
    gpu.pcie.pcie_metric.pcie_speed, gpu.pcie.pcie_metric.pcie_width = 16_000, 8
    gpu.pcie.pcie_metric.pcie_replay_count = 888
    gpu.pcie.pcie_static.max_pcie_speed, gpu.pcie.pcie_static.max_pcie_width = 32_000, 16
    gpu.replays = 7
    gpu.total_ecc.correctable_count, gpu.total_ecc.uncorrectable_count, gpu.total_ecc.deferred_count = 31, 2, 900
    gpu.process_count = 2
    gpu.processes[0].pid, gpu.processes[0].name = 4242, b"vllm"
    gpu.processes[1].pid, gpu.processes[1].name = 4141, b"ray"


def add_mi100(scenario: Scenario, index: int, uuid: str = "37ff738c-0000-1000-80bc-00000000bbb2") -> None:
    """An older card: edge sensor, average power, limits in watts, one clock, no accumulators, memory only in mebibytes."""
    gpu = scenario.gpu(index)
    gpu.uuid, gpu.bdf = uuid.encode(), (0xC1 << 8)
    gpu.asic.market_name, gpu.asic.asic_serial = b"AMD Instinct MI100", b"0xBBB2"
    gpu.driver.driver_version, gpu.driver.driver_name = b"6.3.6", b"amdgpu"
    gpu.activity.gfx_activity, gpu.activity.umc_activity, gpu.activity.mm_activity = 41, 13, NA16
    scenario.refuse(index, "memory_total", "memory_usage")
    gpu.vram_usage.vram_total, gpu.vram_usage.vram_used = 32_752, 9001
    scenario.temperature(index, EDGE, CURRENT, 52)
    scenario.temperature(index, EDGE, CRITICAL, 99)
    scenario.temperature(index, HOTSPOT, CURRENT, 66)
    scenario.temperature(index, HOTSPOT, CRITICAL, 104)
    scenario.temperature(index, VRAM, CURRENT, 61)
    scenario.temperature(index, VRAM, CRITICAL, 94)
    gpu.power.current_socket_power, gpu.power.average_socket_power = NA16, 187
    gpu.power_cap.power_cap, gpu.power_cap.default_power_cap, gpu.power_cap.max_power_cap = 250, 290, 300
    gpu.energy, gpu.energy_resolution = 1_000_000_000, 15.5
    gpu.clock_gfx.clk, gpu.clock_gfx.max_clk = 1395, 1502
    gpu.clock_mem.clk, gpu.clock_mem.max_clk = 1180, 1200
    blank_metrics(gpu)
    gpu.pcie.pcie_metric.pcie_speed, gpu.pcie.pcie_metric.pcie_width = 8000, 4
    gpu.pcie.pcie_metric.pcie_replay_count = 19
    gpu.pcie.pcie_static.max_pcie_speed, gpu.pcie.pcie_static.max_pcie_width = 64_000, 32
    scenario.refuse(index, "replays", "total_ecc")
    gpu.umc_ecc.correctable_count, gpu.umc_ecc.uncorrectable_count = 1000, 3
    gpu.gfx_ecc.correctable_count, gpu.gfx_ecc.uncorrectable_count = 5, 1
    gpu.process_count = 1
    gpu.processes[0].pid, gpu.processes[0].name = 777, b"python"


def two_gpus(path: Path) -> Scenario:
    scenario = Scenario(path)
    add_mi300(scenario, 0)
    add_mi100(scenario, 1)
    scenario.state.gpu_count = 2
    return scenario
