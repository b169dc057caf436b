"""The decoder: Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Gemma differ by flags and by weights that are there or not, not by classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention.gather import GatherAttention
from engine.attention.interface import Attending, Attention
from engine.batch import Batch
from engine.kvstore import KVStore
from engine.linear import Linear
from engine.modelconfig import ModelConfig
from engine.rope import RopeScaling, inverse_frequencies
from engine.stages import Stage, StageClock, Untimed

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear  # Q, K and V of all heads in one product; rotary pairs next to each other
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    qk_norm: Tensor | None = None  # [heads + KV heads, head_dim], in the order of `qkv`
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


class Parts(Protocol):
    """What goes before and after attention in a layer."""

    def enter(self, layer: Layer, x: Tensor, turn: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, q_width + kv_width]: norm, Q, K and V, turned by their positions, complex [tokens, 1,
        head_dim / 2].
        """

    def leave(self, layer: Layer, attended: Tensor, x: Tensor) -> Tensor:
        """[tokens, q_width] and the residual, which may be overwritten -> [tokens, hidden]"""

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """[tokens, hidden], which may be overwritten -> [tokens, hidden]"""


class EagerParts:
    """One operator after another, as the products offer them."""

    def __init__(self, config: ModelConfig) -> None:
        self._heads, self._head_dim = config.num_heads + config.num_kv_heads, config.head_dim
        self._eps = config.norm_eps

    def enter(self, layer: Layer, x: Tensor, turn: Tensor) -> Tensor:
        qkv = layer.qkv.normed(x, layer.attention_norm, self._eps)
        if layer.qk_norm is not None:
            norm_heads_(qkv, layer.qk_norm, self._eps)
        rotate_(qkv, turn, self._heads, self._head_dim)
        return qkv

    def leave(self, layer: Layer, attended: Tensor, x: Tensor) -> Tensor:
        if layer.attention_post_norm is None:
            return layer.attention_out.plus(attended, x)
        return x + F.rms_norm(layer.attention_out(attended), x.shape[-1:], layer.attention_post_norm, self._eps)

    def mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate_up = layer.gate_up.normed(x, layer.mlp_norm, self._eps)
        if layer.mlp_post_norm is None:
            return layer.down.gated_plus(gate_up, x)
        gate, up = gate_up.chunk(2, dim=-1)
        gated = F.gelu(gate, approximate="tanh").mul_(up)
        return x + F.rms_norm(layer.down(gated), x.shape[-1:], layer.mlp_post_norm, self._eps)


class Decoder:
    """`forward` runs the layers over one step's tokens; `logits` is asked only for the rows that need a next token."""

    def __init__(
        self, config: ModelConfig, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, head: Linear, context: int
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.attention: Attention = GatherAttention(config)
        self.parts: Parts = EagerParts(config)
        self.clock: StageClock = Untimed()
        # computes all layers at once, in place, and says how many seconds of it attention took; None: not such a step
        self.fused: Callable[[Tensor, Batch, KVStore], float | None] | None = None
        # rounded as the reference rounds it
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=embedding.dtype))
        self.rotations = rotations(config.head_dim, config.rope_theta, config.rope, context, embedding.device)
        self.local_rotations = self.rotations
        if config.local_rope_theta is not None:
            plain = RopeScaling()
            self.local_rotations = rotations(config.head_dim, config.local_rope_theta, plain, context, embedding.device)

    @property
    def num_layer_weights(self) -> int:
        return sum(
            linear.num_weights
            for layer in self.layers
            for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        )

    @property
    def layer_bytes(self) -> int:
        return sum(
            linear.nbytes
            for layer in self.layers
            for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
        )

    def forward(self, batch: Batch, cache: KVStore, staged: Attending | None = None) -> Tensor:
        """The step's token ids -> [tokens, hidden]; writes K and V of these tokens into the cache. `staged` attends instead of
        the decoder's own attention, in a step that is captured.
        """
        config, clock = self.config, self.clock
        attention = staged or self.attention
        x = F.embedding(batch.ids, self.embedding)
        if config.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.fused is not None and staged is None and self._all_at_once(x, batch, cache):
            return x[: batch.tokens]
        turn = local_turn = self.rotations[batch.positions].unsqueeze(1)
        if self.local_rotations is not self.rotations:
            local_turn = self.local_rotations[batch.positions].unsqueeze(1)
        attention.begin(batch)
        clock.mark(Stage.EMBED)
        for number, layer in enumerate(self.layers):
            local = number in config.local_layers
            qkv = self.parts.enter(layer, x, local_turn if local else turn)
            kept = cache.layers[number]
            kept.write(batch.slots, qkv[: batch.tokens, config.q_width :])
            attended = attention(batch, local, qkv, kept)
            x = self.parts.leave(layer, attended, x)
            clock.mark(Stage.ATTENTION)
            x = self.parts.mlp(layer, x)
            clock.mark(Stage.MLP)
        return x[: batch.tokens]

    def _all_at_once(self, x: Tensor, batch: Batch, cache: KVStore) -> bool:
        """Whether all layers were computed in one call, in place."""
        assert self.fused is not None
        self.clock.mark(Stage.EMBED)
        attention_s = self.fused(x, batch, cache)
        if attention_s is None:
            return False
        self.clock.mark(Stage.MLP)
        self.clock.move(Stage.MLP, Stage.ATTENTION, attention_s)
        return True

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, self.head.padded(rows) - rows))
        logits = self.head.normed(x, self.norm, self.config.norm_eps)[:rows]
        cap = self.config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def rotations(head_dim: int, theta: float, scaling: RopeScaling, context: int, device: torch.device) -> Tensor:
    """cos + i sin of every position's angles, [context, head_dim / 2], complex64. Angles in float32, as the reference has them."""
    frequencies = torch.tensor(inverse_frequencies(head_dim, theta, scaling), dtype=torch.float32)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos() * scaling.amplitude, angles.sin() * scaling.amplitude).to(device)


def norm_heads_(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """RMS norm of the first heads of each row, each with its own row of `weight` [heads, head_dim], in place."""
    heads, head_dim = weight.shape
    rows = qkv[:, : heads * head_dim].view(-1, heads, head_dim)
    rows.copy_(F.rms_norm(rows, (head_dim,), None, eps).mul_(weight))


def rotate_(qkv: Tensor, turn: Tensor, heads: int, head_dim: int) -> None:
    """Turn the first `heads` heads of each row by its position, in place: a pair of numbers is one complex number."""
    pairs = qkv[:, : heads * head_dim].view(-1, heads, head_dim // 2, 2)
    if qkv.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(turn)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turn))
