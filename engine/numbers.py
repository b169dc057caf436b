"""Weights in 8 and 4 bits: the numbers that stand for them, as made from full ones or as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.kernels.native import BLOCK

Tensor = torch.Tensor

ACTIVATION_GROUP = 32
"""Activations that share one scale; groups of weights are whole numbers of these. One scale for a row would be ruled by outliers
(the input of a down projection reaches 30,000 times its mean), one for a tensor would also make a request's answer depend on who
else is in the batch."""

PIECE = 1 << 21
"""Weights that are made into numbers at a time: what is needed on the way is several times as large as they are."""


class NotKept(Exception):
    """Why numbers that a checkpoint holds can't be served as they are, in a few words."""


@dataclass(frozen=True, slots=True)
class Int8:
    """weight = number * step, per group of inputs; numbers -128..127, steps float16.

    With one step for a whole output, perplexity of SmolLM2-135M rose by 0.8 to 1.4 % on the bundled text, with groups of 32 by half.
    """

    numbers: Tensor  # [outputs, inputs padded to a multiple of the group] int8
    step: Tensor  # [outputs, groups] float16
    inputs: int

    @classmethod
    def of(cls, weight: Tensor, group: int = 32) -> Int8:
        numbers, step = _by_pieces(weight, lambda piece: _eight_bits(piece.float(), group))
        return cls(numbers, step, weight.shape[1])

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

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Int8:
        """With its outputs, along the first dimension of everything, in another order."""
        return replace(self, numbers=order(self.numbers), step=order(self.step))

    @property
    def kind(self) -> tuple[object, ...]:
        """What numbers must have in common to be one matrix."""
        return (Int8, self.numbers.shape[1], self.step.shape[1])


@dataclass(frozen=True, slots=True)
class Int4:
    """weight = number * step + least, per group of inputs; numbers 0..15. Step and least value are float16; the least value can
    also be counted in steps: weight = (number + least) * step, as formats with whole zero points have it.

    A scale alone (symmetric numbers) ruins small models: perplexity 27 instead of 20 on SmolLM2-135M.
    """

    numbers: Tensor  # [outputs, inputs padded to a multiple of the group] uint8
    step: Tensor  # [outputs, groups] float16
    least: Tensor  # [outputs, groups] float16
    inputs: int
    in_steps: bool = False

    @classmethod
    def of(cls, weight: Tensor, group: int) -> Int4:
        numbers, step, least = _by_pieces(weight, lambda piece: _four_bits(piece.float(), group))
        return cls(numbers, step, least, weight.shape[1])

    @property
    def group(self) -> int:
        return self.numbers.shape[1] // self.step.shape[1]

    def lowest(self) -> Tensor:
        """What 0 stands for in each group, [outputs, groups] float32."""
        return self.least.float() * self.step.float() if self.in_steps else self.least.float()

    def full(self) -> Tensor:
        """The weights that these numbers stand for, [outputs, inputs] float32."""
        groups = self.numbers.view(*self.step.shape, -1) * self.step.float().unsqueeze(2)
        return (groups + self.lowest().unsqueeze(2)).flatten(1)[:, : self.inputs]

    def packed(self) -> Tensor:
        """As the kernels read them (see quantized.cpp)."""
        more = -self.numbers.shape[0] % BLOCK
        numbers = F.pad(self.numbers, (0, 0, 0, more))
        blocks, groups = numbers.shape[0] // BLOCK, self.step.shape[1]
        # [block, group of 32, eight times four inputs, output, four inputs]
        ordered = numbers.view(blocks, BLOCK, -1, 8, 4).permute(0, 2, 3, 1, 4)
        halves = (ordered[:, :, :4] | ordered[:, :, 4:] << 4).reshape(blocks, groups, -1)
        return torch.cat([_ranges(self.step, more), _ranges(self.least, more), halves], dim=2)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> Int4:
        """With its outputs, along the first dimension of everything, in another order."""
        return replace(self, numbers=order(self.numbers), step=order(self.step), least=order(self.least))

    @property
    def kind(self) -> tuple[object, ...]:
        """What numbers must have in common to be one matrix."""
        return (Int4, self.numbers.shape[1], self.step.shape[1], self.in_steps)


Quantised = Int8 | Int4


def stacked(parts: Sequence[Quantised]) -> Quantised:
    """The outputs of all parts as one matrix. NotKept when they are of different kinds."""
    first = parts[0]
    if any(part.kind != first.kind for part in parts):
        raise NotKept("joined with numbers of another kind")
    numbers, step = torch.cat([part.numbers for part in parts]), torch.cat([part.step for part in parts])
    if isinstance(first, Int8):
        return replace(first, numbers=numbers, step=step)
    least = torch.cat([part.least for part in parts if isinstance(part, Int4)])
    return replace(first, numbers=numbers, step=step, least=least)


def half_steps(step: Tensor) -> Tensor:
    """Steps as float16. NotKept when they are not such numbers."""
    half = step.half()
    if not torch.equal(half.float(), step.float()):
        raise NotKept("steps that are not float16 numbers")
    return half


def _by_pieces(weight: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `make` gives for some outputs at a time, put together."""
    made = [make(piece) for piece in torch.split(weight, max(1, PIECE // weight.shape[1]))]
    return tuple(torch.cat(parts) for parts in zip(*made, strict=True)) if len(made) > 1 else made[0]


def _eight_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    groups = F.pad(weight, (0, -inputs % group)).view(outputs, -1, group)
    step = (groups.abs().amax(dim=2) / 127).half()
    width = step.float().unsqueeze(2)
    numbers = torch.round(groups / width.where(width > 0, 1.0)).clamp_(-127, 127)
    return numbers.to(torch.int8).view(outputs, -1), step


def _four_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    outputs, inputs = weight.shape
    # the last group is filled up with its last number, which changes neither its least nor its largest
    whole = torch.cat([weight, weight[:, -1:].expand(outputs, -inputs % group)], dim=1)
    groups = whole.view(outputs, -1, group)
    low, high = groups.aminmax(dim=2)
    step, least = ((high - low) / 15).half(), low.half()
    width = step.float().unsqueeze(2)
    numbers = torch.round((groups - least.float().unsqueeze(2)) / width.where(width > 0, 1.0)).clamp_(0, 15)
    return numbers.to(torch.uint8).view(outputs, -1), step, least


def _ranges(part: Tensor, more: int) -> Tensor:
    """[outputs, groups] float16 -> [blocks, groups, 32] bytes, with `more` outputs of zeros."""
    filled = F.pad(part, (0, 0, 0, more))
    return filled.view(-1, BLOCK, part.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
