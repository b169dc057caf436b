"""The hand on the double: writes the shared memory that the library answers from. Two GPUs that differ in every field."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

from tests.doubles.nvml.layout import EVERY_FEATURE, FEATURES, MAX_FIELDS, MAX_XIDS, NO_INSTANCE, SLEEP, GpuState, State

NOT_SUPPORTED = 3
DOUBLE, UINT, ULONG, ULLONG, LLONG, SINT, USHORT = range(7)  # nvmlValueType_t
_PACK = {DOUBLE: "<d", UINT: "<Q", ULONG: "<Q", ULLONG: "<Q", LLONG: "<q", SINT: "<q", USHORT: "<Q"}


class Scenario:
    """A mapped state file. `state.gpu[i]` are the raw numbers, in NVML's units."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(State)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.state = State.from_buffer(self._memory)
        self.state.driver_version = 1
        self.state.driver_text = b"570.124.06"
        self.state.pcie_sleep_us = 20000
        for gpu in self.state.gpu:
            gpu.hang_feature = EVERY_FEATURE
            for fid in range(MAX_FIELDS):
                gpu.field_code[fid] = NOT_SUPPORTED

    def gpu(self, index: int) -> GpuState:
        return self.state.gpu[index]

    def field(self, index: int, fid: int, value: float, kind: int = ULLONG, code: int = 0) -> None:
        """Give a field value; negative ones in the low four bytes as the driver leaves them."""
        bits = struct.unpack("<Q", struct.pack(_PACK[kind], value if kind == DOUBLE else int(value)))[0]
        gpu = self.state.gpu[index]
        gpu.field_type[fid], gpu.field_bits[fid], gpu.field_code[fid] = kind, bits, code

    def refuse(self, index: int, *features: str, code: int = NOT_SUPPORTED) -> None:
        for feature in features:
            self.state.gpu[index].feature_code[FEATURES.index(feature)] = code

    def refuse_field(self, index: int, *fids: int, code: int = NOT_SUPPORTED) -> None:
        for fid in fids:
            self.state.gpu[index].field_code[fid] = code

    def calls(self, index: int, feature: str) -> int:
        return int(self.state.gpu[index].feature_calls[FEATURES.index(feature)])

    def hang(self, index: int, feature: str | None = None, how: int = SLEEP) -> None:
        self.state.gpu[index].hang_feature = EVERY_FEATURE if feature is None else FEATURES.index(feature)
        self.state.gpu[index].hang = how

    def release(self) -> None:
        """End every hang, so that nothing is left behind."""
        self.state.init_hang = 0
        for gpu in self.state.gpu:
            gpu.hang = 0

    def xid(self, index: int, code: int, kind: int = 8) -> None:
        slot = self.state.xid_head % MAX_XIDS
        self.state.xid_gpu[slot], self.state.xid_code[slot], self.state.xid_type[slot] = index, code, kind
        self.state.xid_head += 1  # last: the library looks at nothing beyond it

    def move(self, source: int, target: int) -> None:
        """The GPU of one index under another, as after the one before it is gone."""
        ctypes.memmove(
            ctypes.addressof(self.state.gpu[target]), ctypes.addressof(self.state.gpu[source]), ctypes.sizeof(GpuState)
        )

    def reload_driver(self) -> None:
        """What a driver reload does to those who hold the old connection."""
        self.state.generation += 1


def add_hopper(scenario: Scenario, index: int, uuid: str = "GPU-5c0a1e77-0001") -> None:
    """An accelerator with all that a new driver tells: margins, byte counters, GPM, memory temperature; no fan."""
    gpu = scenario.gpu(index)
    gpu.uuid, gpu.name, gpu.brand = uuid.encode(), b"NVIDIA H100 80GB HBM3", 14
    gpu.gpu_util, gpu.mem_util = 98, 61
    gpu.clock[1], gpu.clock[2], gpu.clock_max[1], gpu.clock_max[2] = 1290, 2619, 1980, 2620
    gpu.reasons, gpu.pstate = 0x24, 0
    gpu.temperature, gpu.margin = 86, 1
    for kind in range(8):
        gpu.threshold_code[kind] = NOT_SUPPORTED
    gpu.mem_total, gpu.mem_reserved, gpu.mem_used = 85520809984, 549453824, 71000000512
    gpu.power_mw, gpu.enforced_mw, gpu.requested_mw, gpu.default_mw = 511000, 690000, 695000, 699000
    gpu.energy_mj = 7_000_000_111
    gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max = 4, 5, 8, 16
    gpu.pcie_tx_kib, gpu.pcie_rx_kib, gpu.pcie_replays = 1111, 2222, 7
    gpu.ecc_corrected, gpu.ecc_uncorrected = 31, 2
    gpu.remap_corrected, gpu.remap_uncorrected, gpu.remap_pending, gpu.remap_failed = 5, 6, 1, 0
    gpu.pci_domain, gpu.pci_bus, gpu.pci_device, gpu.persistence = 8, 1, 0, 1
    gpu.process_count = 2
    gpu.pids[0], gpu.pids[1] = 4242, 4141
    gpu.gpm_supported, gpu.gpm_sm, gpu.gpm_tensor, gpu.gpm_dram = 1, 92.5, 11.25, 67.125
    scenario.refuse(index, "fan", "fan_v2")
    for fid, value in {
        82: 94,
        185: 512_250,
        186: 530_000,
        189: 700_000,
        190: 650_000,
        192: 680_000,
        230: 1,
    }.items():
        scenario.field(index, fid, value, UINT)
    for fid, value in {
        83: 7_000_000_500,
        74: 11_500_000_000,
        76: 22_250_000_000,
        269: 418_200_000_000,
        270: 3_125_000_000,
        271: 9_000_000_500,
        197: 5_000_000_000,
        198: 8_000_000_000,
    }.items():
        scenario.field(index, fid, value, ULLONG)
    scenario.field(index, 193, -7, SINT)
    scenario.field(index, 194, -2, SINT)
    scenario.field(index, 195, -3, SINT)
    scenario.field(index, 196, 0, SINT)


