"""Matrix products with weights, behind one small interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.numbers import Int4, Int8, Quantised

Tensor = torch.Tensor


class Linear(Protocol):
    """y = x W^T + b for x of shape [tokens, inputs]; W is [outputs, inputs]."""

    nbytes: int  # of the weights, as one step reads them
    num_weights: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual`, which may be overwritten."""

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The product with x after RMS norm with the weights `norm`."""

    def gated_plus(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        """The product with silu(gate) * up, which lie side by side in each row, plus `residual`, which may be overwritten."""

    def padded(self, rows: int) -> int:
        """How many rows to compute instead of `rows`: some kernels want few different numbers of them."""


class Composed(ABC):
    """What goes before and after the product, by torch's operators. A kernel that does more in one pass says so itself."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self(F.rms_norm(x, (x.shape[-1],), norm, eps))

    def gated_plus(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.plus(F.silu(gate).mul_(up), residual)

    def padded(self, rows: int) -> int:
        return rows


class Plain(Composed):
    """The weights as they are, through torch's own linear."""

    __slots__ = ("bias", "nbytes", "num_weights", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self.nbytes = weight.numel() * weight.element_size()
        self.num_weights = weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def few_sizes(rows: int) -> int:
    """`rows` or somewhat more: each number up to 16, then steps of 4, 32 and 64."""
    step = 1 if rows <= 16 else 4 if rows <= 32 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


class Packed(Composed):
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

    def padded(self, rows: int) -> int:
        """oneDNN makes and keeps a kernel of some 0.7 MB for each number of rows and each shape of weights; a thousand of
        them would cost as much memory as the model. So: each number up to 16, then steps of 4, 32 and 64.
        """
        return few_sizes(rows)


Kernel = Callable[[Tensor, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class Keep:
    """Which of a checkpoint's own numbers are served as they are, and by which product."""

    kernel: Callable[[Quantised, Tensor | None], Linear]
    kinds: tuple[type[Int8 | Int4], ...]
    head_kinds: tuple[type[Int8 | Int4], ...]
