"""GPU performance monitoring through NVML (Hopper and later): how much of the SMs, the DRAM and the tensor cores works."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pynvml

from agent.nvml import codes
from agent.nvml.calls import Calls, Number

METRICS = (
    (pynvml.NVML_GPM_METRIC_SM_UTIL, "sm_active_pct"),
    (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, "tensor_active_pct"),
    (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, "dram_active_pct"),
)
MIG_METRICS = (*METRICS, (pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, "gr_active_pct"))
"""Of an instance also what stands for the use that only whole cards have: the share of time in which its engine was busy."""

SHORTEST_S, LONGEST_S = 0.1, 30.0  # NVML wants its two samples more than 100 ms apart

_one_at_a_time = threading.Lock()
"""Drivers have been seen to crash when GPUs are sampled in parallel."""


Take = Callable[[Any, Any], Any]
"""Fills a sample of a device: (handle, buffer)."""


class Gpm:
    """The pair of samples of one GPU, or one MIG instance of the GPU `device`. Each reading is the mean since the one before, so
    nothing here waits. `ways` to take a sample are tried in order.
    """

    def __init__(
        self,
        ways: Mapping[str, Take] = MappingProxyType({"gpm_sample": pynvml.nvmlGpmSampleGet}),
        device: Any = None,
        wanted: Sequence[tuple[int, str]] = METRICS,
    ) -> None:
        self._ways = ways
        self._device = device
        self._wanted = wanted
        self._supported: bool | None = None
        self._older: Any = None
        self._newer: Any = None
        self._sampled_s: float | None = None  # monotonic s of the sample in _older

    def read(self, calls: Calls, handle: Any, now: float) -> dict[str, Number]:
        """Percent, 0 to 100, over the time since the last reading; empty at the first, or while another GPU is at it."""
        if not self._is_supported(calls, handle) or not _one_at_a_time.acquire(blocking=False):
            return {}
        try:
            return self._read(calls, handle, now)
        finally:
            _one_at_a_time.release()

    @property
    def supported(self) -> bool | None:
        """None before the card was asked."""
        return self._supported

    def forget(self) -> None:
        """Give the sample buffers back to the library."""
        for buffer in (self._older, self._newer):
            if buffer is not None:
                pynvml.nvmlGpmSampleFree(buffer)
        self._older = self._newer = self._sampled_s = None

    def _is_supported(self, calls: Calls, handle: Any) -> bool:
        if self._supported is None:
            answer = calls.ask(
                "gpm_support", pynvml.nvmlGpmQueryDeviceSupport, handle if self._device is None else self._device
            )
            if answer is None:
                return False
            self._supported = bool(answer.isSupportedDevice)
        return self._supported

    def _read(self, calls: Calls, handle: Any, now: float) -> dict[str, Number]:
        if self._newer is None:
            self._older = calls.ask("gpm_alloc", pynvml.nvmlGpmSampleAlloc)
            self._newer = calls.ask("gpm_alloc", pynvml.nvmlGpmSampleAlloc)
            if self._older is None or self._newer is None:
                return {}
        last_s = self._sampled_s
        if last_s is not None and now - last_s <= SHORTEST_S:
            return {}
        self._sampled_s = None
        if all(calls.ask(key, take, handle, self._newer) is None for key, take in self._ways.items()):
            return {}
        fields = {} if last_s is None or now - last_s > LONGEST_S else self._metrics(calls)
        self._older, self._newer, self._sampled_s = self._newer, self._older, now
        return fields

    def _metrics(self, calls: Calls) -> dict[str, Number]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._wanted)
        request.sample1, request.sample2 = self._older, self._newer
        for position, (metric, _) in enumerate(self._wanted):
            request.metrics[position].metricId = metric
        if calls.ask("gpm_metrics", pynvml.nvmlGpmMetricsGet, request) is None:
            return {}
        fields: dict[str, Number] = {}
        for position, (_, name) in enumerate(self._wanted):
            entry = request.metrics[position]
            if entry.nvmlReturn == codes.SUCCESS and math.isfinite(entry.value) and 0 <= entry.value <= 100.5:
                fields[name] = min(100.0, float(entry.value))
        return fields
