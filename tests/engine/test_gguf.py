"""GGUF files: weights, shape and tokenizer come out as transformers reads them from the same file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from engine.checkpoints.find import find_model, open_checkpoint
from engine.checkpoints.gguf import GGUFFile
from engine.modelconfig import ModelConfig, UnsupportedModel
from engine.rope import inverse_frequencies
from tests.engine.checkpoints import TINY, byte_tokenizer, write_checkpoint
from tests.engine.test_families import load, logits_of

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two blanks before, and   three between\t\ttabs",
    "It's 12345 o'clock; we'LL see at 3.14159e-10",
    "line\n\nbreaks\r\n  and indentation\n\t\tdeep",
    "naïve café Ünïcödé ßtraße",
    "人工智能正在改变世界。今天2026年11月。",
    "日本語のテキスト한국어 텍스트 العربية עברית हिन्दी ไทย",
    "emoji 🎉🚀👩‍👩‍👧 and \u0000 control \x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x ** 2  # comment\n",
    "a" * 300,
]


@pytest.fixture(scope="module")
def default_pair() -> tuple[GGUFFile, Any]:
    from transformers import AutoTokenizer

    path = find_model("smollm2-135m-instruct")
    return GGUFFile(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_the_default_models_tokens_are_those_of_transformers(default_pair: tuple[GGUFFile, Any]) -> None:
    ours, theirs = default_pair[0].tokenizer(), default_pair[1]
    source = random.Random(7)
    alphabet = "abc  012.,'\n\té日人한🎉²½٣<|>_-" + "".join(chr(source.randrange(0x20, 0x2FFF)) for _ in range(50))
    made = ["".join(source.choice(alphabet) for _ in range(source.randrange(1, 40))) for _ in range(1500)]
    for text in (*TEXTS, *made):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)


def test_the_default_models_text_is_that_of_transformers(default_pair: tuple[GGUFFile, Any]) -> None:
    ours, theirs = default_pair[0].tokenizer(), default_pair[1]
    source = random.Random(8)
    for _ in range(200):
        ids = [source.randrange(49152) for _ in range(source.randrange(1, 30))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_default_models_chat_prompt_is_that_of_transformers(default_pair: tuple[GGUFFile, Any]) -> None:
    ours, theirs = default_pair[0].tokenizer(), default_pair[1]
    for messages in (
        [{"role": "user", "content": "What is a token?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [{"role": r, "content": r} for r in ("user", "assistant", "user")],
    ):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == expected


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of Q and K in llama-family files."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "num_hidden_layers": 3, "sliding_window": 11, "vocab_size": 273},
    "gemma3": {"head_dim": 256, "num_hidden_layers": 7, "sliding_window": 11, "vocab_size": 273},
}
"""Widths of heads as transformers takes them for given when it reads these files."""


def write_gguf(
    path: Path,
    family: str,
    extra: Callable[[gguf.GGUFWriter], None],
    kind_of: Callable[[str], str | None] = lambda name: None,
) -> Path:
    """A tiny checkpoint as a GGUF file, by the writer that converters use. `kind_of` says how a matrix is quantised."""
    quantised = kind_of("model.embed_tokens.weight") is not None
    changes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96} if quantised else SHAPES.get(family, {})
    gemma = family.startswith("gemma")
    model_type = "gemma3_text" if family == "gemma3" else family
    folder = write_checkpoint(path.parent / "hf", seed=4, model_type=model_type, **changes)
    tensors = load_file(folder / "model.safetensors")
    config = TINY | changes
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if gemma:
        writer.add_sliding_window(config["sliding_window"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if gemma else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    for name, tensor in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        layer = f"blk.{stem.split('.')[2]}." if "layers" in stem else ""
        part = ".".join(stem.split(".")[3:]) if layer else stem
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            tensor = _interleave(tensor, heads)
        if gemma and "norm.weight" in name:
            tensor = tensor + 1  # converters add what the model would
        data = tensor.numpy()
        kind = None
        if tensor.ndim == 2 and (named := kind_of(name)) is not None:
            kind = gguf.GGMLQuantizationType[named]
            data = gguf.quantize(data, kind)
        writer.add_tensor(f"{layer}{names[part]}.{suffix}", np.ascontiguousarray(data), raw_dtype=kind)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary(pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """Bytes, a few merges, and control tokens."""

    def add(writer: gguf.GGUFWriter) -> None:
        inner = byte_tokenizer(260)
        tokens = [str(inner.id_to_token(id)) for id in range(260)]
        tokens[258:260] = ["12", "ab"]
        tokens += ["Ġt", "Ġth", "ĠĠ", "123"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3, 3] + [1] * 6)
        writer.add_token_merges(["1 2", "a b", "Ġ t", "Ġt h", "Ġ Ġ", "12 3"])
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)

    return add


def sentencepiece_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Llama 2's kind: scores instead of merges, bytes as fall-back, a begin token on every text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "t", "h", "e", "th"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *words])
    writer.add_token_scores([0.0] * len(pieces) + [-1.0, -2.0, -3.0, -4.0, -0.5])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def gemma_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Blanks spelled as blanks, scores that say nothing of the order of merges, line breaks that are never cut."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\n\n", "  ", "   ", "th", "he", "the", "▁th", "▁the", "▁", "t", "h", "e", "\n"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*pieces, *words])
    writer.add_token_scores([0.0] * len(pieces) + [-float(number * 7 % 13) for number in range(len(words))])
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [4, 4, 4] + [1] * (len(words) - 3))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


@pytest.mark.parametrize(
    ("family", "vocabulary", "quantised"),
    [
        ("llama", byte_vocabulary("llama-bpe"), False),
        ("qwen2", byte_vocabulary("qwen2"), False),
        ("llama", sentencepiece_vocabulary, True),
        ("qwen3", byte_vocabulary("qwen2"), False),
        ("gemma2", gemma_vocabulary, False),
        ("gemma3", gemma_vocabulary, False),
    ],
    ids=["llama", "qwen2", "llama, Q8_0, SentencePiece", "qwen3", "gemma 2", "gemma 3"],
)
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, vocabulary: Callable[[gguf.GGUFWriter], None], quantised: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = write_gguf(tmp_path / "tiny.gguf", family, vocabulary, lambda name: "Q8_0" if quantised else None)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = torch.randint(0, 250, (1, 50), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = reference(tokens).logits[0]
    got = logits_of(load(path), tokens[0].tolist(), [30, 1, 19], beside=[1, 2, 3])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_a_byte_level_vocabulary_is_cut_as_its_model_was_trained(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", "llama", byte_vocabulary(pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = GGUFFile(path).tokenizer()
    # transformers invents a token <|endoftext|> for a vocabulary that has none
    for text in (*(text for text in TEXTS if "<|endoftext|>" not in text), "<|start|>user\nthe 12<|end|>ab"):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)
    cut = {"llama-bpe": ["123", "4", "5"], "qwen2": ["1", "2", "3", "4", "5"], "gpt-2": ["123", "4", "5"]}
    assert [ours.inner.id_to_token(id) for id in ours.encode("12345")] == cut[pre]
    assert ours.end_tokens == {257}


def test_a_sentencepiece_vocabulary_merges_by_score_and_begins_with_its_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", "llama", sentencepiece_vocabulary)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = GGUFFile(path).tokenizer()
    for text in ("the", "the the", "  the", "thé 日本", "x\ny", "</s>the"):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)
    assert [ours.inner.id_to_token(id) for id in ours.encode("the")] == ["<s>", "▁", "th", "e"]
    assert ours.decode(ours.encode("the thé")) == "the thé"


def test_gemmas_vocabulary_merges_in_the_order_of_its_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "tiny.gguf", "gemma2", gemma_vocabulary)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = GGUFFile(path).tokenizer()
    for text in ("the", " the the", "  the", "thé   het", "t\n\n\nhe  ", "<eos>the", "日本"):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)
    assert [ours.inner.id_to_token(id) for id in ours.encode("   the")] == ["<bos>", "▁▁▁", "the"]
    assert ours.decode(ours.encode("  the thé\n\n")) == "  the thé\n\n"


def test_an_unknown_way_of_cutting_text_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", byte_vocabulary("falcon9"))
    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf: pre-tokenizer 'falcon9' is not known"):
        open_checkpoint(path).tokenizer()


def test_a_file_that_is_not_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUFnot really" + bytes(100))
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf: not a whole GGUF file") as refusal:
        open_checkpoint(path)
    assert "\n" not in str(refusal.value)


def test_rope_factors_stored_in_the_file_stretch_the_frequencies(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        byte_vocabulary("llama-bpe")(writer)
        writer.add_tensor("rope_freqs.weight", np.array([1.0, 2.0, 4.0, 8.0], dtype=np.float32))

    plain = GGUFFile(write_gguf(tmp_path / "plain.gguf", "llama", byte_vocabulary("llama-bpe"))).config
    scaled = GGUFFile(write_gguf(tmp_path / "scaled.gguf", "llama", extra)).config

    def frequencies(config: ModelConfig) -> list[float]:
        return inverse_frequencies(config.head_dim, config.rope_theta, config.rope)

    ratios = [p / s for p, s in zip(*map(frequencies, (plain, scaled)), strict=True)]
    assert ratios == pytest.approx([1.0, 2.0, 4.0, 8.0])


def test_the_tokenizer_of_the_library_is_what_comes_out(default_pair: tuple[GGUFFile, Any]) -> None:
    assert isinstance(default_pair[0].tokenizer().inner, tokenizers.Tokenizer)
    assert default_pair[0].tokenizer().end_tokens == {2}


def test_yarn_and_caps_in_the_file_are_those_of_the_folder_it_was_made_from(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        byte_vocabulary("qwen2")(writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(96)

    file = GGUFFile(write_gguf(tmp_path / "yarn.gguf", "qwen3", extra)).config
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    folder = write_checkpoint(tmp_path / "yarn", model_type="qwen3", head_dim=128, rope_scaling=yarn)
    assert file.rope == open_checkpoint(folder).config.rope

    def caps(writer: gguf.GGUFWriter) -> None:
        gemma_vocabulary(writer)
        writer.add_attn_logit_softcapping(20.0)
        writer.add_final_logit_softcapping(7.0)

    gemma = GGUFFile(write_gguf(tmp_path / "caps.gguf", "gemma2", caps)).config
    assert (gemma.attention_cap, gemma.logit_cap) == (20.0, 7.0)
