"""GPU memory and the processes that use the GPU."""

from __future__ import annotations

from agent.amd_smi.calls import Calls, within
from agent.driver import Number
from telemetry.catalogue import REACH

MEBIBYTE = 2**20
MOST_PROCESSES = 1024


def read(calls: Calls) -> dict[str, Number]:
    """mem_total_bytes and mem_used_bytes: exact where the library tells bytes, else from its mebibytes."""
    kind = calls.smi.AmdSmiMemoryType.VRAM
    total = within(calls.ask("amdsmi_get_gpu_memory_total", kind), 1, REACH)
    used = within(calls.ask("amdsmi_get_gpu_memory_usage", kind), 0, REACH)
    if total is None or used is None:
        usage = calls.table("amdsmi_get_gpu_vram_usage")
        total, used = (within(usage.get(key), 0, 2**32 - 2) for key in ("vram_total", "vram_used"))
        total, used = (None if told is None else told * MEBIBYTE for told in (total, used))
    if not total:
        return {}
    return {"mem_total_bytes": total} | ({} if used is None or used > total else {"mem_used_bytes": used})


def read_processes(calls: Calls) -> tuple[int, ...] | None:
    """Process ids, in order; None when they aren't told."""
    told = calls.ask("amdsmi_get_gpu_process_list")
    if not isinstance(told, list):
        return None
    pids = {entry["pid"] for entry in told[:MOST_PROCESSES] if isinstance(entry, dict) and "pid" in entry}
    return tuple(sorted(pid for pid in pids if isinstance(pid, int) and 0 < pid < 2**31))
