"""What this device can do at most, measured in a fraction of a second: the denominators of MFU and MBU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.accounting import Peaks
from engine.linear import Kernel


def measure_peaks(kernel: Kernel, dtype: torch.dtype, device: torch.device, budget_s: float = 0.4) -> Peaks:
    """FLOP/s of the engine's own product on a large square, bytes/s of reading a tensor larger than any cache.

    Reading is tried in two ways, a sum and a product with one row, and the faster counts. The best of all repeats is taken:
    a neighbour that is busy now must not become the measure of this machine.
    """
    generator = torch.Generator().manual_seed(0)
    side = 1024 if device.type == "cpu" else 8192
    square = torch.randn(side, side, generator=generator).to(device, dtype)
    product = kernel(square, None)
    flops_per_s = 2 * side**3 / _best_s(lambda: product(square), device, budget_s / 3)

    # larger than any cache, and not more than an eighth of what the KV cache has left of a device
    held = 1 << 27 if device.type == "cpu" else min(1 << 31, torch.cuda.mem_get_info(device)[0] // 8)
    numbers = held // dtype.itemsize
    large = torch.ones(numbers // 2048, 2048, dtype=dtype, device=device)
    size = large.numel() * large.element_size()
    read_s = _best_s(large.sum, device, budget_s / 3)
    wide = kernel(large, None)
    row = torch.ones(1, 2048, dtype=dtype, device=device)
    product_s = _best_s(lambda: wide(row), device, budget_s / 3)
    return Peaks(flops_per_s, max(size / read_s, wide.nbytes / product_s))


def _best_s(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    run()
    best = float("inf")
    end = time.perf_counter() + budget_s
    while best == float("inf") or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
