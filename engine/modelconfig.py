"""The shape of a model: what its checkpoint says about it, checked. No tensors here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """A checkpoint that this engine cannot run, in one line that says why."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    kind: none, linear (Chen et al. 2023: positions divided by `factor`), llama3 (low frequencies divided by `factor`, high
    ones kept, a smooth ramp between; Llama 3.1 model card) or factors (each frequency divided by its own number, as GGUF
    files store llama3 scaling).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: grouped-query attention, rotary positions, RMS norm, gated MLP (Llama, Qwen2)."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int  # tokens that the model was trained for
    norm_eps: float
    rope_theta: float
    rope: RopeScaling
    tied: bool  # the output head is the embedding table
    dtype: str = "float32"  # of the stored weights

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that one token keeps in one layer's cache: K and V of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim


def inverse_frequencies(config: ModelConfig) -> list[float]:
    """Rotary frequencies in radians per token, head_dim / 2 of them: theta ** (-2i / d) (Su et al. 2021), then scaled."""
    half = config.head_dim // 2
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    rope = config.rope
    if rope.kind == "none":
        return plain
    if rope.kind == "linear":
        return [f / rope.factor for f in plain]
    if rope.kind == "factors":
        return [f / by for f, by in zip(plain, rope.factors, strict=True)]
    return [_llama3(f, rope) for f in plain]


def _llama3(frequency: float, rope: RopeScaling) -> float:
    turns = rope.original_context * frequency / (2 * math.pi)  # turns within the original context
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    if turns > rope.high_freq_factor:
        return frequency
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


FAMILIES = ("llama", "qwen2", "mistral")


def from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a config.json. UnsupportedModel names the first thing that this engine does not do."""
    family = str(raw.get("model_type", "?"))
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    window = raw.get("sliding_window") if family == "mistral" or raw.get("use_sliding_window") else None
    if window is not None and window < raw["max_position_embeddings"]:
        raise UnsupportedModel(f"sliding_window {window} is not supported; only full attention is")
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "?")
        raise UnsupportedModel(f"quantization_config {method!r} is not supported; use full weights or a GGUF file")
    heads = int(raw["num_attention_heads"])
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    return _checked(
        ModelConfig(
            family=family,
            num_layers=int(raw["num_hidden_layers"]),
            hidden=int(raw["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            intermediate=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            context=int(raw["max_position_embeddings"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rope=_scaling(rope),
            tied=bool(raw.get("tie_word_embeddings", False)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
    )


def _scaling(rope: Mapping[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_context=int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def from_gguf(metadata: Mapping[str, Any], tied: bool, rope_factors: tuple[float, ...] | None) -> ModelConfig:
    """ModelConfig from a GGUF file's metadata; `rope_factors` is the content of its rope_freqs tensor, if it has one."""
    family = str(metadata.get("general.architecture", "?"))
    if family not in FAMILIES:
        raise UnsupportedModel(f"architecture {family!r} is not supported; supported: {', '.join(FAMILIES)}")

    def key(name: str) -> Any:
        try:
            return metadata[f"{family}.{name}"]
        except KeyError:
            raise UnsupportedModel(f"the GGUF file has no {family}.{name}") from None

    if metadata.get(f"{family}.expert_count"):
        raise UnsupportedModel("mixture-of-experts models are not supported")
    heads = int(key("attention.head_count"))
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if rope_factors is not None:
        rope = RopeScaling("factors", factors=rope_factors)
    elif kind == "linear":
        rope = RopeScaling("linear", factor=float(key("rope.scaling.factor")))
    elif kind == "none":
        rope = RopeScaling()
    else:
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: none, linear, rope_freqs")
    hidden = int(key("embedding_length"))
    return _checked(
        ModelConfig(
            family=family,
            num_layers=int(key("block_count")),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(metadata.get(f"{family}.attention.head_count_kv", heads)),
            head_dim=int(metadata.get(f"{family}.attention.key_length", hidden // heads)),
            intermediate=int(key("feed_forward_length")),
            vocab=len(metadata["tokenizer.ggml.tokens"]),
            context=int(key("context_length")),
            norm_eps=float(key("attention.layer_norm_rms_epsilon")),
            rope_theta=float(metadata.get(f"{family}.rope.freq_base", 10_000.0)),
            rope=rope,
            tied=tied,
        )
    )


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim {config.head_dim} is odd: rotary positions need pairs")
    if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
        raise UnsupportedModel(f"rope_freqs holds {len(config.rope.factors)} numbers, expected {config.head_dim // 2}")
    return config
