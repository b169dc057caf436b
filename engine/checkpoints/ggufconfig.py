"""The shape of a model from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.modelconfig import ModelConfig, UnsupportedModel, checked
from engine.rope import RopeScaling, yarn_amplitude

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}  # one layer of so many has no window
BY_HIDDEN = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose scores scale by hidden / heads, not head_dim


def from_gguf(metadata: Mapping[str, Any], tied: bool, rope_factors: tuple[float, ...] | None) -> ModelConfig:
    """ModelConfig from metadata; `rope_factors` is the content of the rope_freqs tensor, if there is one. Norm weights are stored
    with their offset, and what the metadata leaves out is as llama.cpp has it.
    """
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
    heads, hidden, layers = (int(key(name)) for name in ("attention.head_count", "embedding_length", "block_count"))
    head_dim = int(metadata.get(f"{family}.attention.key_length", hidden // heads))
    gemma = family in GLOBAL_EVERY
    every = GLOBAL_EVERY.get(family, 1)
    scaled_by = hidden // heads if layers == BY_HIDDEN.get(family) else head_dim
    return checked(
        ModelConfig(
            family=family,
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(metadata.get(f"{family}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            intermediate=int(key("feed_forward_length")),
            vocab=len(metadata["tokenizer.ggml.tokens"]),
            context=int(key("context_length")),
            norm_eps=float(key("attention.layer_norm_rms_epsilon")),
            rope_theta=float(metadata.get(f"{family}.rope.freq_base", 10_000.0)),
            rope=_scaling(metadata, family, key, rope_factors),
            tied=tied,
            qk_norm=family in ("qwen3", "gemma3"),
            window=int(key("attention.sliding_window")) if gemma else None,
            local_layers=frozenset(number for number in range(layers) if (number + 1) % every),
            local_rope_theta=10_000.0 if family == "gemma3" else None,
            post_norms=gemma,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            attention_scale=scaled_by**-0.5,
            attention_cap=float(metadata.get("gemma2.attn_logit_softcapping", 50.0)) if family == "gemma2" else None,
            logit_cap=float(metadata.get("gemma2.final_logit_softcapping", 30.0)) if family == "gemma2" else None,
        )
    )


def _scaling(
    metadata: Mapping[str, Any], family: str, key: Callable[[str], Any], factors: tuple[float, ...] | None
) -> RopeScaling:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if factors is not None:
        return RopeScaling("factors", factors=factors)
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=float(key("rope.scaling.factor")))
    if kind == "yarn":
        factor = float(key("rope.scaling.factor"))
        return RopeScaling(
            "yarn",
            factor=factor,
            low_freq_factor=float(metadata.get(f"{family}.rope.scaling.yarn_beta_slow", 1.0)),
            high_freq_factor=float(metadata.get(f"{family}.rope.scaling.yarn_beta_fast", 32.0)),
            original_context=int(key("rope.scaling.original_context_length")),
            amplitude=yarn_amplitude(factor) * float(metadata.get(f"{family}.rope.scaling.yarn_attn_factor", 1.0)),
        )
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: none, linear, yarn, rope_freqs")
