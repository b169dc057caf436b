"""The PCIe link: generation, width and replays.

There is no throughput: amdsmi_get_gpu_pci_throughput blocks about a second on many kernels.
"""

from __future__ import annotations

from typing import Any

from agent.amd_smi.calls import Calls, count, within
from agent.driver import Number

GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}
"""PCIe generation by transfer rate, MT/s a lane (PCI-SIG)."""

WIDEST = 32


def read(calls: Calls, *, maxima: bool) -> dict[str, Number]:
    """pcie_gen and pcie_width as they are now; with `maxima` also what card and slot can do."""
    told = calls.table("amdsmi_get_pcie_info")
    now, static = told.get("pcie_metric", {}), told.get("pcie_static", {})
    found = {"pcie_gen": _generation(now.get("pcie_speed")), "pcie_width": _width(now.get("pcie_width"))}
    if maxima:
        found["pcie_gen_max"] = _generation(static.get("max_pcie_speed"))
        found["pcie_width_max"] = _width(static.get("max_pcie_width"))
    return {name: number for name, number in found.items() if number is not None}


def read_replays(calls: Calls) -> dict[str, Number]:
    """pcie_replays_total: transfers repeated since the driver was loaded."""
    replays = count(calls.ask("amdsmi_get_gpu_pci_replay_counter"))
    if replays is None:
        replays = count(calls.table("amdsmi_get_pcie_info").get("pcie_metric", {}).get("pcie_replay_count"))
    return {} if replays is None else {"pcie_replays_total": replays}


def _generation(rate: Any) -> int | None:
    return GENERATIONS.get(rate) if isinstance(rate, int) else None


def _width(lanes: Any) -> int | None:
    told = within(lanes, 1, WIDEST)
    return None if told is None else int(told)
