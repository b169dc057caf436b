"""Counted memory errors.

Retired pages are not told: they are pages of 4 KiB, and remapped_rows_total counts rows.
"""

from __future__ import annotations

from agent.amd_smi.calls import Calls, count
from agent.driver import Number

KINDS = {"ecc_corrected_total": "correctable_count", "ecc_uncorrected_total": "uncorrectable_count"}


def read(calls: Calls) -> dict[str, Number]:
    """ECC errors since the driver was loaded, over all blocks that count them; deferred ones are neither kind yet."""
    total = calls.table("amdsmi_get_gpu_total_ecc_count")
    tables = [total] if total else _blocks(calls)
    fields: dict[str, Number] = {}
    for name, key in KINDS.items():
        told = [errors for table in tables if (errors := count(table.get(key))) is not None]
        if told:
            fields[name] = sum(told)
    return fields


def _blocks(calls: Calls) -> list[dict[str, int]]:
    blocks = [block for block in calls.smi.AmdSmiGpuBlock if block.name not in ("INVALID", "RESERVED")]
    return [calls.table("amdsmi_get_gpu_ecc_count", block) for block in blocks]
