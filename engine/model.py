"""The decoder: Llama, SmolLM2, Mistral (full attention) and Qwen2 differ by flags and biases, not by classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import GatherAttention
from engine.batch import Batch
from engine.kvstore import KVStore
from engine.linear import Linear
from engine.modelconfig import ModelConfig, inverse_frequencies

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear  # Q, K and V of all heads in one product; rotary pairs next to each other
    attention_out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """`forward` runs the layers over one step's tokens; `logits` is asked only for the rows that need a next token."""

    def __init__(
        self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear, context: int
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.attention = GatherAttention(config)
        self.rotations = rotations(config, context, embedding.device)

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

    def forward(self, batch: Batch, cache: KVStore) -> Tensor:
        """The step's token ids -> [tokens, hidden]; writes K and V of these tokens into the cache."""
        config, eps = self.config, self.config.norm_eps
        x = F.embedding(batch.ids, self.embedding)
        turn = self.rotations[batch.positions].unsqueeze(1)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv.normed(x, layer.attention_norm, eps)
            rotate_(qkv, turn, config.num_heads + config.num_kv_heads, config.head_dim)
            kept = cache.layers[number]
            kept.write(batch.slots, qkv[: batch.tokens, config.q_width :])
            x = layer.attention_out.plus(self.attention(batch, qkv, kept), x)
            x = layer.down.gated_plus(layer.gate_up.normed(x, layer.mlp_norm, eps), x)
        return x[: batch.tokens]

    def logits(self, x: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        rows = x.shape[0]
        x = F.pad(x, (0, 0, 0, self.head.padded(rows) - rows))
        return self.head.normed(x, self.norm, self.config.norm_eps)[:rows]


def rotations(config: ModelConfig, context: int, device: torch.device) -> Tensor:
    """cos + i sin of every position's angles, [context, head_dim / 2], complex64. Angles in float32, as the reference has them."""
    frequencies = torch.tensor(inverse_frequencies(config), dtype=torch.float32)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin()).to(device)


def rotate_(qkv: Tensor, turn: Tensor, heads: int, head_dim: int) -> None:
    """Turn the first `heads` heads of each row by its position, in place: a pair of numbers is one complex number."""
    pairs = qkv[:, : heads * head_dim].view(-1, heads, head_dim // 2, 2)
    if qkv.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(turn)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turn))
