"""Whoever reads the paged cache says what torch's own attention says, or is not used. Kernels of CUDA libraries are doubles that
refuse what the real ones refuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.attention.choice import BACKENDS, Trial, choose_attention
from engine.attention.flash import Flash
from engine.attention.flashinfer import FlashInfer
from engine.attention.flex import Flex, compiled_kernel
from engine.attention.gather import GatherAttention
from engine.attention.interface import Attention, Place
from engine.batch import build
from engine.checkpoints.find import open_checkpoint
from engine.draft import Draft
from engine.kvstore import KVStore
from engine.linear import Plain
from engine.loader import load_decoder
from engine.modelconfig import ModelConfig
from engine.request import Request, Sampling
from engine.rope import RopeScaling
from engine.scheduler import Row, StepPlan
from engine.settings import SettingsError
from tests.doubles.attention_kernels import FlashAttn, FlashInferModule
from tests.engine.checkpoints import write_checkpoint

CPU = torch.device("cpu")
MODEL = ModelConfig(
    family="llama",
    num_layers=2,
    hidden=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate=96,
    vocab=300,
    context=600,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope=RopeScaling(),
    tied=True,
)
WINDOWED = replace(MODEL, window=37, local_layers=frozenset({1}))
CAPPED = replace(WINDOWED, attention_cap=1.5, attention_scale=0.3)


def place_of(name: str, model: ModelConfig, **changes: object) -> Place:
    dtype = torch.float32 if name == "flex" else torch.bfloat16
    return replace(Place(model, dtype, CPU, 256 if name == "flash" else 16), **changes)  # type: ignore[arg-type]


MAKE: dict[str, Callable[[Place], Attention]] = {
    "flex": lambda place: Flex(place, flex_attention),
    "flash": lambda place: Flash(place, FlashAttn()),
    "flashinfer": lambda place: FlashInfer(place, FlashInferModule()),
}


def rows_of(spans: list[tuple[int, int, int]], size: int, blocks: int, seed: int) -> list[Row]:
    """(tokens before, new tokens, guesses among them) each, in scattered blocks of its own, but for the first block of the last
    two, which they share.
    """
    free = random.Random(seed).sample(range(blocks), blocks)
    rows = []
    for number, (start, count, guesses) in enumerate(spans):
        request = Request(f"r{number}", [7] * (start + count - guesses), Sampling(), 0.0)
        request.blocks = [free.pop() for _ in range(-(-(start + count) // size))]
        rows.append(Row(request, start, count, Draft(tuple([3] * guesses))))
    if len(rows) > 1 and min(rows[-1].start, rows[-2].start) >= size:
        rows[-1].request.blocks[0] = rows[-2].request.blocks[0]
    return rows


MIXES = {
    "one token": [(40, 1, 0)],
    "the first token": [(0, 1, 0)],
    "tokens at the ends of blocks": [(14, 1, 0), (15, 1, 0), (16, 1, 0), (255, 1, 0), (256, 1, 0)],
    "all at once": [(300, 1, 0), (35, 1, 0), (36, 1, 0), (20, 5, 4), (70, 3, 2), (0, 33, 0), (90, 21, 0), (257, 9, 0)],
    "a chunk of several pieces of the mask": [(50, 150, 0)],
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, id=f"{name}, {kind}")
        for name in MAKE
        for kind, config in (("plain", MODEL), ("windowed", WINDOWED), ("capped", CAPPED))
        if (name, kind) != ("flex", "windowed")  # capped layers have a window too, and without a compiler it is slow
    ],
)
def test_it_says_what_torch_says(name: str, config: ModelConfig) -> None:
    place = place_of(name, config)
    way, reference = MAKE[name](place), GatherAttention(config)
    size, blocks = place.block_size, 80
    generator = torch.Generator().manual_seed(3)
    for seed, spans in enumerate(MIXES.values()):
        rows = rows_of(spans, size, blocks, seed)
        cache = KVStore(config, blocks, size, place.dtype, CPU).layers[1]
        cache.parts[0].copy_(torch.randn(cache.parts[0].shape, generator=generator))
        plan = StepPlan(rows=rows)
        padded = sum(row.count for row in rows) + 2  # rows that are computed and thrown away
        batch = build(plan, size, place.dtype, CPU, lambda tokens, to=padded: to, config.window)
        bare = build(plan, size, place.dtype, CPU, lambda tokens, to=padded: to, config.window, way.gathers)
        assert not bare.full.decode and not bare.local.prefill
        qkv = torch.randn(padded, config.q_width + config.kv_width, generator=generator).to(place.dtype)
        cache.write(batch.slots, qkv[: batch.tokens, config.q_width :])
        way.begin(bare)
        for local in (False, True) if config.local_layers else (False,):
            expected, own = reference(batch, local, qkv, cache), way(bare, local, qkv, cache)
            assert own.shape == expected.shape and own.dtype is place.dtype
            bound = 1e-5 if place.dtype is torch.float32 else 1e-2
            assert float(torch.dist(own.float(), expected.float()) / expected.float().norm()) < bound
            assert not own[batch.tokens :].any()


@pytest.mark.long
def test_flex_that_torch_has_compiled_says_what_torch_says(tmp_path: Path) -> None:
    """On CPU, for Gemma 2: some ten kernels, of half a minute or more each on a busy machine."""
    folder = write_checkpoint(tmp_path, seed=5, model_type="gemma2", sliding_window=20, head_dim=16)
    place = place_of("flex", open_checkpoint(folder).config)
    with torch.inference_mode():
        Trial(place).hold(Flex(place, compiled_kernel()), GatherAttention(place.config))


def test_a_models_layers_with_and_without_a_window_and_its_cap_come_out_right_through_flex(tmp_path: Path) -> None:
    """Gemma 2: both kinds of layers and a cap. Two requests, of which one is read in chunks while the other decodes."""
    folder = write_checkpoint(tmp_path, seed=5, model_type="gemma2", sliding_window=20, head_dim=8)
    logits: list[torch.Tensor] = []
    for flex in (False, True):
        with torch.inference_mode():
            decoder = load_decoder(open_checkpoint(folder), torch.float32, CPU, 128, lambda done: None, Plain)
            config = decoder.config
            assert config.attention_cap is not None and config.window == 20 and len(config.local_layers) == 1
            if flex:
                decoder.attention = MAKE["flex"](place_of("flex", config))
            cache = KVStore(config, 20, 16, torch.float32, CPU)
            requests = [
                Request("a", list(range(30)), Sampling(), 0.0),
                Request("b", list(range(9, 70)), Sampling(), 0.0),
            ]
            requests[0].blocks, requests[1].blocks = [3, 0, 11], [19, 4, 7, 2, 5]
            found = []
            for most in (25, 30, 1, 1):
                rows = [Row(r, r.num_computed, min(most, r.num_tokens - r.num_computed)) for r in requests]
                rows = [row for row in rows if row.count]
                batch = build(
                    StepPlan(rows=rows), 16, torch.float32, CPU, window=config.window, gathers=decoder.attention.gathers
                )
                found.append(decoder.logits(decoder.forward(batch, cache)))
                for row in rows:
                    row.request.num_computed += row.count
                    if row.request.num_computed == row.request.num_tokens:
                        row.request.tokens.append(17)
            logits.append(torch.cat(found))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("flash", {"dtype": torch.float32}, "set dtype"),
        ("flash", {"block_size": 128}, "set block_size = 256"),
        ("flash", {"int8": True}, "set kv_dtype = auto"),
        ("flash", {"config": replace(MODEL, head_dim=320)}, "256 at most"),
        ("flashinfer", {"dtype": torch.float32}, "set dtype"),
        ("flashinfer", {"int8": True}, "set kv_dtype = auto"),
        ("flashinfer", {"config": replace(MODEL, head_dim=80)}, "this model has 80"),
        ("flex", {"int8": True}, "set kv_dtype = auto"),
        ("flex", {"block_size": 24}, "set block_size"),
    ],
)
def test_what_does_not_suit_says_why(name: str, changes: dict[str, object], what: str) -> None:
    """And the double refuses it too, where it is a matter of the library."""
    place = place_of(name, MODEL, **changes)
    with pytest.raises(SettingsError, match=what):
        choose_attention(name, place, print, on_cuda=True, found=libraries)
    if name != "flex" and not place.int8:
        with pytest.raises((RuntimeError, ValueError)):
            Trial(place).hold(MAKE[name](place), GatherAttention(place.config))


def libraries(module: str) -> Any:
    return {"flash_attn": FlashAttn(), "flashinfer": FlashInferModule()}[module]


def absent(module: str) -> Any:
    raise ModuleNotFoundError(f"No module named {module!r}")


SHORT = replace(WINDOWED, context=60, num_heads=2, num_kv_heads=1)


class Log(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def no_compiler(*given: object, **more: object) -> None:
    raise RuntimeError("no C++ compiler\nwas found")


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a trial measures, by name, instead of the real ones; an hour for the others. No compiler is there for flex."""
    seconds: dict[str, float] = {}
    monkeypatch.setattr(Trial, "times", lambda self, way: (seconds.get(way.name, 3600.0), 1.0))
    monkeypatch.setattr("engine.attention.flex.compiled_kernel", lambda: no_compiler)
    return seconds


