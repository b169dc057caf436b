"""Decoding steps that were captured and are replayed give the tokens of steps that are computed as they come, touch no block
but their own, and are given up in one line where they can't be captured. Graphs are recorded operators here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.accounting import Peaks
from engine.assembly import assemble, make_scheduler
from engine.attention.flash import Flash
from engine.attention.flashinfer import FlashInfer
from engine.attention.flex import Flex
from engine.attention.gather import GatherAttention
from engine.attention.interface import Attention, Place
from engine.checkpoints.find import open_checkpoint
from engine.core import Engine
from engine.graphs import CapturerOf, DecodeGraphs, Size, capture_all, graph_bytes, sizes_of
from engine.kvstore import KVStore
from engine.linear import Plain
from engine.loader import load_decoder
from engine.model import Decoder
from engine.request import Request, Sampling
from engine.runner import Runner, cost_of
from engine.scheduler import Row
from engine.settings import EngineSettings
from engine.stats import EngineStats
from engine.threads import ThreadChooser
from tests.doubles.attention_kernels import FlashAttn, FlashInferModule
from tests.doubles.graph_recorder import CantCapture, GraphRecorder, launched
from tests.engine.checkpoints import write_checkpoint

CPU = torch.device("cpu")
CONTEXT = 96
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}


def tiny(folder: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    checkpoint = open_checkpoint(write_checkpoint(folder, seed=11, tie_word_embeddings=False, **changes))
    with torch.inference_mode():
        return load_decoder(checkpoint, dtype, CPU, 512, lambda done: None, Plain)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny(tmp_path_factory.mktemp("tiny"), **WINDOWED)


def engine_with(decoder: Decoder, blocks: int, graphs: bool, int8: bool = False) -> tuple[Engine, Runner]:
    settings = EngineSettings(block_size=4, max_seqs=6, token_budget=37, preemption="recompute")
    cache = KVStore(decoder.config, blocks + 1, 4, torch.float32, CPU, int8)
    runner = Runner(decoder, cache, ThreadChooser(1))
    if graphs:
        sizes = [Size(n, width) for n in (6, 4, 2, 1) for width in (24, 8)]
        runner.graphs = DecodeGraphs(decoder, cache, blocks, sizes, GraphRecorder())
    scheduler = make_scheduler(settings, blocks, 0, CONTEXT, 37)
    stats = EngineStats(started_s=0.0, peaks=Peaks(1e9, 1e9))
    return Engine(scheduler, runner, cost_of(decoder, cache), stats, frozenset(), CONTEXT), runner


def outputs_of(engine: Engine) -> list[list[int]]:
    """Requests come and go: the decoding batch grows and shrinks, some share beginnings, blocks change hands."""
    source = random.Random(5)
    common = [source.randrange(250) for _ in range(40)]
    requests = []
    for number in range(12):
        own = [source.randrange(250) for _ in range(source.choice((1, 9, 30)))]
        sampling = Sampling(temperature=0.0, max_tokens=source.choice((3, 8, 25)), ignore_eos=True)
        requests.append(Request(f"r{number}", common[: source.choice((0, 3, 21, 40))] + own, sampling, float(number)))
        engine.add(requests[-1])
        for _ in range(4):
            engine.step()
            engine.scheduler.check()
    while engine.has_work:
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("int8", [False, True], ids=["full cache", "8 bits"])
def test_tokens_are_those_of_steps_that_are_computed_as_they_come(decoder: Decoder, int8: bool) -> None:
    """In a pool that is too small for all, with windows: blocks are evicted, taken by others, and written again."""
    expected = outputs_of(engine_with(decoder, 60, False, int8)[0])
    engine, runner = engine_with(decoder, 60, True, int8)
    assert outputs_of(engine) == expected
    assert len({token for output in expected for token in output}) > 10
    assert runner.graphs is not None and runner.graphs.replays > 40
    assert runner.graphs.replays < len(engine.steps.last(10_000))  # steps with prompts went as before


def rows_of(contexts: Sequence[int], blocks: int, size: int = 4) -> list[Row]:
    free = random.Random(7).sample(range(blocks), blocks)
    rows = []
    for number, context in enumerate(contexts):
        request = Request(f"r{number}", [(number * 31 + at) % 250 for at in range(context)], Sampling(), 0.0)
        request.blocks = [free.pop() for _ in range(-(-context // size))]
        rows.append(Row(request, context - 1, 1))
    return rows


def filled(cache: KVStore) -> KVStore:
    generator = torch.Generator().manual_seed(4)
    for layer in cache.layers:
        layer.parts[0].copy_(torch.randn(layer.parts[0].shape, generator=generator))
    return cache


def test_rows_that_fill_up_a_size_change_nothing_but_the_spare_block(decoder: Decoder) -> None:
    cache = filled(KVStore(decoder.config, 41, 4, torch.float32, CPU))
    graphs = DecodeGraphs(decoder, cache, 40, [Size(5, 8), Size(8, 8)], GraphRecorder())
    rows = rows_of([9, 1, 32, 16, 5], 40)
    before = [layer.parts[0].clone() for layer in cache.layers]
    exact = graphs.logits(rows)
    assert exact is not None
    exact, after = exact.clone(), [layer.parts[0].clone() for layer in cache.layers]
    taken = {row.request.blocks[row.start // 4] for row in rows}
    for old, new in zip(before, after, strict=True):
        changed = {int(block) for block in (old != new).any(dim=1).nonzero().flatten()}
        assert changed == taken
    for poison in (0.0, 1e4):  # what stands in the spare block, and how many rows are filled up
        cache.layers[0].parts[0][40] = poison
        again = DecodeGraphs(decoder, cache, 40, [Size(8, 8)], GraphRecorder()).logits(rows)
        assert again is not None
        torch.testing.assert_close(again, exact, rtol=1e-5, atol=1e-5)
        for old, layer in zip(after, cache.layers, strict=True):
            assert torch.equal(old[:40], layer.parts[0][:40])


@torch.inference_mode()
def test_a_replay_reads_what_was_loaded_last_and_nothing_of_the_step_before(decoder: Decoder) -> None:
    """Two steps through one capture, in another order each, against captures of their own; what the first one was made of is spoilt."""
    cache = filled(KVStore(decoder.config, 81, 4, torch.float32, CPU))
    graphs = DecodeGraphs(decoder, cache, 80, [Size(4, 8)], GraphRecorder())
    first, second = rows_of([9, 30, 17], 40), rows_of([3, 32, 8, 21], 80)
    for rows in (first, second, first):
        fresh = DecodeGraphs(decoder, cache, 80, [Size(4, 8)], GraphRecorder()).logits(rows)
        own = graphs.logits(rows)
        assert own is not None and fresh is not None
        assert torch.equal(own, fresh)
        kept = [list(row.request.blocks) for row in rows]
        for row in rows:  # the plan's own lists: nothing may look at them again
            row.request.blocks[:] = [10**6] * len(row.request.blocks)
        captured = graphs._captured[Size(4, 8)]
        captured.replay()
        assert torch.equal(captured.logits[: len(rows)], fresh)
        captured.inputs.fill_(0)
        captured.logits.fill_(float("nan"))
        for row, blocks in zip(rows, kept, strict=True):
            row.request.blocks[:] = blocks


@pytest.mark.parametrize(
    ("contexts", "counts", "replayed"),
    [
        ([9, 5], [1, 1], True),
        ([9, 5], [1, 2], False),
        ([9] * 5, [1] * 5, False),
        ([33, 2], [1, 1], False),
        ([], [], False),
    ],
    ids=["single tokens", "a chunk among them", "too many", "too long", "none"],
)
def test_only_steps_of_single_tokens_that_fit_are_replayed(
    decoder: Decoder, contexts: list[int], counts: list[int], replayed: bool
) -> None:
    cache = KVStore(decoder.config, 61, 4, torch.float32, CPU)
    graphs = DecodeGraphs(decoder, cache, 60, [Size(1, 8), Size(4, 8)], GraphRecorder())
    rows = [Row(row.request, row.context - n, n) for row, n in zip(rows_of(contexts, 60), counts, strict=True)]
    logits = graphs.logits(rows)
    assert (logits is not None) is replayed
    if logits is not None:
        assert logits.shape == (2, decoder.config.vocab)


BACKENDS: dict[str, tuple[int, Callable[[Place], Attention]]] = {
    "flash": (256, lambda place: Flash(place, FlashAttn())),
    "flashinfer": (16, lambda place: FlashInfer(place, FlashInferModule())),
    "flex": (16, lambda place: Flex(place, lambda *given, **more: launched(lambda: flex_attention(*given, **more)))),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_can_be_captured_and_says_the_same_then(name: str, tmp_path: Path) -> None:
    """Twice with other tables and lengths: what was planned for the first must not stay in the second."""
    size, make = BACKENDS[name]
    dtype = torch.float32 if name == "flex" else torch.bfloat16
    heads = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
    decoder = tiny(tmp_path, dtype, **{**WINDOWED, "model_type": "qwen3", **heads})
    place = Place(decoder.config, dtype, CPU, size)
    found: dict[str, list[torch.Tensor]] = {}
    for way in (GatherAttention(decoder.config), make(place)):
        decoder.attention = way
        cache = filled(KVStore(decoder.config, 13, size, dtype, CPU))
        graphs = DecodeGraphs(decoder, cache, 12, [Size(4, 3)], GraphRecorder())
        found[way.name] = []
        for contexts in ([40, 3, 17], [16, 33, 20, 1]):
            logits = graphs.logits(rows_of(contexts, 12, size))
            assert logits is not None
            found[way.name].append(logits.float().clone())
    for own, expected in zip(found[name], found["sdpa"], strict=True):
        assert float(torch.dist(own, expected) / expected.norm()) < (1e-4 if name == "flex" else 2e-2)


class HostReading(GatherAttention):
    """Looks at a length on the host in each layer: what can't be captured."""

    def decode(self, group, qkv, cache):  # type: ignore[no-untyped-def]
        assert int(group.lengths.max()) > 0
        return super().decode(group, qkv, cache)


