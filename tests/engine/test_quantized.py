"""Quantised weights: the numbers stand for the weights, every product is the reference's, and a row is nobody else's business."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.attention.gather import CompiledAttention, GatherAttention
from engine.batch import build as build_batch
from engine.checkpoints.find import open_checkpoint
from engine.draft import Draft
from engine.kernelchoice import choose_kernel
from engine.kernels import build
from engine.kernels.native import Kernels, kernels
from engine.kvstore import KVStore, PlainLayer
from engine.linear import Linear, Plain
from engine.loader import load_decoder
from engine.numbers import Int4, Int8, Quantised
from engine.quantized import Compiled, TorchInt4, TorchInt8, Widened, grouped
from engine.request import Request, Sampling
from engine.scheduler import Row, StepPlan
from tests.engine.checkpoints import write_checkpoint
from tests.engine.compiling import built

SHAPES = ((1, 1), (3, 31), (16, 32), (17, 33), (40, 576), (50, 1000))
"""Outputs and inputs: below, at and beyond a block of outputs, a group of inputs."""
ROWS = (1, 2, 3, 7, 8, 9, 64)


def weight_of(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return torch.randn(outputs, inputs, generator=generator) * 0.1 + 0.02


def activations(rows: int, inputs: int) -> torch.Tensor:
    """With one outlier a row that is thousands of times as large as the rest."""
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    x[:, inputs // 2] *= 5000
    return x


def schemes(weight: torch.Tensor) -> list[Quantised]:
    made: list[Quantised] = [scheme.of(weight, group) for scheme in (Int8, Int4) for group in (32, 64, 128)]
    lowest = Int8.of(weight)
    made.append(replace(lowest, numbers=lowest.numbers.where(lowest.numbers != 127, -128)))
    counted = Int4.of(weight, 64)
    zero = torch.arange(counted.least.numel()).view(counted.least.shape) % 16
    return [*made, replace(counted, least=-zero.half(), in_steps=True)]


def exactly(x: torch.Tensor, quantised: Quantised, bias: torch.Tensor) -> torch.Tensor:
    return grouped(x).double() @ quantised.full().double().T + bias.double()


def near(got: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return float(torch.dist(got.double(), expected.double())) <= share * float(expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_products_are_the_exact_ones_within_rounding(compiled: Kernels, shape: tuple[int, int]) -> None:
    weight, bias = weight_of(*shape), torch.arange(shape[0]) / 7
    for quantised, rows in itertools.product(schemes(weight), ROWS):
        x = activations(rows, shape[1])
        assert near(Compiled(compiled, quantised, bias)(x), exactly(x, quantised, bias), 1e-6)


@pytest.mark.parametrize("inputs", [33, 96])
def test_norm_gate_and_residual_in_one_pass_are_those_of_torch(compiled: Kernels, inputs: int) -> None:
    weight, bias = weight_of(21, inputs), torch.arange(21) / 7
    norm = torch.linspace(-1, 2, inputs)
    for quantised in schemes(weight):
        one, apart = Compiled(compiled, quantised, bias), Widened(Plain, quantised, bias)
        x, gate_up = activations(5, inputs), torch.randn(5, 2 * inputs) * 3
        # a number on the edge between two steps may fall to either side
        assert near(one.normed(x, norm, 1e-5), apart.normed(x, norm, 1e-5), 2e-4)
        residual = torch.arange(105.0).view(5, 21)
        assert near(one.gated_plus(gate_up, residual.clone()), apart.gated_plus(gate_up, residual.clone()), 2e-4)
        assert near(one.plus(x, residual.clone()), apart.plus(x, residual.clone()), 1e-6)


def test_silu_is_right_for_gates_of_any_size(compiled: Kernels) -> None:
    gates = torch.cat([torch.linspace(-100, 100, 1001), torch.tensor([-1e4, 1e4, 0.0])])
    one = Int8.of(torch.ones(1, 1))
    ones = Compiled(compiled, one, None)
    got = torch.cat([ones.gated_plus(torch.tensor([[float(gate), 1.0]]), torch.zeros(1, 1)) for gate in gates])[:, 0]
    torch.testing.assert_close(got / one.full()[0, 0], F.silu(gates), rtol=1e-6, atol=1e-33)


def test_a_row_does_not_depend_on_the_others_nor_on_threads(compiled: Kernels) -> None:
    for quantised in schemes(weight_of(50, 200)):
        linear = Compiled(compiled, quantised, None)
        x = activations(19, 200)
        together = linear(x)
        assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(19))
        threads = torch.get_num_threads()
        try:
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                assert torch.equal(linear(x), together)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (9, 3, 64), (2, 2, 80), (8, 1, 128)])
def test_attention_over_scattered_blocks_is_that_of_torch(
    compiled: Kernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    firsts, lengths = torch.tensor([0, 0, 3, 9, 21]), torch.tensor([1, 4, 5, 37, 64])
    cache = torch.randn(100 * 4, 2 * kv_heads * head_dim)
    table = torch.randperm(100)[:80].view(5, 16)
    width = heads * head_dim
    rows = torch.randn(5, width + 7) * 3  # what follows the queries in a row is not read
    out = torch.full((5, heads, head_dim), 7.0)
    compiled.attention(rows, cache, table, (firsts, lengths), 4, kv_heads, 0.3, out)
    for row, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
        slots = (table[row].unsqueeze(1) * 4 + torch.arange(4)).flatten()[first:length]
        k, v = cache[slots].view(length - first, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
        q = rows[row, :width].view(1, heads, 1, head_dim)
        expected = F.scaled_dot_product_attention(q, k[None], v[None], enable_gqa=True, scale=0.3)
        torch.testing.assert_close(out[row], expected[0, :, 0], rtol=1e-4, atol=1e-5)
    alone = torch.empty(1, heads, head_dim)
    compiled.attention(rows[3:4], cache, table[3:4], (firsts[3:4], lengths[3:4]), 4, kv_heads, 0.3, alone)
    assert torch.equal(alone[0], out[3])


def test_extreme_scores_make_one_weight_and_no_nan(compiled: Kernels) -> None:
    cache = torch.zeros(16, 16)
    cache[:, 0] = torch.linspace(-1e4, 1e4, 16)
    cache[:, 8:] = torch.arange(16.0).unsqueeze(1)
    out, span = torch.empty(1, 1, 8), (torch.tensor([0]), torch.tensor([16]))
    compiled.attention(torch.full((1, 8), 9.0), cache, torch.tensor([[0]]), span, 16, 1, 1.0, out)
    assert torch.equal(out, torch.full((1, 1, 8), 15.0))


def test_decoding_by_the_kernel_is_decoding_by_torch_with_windows_too(compiled: Kernels, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=4, model_type="mistral", sliding_window=7)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.window == 7
    answers = []
    for attention in (GatherAttention(checkpoint.config), CompiledAttention(checkpoint.config, compiled)):
        cpu = torch.device("cpu")
        with torch.inference_mode():
            decoder = load_decoder(checkpoint, torch.float32, cpu, 64, lambda done: None, Plain)
            decoder.attention = attention
            cache = KVStore(decoder.config, 32, 4, torch.float32, cpu)
            logits = []
            requests = [Request(name, list(range(length)), Sampling(), 0.0) for name, length in (("a", 5), ("b", 22))]
            requests[0].blocks, requests[1].blocks = [3, 9, 4], [7, 1, 12, 30, 2, 8, 20]
            for step in range(6):
                plan = StepPlan([Row(r, r.num_computed, len(r.tokens) - r.num_computed) for r in requests])
                batch = build_batch(plan, 4, torch.float32, cpu, window=decoder.config.window)
                logits.append(decoder.logits(decoder.forward(batch, cache))[-2:] if step else torch.zeros(1))
                for request in requests:
                    request.num_computed = len(request.tokens)
                    request.tokens.append(step + 1)
            answers.append(torch.cat(logits[1:]))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [[4, 5, 6, 7, 8, 9], [9, 1, 7, 3, 8, 2]], ids=["side by side", "scattered"])
@pytest.mark.parametrize("window", [None, 7])
def test_a_token_and_its_guesses_attend_as_each_would_alone(
    compiled: Kernels, tmp_path: Path, window: int | None, blocks: list[int]
) -> None:
    """By the kernel to the last bit, by torch within rounding."""
    config = open_checkpoint(write_checkpoint(tmp_path)).config
    cpu, width = torch.device("cpu"), config.q_width + config.kv_width
    cache = PlainLayer(10, 4, config.kv_width, torch.float32, cpu)
    cache.slots.normal_(generator=torch.Generator().manual_seed(1))
    qkv = torch.randn(6, width, generator=torch.Generator().manual_seed(2))
    attention, torchs = CompiledAttention(config, compiled), GatherAttention(config)
    request = Request("r", list(range(18)), Sampling(), 0.0)
    request.blocks = blocks
    reach = build_batch(StepPlan([Row(request, 17, 6, Draft((1, 2, 3, 4, 5)))]), 4, torch.float32, cpu, int, window)
    together = attention(reach, True, qkv, cache)
    torch.testing.assert_close(torchs(reach, True, qkv, cache), together, rtol=1e-5, atol=1e-5)
    for place in range(6):
        alone = Request("a", list(range(18 + place)), Sampling(), 0.0)
        alone.blocks = blocks
        one = build_batch(StepPlan([Row(alone, 17 + place, 1)]), 4, torch.float32, cpu, int, window)
        assert torch.equal(attention(one, True, qkv[place : place + 1], cache)[0], together[place])


@pytest.mark.parametrize("inputs", [64, 256])
def test_without_a_compiler_results_are_equal_within_rounding(inputs: int) -> None:
    weight, bias = weight_of(32, inputs), torch.arange(32) / 7
    eight, four = Int8.of(weight), Int4.of(weight, 32)
    plain: list[tuple[Linear, Quantised, float]] = [
        (Widened(Plain, eight, bias), eight, 1e-6),
        (Widened(Plain, four, bias), four, 1e-6),
        (TorchInt8(weight, bias), eight, 2e-2),
        (TorchInt4(four, bias), four, 2e-2),
    ]
    for linear, quantised, share in plain:
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            assert near(linear(x), exactly(x, quantised, bias), share)


def test_half_precision_goes_in_and_comes_out(compiled: Kernels) -> None:
    linear = Compiled(compiled, Int8.of(weight_of(16, 64)), None)
    x = torch.randn(3, 64).bfloat16()
    assert linear(x).dtype is torch.bfloat16
    assert near(linear(x).float(), linear(x.float()), 1e-2)


def test_eight_bits_lie_within_half_a_step_and_zeros_stay_zeros() -> None:
    weight = weight_of(40, 100)
    weight[3] = 0
    quantised = Int8.of(weight)
    steps = quantised.step.float().repeat_interleave(32, dim=1)[:, :100]
    assert bool(((quantised.full() - weight).abs() <= 0.6 * steps).all())  # a rounded step may cut the largest off
    assert float(quantised.full()[3].abs().max()) == 0


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_lie_within_half_a_step_of_their_group(group: int) -> None:
    weight = weight_of(40, 250)
    weight[5, :group] = 0.25
    quantised = Int4.of(weight, group)
    steps = quantised.step.float().repeat_interleave(group, dim=1)[:, :250]
    assert bool(((quantised.full() - weight).abs() <= 0.5001 * steps + 2e-4).all())
    assert torch.equal(quantised.full()[5, :group], weight[5, :group])


def test_bytes_are_those_of_the_packed_weights(compiled: Kernels) -> None:
    weight = weight_of(64, 256)
    assert Compiled(compiled, Int8.of(weight), None).nbytes == 64 * 256 + 64 * 8 * 2
    assert Compiled(compiled, Int8.of(weight, 64), None).nbytes == 64 * 256 + 64 * 4 * 2
    assert Compiled(compiled, Int4.of(weight, 32), None).nbytes == 64 * 256 // 2 + 64 * 8 * 4
    assert Compiled(compiled, Int4.of(weight, 128), None).nbytes == 64 * 256 // 2 + 64 * 2 * 4


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_the_chosen_kernel_is_one_that_agrees_with_the_scheme(scheme: str) -> None:
    weight, lines = weight_of(96, 64), list[str]()
    choice = choose_kernel(weight, lines.append, kernels(lines.append), scheme)
    x = torch.randn(4, 64)
    expected = {"none": weight, "int8": Int8.of(weight).full(), "int4": Int4.of(weight, 32).full()}[scheme]
    assert near(choice.kernel(weight, None)(x), x @ expected.T, 3e-2)
    assert choice.name in lines[-1] and "x at 1, " in lines[-1]
    assert all(speedup > 0 for speedup in choice.speedups)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pairscope"


def compiler_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake = tmp_path / "compiler"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))


def test_a_compiler_that_fails_costs_one_line_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in ("echo 'x.cpp:1: error: no such thing' >&2; exit 1", "exit 0"):
        compiler_that(tmp_path, monkeypatch, script)
        lines: list[str] = []
        assert kernels(lines.append) is None
        assert len([line for line in lines if line.startswith("no compiled kernels")]) == 1
        assert [path for path in cache.iterdir() if path.stat().st_size] == []


def test_without_a_compiler_the_reason_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    lines: list[str] = []
    assert kernels(lines.append) is None
    assert lines == [
        "no compiled kernels, torch's own operators instead: no C++ compiler on this machine; "
        "install g++ or clang++ to be several times as fast"
    ]


def test_a_built_library_is_used_again_and_a_damaged_one_is_built_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    compile_: Callable[[str, bytes, Path], None] = build._compile

    def counted(compiler: str, source: bytes, library: Path) -> None:
        if made:
            shutil.copy(made[0], library)
        else:
            compile_(compiler, source, library)
        made.append(library)

    monkeypatch.setattr(build, "_compile", counted)
    built()
    build.load(lambda line: None)
    assert len(made) == 1
    (library,) = cache.iterdir()
    assert not library.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # in another folder: a library that this process has loaded is not read again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    damaged = build.own_folder(build.cache_folder()) / library.name
    damaged.write_bytes(b"\x7fELF and no more")
    build.load(lambda line: None)
    assert made == [library, damaged]


def test_a_folder_that_others_can_write_is_not_used(cache: Path, tmp_path: Path) -> None:
    build.own_folder(cache)
    cache.chmod(0o777)
    with pytest.raises(PermissionError, match="others can write"):
        build.own_folder(cache)
    cache.chmod(0o700)
    build.own_folder(cache)
    tmp_path.chmod(0o777)  # without the sticky bit anybody may put another folder in its place
    with pytest.raises(PermissionError, match="others can write"):
        build.own_folder(cache)
    tmp_path.chmod(0o700)


def test_the_cache_follows_systemd_then_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("CACHE_DIRECTORY", os.pathsep.join(("/a", "/b")))
    assert build.cache_folder() == Path("/a")
    monkeypatch.delenv("CACHE_DIRECTORY")
    assert build.cache_folder() == Path("/x/pairscope")