def test_of_those_that_agree_the_fastest_is_taken_and_told(clocked: dict[str, float]) -> None:
    log = Log()
    clocked.update({"sdpa": 3.0, "flashinfer": 1.5, "flash": 1.0})
    chosen = choose_attention("auto", place_of("flashinfer", SHORT), log, True, libraries)
    assert chosen is not None and chosen.name == "flashinfer"
    assert log == [
        "attention flash: not used (flash-attn reads pages of a multiple of 256 tokens: set block_size = 256)",
        "attention flex: not used (no C++ compiler)",
        "attention: flashinfer, beside sdpa: 2.0x in decoding, 1.0x in prompts",
    ]
    assert choose_attention("auto", place_of("flash", SHORT), log, True, libraries).name == "flash"  # type: ignore[union-attr]


def test_where_nothing_is_installed_or_faster_torchs_own_way_stays(clocked: dict[str, float]) -> None:
    log = Log()
    clocked.update({"sdpa": 1.0, "flashinfer": 1.5})
    for found in (libraries, absent):
        assert choose_attention("auto", place_of("flashinfer", SHORT), log, True, found).name == "sdpa"  # type: ignore[union-attr]
    assert log[-4:-1] == [
        "attention flashinfer: not used (No module named 'flashinfer')",
        "attention flash: not used (flash-attn reads pages of a multiple of 256 tokens: set block_size = 256)",
        "attention flex: not used (no C++ compiler)",
    ]
    assert log[-1] == "attention: sdpa"


