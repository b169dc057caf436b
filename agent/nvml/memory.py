"""GPU memory, and who computes on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml

from agent.nvml.calls import Calls, Number

INTEGRATED = ("GB10", "Orin", "Thor", "Jetson", "nvgpu")
"""Parts of the names of devices that share the host's memory and have none of their own to report."""


def read(calls: Calls, handle: Any, name: str, meminfo: Path) -> dict[str, Number]:
    """mem_used_bytes and mem_total_bytes.

    The second version of the call leaves the driver's own reserve out of `used`; the first counts it in. Only a device known to be
    integrated falls back on the host's memory: anywhere else "not supported" stays absent.
    """
    info = calls.ask("memory_v2", pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if info is None:
        info = calls.ask("memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
    if info is not None:
        if not 0 < info.total < 2**63 or info.used > info.total:
            return {}
        return {"mem_used_bytes": float(info.used), "mem_total_bytes": float(info.total)}
    return _of_the_host(meminfo) if any(part in name for part in INTEGRATED) else {}


def _of_the_host(meminfo: Path) -> dict[str, Number]:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines() if ":" in line)
        total = float(rows["MemTotal"].split()[0]) * 1024
        available = float(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    return {"mem_used_bytes": total - available, "mem_total_bytes": total}


def read_processes(calls: Calls, handle: Any) -> tuple[int, ...] | None:
    """The compute processes' ids, of the host even inside a container; None when the card doesn't tell."""
    running = calls.ask("processes_v3", pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if running is None:
        running = calls.ask("processes_v2", pynvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return None if running is None else tuple(sorted({int(process.pid) for process in running}))
