"""An exporter's HTTP endpoint: plays dcgm-exporter or npu-exporter from one state of two devices that differ in every field."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.doubles.engine_endpoint import EngineEndpoint, Page


@dataclass(frozen=True)
class Device:
    """One GPU or NPU, in the units that an exporter publishes. `extra` overrides or adds families; a None removes one."""

    index: int
    uuid: str
    model: str
    util: float
    mem_util: float
    clock: float
    mem_clock: float
    temp: float
    mem_temp: float
    power: float
    energy_mj: float
    fb_used: float
    fb_free: float
    fb_reserved: float
    gr: float
    sm: float
    dram: float
    tensor: float
    pcie_rx: float
    pcie_tx: float
    xid: int = 0
    reasons: int = 0
    extra: dict[str, float | None] = field(default_factory=dict)
    instances: tuple[tuple[str, str, dict[str, float]], ...] = ()  # GPU_I_ID, profile, families

    def later(self, seconds: float, **changes: object) -> Device:
        """The device after a while at its power; an energy counter runs."""
        return replace(self, energy_mj=self.energy_mj + self.power * seconds * 1000, **changes)  # type: ignore[arg-type]


FIRST = Device(
    *(0, "GPU-5c0a1e77-0001", "NVIDIA H100 80GB HBM3", 98.0, 41.0, 1980.0, 2619.0, 61.0, 72.0, 512.5),
    *(9_876_543_210_123.0, 60_000.0, 20_681.0, 878.0, 0.97, 0.81, 0.67, 0.33, 3.5e9, 1.25e9),
)
SECOND = Device(
    *(1, "GPU-a9d3f210-0002", "NVIDIA A100-SXM4-40GB", 45.0, 17.0, 1410.0, 1593.0, 54.0, 65.0, 301.25),
    *(1_234_567_890.0, 11_000.0, 29_312.0, 624.0, 0.44, 0.42, 0.21, 0.11, 2.25e9, 0.75e9),
)


def dcgm_families(device: Device) -> dict[str, float]:
    found: dict[str, float | None] = {
        "DCGM_FI_DEV_GPU_UTIL": device.util,
        "DCGM_FI_DEV_MEM_COPY_UTIL": device.mem_util,
        "DCGM_FI_DEV_SM_CLOCK": device.clock,
        "DCGM_FI_DEV_MEM_CLOCK": device.mem_clock,
        "DCGM_FI_DEV_GPU_TEMP": device.temp,
        "DCGM_FI_DEV_MEMORY_TEMP": device.mem_temp,
        "DCGM_FI_DEV_POWER_USAGE": device.power,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": device.energy_mj,
        "DCGM_FI_DEV_FB_USED": device.fb_used,
        "DCGM_FI_DEV_FB_FREE": device.fb_free,
        "DCGM_FI_DEV_FB_RESERVED": device.fb_reserved,
        "DCGM_FI_DEV_XID_ERRORS": device.xid,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": device.reasons,
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE": device.gr,
        "DCGM_FI_PROF_SM_ACTIVE": device.sm,
        "DCGM_FI_PROF_DRAM_ACTIVE": device.dram,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": device.tensor,
        "DCGM_FI_PROF_PCIE_RX_BYTES": device.pcie_rx,
        "DCGM_FI_PROF_PCIE_TX_BYTES": device.pcie_tx,
        **device.extra,
    }
    return {name: value for name, value in found.items() if value is not None}


def npu_families(device: Device) -> dict[str, float]:
    found: dict[str, float | None] = {
        "npu_chip_info_utilization": device.sm * 100,
        "npu_chip_info_overall_utilization": device.util,
        "npu_chip_info_cube_utilization": device.tensor * 100,
        "npu_chip_info_hbm_bandwidth_utilization": device.mem_util,
        "npu_chip_info_temperature": device.temp,
        "npu_chip_info_hbm_temperature": device.mem_temp,
        "npu_chip_info_power": device.power,
        "npu_chip_info_aicore_current_freq": device.clock,
        "npu_chip_info_aicore_freq": device.clock + 100,
        "npu_chip_info_hbm_used_memory": device.fb_used,
        "npu_chip_info_hbm_total_memory": device.fb_used + device.fb_free,
        "npu_chip_info_health_status": 1,
        "npu_chip_info_link_status": 1,
        "npu_chip_info_process_info_num": device.index + 2,
        **device.extra,
    }
    return {name: value for name, value in found.items() if value is not None}


class ExporterEndpoint(EngineEndpoint):
    """`devices` are what is published; `mode` is dcgm or npu. `fault` (see `page`) is how it misbehaves."""

    def __init__(self, mode: str = "dcgm", devices: tuple[Device, ...] = (FIRST, SECOND)) -> None:
        self.mode = mode
        self.devices = devices
        self.fault = ""
        self.new_names = False  # labels of newer exporters
        self.with_uuid = True
        self.stamp_ms: int | None = None
        super().__init__()
        self.pages["/metrics"] = self.page

    def run(self, seconds: float, **changes: object) -> None:
        """Let time pass for the devices; `changes` are the first one's."""
        first, *others = self.devices
        self.devices = (first.later(seconds, **changes), *(device.later(seconds) for device in others))

    def text(self) -> str:
        lines = ["# HELP made_up a text that is none of theirs", "# TYPE made_up gauge"]
        for device in self.devices:
            families = dcgm_families(device) if self.mode == "dcgm" else npu_families(device)
            lines += [self._line(name, self._labels(device), value) for name, value in families.items()]
            for number, profile, values in device.instances:
                more = f',GPU_I_PROFILE="{profile}",GPU_I_ID="{number}"'
                lines += [self._line(name, self._labels(device) + more, value) for name, value in values.items()]
        return "\n".join(lines) + "\n"

    def page(self) -> Page:
        """The answer, or what `fault` makes of it: 404, 500, hang, drip, endless, bomb, truncated, empty, nonsense."""
        body = self.text().encode()
        if self.fault in ("404", "500"):
            return Page(b"no", int(self.fault))
        if self.fault == "hang":
            self.released.wait(120)
            return Page(raw=iter(()))
        if self.fault == "drip":
            return Page(raw=self._drip())
        if self.fault == "endless":
            return Page(raw=itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], itertools.repeat(b"#" * 65535 + b"\n")))
        if self.fault == "bomb":
            return Page(gzip.compress(b"#" * (64 << 20)), headers={"Content-Encoding": "gzip"})
        if self.fault == "truncated":
            return Page(body[: len(body) // 2], headers={"Content-Length": str(len(body))})
        if self.fault == "empty":
            return Page(b"go_goroutines 12\n")
        if self.fault == "nonsense":
            return Page(b"\xff\xfe\x00{{{ not\nmetrics at all\n" * 100)
        return Page(body)

    def _drip(self) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while not self.released.wait(0.05):
            yield b"#"

    def _labels(self, device: Device) -> str:
        if self.mode == "npu":
            vdie = device.uuid if self.with_uuid else ""
            return f'id="{device.index}",model_name="{device.model}",vdie_id="{vdie}",pod_name="p{device.index}"'
        uuid = device.uuid if self.with_uuid else "GPU-00000000-0000-0000-0000-000000000000"
        bus = f'pci_bus_id="00000000:{device.index + 1}B:00.0",modelName="{device.model}"'
        if self.new_names:
            return f'gpu="{device.index}",uuid="{uuid}",{bus},hostname="n07"'
        return f'gpu="{device.index}",UUID="{uuid}",{bus},Hostname="n07"'

    def _line(self, name: str, labels: str, value: float) -> str:
        number = str(int(value)) if value == int(value) else repr(value)
        return f"{name}{{{labels}}} {number}" + (f" {self.stamp_ms}" if self.stamp_ms is not None else "")
