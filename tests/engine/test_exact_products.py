"""Weights kept in 16, 8 or 4 bits and widened on their way into a float32 sum give the bits of the widened weights' product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.native import Kernels
from engine.numbers import Int4, Int8
from engine.quantized import Bfloat16, Compiled, Full, as_short_as_exact

Tensor = torch.Tensor
Kept = Int4 | Int8 | Bfloat16
ROWS = (1, 2, 3, 4, 7, 12, 13, 36, 37, 75)
SHAPES = ((1, 32), (17, 96), (48, 64), (1100, 256))


def kept(kind: str, weight: Tensor, group: int) -> tuple[Kept, Tensor]:
    """In that form, and as the float32 numbers that it stands for."""
    if kind == "bfloat16":
        short = Bfloat16(weight.bfloat16(), weight.shape[1])
        return short, short.numbers.float()
    made = Int8.of(weight, group) if kind == "8 bits" else Int4.of(weight, group)
    if isinstance(made, Int4) and kind == "4 bits, whole zero points":
        zero = torch.randint(0, 16, made.least.shape, generator=torch.Generator().manual_seed(3))
        made = replace(made, least=(-zero).half(), in_steps=True)
    return made, made.full().contiguous()


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("4 bits", 32),
        ("4 bits", 128),
        ("4 bits, whole zero points", 32),
        ("4 bits, whole zero points", 64),
        ("8 bits", 32),
        ("8 bits", 64),
        ("bfloat16", 32),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_is_that_of_the_widened_weights(
    compiled: Kernels, kind: str, group: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(7)
    weight = torch.randn(shape) * torch.logspace(-4, 2, shape[0]).unsqueeze(1)
    narrow, full = kept(kind, weight, group)
    bias, norm = torch.randn(shape[0]), torch.rand(shape[1]) + 0.5
    ours, whole = Compiled(compiled, narrow, bias, exact=True), Compiled(compiled, Full.of(full), bias)
    assert ours.nbytes < 0.6 * whole.nbytes or shape[1] < group  # then the group is filled up
    for rows in ROWS:
        x, gate_up, residual = (torch.randn(rows, n) for n in (shape[1], 2 * shape[1], shape[0]))
        assert torch.equal(ours(x), whole(x)), rows
        assert torch.equal(ours.normed(x, norm, 1e-5), whole.normed(x, norm, 1e-5)), rows
        assert torch.equal(ours.gated_plus(gate_up, residual.clone()), whole.gated_plus(gate_up, residual.clone())), (
            rows
        )


def test_activations_of_the_quantised_product_of_the_same_numbers_are_rounded(compiled: Kernels) -> None:
    torch.manual_seed(2)
    narrow = Int4.of(torch.randn(48, 64), 32)
    x = torch.randn(3, 64)
    assert not torch.equal(Compiled(compiled, narrow, None)(x), Compiled(compiled, narrow, None, exact=True)(x))


def test_what_bfloat16_would_change_stays_whole() -> None:
    weight = torch.randn(16, 64).bfloat16().float()
    assert isinstance(as_short_as_exact(weight), Bfloat16)
    weight[11, 3] = torch.nextafter(weight[11, 3], torch.tensor(9.0))
    assert isinstance(as_short_as_exact(weight), Full)
    assert isinstance(as_short_as_exact(torch.zeros(16, 40)), Full)  # no whole pieces of 32 inputs


def test_the_number_of_threads_changes_nothing(compiled: Kernels) -> None:
    torch.manual_seed(3)
    linear = Compiled(compiled, Int4.of(torch.randn(1100, 64), 32), None, exact=True)
    x = torch.randn(40, 64)
    one_by_one = torch.cat([linear(x[row : row + 1]) for row in range(40)])
    before = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(linear(x), one_by_one)
    finally:
        torch.set_num_threads(before)