def test_what_cannot_be_captured_is_told_in_one_line_and_steps_go_on_without(decoder: Decoder) -> None:
    log: list[str] = []
    cache = KVStore(decoder.config, 9, 4, torch.float32, CPU)
    usual = decoder.attention
    decoder.attention = HostReading(decoder.config)
    try:
        with pytest.raises(CantCapture):
            DecodeGraphs(decoder, cache, 8, [Size(1, 2)], GraphRecorder())
        assert capture_all(decoder, cache, 8, [Size(1, 2)], GraphRecorder(), log.append) is None
        assert graph_bytes(decoder, cache, [Size(1, 2)], GraphRecorder(), log.append) is None
    finally:
        decoder.attention = usual
    assert log[0] == "CUDA graphs: not used (aten::item can't be captured)"
    assert decoder.clock.__class__.__name__ == "Untimed"


def test_sizes_cover_every_batch_and_context_and_hold_no_more_than_pays() -> None:
    assert sizes_of(6, 1000, 16, gathers=False) == [Size(6, 63), Size(4, 63), Size(2, 63), Size(1, 63)]
    assert sizes_of(1, 10, 16, gathers=False) == [Size(1, 1)]
    found = sizes_of(32, 8192, 16, gathers=True)
    assert {size.rows for size in found} == {1, 2, 4, 8, 16, 32}
    assert {size.width for size in found if size.rows == 1} == {16, 32, 64, 128, 256, 512}
    assert max(size.rows * size.width * 16 for size in found) == 1 << 16
    assert found[0].rows * found[0].width * 16 == 1 << 16


