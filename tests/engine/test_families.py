"""Random small models of every family and shape give transformers' logits, through the paged cache and in odd chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.batch import build
from engine.blocks import BlockPool
from engine.checkpoints.find import open_checkpoint
from engine.kvstore import KVStore
from engine.linear import Kernel, Packed, Plain
from engine.loader import load_decoder
from engine.model import Decoder
from engine.modelconfig import UnsupportedModel
from engine.queue import FirstCome
from engine.request import Request, Sampling
from engine.scheduler import Scheduler
from tests.engine.checkpoints import write_checkpoint

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
QWEN2_WINDOW = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 17,
    "max_window_layers": 1,
}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 10,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 5.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, grouped queries, tied head": {},
    "llama, one KV head a head, head of its own": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama, one KV head for all": {"num_key_value_heads": 1},
    "llama 3 rope scaling": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500.0},
    "linear rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope as transformers 5 writes it": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "heads wider than hidden / heads": {"head_dim": 16},
    "qwen2, biases on q, k and v": {"model_type": "qwen2", "num_hidden_layers": 3},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "mistral, a window within blocks": {"model_type": "mistral", "sliding_window": 6},
    "mistral, a window that ends with blocks": {"model_type": "mistral", "sliding_window": 32},
    "qwen2, a window in its last layers": QWEN2_WINDOW,
    "qwen3, heads normed": {"model_type": "qwen3", "head_dim": 16},
    "qwen3, windows by layer": {
        "model_type": "qwen3",
        "head_dim": 8,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "yarn, the context not restated": {"model_type": "qwen2", "rope_scaling": YARN},
    "yarn with all its numbers": {
        "model_type": "qwen3",
        "head_dim": 32,
        "rope_parameters": YARN | {"beta_fast": 6.0, "beta_slow": 1.5, "attention_factor": 1.3, "truncate": False},
    },
    "gemma 2, layers in turn": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0},
    "gemma 2 without caps": GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma 3, two rotary bases": GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 3},
    "gemma 3 as transformers 5 writes it": GEMMA
    | {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
}


def load(folder: Path, kernel: Kernel = Plain) -> Decoder:
    checkpoint = open_checkpoint(folder)
    with torch.inference_mode():
        return load_decoder(checkpoint, torch.float32, CPU, 512, lambda done: None, kernel)


def logits_of(decoder: Decoder, tokens: list[int], chunks: list[int], beside: list[int]) -> torch.Tensor:
    """Logits of each token, computed chunk by chunk through a paged cache, next to another sequence in the same steps if there
    is one.
    """
    pool = BlockPool(64, 4)
    pool.take(3)  # so that blocks don't begin at 0
    cache = KVStore(decoder.config, 64, 4, torch.float32, CPU)
    rows: list[torch.Tensor] = []
    first = Request("a", tokens[:1], Sampling(), 0.0)
    other = Request("b", beside or [0], Sampling(), 0.0)
    scheduler = Scheduler(pool, FirstCome(), 2, 1000, 256)
    if beside:
        scheduler.add(other)
    scheduler.add(first)
    done = 0
    with torch.inference_mode():
        for count in chunks:
            first.tokens = tokens[: done + count]
            plan = scheduler.schedule()
            batch = build(plan, 4, torch.float32, CPU, decoder.head.padded, decoder.config.window)
            out = decoder.logits(decoder.forward(batch, cache))
            at = 0
            for row in batch.rows:
                if row.request is first:
                    rows.append(out[at : at + row.count])
                at += row.count
                row.request.num_computed += row.count
            other.tokens += beside[:1]
            done += count
    return torch.cat(rows)


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_logits_equal_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path, seed=3, **changes)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 250, (1, 101), generator=generator)
    with torch.inference_mode():
        expected = reference(tokens).logits[0]
    # from nothing, onto a cache, one at a time, then a chunk that begins within a block
    chunks = [37, 1, 1, 1, 21, 1, 38, 1]
    got = logits_of(load(folder), tokens[0].tolist(), chunks, beside=[9, 8, 7, 6, 5])
    assert expected.std() > 0.3  # the model says something
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["mistral, a window within blocks", "gemma 2, layers in turn"])
def test_alone_in_a_run_of_blocks_a_windowed_sequence_has_the_logits_it_has_in_company(
    name: str, tmp_path: Path
) -> None:
    decoder = load(write_checkpoint(tmp_path, seed=3, **FAMILIES[name]))
    tokens = [number * 37 % 250 for number in range(60)]
    chunks = [20, *[1] * 12, 28]
    alone, beside = (logits_of(decoder, tokens, chunks, other) for other in ([], [9, 8, 7]))
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-4)


def test_weights_in_shards_load_like_weights_in_one_file(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", seed=1)
    parts = write_checkpoint(tmp_path / "parts", seed=1)
    with safe_open(parts / "model.safetensors", framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    (parts / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name, file in shards.items() if file == shard}, parts / shard)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    tokens = list(range(40))
    torch.testing.assert_close(
        logits_of(load(parts), tokens, [40], [1, 2]), logits_of(load(whole), tokens, [40], [1, 2])
    )
    (parts / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["mamba"] * 2}, "layer_types 'mamba'"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types names 1 layers, expected 2"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is '0', expected a whole number above 0"),
        ({"hidden_size": "x"}, "hidden_size is 'x', expected a whole number above 0"),
        ({"vocab_size": 2.5}, "vocab_size is '2.5'"),
        ({"rms_norm_eps": "x"}, "config.json: a value is not what it should be"),
        ({"rope_scaling": "x"}, "config.json: a value is not what it should be"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_with_its_reason(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 100, -100], ids=["nothing", "the beginning", "all but the end"])
def test_a_file_of_weights_that_is_not_whole_is_refused_in_one_line(kept: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        UnsupportedModel, match=r"model\.safetensors: not a whole \.safetensors file .*get it again"
    ) as refusal:
        open_checkpoint(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: not a tokenizer"):
        open_checkpoint(folder).tokenizer()


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.2\."):
        load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(UnsupportedModel, match=r"gate_proj\.weight has shape \[48, 32\], expected \[50, 32\]"):
        load(folder)


def test_without_packed_kernels_the_results_are_the_same_within_rounding(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=2, model_type="qwen2")
    tokens = list(range(60))
    chosen = logits_of(load(folder, Packed), tokens, [60], [1])
    torch.testing.assert_close(logits_of(load(folder, Plain), tokens, [60], [1]), chosen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_stays_on_the_models_device(tmp_path: Path, dtype: torch.dtype) -> None:
    """On torch's `meta` device nothing is computed, but any mixing with another device fails, as it would on CUDA."""
    device = torch.device("meta")
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, model_type="qwen2"))
    scheduler = Scheduler(BlockPool(64, 16), FirstCome(), 8, 40, 256)
    for id, length in (("a", 3), ("b", 50), ("c", 9)):
        scheduler.add(Request(id, [1] * length, Sampling(), 0.0))
    with torch.inference_mode():
        decoder = load_decoder(checkpoint, dtype, device, 512, lambda done: None, Plain)
        cache = KVStore(checkpoint.config, 64, 16, dtype, device)
        shapes = []
        for _ in range(4):
            plan = scheduler.schedule()
            batch = build(plan, 16, dtype, device, window=decoder.config.window)
            logits = decoder.logits(decoder.forward(batch, cache))
            assert (logits.device, logits.dtype) == (device, dtype)
            shapes.append((len(batch.full.decode), len(batch.full.prefill), logits.shape[0]))
            for row in plan.rows:
                row.request.tokens += [1] * row.samples
                row.request.num_computed += row.count
    assert shapes == [(0, 2, 40), (1, 2, 23), (1, 0, 3), (1, 0, 3)]


