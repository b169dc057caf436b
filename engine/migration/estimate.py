"""How long a KV cache takes over a link, by arithmetic: nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how large its cache is. `number_bytes`: 4 float32, 2 bfloat16 and float16, 1 int8 (a scale of four
    bytes a head comes on top).
    """

    layers: int
    kv_heads: int
    head_dim: int
    number_bytes: float = 2

    @property
    def bytes_per_token(self) -> float:
        """layers x 2 (K and V) x KV heads x head_dim x bytes per number."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.number_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """`bytes` over `bytes_per_s`: a lower bound, as a link gives no more than its rate."""

    bytes: float
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return self.bytes / self.bytes_per_s

    def rate_within(self, seconds: float) -> float:
        """Bytes/s that a link must give to be done within `seconds`."""
        return self.bytes / seconds


def estimate(bytes_per_token: float, tokens: int, bytes_per_s: float) -> Estimate:
    """Of `tokens` tokens of one sequence, at `bytes_per_s` of the link."""
    return Estimate(bytes_per_token * tokens, bytes_per_s)


def tokens_within(bytes_per_token: float, seconds: float, bytes_per_s: float) -> int:
    """How many tokens' cache the link carries in so long."""
    return int(seconds * bytes_per_s / bytes_per_token)