class OneOff(FlashInferModule):
    """Its windows are one token too wide."""

    class BatchDecodeWithPagedKVCacheWrapper(FlashInferModule.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *given: Any, window_left: int = -1, **more: Any) -> None:
            super().plan(*given, window_left=window_left + 1 if window_left >= 0 else -1, **more)


class Broken(FlashInferModule):
    def BatchPrefillWithPagedKVCacheWrapper(self, *given: Any) -> Any:  # type: ignore[override]
        raise FileNotFoundError("no nvcc\nand a long story")


@pytest.mark.parametrize(("library", "what"), [(OneOff(), "lies 0.* from torch's"), (Broken(), r"no nvcc\)")])
def test_who_errs_or_fails_is_not_used_and_refused_where_asked_for(
    clocked: dict[str, float], library: Any, what: str
) -> None:
    log = Log()
    clocked.update({"sdpa": 3.0, "flashinfer": 1.0})
    place = place_of("flashinfer", SHORT)
    assert choose_attention("auto", place, log, True, lambda module: library).name == "sdpa"  # type: ignore[union-attr]
    with pytest.raises(SettingsError, match=f"attention is 'flashinfer': it failed its trial .*{what}"):
        choose_attention("flashinfer", place, log, True, lambda module: library)


@pytest.mark.parametrize(("name", "package"), [("flash", "flash-attn"), ("flashinfer", "flashinfer-python")])
def test_what_is_asked_for_and_not_there_is_one_line_with_the_remedy(name: str, package: str) -> None:
    with pytest.raises(SettingsError, match=f"attention is '{name}'.*can't be imported.*pip install {package}, or use"):
        choose_attention(name, place_of(name, SHORT), print, True, absent)
    with pytest.raises(SettingsError, match=f"attention is '{name}': {package} runs on CUDA only"):
        choose_attention(name, place_of(name, SHORT), print, False, libraries)


def test_on_cpu_auto_leaves_what_came_with_the_products() -> None:
    assert choose_attention("auto", place_of("flex", SHORT), print, on_cuda=False, found=absent) is None
    chosen = choose_attention("sdpa", place_of("flex", SHORT), print, on_cuda=False, found=absent)
    assert isinstance(chosen, GatherAttention)


def test_one_that_is_asked_for_is_taken_though_it_is_slower(clocked: dict[str, float]) -> None:
    log = Log()
    clocked.update({"sdpa": 1.0, "flashinfer": 4.0})
    chosen = choose_attention("flashinfer", place_of("flashinfer", SHORT), log, True, libraries)
    assert chosen is not None and chosen.name == "flashinfer"
    assert log == ["attention: flashinfer, beside sdpa: 0.2x in decoding, 1.0x in prompts"]


def test_each_backend_of_the_setting_is_registered() -> None:
    assert {*BACKENDS, "auto", "sdpa"} == {"auto", "sdpa", "flex", "flash", "flashinfer"}
