"""Weights in 8 and 4 bits: how they are made from full ones; and their products and full ones', by compiled kernels or by torch alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.native import BLOCK, Kernels, Weights
from engine.linear import Composed, Kernel

Tensor = torch.Tensor

ACTIVATION_GROUP = 32
"""Activations that share one scale. One scale for a row would be ruled by outliers (the input of a down projection reaches
30,000 times its mean), one for a tensor would also make a request's answer depend on who else is in the batch."""


@dataclass(frozen=True, slots=True)
class Int8:
    """weight = number * step, per group of inputs; numbers -127..127, steps float16.

    With one step for a whole output, perplexity of SmolLM2-135M rose by 0.8 to 1.4 % on the bundled text, with groups of 32 by half.
    """

    numbers: Tensor  # [outputs, inputs padded to a multiple of the group] int8
    step: Tensor  # [outputs, groups] float16
    inputs: int

    @classmethod
    def of(cls, weight: Tensor, group: int = 32) -> Int8:
        outputs, inputs = weight.shape
        groups = F.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
        step = (groups.abs().amax(dim=2) / 127).half()
        width = step.float().unsqueeze(2)
        numbers = torch.round(groups / width.where(width > 0, 1.0)).clamp_(-127, 127)
        return cls(numbers.to(torch.int8).view(outputs, -1), step, inputs)

    @property
    def group(self) -> int:
        return self.numbers.shape[1] // self.step.shape[1]

    def full(self) -> Tensor:
        """The weights that these numbers stand for, [outputs, inputs] float32."""
        groups = self.numbers.view(*self.step.shape, -1) * self.step.float().unsqueeze(2)
        return groups.flatten(1)[:, : self.inputs]

    def packed(self) -> Tensor:
        """As the kernels read them (see quantized.cpp)."""
        more = -self.numbers.shape[0] % BLOCK
        numbers = F.pad(self.numbers, (0, 0, 0, more))
        blocks, groups = numbers.shape[0] // BLOCK, self.step.shape[1]
        ordered = numbers.view(blocks, BLOCK, -1, 4).transpose(1, 2).reshape(blocks, groups, -1)
        return torch.cat([_ranges(self.step, more), ordered.view(torch.uint8)], dim=2)


@dataclass(frozen=True, slots=True)
class Int4:
    """weight = number * step + least, per group of inputs; numbers 0..15. Step and least value are float16.

    A scale alone (symmetric numbers) ruins small models: perplexity 27 instead of 20 on SmolLM2-135M.
    """

    numbers: Tensor  # [outputs, inputs padded to a multiple of the group] uint8
    step: Tensor  # [outputs, groups] float16
    least: Tensor  # [outputs, groups] float16
    inputs: int

    @classmethod
    def of(cls, weight: Tensor, group: int) -> Int4:
        outputs, inputs = weight.shape
        # the last group is filled up with its last number, which changes neither its least nor its largest
        whole = torch.cat([weight.float(), weight[:, -1:].float().expand(outputs, -inputs % group)], dim=1)
        groups = whole.view(outputs, -1, group)
        low, high = groups.aminmax(dim=2)
        step, least = ((high - low) / 15).half(), low.half()
        width = step.float().unsqueeze(2)
        numbers = torch.round((groups - least.float().unsqueeze(2)) / width.where(width > 0, 1.0)).clamp_(0, 15)
        return cls(numbers.to(torch.uint8).view(outputs, -1), step, least, inputs)

    @property
    def group(self) -> int:
        return self.numbers.shape[1] // self.step.shape[1]

    def full(self) -> Tensor:
        """The weights that these numbers stand for, [outputs, inputs] float32."""
        groups = self.numbers.view(*self.step.shape, -1) * self.step.float().unsqueeze(2)
        return (groups + self.least.float().unsqueeze(2)).flatten(1)[:, : self.inputs]

    def packed(self) -> Tensor:
        """As the kernels read them (see quantized.cpp)."""
        more = -self.numbers.shape[0] % BLOCK
        numbers = F.pad(self.numbers, (0, 0, 0, more))
        blocks, groups = numbers.shape[0] // BLOCK, self.step.shape[1]
        # [block, group of 32, eight times four inputs, output, four inputs]
        ordered = numbers.view(blocks, BLOCK, -1, 8, 4).permute(0, 2, 3, 1, 4)
        halves = (ordered[:, :, :4] | ordered[:, :, 4:] << 4).reshape(blocks, groups, -1)
        return torch.cat([_ranges(self.step, more), _ranges(self.least, more), halves], dim=2)


def _ranges(part: Tensor, more: int) -> Tensor:
    """[outputs, groups] float16 -> [blocks, groups, 32] bytes, with `more` outputs of zeros."""
    filled = F.pad(part, (0, 0, 0, more))
    return filled.view(-1, BLOCK, part.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


Quantised = Int8 | Int4


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
        weights = Weights(*at, quantised.inputs, padded, outputs, quantised.group, bits, int(exact))
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
        zero = quantised.least.float() + 8 * quantised.step.float()
        self.ranges = torch.stack([quantised.step.float(), zero], dim=2).transpose(0, 1).contiguous().bfloat16()
        self.bias = bias
        self.nbytes = self.packed.nbytes + self.ranges.nbytes
        self.num_weights = quantised.numbers.shape[0] * self.inputs

    def __call__(self, x: Tensor) -> Tensor:
        filled = F.pad(x.bfloat16(), (0, -self.inputs % self.group)).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(filled, self.packed, self.group, self.ranges)
        y = y.to(x.dtype)
        return y if self.bias is None else y.add_(self.bias)
