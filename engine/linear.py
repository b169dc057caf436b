"""Matrix products with weights, behind one small interface, and the choice of the kernel that is fastest on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Linear(Protocol):
    """y = x W^T + b for x of shape [tokens, inputs]; W is [outputs, inputs]."""

    nbytes: int  # of the weights, as one step reads them
    num_weights: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual`, which may be overwritten."""

    @staticmethod
    def padded(rows: int) -> int:
        """How many rows to compute instead of `rows`: some kernels want few different numbers of them."""


class Plain:
    """The weights as they are, through torch's own linear."""

    __slots__ = ("bias", "nbytes", "num_weights", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.nbytes = weight.numel() * weight.element_size()
        self.num_weights = weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(residual)

    @staticmethod
    def padded(rows: int) -> int:
        return rows


class Packed:
    """The weights reordered once for oneDNN's kernels (CPU). Two to four times as fast as Plain from 2 rows on, where
    MKL has no good kernel for few rows, and a row's result does not depend on how many others are computed with it.
    """

    __slots__ = ("bias", "nbytes", "num_weights", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.nbytes = weight.numel() * weight.element_size()
        self.num_weights = weight.numel()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)  # 16: rows to optimise for
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)

    @staticmethod
    def padded(rows: int) -> int:
        """oneDNN makes and keeps a kernel of some 0.7 MB for each number of rows and each shape of weights; a thousand of
        them would cost as much memory as the model. So: each number up to 16, then steps of 4, 32 and 64.
        """
        step = 1 if rows <= 16 else 4 if rows <= 32 else 32 if rows <= 256 else 64
        return -(-rows // step) * step


Kernel = Callable[[Tensor, Tensor | None], Linear]


def choose_kernel(sample: Tensor, log: Callable[[str], None]) -> Kernel:
    """Plain or Packed, by trying both on a weight of the model: packing must work, agree within rounding and be faster.

    The packing operators are torch's own, but not promised to stay; where they are missing or fail, Plain is the answer.
    """
    if sample.device.type != "cpu":
        return Plain
    rows = [torch.randn(m, sample.shape[1], dtype=sample.dtype) for m in (1, 8, 64)]
    plain = Plain(sample)
    try:
        packed = Packed(sample)
        for x in rows:
            scale = float(plain(x).abs().max())
            if not torch.allclose(packed(x), plain(x), rtol=1e-3, atol=1e-4 * scale):
                raise RuntimeError("the packed product differs from the plain one")
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log(f"linear kernel: plain ({str(error).splitlines()[0]})")
        return Plain
    times = {kernel.__class__: sum(_best_s(kernel, x) for x in rows) for kernel in (plain, packed)}
    fastest: type[Plain] | type[Packed] = Packed if times[Packed] < times[Plain] else Plain
    log(f"linear kernel: {fastest.__name__.lower()} (packed takes {times[Packed] / times[Plain]:.2f} of plain's time)")
    return fastest


def _best_s(linear: Linear, x: Tensor, repeats: int = 5) -> float:
    linear(x)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        linear(x)
        best = min(best, time.perf_counter() - began)
    return best
