"""The shape of a model, checked. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.rope import RopeScaling


class UnsupportedModel(ValueError):
    """A checkpoint that this engine cannot run, in one line that says why."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: grouped-query attention, rotary positions, RMS norm, gated MLP; families differ in what follows `dtype`."""

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
    qk_norm: bool = False  # RMS norm of each head's query and key, before they turn (Qwen3, Gemma 3)
    window: int | None = None  # tokens that `local_layers` attend to, the token's own among them
    local_layers: frozenset[int] = frozenset()
    local_rope_theta: float | None = None  # of local layers, unscaled; None: they turn as the others do
    post_norms: bool = (
        False  # RMS norm of what attention and MLP give, before it is added, and a gate of GELU, not SiLU (Gemma)
    )
    norm_offset: float = 0.0  # what is added to stored norm weights
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of query times key; None: head_dim ** -0.5
    attention_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None  # and so do logits

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that one token keeps in one layer's cache: K and V of every KV head."""
        return 2 * self.num_kv_heads * self.head_dim


def checked(config: ModelConfig) -> ModelConfig:
    """`config` itself. UnsupportedModel when its parts don't fit together."""
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModel(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim {config.head_dim} is odd: rotary positions need pairs")
    if config.rope.kind == "factors" and len(config.rope.factors) != config.head_dim // 2:
        raise UnsupportedModel(f"rope_freqs holds {len(config.rope.factors)} numbers, expected {config.head_dim // 2}")
    if config.window is not None and config.window < 1:
        raise UnsupportedModel(f"sliding_window {config.window} is not supported; at least 1 token is")
    return config
