"""The PCIe link: generation, width and bytes a second. Directions are the GPU's: receive is host to device."""

from __future__ import annotations

from typing import Any

import pynvml

from agent.nvml.calls import Calls, FieldId, Number

TX_BYTES = 197
RX_BYTES = 198
FIELDS = (TX_BYTES, RX_BYTES)
TX_COUNTER, RX_COUNTER = 0, 1  # nvmlPcieUtilCounter_t
KIB = 1024
LONGEST_INTERVAL_S = 15.0
"""Two readings further apart than this say nothing about the second that is written."""


class Link:
    """One GPU's link. Keeps the last byte counters."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, Number]] = {}  # id -> monotonic s, bytes

    def read(self, values: dict[FieldId, Number], now: float) -> dict[str, Number]:
        """pcie_tx_bytes_s and pcie_rx_bytes_s from counters. A counter that went back has wrapped or been reset: no rate."""
        fields: dict[str, Number] = {}
        for fid, name in ((TX_BYTES, "pcie_tx_bytes_s"), (RX_BYTES, "pcie_rx_bytes_s")):
            if fid not in values:
                continue
            last, self._last[fid] = self._last.get(fid), (now, values[fid])
            if last is not None and 0 < now - last[0] < LONGEST_INTERVAL_S and values[fid] >= last[1]:
                fields[name] = (values[fid] - last[1]) / (now - last[0])
        return fields


def read_state(calls: Calls, handle: Any) -> dict[str, Number]:
    """Generation and width now. Both drop on an idle card: judge them under load only."""
    return _counts(
        calls,
        handle,
        ("pcie_gen", pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        ("pcie_width", pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    )


def read_maxima(calls: Calls, handle: Any) -> dict[str, Number]:
    """The most that card and slot together can do."""
    return _counts(
        calls,
        handle,
        ("pcie_gen_max", pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        ("pcie_width_max", pynvml.nvmlDeviceGetMaxPcieLinkWidth),
    )


def read_throughput(calls: Calls, handle: Any) -> dict[str, Number]:
    """Bytes a second by the driver's own 20 ms measurement of each direction: for cards with no byte counters."""
    fields: dict[str, Number] = {}
    for name, counter in (("pcie_tx_bytes_s", TX_COUNTER), ("pcie_rx_bytes_s", RX_COUNTER)):
        kib = calls.ask(name, pynvml.nvmlDeviceGetPcieThroughput, handle, counter)
        if kib is not None:
            fields[name] = float(kib * KIB)
    return fields


def _counts(calls: Calls, handle: Any, *questions: tuple[str, Any]) -> dict[str, Number]:
    fields: dict[str, Number] = {}
    for name, function in questions:
        count = calls.ask(name, function, handle)
        if count:  # there is no generation 0 and no width 0 on a card that answers
            fields[name] = int(count)
    return fields
