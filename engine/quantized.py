"""Products with weights in 8 and 4 bits, and full ones', by compiled kernels or by torch alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.native import BLOCK, Kernels, Weights
from engine.linear import Composed, Kernel
from engine.numbers import ACTIVATION_GROUP, Int4, Int8, Quantised

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Full:
    """Weights as they are, for the compiled kernels: float32."""

    numbers: Tensor  # [outputs, inputs] float32
    inputs: int
    group: int = ACTIVATION_GROUP

    @classmethod
    def of(cls, weight: Tensor) -> Full:
        return cls(weight.float(), weight.shape[1])

    def packed(self) -> Tensor:
        """As the kernels read them (see full.h)."""
        numbers = F.pad(self.numbers, (0, 0, 0, -self.numbers.shape[0] % BLOCK))
        return numbers.view(-1, BLOCK, self.inputs).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """Weights that bfloat16 holds exactly, as most checkpoints do; the compiled kernels compute with them in float32."""

    numbers: Tensor  # [outputs, inputs] bfloat16
    inputs: int
    group: int = ACTIVATION_GROUP

    @classmethod
    def of(cls, weight: Tensor) -> Bfloat16 | None:
        """None where the 16 bits would lose something."""
        short = weight.bfloat16()
        return cls(short, weight.shape[1]) if torch.equal(short.to(weight.dtype), weight) else None

    def packed(self) -> Tensor:
        """As the kernels read them (see exact.h)."""
        numbers = F.pad(self.numbers, (0, 0, 0, -self.numbers.shape[0] % BLOCK))
        return numbers.view(-1, BLOCK, self.inputs).transpose(1, 2).contiguous()


def as_short_as_exact(weight: Tensor) -> Bfloat16 | Full:
    """In 16 bits where these hold every weight and the kernels' pieces of 32 inputs fit, or whole."""
    short = None if weight.shape[1] % ACTIVATION_GROUP else Bfloat16.of(weight)
    return short or Full.of(weight)


def grouped(x: Tensor) -> Tensor:
    """Activations [rows, inputs] as the kernels see them: rounded to 8 bits in groups of 32."""
    rows, inputs = x.shape
    groups = F.pad(x, (0, -inputs % ACTIVATION_GROUP)).view(rows, -1, ACTIVATION_GROUP)
    most = groups.abs().amax(dim=2, keepdim=True)
    # torch computes 127 / x as 127 * (1 / x), which rounds twice, and the kernels don't
    numbers = torch.round(groups * torch.where(most > 0, torch.full_like(most, 127) / most, 0.0))
    return (numbers * (most / 127)).flatten(1)[:, :inputs]


class Compiled(Composed):
    """By the compiled kernels; the norm before, the gate and the residual are part of the same pass.

    exact: numbers of 8 and 4 bits are widened and activations stay float32; the result has the bits of the product with the full
    weights that they stand for. Inputs must be a multiple of 32 then.
    """

    __slots__ = ("_kept", "_kernels", "_outputs", "address", "nbytes", "num_weights")

    def __init__(
        self, kernels: Kernels, quantised: Quantised | Full | Bfloat16, bias: Tensor | None, exact: bool = False
    ) -> None:
        outputs, padded = quantised.numbers.shape
        packed = quantised.packed()
        full_bias = None if bias is None else bias.float().contiguous()
        at = (packed.data_ptr(), None if full_bias is None else full_bias.data_ptr())
        bits = {Int8: 8, Int4: 4, Bfloat16: 16, Full: 32}[type(quantised)]
        exact = exact or bits > 8
        assert bits == 32 or not exact or quantised.inputs % ACTIVATION_GROUP == 0
        in_steps = isinstance(quantised, Int4) and quantised.in_steps
        weights = Weights(*at, quantised.inputs, padded, outputs, quantised.group, bits, exact, in_steps)
        self._kept = (packed, full_bias, weights)  # the kernels know only addresses
        self.address = ctypes.c_void_p(ctypes.addressof(weights))
        self._kernels = kernels
        self._outputs = outputs
        self.nbytes = packed.nbytes
        self.num_weights = outputs * quantised.inputs

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._run(x, residual=residual)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._run(x, norm, eps)

    def gated_plus(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._run(gate_up, gated=True, residual=residual)

    def _run(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        if x.dtype is not torch.float32:
            whole = self._run(
                x.float(),
                norm if norm is None else norm.float(),
                eps,
                gated,
                residual if residual is None else residual.float(),
            )
            return whole.to(x.dtype)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty(x.shape[0], self._outputs) if residual is None else residual
        self._kernels.product(self.address, x, y, norm, eps, gated, residual)
        return y


class Widened(Composed):
    """By torch's float32 product with what the numbers stand for, and activations rounded as the kernels round them: the same
    results within rounding and no faster than full weights. What everything else is held against.
    """

    __slots__ = ("_inner", "nbytes", "num_weights")

    def __init__(self, plain: Kernel, quantised: Quantised, bias: Tensor | None) -> None:
        self._inner = plain(quantised.full(), None if bias is None else bias.float())
        self.nbytes = self._inner.nbytes
        self.num_weights = self._inner.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(grouped(x.float())).to(x.dtype)

    def padded(self, rows: int) -> int:
        return self._inner.padded(rows)


class TorchInt8(Composed):
    """By torch's packed operator for 8-bit weights: one step an output, and activations in bfloat16, as only so it is fast."""

    __slots__ = ("bias", "nbytes", "num_weights", "numbers", "step")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        step = weight.float().abs().amax(dim=1, keepdim=True) / 127
        self.numbers = torch.round(weight.float() / step.where(step > 0, 1.0)).to(torch.int8)
        self.step = step.flatten().bfloat16()
        self.bias = bias
        self.nbytes = self.numbers.nbytes + self.step.nbytes
        self.num_weights = self.numbers.numel()

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16().contiguous(), self.numbers, self.step)
        y = y.to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)


class TorchInt4(Composed):
    """By torch's packed operator for 4-bit weights, with activations in bfloat16."""

    __slots__ = ("bias", "group", "inputs", "nbytes", "num_weights", "packed", "ranges")

    def __init__(self, quantised: Int4, bias: Tensor | None) -> None:
        self.group = quantised.group
        self.inputs = quantised.inputs
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised.numbers.int(), 1)
        # the operator's weight is (number - 8) * step + zero
        zero = quantised.lowest() + 8 * quantised.step.float()
        self.ranges = torch.stack([quantised.step.float(), zero], dim=2).transpose(0, 1).contiguous().bfloat16()
        self.bias = bias
        self.nbytes = self.packed.nbytes + self.ranges.nbytes
        self.num_weights = quantised.numbers.shape[0] * self.inputs

    def __call__(self, x: Tensor) -> Tensor:
        filled = F.pad(x.bfloat16(), (0, -self.inputs % self.group)).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(filled, self.packed, self.group, self.ranges)
        y = y.to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)
