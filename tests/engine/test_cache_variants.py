"""Greedy output is the same whatever the cache does: prefixes shared, requests preempted and recomputed or swapped, contiguous
extents, static batches, 8 bits. A tiny model with random weights, through the real tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from engine.accounting import Peaks
from engine.assembly import make_scheduler
from engine.batch import build
from engine.blocks import BlockPool
from engine.checkpoints.find import open_checkpoint
from engine.core import Engine
from engine.draft import Draft
from engine.kvstore import Int8Layer, KVStore, bytes_per_token
from engine.linear import Plain
from engine.loader import load_decoder
from engine.model import Decoder
from engine.queue import FirstCome
from engine.request import Request, Sampling
from engine.runner import Runner, cost_of
from engine.scheduler import Scheduler
from engine.settings import EngineSettings
from engine.stats import Counters, EngineStats
from engine.threads import ThreadChooser
from tests.engine.checkpoints import write_checkpoint
from tests.engine.fakes import Always, FakeClock, speculate

CPU = torch.device("cpu")
CONTEXT = 160
SMALL, HOST = 44, 80
"""Blocks of four tokens: six requests of the mix don't fit into so few at once."""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False)


def tiny(folder: Path, **changes: object) -> Decoder:
    checkpoint = open_checkpoint(write_checkpoint(folder, seed=11, **changes))
    with torch.inference_mode():
        return load_decoder(checkpoint, torch.float32, CPU, 512, lambda done: None, Plain)


def engine_with(decoder: Decoder, blocks: int, **changes: object) -> Engine:
    settings = EngineSettings(block_size=4, max_seqs=6, token_budget=37, **changes)  # type: ignore[arg-type]
    host_blocks = HOST if settings.preemption == "swap" else 0
    cache = KVStore(decoder.config, blocks, 4, torch.float32, CPU, settings.kv_dtype == "int8", host_blocks)
    scheduler = make_scheduler(settings, blocks, host_blocks, CONTEXT, 37)
    stats = EngineStats(started_s=0.0, peaks=Peaks(1e9, 1e9))
    runner = Runner(decoder, cache, ThreadChooser(1))
    return Engine(scheduler, runner, cost_of(decoder, cache), stats, frozenset(), CONTEXT)


def mix() -> list[Request]:
    """Prompts of which many begin alike, up to within a block, at its end and beyond; the last one is a request's whole text."""
    source = random.Random(5)
    common = [source.randrange(250) for _ in range(70)]
    requests = []
    for number in range(24):
        shared = common[: source.choice((0, 3, 4, 21, 40, 64, 70))]
        own = [source.randrange(250) for _ in range(source.choice((0, 1, 9, 30)))]
        sampling = Sampling(temperature=0.0, max_tokens=source.choice((1, 8, 55)), ignore_eos=True)
        requests.append(Request(f"r{number}", shared + own or [9], sampling, float(number)))
    return requests


def outputs_of(engine: Engine) -> tuple[list[list[int]], Counters]:
    """Requests come one by one while others run; blocks are checked after each step."""
    requests = mix()
    for request in requests:
        engine.add(request)
        for _ in range(2):
            engine.step()
            engine.scheduler.check()
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.pool.num_taken == 0
    return [request.output for request in requests], engine.stats.counters


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> list[list[int]]:
    outputs, counters = outputs_of(engine_with(decoder, 1000, prefix_cache=False))
    assert counters.preemptions_total == counters.prefix_queries_total == counters.prefix_hits_total == 0
    assert len({token for output in outputs for token in output}) > 30  # the model says different things
    return outputs


VARIANTS: dict[str, tuple[int, dict[str, object], Callable[[Counters], object]]] = {
    "prefixes shared": (1000, {}, lambda c: c.prefix_hits_total > 300 and not c.prefix_evictions_total),
    "recomputed": (SMALL, {"prefix_cache": False}, lambda c: c.recomputed_tokens_total > 20),
    "prefixes shared, evicted and recomputed": (
        SMALL,
        {},
        lambda c: c.prefix_hits_total > 100 and c.prefix_evictions_total > 20 and c.preemptions_recompute_total,
    ),
    "swapped": (
        SMALL,
        {"prefix_cache": False, "preemption": "swap"},
        lambda c: c.swap_in_blocks_total > 30 and c.preemptions_swap_total > 2 and not c.recomputed_tokens_total,
    ),
    "prefixes shared and swapped": (
        SMALL,
        {"preemption": "swap"},
        lambda c: c.preemptions_swap_total and c.prefix_hits_total > 100,
    ),
    "contiguous": (
        2 * CONTEXT // 4,
        {"kv_layout": "contiguous"},
        lambda c: c.blocked_on_blocks_total > 50 and not c.preemptions_total and not c.prefix_queries_total,
    ),
    "static batches": (1000, {"batching": "static"}, lambda c: c.blocked_on_seqs_total > 20),
}


