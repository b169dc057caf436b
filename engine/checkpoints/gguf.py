"""Weights, shape and tokenizer from one GGUF file. Quantised tensors are dequantised to float32 by the `gguf` library, or kept as the
numbers that they are stored in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch

from engine.chat import ChatTemplate
from engine.checkpoints.ggufconfig import from_gguf
from engine.checkpoints.ggufvocab import build_tokenizer
from engine.modelconfig import ModelConfig, UnsupportedModel
from engine.numbers import Int4, Int8, NotKept, Quantised
from engine.tokenizer import Tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Hugging Face's names -> llama.cpp's, without layer and suffix."""
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Where they differ in models that have norms after attention and MLP, too."""


FULL = tuple(gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "F64"))
BLOCK = 32
"""Weights that share a step in Q8_0, Q4_0 and Q4_1."""


def gguf_name(name: str, post_norms: bool) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        names = _NAMES | _POST_NORMS if post_norms else _NAMES
        return f"blk.{layer}.{names[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


class GGUFFile:
    """One file, memory-mapped: a tensor is dequantised when it is asked for."""

    def __init__(self, path: Path) -> None:
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise UnsupportedModel(
                f"{path}: not a whole GGUF file ({error}); get it again, or name another one"
            ) from None
        self.path = path
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = self._tensors.get("rope_freqs.weight")
        try:
            self.config: ModelConfig = from_gguf(
                self.metadata,
                tied="output.weight" not in self._tensors,
                rope_factors=None if factors is None else tuple(float(f) for f in factors.data),
            )
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        except KeyError as missing:
            raise UnsupportedModel(f"{path}: the GGUF file has no {missing}") from None

    def has(self, name: str) -> bool:
        return gguf_name(name, self.config.post_norms) in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors[gguf_name(name, self.config.post_norms)]
        numbers = gguf.dequantize(stored.data, stored.tensor_type)
        values = torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy())
        return self._in_order(name, values)

    def numbers(self, name: str) -> Quantised | None:
        stored = self._tensors[gguf_name(name, self.config.post_norms)]
        if stored.tensor_type in FULL:
            return None
        kept = _kept(stored)
        return kept.reordered(lambda rows: self._in_order(name, rows))

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a matrix in Hugging Face's order."""
        if self.config.family in ("llama", "mistral"):
            if ".q_proj." in name:
                return _ungroup(rows, self.config.num_heads)
            if ".k_proj." in name:
                return _ungroup(rows, self.config.num_kv_heads)
        return rows

    def tokenizer(self) -> Tokenizer:
        inner = build_tokenizer(self.metadata, self.path)
        source = self.metadata.get("tokenizer.chat_template")
        tokens = self.metadata["tokenizer.ggml.tokens"]
        special = {
            f"{short}_token": tokens[self.metadata[f"tokenizer.ggml.{long}_token_id"]]
            for short, long in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if f"tokenizer.ggml.{long}_token_id" in self.metadata
        }
        return Tokenizer(inner, self._end_tokens(inner), ChatTemplate(source, special) if source else None)

    def _end_tokens(self, inner: tokenizers.Tokenizer) -> frozenset[int]:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        return frozenset(self.metadata[f"tokenizer.ggml.{k}"] for k in keys if f"tokenizer.ggml.{k}" in self.metadata)


def _kept(stored: gguf.ReaderTensor) -> Quantised:
    """The numbers of a quantised matrix. A block is a step (float16), in Q4_1 a least value (float16), then 32 numbers: bytes, or
    sixteen bytes with the first sixteen numbers in their low halves and the others in the high ones (ggml-common.h).
    """
    kinds = gguf.GGMLQuantizationType
    if stored.tensor_type not in (kinds.Q8_0, kinds.Q4_0, kinds.Q4_1):
        raise NotKept(f"of type {stored.tensor_type.name}")
    outputs = stored.data.shape[0]
    blocks = torch.from_numpy(stored.data.copy()).view(outputs, -1, gguf.GGML_QUANT_SIZES[stored.tensor_type][1])
    inputs = blocks.shape[1] * BLOCK
    step = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    if stored.tensor_type == kinds.Q8_0:
        return Int8(blocks[..., 2:].contiguous().view(torch.int8).view(outputs, inputs), step, inputs)
    packed = blocks[..., -16:]
    numbers = torch.cat([packed & 15, packed >> 4], dim=2).view(outputs, inputs)
    if stored.tensor_type == kinds.Q4_0:
        return Int4(numbers, step, torch.full_like(step, -8), inputs, in_steps=True)
    return Int4(numbers, step, blocks[..., 2:4].contiguous().view(torch.float16).squeeze(2), inputs)


def _ungroup(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a llama-family Q or K from llama.cpp's order (rotary pairs next to each other) to Hugging Face's (halves)."""
    head_dim = weight.shape[0] // heads
    pairs = weight.reshape(heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