def with_recorder(monkeypatch: pytest.MonkeyPatch, recorder: GraphRecorder) -> None:
    def capturer_of(settings: EngineSettings, device: torch.device) -> GraphRecorder | None:
        return recorder if settings.cuda_graphs else None

    made: CapturerOf = capturer_of
    monkeypatch.setattr("engine.assembly.capturer_of", made)


def test_an_engine_counts_the_memory_of_its_graphs_before_it_sizes_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path)
    settings = EngineSettings(model=str(folder), max_seqs=4, max_context=64, quantize="none")
    settings = replace(settings, attention="sdpa")
    monkeypatch.setattr("engine.assembly.DEFAULT_KV_GIB", 0.01)
    blocks, outputs, logs = [], [], []
    for graphs in (False, True):
        with_recorder(monkeypatch, GraphRecorder(bytes_each=1 << 20))
        log: list[str] = []
        made = assemble(replace(settings, cuda_graphs=graphs), lambda *stage: None, log.append)
        request = Request("a", list(range(20)), Sampling(temperature=0.0, max_tokens=9, ignore_eos=True), 0.0)
        made.engine.add(request)
        while made.engine.has_work:
            made.engine.step()
        blocks.append(made.engine.scheduler.pool.num_blocks)
        outputs.append(request.output)
        logs.append([line for line in log if "graphs" in line])
        made.close()
    block_bytes = 2 * 2 * 2 * 8 * 4 * 16
    assert blocks[0] == int(0.01 * 2**30) // block_bytes
    assert blocks[1] == (int(0.01 * 2**30) - 3 * 2**20) // block_bytes  # three sizes
    assert outputs[0] == outputs[1]
    assert logs[0] == []
    assert logs[1] == ["CUDA graphs: 3 sizes, up to 4 sequences, 3 MiB"]