@pytest.mark.parametrize(("blocks", "changes", "happened"), VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_output_is_the_same(
    decoder: Decoder,
    plain: list[list[int]],
    blocks: int,
    changes: dict[str, object],
    happened: Callable[[Counters], object],
) -> None:
    outputs, counters = outputs_of(engine_with(decoder, blocks, **changes))
    assert happened(counters), "\n".join(f"{f.name} {getattr(counters, f.name)}" for f in fields(counters))
    assert outputs == plain


@pytest.mark.parametrize(
    "changes",
    [{}, {"prefix_cache": False, "preemption": "swap"}, {"kv_layout": "contiguous"}],
    ids=["recomputed", "swapped", "contiguous"],
)
def test_guessed_tokens_change_no_output(decoder: Decoder, plain: list[list[int]], changes: dict[str, object]) -> None:
    """Guesses by somebody who knows the output and errs on purpose, in a pool that is too small."""
    engine = engine_with(decoder, 2 * CONTEXT // 4 if "kv_layout" in changes else SMALL, **changes)
    speculate(engine, Knowing(plain), FakeClock(), payoff=Always)
    outputs, _ = outputs_of(engine)
    assert outputs == plain
    assert engine.stats.speculation is not None
    assert 100 < engine.stats.speculation.accepted_total < engine.stats.speculation.drafted_total


class Knowing:
    """Guesses what the requests of the mix will get, and every seventh token something else."""

    free = False

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.outputs = outputs

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._guess(request, tokens) for request, tokens in wanted]

    def _guess(self, request: Request, tokens: int) -> Draft:
        places = range(request.num_output, request.num_output + tokens)
        known = self.outputs[int(request.id[1:])]
        return Draft(tuple(known[n] if n % 7 and n < len(known) else 3 for n in places))

    def forget(self, id: str) -> None:
        pass


def test_with_windows_too_sharing_recomputing_and_swapping_change_nothing(tmp_path: Path) -> None:
    """Windows that end within a block, on a prefix that others computed, on blocks that went to the host and came back."""
    windowed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}
    decoder = tiny(tmp_path, num_hidden_layers=3, tie_word_embeddings=False, **windowed)
    expected, _ = outputs_of(engine_with(decoder, 1000, prefix_cache=False))
    for changes in ({}, {"preemption": "swap"}, {"kv_layout": "contiguous"}):
        blocks = 2 * CONTEXT // 4 if changes.get("kv_layout") else SMALL
        outputs, counters = outputs_of(engine_with(decoder, blocks, **changes))
        assert outputs == expected
        assert counters.preemptions_total or changes.get("kv_layout")
    engine = engine_with(decoder, SMALL)
    speculate(engine, Knowing(expected), FakeClock(), payoff=Always)
    assert outputs_of(engine)[0] == expected
    everywhere, _ = outputs_of(
        engine_with(
            tiny(
                tmp_path, num_hidden_layers=3, tie_word_embeddings=False, **(windowed | {"use_sliding_window": False})
            ),
            1000,
        )
    )
    assert everywhere != expected  # the window says something


def test_in_8_bits_too_sharing_and_swapping_change_nothing(decoder: Decoder) -> None:
    expected, _ = outputs_of(engine_with(decoder, 1000, prefix_cache=False, kv_dtype="int8"))
    engine = engine_with(decoder, 1000, kv_dtype="int8")
    speculate(engine, Knowing(expected), FakeClock(), payoff=Always)
    assert outputs_of(engine)[0] == expected
    for changes in ({}, {"preemption": "swap"}):
        outputs, counters = outputs_of(engine_with(decoder, SMALL, kv_dtype="int8", **changes))
        assert counters.prefix_hits_total > 100
        assert counters.preemptions_total
        assert outputs == expected


