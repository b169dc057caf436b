"""A checkpoint's own numbers of 8 and 4 bits are served as they are, where the kernels take them, and never all widened at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoints.find import open_checkpoint
from engine.checkpoints.interface import Checkpoint
from engine.divergence import measure
from engine.kernels.native import Kernels
from engine.linear import Keep, Plain
from engine.loader import full_decoder, load_decoder
from engine.model import Decoder
from engine.modelconfig import ModelConfig
from engine.numbers import Int4, Int8, NotKept, Quantised
from engine.parallel.shard import Shard, ShardedCheckpoint
from engine.progress import silent
from engine.quantized import Compiled, Full, Widened
from engine.scheme import SchemeLoader
from engine.tokenizer import Tokenizer
from tests.engine.checkpoints import write_checkpoint
from tests.engine.test_families import logits_of
from tests.engine.test_gguf import byte_vocabulary, write_gguf
from tests.engine.test_packed_checkpoints import packed_folder

Tensor = torch.Tensor
CPU = torch.device("cpu")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.quality.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def compiled_wins(compiled: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """On models this small any kernel may be the fastest."""
    monkeypatch.setattr(
        "engine.kernelchoice._fastest", lambda times: next(name for name in times if "compiled" in name)
    )


def gguf_file(folder: Path, kind_of: Callable[[str], str | None]) -> Path:
    return write_gguf(folder / "tiny.gguf", "llama", byte_vocabulary("llama-bpe"), kind_of)


def loader(checkpoint: Checkpoint, path: Path, lines: list[str], dtype: torch.dtype = torch.float32) -> SchemeLoader:
    return SchemeLoader(checkpoint, path, dtype, CPU, 64, 32, silent, lines.append)


def decoder_of(path: Path, scheme: str, lines: list[str]) -> Decoder:
    with torch.inference_mode():
        return loader(open_checkpoint(path), path, lines).unchecked(scheme).decoder


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        (AWQ, Int4),
        (AWQ | {"group_size": 64}, Int4),
        (AWQ | {"group_size": 128}, Int4),
        (GPTQ, Int4),
        (GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, Int4),
        (GPTQ | {"bits": 8, "group_size": 32, "sym": True}, Int8),
    ],
    ids=["awq", "awq, a last group that isn't full", "awq, one wide group", "gptq", "gptq v2, -1", "gptq, 8 bits"],
)
def test_numbers_of_a_packed_matrix_stand_for_exactly_its_weights(
    stated: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(packed_folder(tmp_path, stated, **WIDE)[0])
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"):
        numbers = checkpoint.numbers(f"model.layers.1.{part}.weight")
        assert isinstance(numbers, kind)
        assert torch.equal(numbers.full(), checkpoint.tensor(f"model.layers.1.{part}.weight")), part
    assert checkpoint.numbers("model.embed_tokens.weight") is None
    with pytest.raises(KeyError):
        checkpoint.tensor("model.layers.9.mlp.down_proj.weight")


@pytest.mark.parametrize(("kind", "made"), [("Q4_0", Int4), ("Q4_1", Int4), ("Q8_0", Int8)])
def test_numbers_of_a_gguf_matrix_stand_for_exactly_its_weights(kind: str, made: type, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(gguf_file(tmp_path, lambda name: kind))
    for name in (
        Q_PROJ,
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ):
        numbers = checkpoint.numbers(name)
        assert isinstance(numbers, made)
        assert torch.equal(numbers.full(), checkpoint.tensor(name)), name
    assert checkpoint.numbers("model.norm.weight") is None


@pytest.mark.parametrize(
    ("stated", "shuffled", "reason"),
    [
        (GPTQ | {"group_size": 16}, False, "groups of 16"),
        (GPTQ | {"group_size": 32}, True, "not neighbours"),
        (GPTQ | {"bits": 8}, False, "another zero than the middle"),
    ],
)
def test_numbers_that_no_kernel_takes_are_widened_and_the_reason_is_said(
    compiled_wins: None, stated: dict[str, Any], shuffled: bool, reason: str, tmp_path: Path
) -> None:
    packed, plain = packed_folder(tmp_path, stated, shuffled, **WIDE)
    with pytest.raises(NotKept, match=reason):
        open_checkpoint(packed).numbers(Q_PROJ)
    lines: list[str] = []
    decoder = decoder_of(packed, "none", lines)
    (said,) = [line for line in lines if "numbers" in line]
    assert reason in said and "widened" in said
    assert torch.equal(
        logits_of(decoder, [1, 2, 3], [3], []), logits_of(decoder_of(plain, "none", lines), [1, 2, 3], [3], [])
    )


def test_steps_that_float16_does_not_hold_are_not_kept(tmp_path: Path) -> None:
    packed, _ = packed_folder(tmp_path, AWQ, **WIDE)
    tensors = load_file(packed / "model.safetensors")
    name = Q_PROJ.replace("weight", "scales")
    save_file(tensors | {name: tensors[name].float() * 1.0001}, packed / "model.safetensors")
    with pytest.raises(NotKept, match="not float16"):
        open_checkpoint(packed).numbers(Q_PROJ)


@pytest.mark.parametrize("which", ["awq", "gptq", "gptq, 8 bits", "gguf, 4 and 8 bits", "gguf, 4 bits from -8"])
def test_full_precision_by_kept_numbers_has_every_bit_of_that_by_widened_ones(
    compiled: Kernels, which: str, tmp_path: Path
) -> None:
    """Q and K, whose outputs are put into another order, and joined products among them."""
    match which:
        case "awq":
            path = packed_folder(tmp_path, AWQ, **WIDE)[0]
        case "gptq":
            path = packed_folder(tmp_path, GPTQ, **WIDE)[0]
        case "gptq, 8 bits":
            path = packed_folder(tmp_path, GPTQ | {"bits": 8, "sym": True}, **WIDE)[0]
        case "gguf, 4 and 8 bits":
            path = gguf_file(tmp_path, lambda name: "Q8_0" if "embed" in name else "Q4_1")
        case _:
            path = gguf_file(tmp_path, lambda name: "Q4_0")
    checkpoint, lines = open_checkpoint(path), list[str]()
    with torch.inference_mode():
        exact = Keep(lambda numbers, bias: Compiled(compiled, numbers, bias, exact=True), (Int8, Int4), (Int8, Int4))
        decoders = [
            load_decoder(
                checkpoint,
                torch.float32,
                CPU,
                64,
                lambda done: None,
                lambda weight, bias: Compiled(compiled, Full.of(weight), bias),
                keep=keep,
                log=lines.append,
            )
            for keep in (exact, None)
        ]
    kept, full = (logits_of(decoder, list(range(30)), [17, 13], [5, 6]) for decoder in decoders)
    assert torch.equal(kept, full)
    assert decoders[0].layer_bytes < 0.4 * decoders[1].layer_bytes
    products = 9 if "gguf" in which else 8  # the head of the others is a full embedding
    assert lines == [f"{products} of 9 products by the checkpoint's own numbers"]


def test_an_engine_keeps_numbers_for_full_precision_and_for_as_many_bits(compiled_wins: None, tmp_path: Path) -> None:
    packed, plain = packed_folder(tmp_path, AWQ, **WIDE)
    lines: list[str] = []
    decoder = decoder_of(packed, "none", lines)
    assert any(line.startswith("8 of 9 products") for line in lines)
    assert decoder.fused is not None
    torch.testing.assert_close(
        logits_of(decoder, [1, 2, 3, 4], [4], []), logits_of(decoder_of(plain, "none", []), [1, 2, 3, 4], [4], [])
    )
    for scheme, said in (("int4", ["8 of 9 products"]), ("int8", [])):
        lines.clear()
        decoder_of(packed, scheme, lines)
        assert [line[:15] for line in lines if "own numbers" in line] == said, scheme
    lines.clear()
    decoder_of(plain, "none", lines)
    assert not any("own numbers" in line for line in lines)


def test_four_bits_of_a_checkpoint_cost_only_what_its_activations_in_8_bits_do(
    compiled_wins: None, tmp_path: Path
) -> None:
    """Made anew from the widened weights they would be other numbers."""
    path = gguf_file(tmp_path, lambda name: "Q8_0" if "embed" in name else "Q4_1")
    checkpoint = open_checkpoint(path)

    def widened(weight: Tensor, bias: Tensor | None) -> Widened:
        raise AssertionError("made anew")

    with torch.inference_mode():
        keep = Keep(lambda numbers, bias: Widened(Plain, numbers, bias), (Int4,), (Int8,))
        same = load_decoder(checkpoint, torch.float32, CPU, 64, lambda done: None, widened, keep=keep)
    # a number on the edge between two steps may fall to either side
    got, expected = (logits_of(d, list(range(20)), [20], []) for d in (decoder_of(path, "int4", []), same))
    assert float(torch.dist(got, expected)) < 0.01 * float(expected.norm())


def test_parts_of_different_kinds_are_joined_in_full_precision(compiled: Kernels, tmp_path: Path) -> None:
    path = gguf_file(tmp_path, lambda name: "Q8_0" if "v_proj" in name or "embed" in name else "Q4_1")
    lines: list[str] = []
    decoder = decoder_of(path, "none", lines)
    (said,) = [line for line in lines if "products by" in line]
    assert said == "7 of 9 products by the checkpoint's own numbers; not kept: 6 joined with numbers of another kind"
    with torch.inference_mode():
        reference = full_decoder(open_checkpoint(path), decoder)
    torch.testing.assert_close(logits_of(decoder, [7, 8, 9], [3], []), logits_of(reference, [7, 8, 9], [3], []))


def test_without_a_compiler_numbers_are_widened_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.scheme.kernels", lambda log: None)
    path = packed_folder(tmp_path, AWQ, **WIDE)[0]
    lines: list[str] = []
    decoder_of(path, "none", lines)
    assert [line for line in lines if "own numbers" in line] == [
        "the checkpoint's own numbers are widened to full weights: no compiled kernels"
    ]


def test_a_rank_widens_its_share(tmp_path: Path) -> None:
    packed, plain = packed_folder(tmp_path, AWQ, **WIDE)
    share = ShardedCheckpoint(open_checkpoint(packed), Shard(1, 2))
    with pytest.raises(NotKept, match="split over ranks"):
        share.numbers(Q_PROJ)
    assert ShardedCheckpoint(open_checkpoint(plain), Shard(1, 2)).numbers(Q_PROJ) is None


class Watched:
    """A checkpoint that knows how many of the matrices that it gave are still somewhere."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.config: ModelConfig = inner.config
        self.most = 0
        self._given: list[weakref.ref[Tensor]] = []

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    def tensor(self, name: str) -> Tensor:
        tensor = self.inner.tensor(name)
        if "_proj.weight" in name:
            gc.collect()
            self._given = [given for given in self._given if given() is not None]
            self._given.append(weakref.ref(tensor))
            self.most = max(self.most, len(self._given))
        return tensor

    def numbers(self, name: str) -> Quantised | None:
        return self.inner.numbers(name)

    def tokenizer(self) -> Tokenizer:
        return self.inner.tokenizer()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_no_more_than_a_layer_of_full_weights_is_held_while_weights_are_made_and_measured(
    compiled: Kernels, scheme: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "full", num_hidden_layers=5, hidden_size=64, intermediate_size=96)
    watched = Watched(open_checkpoint(folder))
    with torch.inference_mode():
        made = loader(watched, folder, [])
        made.check(scheme, made.choice(scheme), anew=True)
    assert 0 < watched.most <= 7


def test_full_weights_read_when_they_are_needed_are_the_same_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, num_hidden_layers=3, tie_word_embeddings=False)
    checkpoint = open_checkpoint(folder)
    with torch.inference_mode():
        whole = load_decoder(checkpoint, torch.float32, CPU, 64, lambda done: None, Plain)
        read = full_decoder(checkpoint, whole)
        quality = measure("int8", read, whole, [token % 256 for token in range(0, 900, 7)], lambda done: None)
    assert torch.equal(logits_of(read, [1, 2, 3], [2, 1], []), logits_of(whole, [1, 2, 3], [2, 1], []))
    assert (quality.kl, quality.top1) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert len(read.layers) == 3 and len(read.layers[1:]) == 2