def add_ampere(scenario: Scenario, index: int, uuid: str = "GPU-a9d3f210-0002") -> None:
    """An older data-centre card: absolute thresholds, no margin, no byte counters, no GPM, power by the plain call; a fan."""
    gpu = scenario.gpu(index)
    gpu.uuid, gpu.name, gpu.brand = uuid.encode(), b"NVIDIA A100-PCIE-40GB", 2
    gpu.gpu_util, gpu.mem_util = 43, 17
    gpu.clock[1], gpu.clock[2], gpu.clock_max[1], gpu.clock_max[2] = 1395, 1215, 1410, 1216
    gpu.reasons, gpu.pstate = 0xC0 | 0x8, 2
    gpu.temperature, gpu.margin = 57, 0
    scenario.refuse(index, "margin")
    gpu.threshold[0], gpu.threshold[1], gpu.threshold[2], gpu.threshold[3] = 92, 89, 95, 85
    gpu.mem_total, gpu.mem_reserved, gpu.mem_used = 42949672960, 603979776, 9000001536
    gpu.power_mw, gpu.enforced_mw, gpu.requested_mw, gpu.default_mw = 187500, 225000, 230000, 250000
    gpu.energy_mj = 1_234_567_750
    gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max = 3, 6, 4, 32
    gpu.pcie_tx_kib, gpu.pcie_rx_kib, gpu.pcie_replays = 3000, 5000, 19
    gpu.ecc_corrected, gpu.ecc_uncorrected = 1001, 4
    gpu.remap_corrected, gpu.remap_uncorrected, gpu.remap_pending, gpu.remap_failed = 8, 1, 0, 1
    gpu.pci_domain, gpu.pci_bus, gpu.pci_device, gpu.persistence = 9, 1, 0, 1
    gpu.process_count = 1
    gpu.pids[0] = 777
    gpu.fan = 64
    scenario.field(index, 82, 71, UINT)
    scenario.field(index, 230, 2, UINT)
    scenario.field(index, 186, 187_500, UINT)
    for fid, value in {
        74: 1_000_000_001,
        76: 2_000_000_002,
        269: 3_000_000_003,
        270: 4_000_000_004,
        271: 5_000_000_005,
    }.items():
        scenario.field(index, fid, value, ULLONG)


def add_mig(scenario: Scenario, index: int, first: int = 8) -> None:
    """MIG on a GPU: two instances that differ in every field, and a gap between them. The whole card tells its use no more."""
    gpu = scenario.gpu(index)
    gpu.mig_mode, gpu.mig_room, gpu.mig_first = 1, 3, first
    scenario.refuse(index, "utilization", "remapped_rows")
    scenario.gpu(first + 1).gpu_instance = NO_INSTANCE
    for slot, number, uuid, profile in ((first, 1, b"aaaa", b"3g.40gb"), (first + 2, 5, b"bbbb", b"1g.10gb")):
        part = scenario.gpu(slot)
        part.uuid, part.name = b"MIG-7d20f1c4-" + uuid, b"NVIDIA H100 80GB HBM3 MIG " + profile
        part.gpu_instance = number
        part.mem_total, part.mem_reserved, part.mem_used = number * 8 * 2**30, number * 2**20, number * 3 * 2**30
        part.process_count = number
        for position in range(number):
            part.pids[position] = 9000 + 10 * number + position
        part.gpm_supported, part.gpm_sm, part.gpm_tensor = 1, 10.5 + number, 20.25 + number
        part.gpm_dram, part.gpm_graphics = 30.75 + number, 40.125 + number
        scenario.refuse(slot, "mig_mode", "pci", "temperature", "temperature_v", "power_usage", "gpm_sample")


def two_gpus(path: Path) -> Scenario:
    scenario = Scenario(path)
    add_hopper(scenario, 0)
    add_ampere(scenario, 1)
    scenario.state.gpu_count = 2
    return scenario