def test_what_is_cached_is_neither_computed_again_nor_copied(decoder: Decoder) -> None:
    engine = engine_with(decoder, 100)
    prompt = [number % 250 for number in range(33)]

    def ask(id: str) -> Request:
        request = Request(id, prompt, Sampling(temperature=0.0, max_tokens=4, ignore_eos=True), 0.0)
        engine.add(request)
        engine.step()
        return request

    first = ask("first")
    second = ask("second")
    assert second.blocks[:8] == first.blocks[:8]  # the same memory
    assert second.blocks[8] != first.blocks[8]
    counters = engine.stats.counters
    assert (counters.prefix_queries_total, counters.prefix_hits_total) == (66, 32)
    assert (counters.prompt_tokens_total, counters.prompt_tokens_computed_total) == (66, 34)
    assert engine.scheduler.pool.num_taken == len({*first.blocks, *second.blocks})
    assert engine.stats.occupancy.slots_unused == sum(4 * len(r.blocks) - r.num_computed for r in (first, second))
    while engine.has_work:
        engine.step()
    assert first.output == second.output
    assert (
        engine.scheduler.pool.num_cached == 9
    )  # 33 prompt tokens and 4 of the output, but for the last: nine full blocks


def logits_of(decoder: Decoder, cache: KVStore, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits of each token, computed in chunks through the cache."""
    scheduler = Scheduler(BlockPool(64, 4), FirstCome(), 1, 1000, 256)
    request = Request("a", tokens[:chunk], Sampling(), 0.0)
    scheduler.add(request)
    rows = []
    with torch.inference_mode():
        while request.num_computed < len(tokens):
            request.tokens = list(tokens[: request.num_computed + chunk])
            plan = scheduler.schedule()
            batch = build(plan, 4, torch.float32, CPU, decoder.head.padded)
            rows.append(decoder.logits(decoder.forward(batch, cache)))
            scheduler.computed(plan.rows[0])
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 7, 120])
def test_8_bits_keep_the_logits_near_and_nearly_every_best_token(decoder: Decoder, chunk: int) -> None:
    source = random.Random(2)
    tokens = [source.randrange(250) for _ in range(120)]
    exact = logits_of(decoder, KVStore(decoder.config, 64, 4, torch.float32, CPU), tokens, chunk)
    near = logits_of(decoder, KVStore(decoder.config, 64, 4, torch.float32, CPU, int8=True), tokens, chunk)
    assert not torch.equal(near, exact)
    assert float((near - exact).abs().max()) < 0.05 * float(exact.std())
    assert float((near.argmax(-1) == exact.argmax(-1)).float().mean()) > 0.95


def test_an_outlier_in_one_head_costs_the_other_heads_no_precision() -> None:
    layer = Int8Layer(2, 4, heads=4, head_dim=8, dtype=torch.float32, device=CPU)
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    rows[1, 8] = 1e4
    rows[2, 16:24] = 0.0
    kept = rows.clone()
    slots = torch.tensor([5, 0, 2])
    layer.write(slots, kept)
    error = (kept - rows).abs().view(3, 4, 8)
    assert float(error[1, 1].max()) > 0.5
    error[1, 1] = 0.0
    limit = rows.view(3, 4, 8).abs().amax(-1, keepdim=True) / 127 / 2
    assert bool((error <= limit * 1.001).all())
    assert torch.equal(kept[2, 16:24], torch.zeros(8))
    stored = layer.gather(torch.tensor([0, 1]))
    assert torch.equal(stored[slots], kept)  # what attention has seen is what it will see
    assert torch.equal(layer.run(1, 2)[1], kept[0])


def test_8_bits_take_a_good_quarter_of_the_memory(decoder: Decoder) -> None:
    config = decoder.config
    for int8 in (False, True):
        cache = KVStore(config, 10, 4, torch.float32, CPU, int8)
        held = sum(part.numel() * part.element_size() for layer in cache.layers for part in layer.parts)
        assert held == 40 * bytes_per_token(config, torch.float32, int8) == 40 * cache.bytes_per_token
    assert bytes_per_token(config, torch.float32, int8=True) == 2 * 2 * 2 * (8 + 4)
