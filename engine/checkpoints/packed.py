"""Weights of few bits as GPTQ and AWQ checkpoints hold them: several numbers in each int32, a step and a zero for each group of inputs.

weight[input, output] = step[group of the input, output] * (number[input, output] - zero[group of the input, output]). The layouts are
those that AutoGPTQ and AutoAWQ write (formats "gptq", "gptq_v2" and "gemm").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.modelconfig import UnsupportedModel
from engine.numbers import ACTIVATION_GROUP, Int4, Int8, NotKept, Quantised, half_steps

Tensor = torch.Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that the i-th four bits of an int32 belong to, counted within the eight that it holds."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs its weights."""

    method: str  # awq or gptq
    bits: int
    group: int  # inputs that share a step; -1: all
    zero_less: int  # what was taken from the zeros before they were packed

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Packing:
        """From a `quantization_config`. UnsupportedModel names what this engine doesn't read."""
        method = str(stated.get("quant_method", "?"))
        bits = stated.get("bits", stated.get("w_bit"))
        group = stated.get("group_size", stated.get("q_group_size"))
        if method not in ("awq", "gptq"):
            raise UnsupportedModel(
                f"quantization_config {method!r} is not supported; supported: awq, gptq, or full weights, or a GGUF file"
            )
        known = (4,) if method == "awq" else (4, 8)
        if bits not in known:
            raise UnsupportedModel(f"{method} weights of {bits!r} bits are not supported; supported: {known}")
        if type(group) is not int or not (group == -1 or group > 0):
            raise UnsupportedModel(f"quantization_config group_size {group!r} is not supported; expected -1 or a size")
        form = stated.get("version", "gemm") if method == "awq" else stated.get("checkpoint_format", "gptq")
        if str(form).lower() not in (("gemm",) if method == "awq" else ("gptq", "gptq_v2")):
            raise UnsupportedModel(f"{method} weights in the form {form!r} are not supported")
        return cls(method, bits, group, int(form == "gptq"))

    def matrix(self, name: str, part: Callable[[str], Tensor | None]) -> PackedMatrix:
        """The matrix `name`; `part("qweight")` and so on are its parts. UnsupportedModel if they don't fit."""
        packed, zeros, step = (self._needed(name, part, what) for what in ("qweight", "qzeros", "scales"))
        if self.method == "awq":
            numbers = _from_columns(packed, self.bits, AWQ_ORDER)
            zero = _from_columns(zeros, self.bits, AWQ_ORDER)
        else:
            numbers = _from_columns(packed.T, self.bits).T
            zero = (_from_columns(zeros, self.bits) + self.zero_less) & ((1 << self.bits) - 1)
        inputs, outputs = numbers.shape
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        if step.shape != (groups, outputs) or zero.shape != (groups, outputs):
            raise UnsupportedModel(
                f"{name}: scales {list(step.shape)} and zeros {list(zero.shape)} don't fit {inputs} inputs in groups of {group} "
                f"and {outputs} outputs"
            )
        in_order = torch.arange(inputs) // group
        of_input = part("g_idx") if self.method == "gptq" else None
        if of_input is None:
            of_input = in_order
        elif of_input.shape != (inputs,) or not 0 <= int(of_input.min()) <= int(of_input.max()) < groups:
            raise UnsupportedModel(f"{name}: g_idx doesn't name one of the {groups} groups for each of {inputs} inputs")
        of_input = of_input.long()
        return PackedMatrix(self.bits, group, numbers, zero, step, of_input, torch.equal(of_input, in_order))

    @staticmethod
    def _needed(name: str, part: Callable[[str], Tensor | None], what: str) -> Tensor:
        tensor = part(what)
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}.{what}")
        if tensor.dim() != 2 or (what != "scales" and tensor.dtype is not torch.int32):
            raise UnsupportedModel(
                f"{name}.{what}: {tensor.dtype} of shape {list(tensor.shape)}, expected two dimensions"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, unpacked to whole numbers."""

    bits: int
    group: int
    numbers: Tensor  # [inputs, outputs] int32
    zero: Tensor  # [groups, outputs] int32
    step: Tensor  # [groups, outputs]
    of_input: Tensor  # [inputs] int64: the group of each
    in_order: bool  # groups are neighbours

    def weight(self) -> Tensor:
        """[outputs, inputs] float32 of what the numbers stand for."""
        return (self.step.float()[self.of_input] * self._from_zero()).T.contiguous()

    def kept(self) -> Quantised:
        """The numbers as the kernels take them. NotKept where their groups, steps or sizes are others."""
        inputs = self.numbers.shape[0]
        group = self.group if self.group < inputs else -(-inputs // ACTIVATION_GROUP) * ACTIVATION_GROUP
        if not self.in_order:
            raise NotKept("groups of inputs that are not neighbours (g_idx)")
        if group % ACTIVATION_GROUP:
            raise NotKept(f"groups of {group}")
        step, padding = half_steps(self.step).T.contiguous(), (0, -inputs % group)
        if self.bits == 4:
            least = (-self.zero).half().T.contiguous()
            return Int4(F.pad(self.numbers.T.to(torch.uint8), padding), step, least, inputs, in_steps=True)
        numbers = self._from_zero()
        low, high = numbers.aminmax()
        if low < -128 or high > 127:
            raise NotKept("8 bits around another zero than the middle")
        return Int8(F.pad(numbers.T.to(torch.int8), padding), step, inputs)

    def _from_zero(self) -> Tensor:
        return self.numbers - self.zero[self.of_input]


def _from_columns(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, words] int32 -> [rows, words * numbers a word] int32, the numbers 0 .. 2^bits - 1, lowest bits first or in `order`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        numbers = numbers[:, :, torch.tensor(order).argsort()]
    return numbers.flatten(1)
