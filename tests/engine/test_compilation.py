"""Compiled layers say what eager ones say, are taken only where they do and it pays, and are given up in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import compilation
from engine.checkpoints.find import open_checkpoint
from engine.compilation import CompiledParts, compile_parts, gated
from engine.linear import Packed, Plain
from engine.loader import load_decoder
from engine.model import Decoder, EagerParts
from tests.engine.checkpoints import write_checkpoint
from tests.engine.test_cache_variants import engine_with, outputs_of

CPU = torch.device("cpu")


def same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def tiny(folder: Path, dtype: torch.dtype = torch.float32, kernel: Any = Plain, **changes: object) -> Decoder:
    checkpoint = open_checkpoint(write_checkpoint(folder, seed=3, **changes))
    with torch.inference_mode():
        return load_decoder(checkpoint, dtype, CPU, 512, lambda done: None, kernel)


FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2, biases": {"model_type": "qwen2"},
    "qwen3, norms of heads": {"model_type": "qwen3", "head_dim": 8},
    "gemma3, norms after": {"model_type": "gemma3_text", "head_dim": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_compiled_is_what_is_computed_otherwise(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    decoder = tiny(tmp_path, dtype, **FAMILIES[family])
    parts, eager = CompiledParts(decoder.config, print, same), EagerParts(decoder.config)
    generator = torch.Generator().manual_seed(1)
    layer = decoder.layers[1]
    with torch.inference_mode():
        for rows in (1, 7):
            x, attended, turn = compilation._inputs(decoder, rows, generator)
            turn = decoder.rotations[torch.arange(3, 3 + rows)].unsqueeze(1)
            pairs = [
                (parts.enter(layer, x, turn), eager.enter(layer, x, turn)),
                (parts.leave(layer, attended, x), eager.leave(layer, attended, x.clone())),
                (parts.mlp(layer, x), eager.mlp(layer, x.clone())),
            ]
            for own, expected in pairs:
                assert own.dtype is dtype
                error = torch.dist(own.float(), expected.float()) / expected.float().norm()
                assert float(error) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert not parts.failed


def test_off_and_auto_on_cpu_leave_layers_as_they_are(tmp_path: Path) -> None:
    decoder, log = tiny(tmp_path), list[str]()
    for wanted, on_cuda in (("off", True), ("auto", False)):
        compile_parts(decoder, wanted, log.append, on_cuda, refusing)
        assert isinstance(decoder.parts, EagerParts) and log == []


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: object) -> None:
        raise RuntimeError("no working C++ compiler\nand a long story")

    return run


@pytest.mark.parametrize(("gain", "wanted", "taken"), [(1.5, "auto", True), (1.01, "auto", False), (0.5, "on", True)])
def test_auto_takes_it_for_a_gain_and_the_log_says_what_it_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: float, wanted: str, taken: bool
) -> None:
    monkeypatch.setattr(compilation, "_times", lambda decoder, ways, given: (gain, 1.0))
    decoder, log = tiny(tmp_path), list[str]()
    compile_parts(decoder, wanted, log.append, True, same)
    assert isinstance(decoder.parts, CompiledParts) is taken
    (line,) = log
    assert f"{gain:.2f}x at 1, {gain:.2f}x at 8, {gain:.2f}x at 64 rows" in line and "s to compile and try" in line
    assert line.startswith("compile: not used") is not taken


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given) * (1.001 if function is gated else 1.0)


@pytest.mark.parametrize(
    ("kernel", "compiler", "line"),
    [
        (Plain, refusing, "compile: given up (no working C++ compiler)"),
        (Plain, wrong, "compile: not used (its results lie 0.001 from those before)"),
        (Packed, same, "compile: not used (only plain products are compiled, not packed, quantised or shared ones)"),
    ],
    ids=["fails", "wrong", "packed"],
)
def test_what_fails_errs_or_is_not_for_it_goes_on_eagerly_with_one_line(
    tmp_path: Path, kernel: Any, compiler: Any, line: str
) -> None:
    decoder, log = tiny(tmp_path, kernel=kernel), list[str]()
    with torch.inference_mode():
        compile_parts(decoder, "on", log.append, False, compiler)
    assert isinstance(decoder.parts, EagerParts)
    assert log == [line]


def test_a_shape_that_fails_later_on_is_computed_eagerly_and_so_is_everything_after_it(tmp_path: Path) -> None:
    decoder, log = tiny(tmp_path), list[str]()
    calls = []

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor, *given: object) -> Any:
            calls.append(len(x))
            if len(x) == 5:
                raise OSError("no space left")
            return function(x, *given)

        return run

    parts, eager = CompiledParts(decoder.config, log.append, failing), EagerParts(decoder.config)
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for rows in (3, 5, 3):
            x, _, _ = compilation._inputs(decoder, rows, generator)
            expected = eager.mlp(decoder.layers[0], x.clone())
            torch.testing.assert_close(parts.mlp(decoder.layers[0], x), expected)
    assert calls == [3, 5]
    assert log == ["compile: given up (no space left)"]


def test_torch_compiles_a_part_and_it_agrees(tmp_path: Path) -> None:
    """The MLP alone: each part takes seconds."""
    decoder, log = tiny(tmp_path), list[str]()
    compiled = []

    def only_the_mlp(function: Callable[..., Any]) -> Callable[..., Any]:
        if function is not gated:
            return function
        compiled.append(function)
        made: Callable[..., Any] = torch.compile(function)
        return made

    with torch.inference_mode():
        compile_parts(decoder, "on", log.append, False, only_the_mlp)
    assert compiled == [gated]
    assert isinstance(decoder.parts, CompiledParts), log
    assert log[0].startswith("compile: layers without attention ")


@pytest.mark.long
def test_greedy_tokens_of_compiled_layers_are_those_of_eager_ones(tmp_path: Path) -> None:
    """All parts by torch's compiler, through an engine that reads prompts in chunks and preempts."""
    decoder, log = tiny(tmp_path, tie_word_embeddings=False), list[str]()
    expected, _ = outputs_of(engine_with(decoder, 44))
    with torch.inference_mode():
        compile_parts(decoder, "on", log.append, False)
    assert isinstance(decoder.parts, CompiledParts), log
    assert outputs_of(engine_with(decoder, 44))[0] == expected
    assert not decoder.parts.failed
