"""GPU memory, and who computes on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml

from agent.nvml.calls import Calls, Number
from telemetry.sample import Value

INTEGRATED = ("GB10", "Orin", "Thor", "Jetson", "nvgpu")
"""Parts of the names of devices that share the host's memory and have none of their own to report."""

HIGHEST_PID = 2**22  # Linux's PID_MAX_LIMIT


def read(calls: Calls, handle: Any, name: str, meminfo: Path) -> dict[str, Value]:
    """mem_used_bytes, mem_total_bytes and memory_kind: device, or unified where GPU and host share one memory.

    The second version of the call leaves the driver's own reserve out of `used`; the first counts it in. Only a device known to be
    integrated falls back on the host's memory: anywhere else "not supported" stays absent. Some drivers answer for such a device
    with the host's totals, which is as unified.
    """
    own = read_device(calls, handle)
    if own:
        unified = _is_integrated(name) or own["mem_total_bytes"] == _of_the_host(meminfo).get("mem_total_bytes")
        return {**own, "memory_kind": "unified" if unified else "device"}
    if not _is_integrated(name):
        return {}
    shared = _of_the_host(meminfo)
    return {**shared, "memory_kind": "unified"} if shared else {}


def read_device(calls: Calls, handle: Any) -> dict[str, Number]:
    """mem_used_bytes and mem_total_bytes as the driver tells them of a GPU or a MIG instance."""
    info = calls.ask("memory_v2", pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if info is None:
        info = calls.ask("memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
    if info is None or not 0 < info.total < 2**63 or info.used > info.total:
        return {}
    return {"mem_used_bytes": float(info.used), "mem_total_bytes": float(info.total)}


def _is_integrated(name: str) -> bool:
    return any(part in name for part in INTEGRATED)


def _of_the_host(meminfo: Path) -> dict[str, Number]:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines() if ":" in line)
        total = float(rows["MemTotal"].split()[0]) * 1024
        available = float(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return {}
    return {"mem_used_bytes": total - available, "mem_total_bytes": total}


def read_processes(calls: Calls, handle: Any) -> tuple[int, ...] | None:
    """The compute processes' ids, of the host even inside a container; None when the card doesn't tell.

    Some drivers of the 535 branch fill the third version's call with longer records than its header says, so that every entry after
    the first is torn: such a list is left for the second version's.
    """
    for key, function in (
        ("processes_v3", pynvml.nvmlDeviceGetComputeRunningProcesses_v3),
        ("processes_v2", pynvml.nvmlDeviceGetComputeRunningProcesses_v2),
    ):
        running = calls.ask(key, function, handle)
        if running is None:
            continue
        pids = [int(process.pid) for process in running]
        if all(0 < pid <= HIGHEST_PID for pid in pids):
            return tuple(sorted(set(pids)))
        calls.refuse(key)
    return None
