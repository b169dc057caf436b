"""Counted faults of a GPU: memory errors, remapped rows, PCIe replays; and what the driver asks to be done about them.

Retired pages, of cards before Ampere, are no remapped rows: a page that is retired is memory lost, a row that is remapped is not.
They are left out.
"""

from __future__ import annotations

from typing import Any

import pynvml

from agent.nvml.calls import ALL_ONES, Calls, Number

CORRECTED, UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
SINCE_RESET = 0  # nvmlEccCounterType_t, volatile
RECOVERY_ACTION = 230
CONSUMER_BRANDS = frozenset({5, 6, 15, 16})  # nvmlBrandType_t: GeForce, Titan, GeForce RTX, Titan RTX
"""Cards that answer the row remapping call with zeros though they have no row remapping."""


def read(calls: Calls, handle: Any, brand: int | None) -> dict[str, Number]:
    """ECC errors since the last reset, rows remapped in the card's life and whether one waits or failed, PCIe replays, recovery action."""
    fields: dict[str, Number] = {}
    for name, kind in (("ecc_corrected_total", CORRECTED), ("ecc_uncorrected_total", UNCORRECTED)):
        errors = calls.ask(name, pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, SINCE_RESET)
        if errors is not None and errors < 2**63:
            fields[name] = int(errors)
    if brand not in CONSUMER_BRANDS:
        rows = calls.ask("remapped_rows", pynvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and not ALL_ONES.intersection(rows):
            corrected, uncorrected, pending, failed = rows
            fields["remapped_rows_total"] = int(corrected) + int(uncorrected)
            fields["remap_pending"] = int(bool(pending))
            fields["remap_failed"] = int(bool(failed))
    replays = calls.ask("pcie_replays", pynvml.nvmlDeviceGetPcieReplayCounter, handle)
    if replays is not None:
        fields["pcie_replays_total"] = int(replays)
    action = calls.fields(handle, (RECOVERY_ACTION,)).get(RECOVERY_ACTION)
    if action is not None and action < 2**16:
        fields["recovery_action"] = int(action)
    return fields
