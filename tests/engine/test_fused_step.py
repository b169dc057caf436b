"""All layers in one call give what the layers give one by one; float32 weights in the compiled kernels are those of torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.batch import build as build_batch
from engine.checkpoints.find import open_checkpoint
from engine.fusedstep import LONG_CHUNK, FusedStep
from engine.kernels.native import Kernels
from engine.kvstore import KVStore, PlainLayer
from engine.linear import Plain
from engine.loader import load_decoder
from engine.model import Decoder
from engine.quantized import Compiled, Full
from engine.request import Request, Sampling
from engine.scheduler import Row, StepPlan
from engine.threads import usable_cores
from tests.engine.checkpoints import write_checkpoint

CPU = torch.device("cpu")
ROWS = (1, 2, 5, 6, 7, 12, 13, 16, 30)


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (64, 40), (90, 129)])
def test_full_weights_give_torchs_products_for_any_rows_and_outputs(compiled: Kernels, shape: tuple[int, int]) -> None:
    torch.manual_seed(5)
    weight, bias, norm = torch.randn(shape), torch.randn(shape[0]), torch.rand(shape[1]) + 0.5
    ours, theirs = Compiled(compiled, Full.of(weight), bias), Plain(weight, bias)
    for rows in ROWS:
        x, gate_up, residual = (torch.randn(rows, n) for n in (shape[1], 2 * shape[1], shape[0]))
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.normed(x, norm, 1e-5), theirs.normed(x, norm, 1e-5), rtol=1e-4, atol=1e-4)
        expected = theirs.gated_plus(gate_up, residual.clone())
        torch.testing.assert_close(ours.gated_plus(gate_up, residual.clone()), expected, rtol=1e-4, atol=1e-4)


def test_a_row_with_full_weights_does_not_depend_on_the_others_nor_on_threads(compiled: Kernels) -> None:
    linear = Compiled(compiled, Full.of(torch.randn(1100, 70)), None)
    x = torch.randn(29, 70)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(29))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(threads)


def test_more_threads_than_processors_meet_at_every_barrier_and_compute_the_same(compiled: Kernels) -> None:
    """They sleep there, most of the time: one that nobody woke would never come back."""
    linear = Compiled(compiled, Full.of(torch.randn(1100, 70)), None)
    x = torch.randn(3, 70)
    threads = torch.get_num_threads()
    expected = linear(x)
    try:
        torch.set_num_threads(usable_cores() + 4)
        assert all(torch.equal(linear(x), expected) for _ in range(200))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (10, 2, 64), (3, 1, 96), (16, 4, 128)])
def test_many_rows_attend_as_torch_does_however_heads_are_taken_together(
    compiled: Kernels, heads: int, kv_heads: int, head_dim: int
) -> None:
    torch.manual_seed(6)
    lengths = torch.arange(1, 12)
    firsts = torch.where(lengths > 7, 3, 0)
    cache, table = torch.randn(40 * 4, 2 * kv_heads * head_dim), torch.randperm(40)[:33].view(11, 3)
    rows = torch.randn(11, heads * head_dim) * 3
    out = torch.empty(11, heads, head_dim)
    compiled.attention(rows, cache, table, (firsts, lengths), 4, kv_heads, 0.3, out)
    for row, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
        slots = (table[row].unsqueeze(1) * 4 + torch.arange(4)).flatten()[first:length]
        k, v = cache[slots].view(length - first, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
        q = rows[row].view(1, heads, 1, head_dim)
        expected = F.scaled_dot_product_attention(q, k[None], v[None], enable_gqa=True, scale=0.3)
        torch.testing.assert_close(out[row], expected[0, :, 0], rtol=1e-4, atol=1e-5)
        alone, span = torch.empty(1, heads, head_dim), (firsts[row : row + 1], lengths[row : row + 1])
        compiled.attention(rows[row : row + 1], cache, table[row : row + 1], span, 4, kv_heads, 0.3, alone)
        assert torch.equal(alone[0], out[row])


def decoder_of(folder: Path, compiled: Kernels) -> Decoder:
    def kernel(weight: torch.Tensor, bias: torch.Tensor | None) -> Compiled:
        return Compiled(compiled, Full.of(weight), bias)

    return load_decoder(open_checkpoint(folder), torch.float32, CPU, 512, lambda done: None, kernel)


def read(decoder: Decoder, prompts: list[list[int]], steps: int) -> list[torch.Tensor]:
    """Logits of each step: the prompts in two pieces, the second one beside others' single tokens, then token by token."""
    cache = KVStore(decoder.config, 100, 4, torch.float32, CPU)
    blocks = iter(torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist())
    requests = [Request(str(n), prompt, Sampling(), 0.0) for n, prompt in enumerate(prompts)]
    for request in requests:
        request.blocks = list(itertools.islice(blocks, -(-(request.num_tokens + steps) // 4)))
    logits = []
    for step in range(steps):
        rows = []
        for number, request in enumerate(requests):
            due = request.num_tokens - request.num_computed
            first_piece = step == 0 and number % 2 == 0
            rows.append(Row(request, request.num_computed, max(1, due // 2) if first_piece else due))
        batch = build_batch(StepPlan(rows), 4, torch.float32, CPU)
        x = decoder.forward(batch, cache)
        logits.append(decoder.logits(x))
        for row in rows:
            row.request.num_computed = row.context
            if row.context == row.request.num_tokens:
                row.request.tokens.append(3 + step)
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.inference_mode()
def test_all_layers_at_once_give_what_they_give_one_by_one(compiled: Kernels, tmp_path: Path, family: str) -> None:
    decoder = decoder_of(write_checkpoint(tmp_path, seed=3, model_type=family, num_hidden_layers=3), compiled)
    prompts = [[n * 7 % 250 for n in range(at, at + length)] for at, length in ((0, 9), (3, 1), (5, 70), (8, 2))]
    apart = read(decoder, prompts, 7)
    assert FusedStep.suits(decoder)
    fused = FusedStep(decoder, compiled)
    taken: list[bool] = []

    def at_once(x: torch.Tensor, batch: Batch, cache: KVStore) -> float | None:
        found = fused(x, batch, cache)
        taken.append(found is not None)
        return found

    decoder.fused = at_once
    together = read(decoder, prompts, 7)
    assert taken == [True] * 7
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_another_cache_is_taken_up_and_long_chunks_and_other_caches_go_layer_by_layer(
    compiled: Kernels, tmp_path: Path
) -> None:
    decoder = decoder_of(write_checkpoint(tmp_path, seed=3), compiled)
    fused = FusedStep(decoder, compiled)
    caches = [KVStore(decoder.config, 40, 16, torch.float32, CPU) for _ in range(2)]
    long = Request("long", [n % 250 for n in range(LONG_CHUNK + 1)], Sampling(), 0.0)
    short = Request("short", [1, 2, 3], Sampling(), 0.0)
    long.blocks, short.blocks = list(range(17)), [20]

    def run(request: Request, cache: KVStore) -> torch.Tensor | None:
        batch = build_batch(StepPlan([Row(request, 0, request.num_tokens)]), 16, torch.float32, CPU)
        x = F.embedding(batch.ids, decoder.embedding)
        attention_s = fused(x, batch, cache)
        assert attention_s is None or 0 < attention_s < 60
        return None if attention_s is None else x

    answers = [run(short, cache) for cache in (*caches, caches[0])]
    assert all(answer is not None and torch.equal(answer, answers[0]) for answer in answers)
    kept = [[layer.slots for layer in cache.layers if isinstance(layer, PlainLayer)] for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert kept[0][0][320:323].abs().min() > 0
    assert run(long, caches[0]) is None
    assert run(short, KVStore(decoder.config, 40, 16, torch.float32, CPU, int8=True)) is None


@pytest.mark.parametrize(
    ("family", "more"), [("qwen3", {"head_dim": 8}), ("gemma2", {"head_dim": 8}), ("mistral", {"sliding_window": 7})]
)
def test_models_with_more_than_the_kernel_knows_go_layer_by_layer(
    compiled: Kernels, tmp_path: Path, family: str, more: dict[str, int]
) -> None:
    assert not FusedStep.suits(decoder_of(write_checkpoint(tmp_path, model_type=family, **more), compiled))
