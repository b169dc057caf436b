"""The arithmetic of a dense transformer: what its weights, its KV cache and a step of it weigh and move. Bytes, FLOP, seconds.

Only what follows from the shape; no efficiency is assumed. Shapes are those of the published configurations of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

HALF_PRECISION = 2  # bytes: FP16 and BF16 alike


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model with 16-bit weights and KV cache. `kv_heads` below `heads` is grouped-query attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    parameters: float

    @property
    def weight_bytes(self) -> float:
        return HALF_PRECISION * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers: 2 x layers x KV heads x head dimension x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * HALF_PRECISION

    def kv_bytes(self, tokens: float) -> float:
        return self.kv_bytes_per_token * tokens

    @property
    def mlp_bytes(self) -> int:
        """Weights of one layer's gated MLP: three matrices."""
        return 3 * self.hidden * self.ffn * HALF_PRECISION

    def mlp_flop(self, batch: float) -> float:
        """Of one layer and one decode step: a multiplication and an addition for each weight and sequence."""
        return 2.0 * 3 * self.hidden * self.ffn * batch

    def scores_flop(self, batch: float, context: float) -> float:
        """Of one layer and one decode step, queries times keys: each sequence against its whole context."""
        return 2.0 * self.heads * self.head_dim * context * batch

    def kv_to_weights(self, batch: float, context: float) -> float:
        """Bytes of KV cache that a decode step reads, over its bytes of weights, which are read once for the whole batch."""
        return self.kv_bytes(batch * context) / self.weight_bytes


SHAPES: Mapping[str, Shape] = {
    "qwen2-7b": Shape(28, 3584, 28, 4, 128, 18_944, 7.62e9),
    "llama-2-7b": Shape(32, 4096, 32, 32, 128, 11_008, 6.74e9),
    "llama-2-13b": Shape(40, 5120, 40, 40, 128, 13_824, 13.0e9),
    "llama-3-8b": Shape(32, 4096, 32, 8, 128, 14_336, 8.03e9),
    "llama-3-70b": Shape(80, 8192, 64, 8, 128, 28_672, 70.6e9),
}


def moved_s(size_bytes: float, gbit_s: float) -> float:
    """The least time that a link needs, without any overhead. ValueError for a link that carries nothing."""
    if gbit_s <= 0:
        raise ValueError(f"a link of {gbit_s} Gbit/s carries nothing")
    return size_bytes * 8 / (gbit_s * 1e9)


def decode_flop_per_byte(batch: float) -> float:
    """Of the weights' part of a decode step: 2 FLOP for each weight and sequence, over its two bytes."""
    return 2.0 * batch / HALF_PRECISION
