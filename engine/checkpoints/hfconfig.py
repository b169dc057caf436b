"""The shape of a model from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.modelconfig import ModelConfig, UnsupportedModel, checked
from engine.rope import RopeScaling, yarn_amplitude

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}  # where it is not hidden / heads by default
LOCAL, FULL = "sliding_attention", "full_attention"


def from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig from a config.json. UnsupportedModel names the first thing that this engine does not do; KeyError a key that
    is missing.
    """
    family = str(raw.get("model_type", "?"))
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    gemma = family.startswith("gemma")
    key, known = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if raw.get(key, known) != known:
        raise UnsupportedModel(f"{key} {raw[key]!r} is not supported; supported: {known}")
    heads = _size(raw, "num_attention_heads")
    rope, local_theta = _rope(raw, family)
    scaling = _scaling(rope, _size(raw, "max_position_embeddings"))
    window = _window(raw, family)
    return checked(
        ModelConfig(
            family=family,
            num_layers=_size(raw, "num_hidden_layers"),
            hidden=_size(raw, "hidden_size"),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or HEAD_DIMS.get(family) or int(raw["hidden_size"]) // heads),
            intermediate=_size(raw, "intermediate_size"),
            vocab=_size(raw, "vocab_size"),
            context=_context(raw, scaling),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope["rope_theta"]),
            rope=scaling,
            tied=bool(raw.get("tie_word_embeddings", gemma)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            qk_norm=family in ("qwen3", "gemma3_text"),
            window=window,
            local_layers=_local_layers(raw, family, window),
            local_rope_theta=local_theta,
            post_norms=gemma,
            norm_offset=1.0 if gemma else 0.0,
            embedding_scale=float(raw["hidden_size"]) ** 0.5 if gemma else 1.0,
            attention_scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5 if gemma else None,
            attention_cap=raw.get("attn_logit_softcapping", 50.0 if family == "gemma2" else None) if gemma else None,
            logit_cap=raw.get("final_logit_softcapping", 30.0 if family == "gemma2" else None) if gemma else None,
        )
    )


def _size(raw: Mapping[str, Any], key: str) -> int:
    """A count of something that there must be. KeyError without it, UnsupportedModel when it is none."""
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {str(value)[:40]!r}, expected a whole number above 0")
    return value


def _window(raw: Mapping[str, Any], family: str) -> int | None:
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported; a decoder attends to what came before")
    if family == "llama" or (family.startswith("qwen") and not raw.get("use_sliding_window")):
        return None
    window = raw.get("sliding_window", 4096)
    return None if window is None else int(window)


def _local_layers(raw: Mapping[str, Any], family: str, window: int | None) -> frozenset[int]:
    """The layers with a window: as `layer_types` says, or by the family's rule."""
    numbers = range(int(raw["num_hidden_layers"]))
    if window is None:
        return frozenset()
    if family == "mistral":
        return frozenset(numbers)
    if (kinds := raw.get("layer_types")) is not None:
        unknown = next((kind for kind in kinds if kind not in (LOCAL, FULL)), None)
        if unknown is not None:
            raise UnsupportedModel(f"layer_types {unknown!r} is not supported; supported: {FULL}, {LOCAL}")
        if len(kinds) != len(numbers):
            raise UnsupportedModel(f"layer_types names {len(kinds)} layers, expected {len(numbers)}")
        return frozenset(number for number in numbers if kinds[number] == LOCAL)
    if family.startswith("qwen"):
        return frozenset(number for number in numbers if number >= int(raw.get("max_window_layers", 28)))
    every = 2 if family == "gemma2" else int(raw.get("sliding_window_pattern") or 6)  # the last of so many is global
    return frozenset(number for number in numbers if (number + 1) % every)


def _rope(raw: Mapping[str, Any], family: str) -> tuple[dict[str, Any], float | None]:
    """The rotary parameters, `rope_theta` among them, and the base of local layers where it is another."""
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = raw.get("rope_theta")
    if family != "gemma3_text":
        return {**rope, "rope_theta": rope.get("rope_theta") or theta or 10_000.0}, None
    local = rope.pop(LOCAL, None) or {}
    if local.get("rope_type", "default") != "default":
        raise UnsupportedModel(f"rope scaling {local['rope_type']!r} of local layers is not supported")
    rope |= rope.pop(FULL, None) or {}
    local_theta = local.get("rope_theta") or raw.get("rope_local_base_freq") or 10_000.0
    return {**rope, "rope_theta": rope.get("rope_theta") or theta or 1_000_000.0}, float(local_theta)


def _scaling(rope: Mapping[str, Any], trained: int) -> RopeScaling:
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
    if kind == "yarn":
        return _yarn(rope, trained)
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _yarn(rope: Mapping[str, Any], trained: int) -> RopeScaling:
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UnsupportedModel("rope scaling 'yarn' with mscale and mscale_all_dim is not supported")
    factor = float(rope["factor"])
    return RopeScaling(
        "yarn",
        factor=factor,
        low_freq_factor=float(rope.get("beta_slow") or 1.0),
        high_freq_factor=float(rope.get("beta_fast") or 32.0),
        original_context=int(rope.get("original_max_position_embeddings") or trained),
        amplitude=float(rope.get("attention_factor") or yarn_amplitude(factor)),
        truncate=bool(rope.get("truncate", True)),
    )


def _context(raw: Mapping[str, Any], scaling: RopeScaling) -> int:
    """Qwen's model cards add yarn without touching max_position_embeddings, which then names the context before it."""
    stated = int(raw["max_position_embeddings"])
    return max(stated, int(scaling.factor * scaling.original_context)) if scaling.kind == "yarn" else stated