def test_half_precision_runs_on_cpu_and_is_near(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=6)
    tokens = list(range(30))
    exact = logits_of(load(folder), tokens, [30], [1])
    with torch.inference_mode():
        half = load_decoder(open_checkpoint(folder), torch.bfloat16, CPU, 512, lambda done: None, Plain)
        cache = KVStore(half.config, 8, 16, torch.bfloat16, CPU)
        scheduler = Scheduler(BlockPool(8, 16), FirstCome(), 1, 64, 256)
        scheduler.add(Request("a", tokens, Sampling(), 0.0))
        got = half.logits(half.forward(build(scheduler.schedule(), 16, torch.bfloat16, CPU), cache))
    assert float((got.float() - exact).abs().mean()) < 0.03 * float(exact.abs().mean())


def test_padded_numbers_of_rows_are_few_and_never_too_small() -> None:
    packed = Packed(torch.zeros(8, 8))
    padded = [packed.padded(rows) for rows in range(1, 2049)]
    assert all(more >= rows for rows, more in enumerate(padded, start=1))
    assert padded[:16] == list(range(1, 17))
    assert len(set(padded[:256])) == 16 + 4 + 7
    assert max(more / rows for rows, more in enumerate(padded, start=1) if rows > 64) < 1.5
    assert [Plain(torch.zeros(8, 8)).padded(rows) for rows in (1, 17, 300)] == [1, 17, 300]
