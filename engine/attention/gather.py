"""Attention over the paged cache: gather by block, then torch's scaled-dot-product attention, on CPU and CUDA alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.attention.paged import StaticTables
from engine.batch import Batch, DecodeGroup, PrefillChunk
from engine.kernels.native import Kernels
from engine.kvstore import LayerCache, PlainLayer
from engine.modelconfig import ModelConfig

Tensor = torch.Tensor


class GatherAttention:
    """Grouped-query attention of one step's tokens; K and V of these tokens must be in the cache already.

    In decoding, the queries that share a KV head stand as rows of one small query matrix, so K and V are never repeated.
    A row's result does not depend on its padding: the mask makes those weights exactly 0.
    """

    name = "sdpa"
    gathers = True

    def __init__(self, config: ModelConfig) -> None:
        self.heads = config.num_heads
        self.groups = config.num_kv_heads
        self.per_group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_width = config.q_width
        self.kv_width = config.kv_width
        self.scale = config.attention_scale
        self.cap = config.attention_cap
        self.window = config.window

    def begin(self, batch: Batch) -> None:
        pass  # the batch brings masks and tables with it

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        reach, tokens = batch.local if local else batch.full, batch.tokens
        if len(reach.decode) == 1 and reach.decode[0].end == qkv.shape[0]:
            return self.decode(reach.decode[0], qkv, cache)
        out = qkv.new_empty(qkv.shape[0], self.q_width)
        out[tokens:] = 0.0
        for group in reach.decode:
            out[group.begin : group.end] = self.decode(group, qkv, cache)
        for chunk in reach.prefill:
            out[chunk.begin : chunk.end] = self._prefill(chunk, qkv, cache)
        return out

    def stage(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> StagedGather:
        return StagedGather(self, rows, width, dtype, device)

    def decode(self, group: DecodeGroup, qkv: Tensor, cache: LayerCache) -> Tensor:
        """[tokens, q_width + kv_width] -> [the group's rows, q_width]"""
        rows = group.end - group.begin
        q = qkv[group.begin : group.end, : self.q_width].view(rows, self.groups, self.per_group, self.head_dim)
        if group.view is not None:
            kv = cache.run(*group.view)[group.skip :].unsqueeze(0)
        elif group.shared:
            kv = cache.gather(group.table[: group.table.shape[0] // rows]).unsqueeze(0)
        else:
            kv = cache.gather(group.table).view(rows, -1, self.kv_width)
        k, v = self._split(kv.expand(rows, -1, -1))
        if self.cap is not None:
            return capped_attention(q, k, v, group.mask, self.scale, self.cap).reshape(rows, self.q_width)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=self.scale)
        return out.reshape(rows, self.q_width)

    def _prefill(self, chunk: PrefillChunk, qkv: Tensor, cache: LayerCache) -> Tensor:
        own = qkv[chunk.begin : chunk.end].unsqueeze(0)
        tokens = chunk.end - chunk.begin
        q = own[..., : self.q_width].view(1, tokens, self.heads, self.head_dim).transpose(1, 2)
        if chunk.table is None:
            k, v = self._split(own[..., self.q_width :])
        else:
            k, v = self._split(cache.gather(chunk.table)[: chunk.context].unsqueeze(0))
        if self.cap is not None:
            mask = causal_mask(tokens, q) if chunk.mask is None else chunk.mask
            q = q.view(1, self.groups, self.per_group, tokens, self.head_dim)
            out = capped_attention(q, k.unsqueeze(2), v.unsqueeze(2), mask, self.scale, self.cap).flatten(1, 2)
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=self.scale,
                enable_gqa=self.per_group > 1,
            )
        return out.transpose(1, 2).reshape(tokens, self.q_width)

    def _split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, tokens, kv_width] -> K and V, each a view [rows, KV heads, tokens, head_dim]."""
        both = kv.view(kv.shape[0], kv.shape[1], 2, self.groups, self.head_dim)
        return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


class StagedGather:
    """Rows that attend over tables of one padded width; the mask is made anew in each replay, from the lengths."""

    def __init__(
        self, attention: GatherAttention, rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._attention = attention
        self._tables = StaticTables(rows, width, device)
        self._dtype = dtype
        self._groups: tuple[DecodeGroup, DecodeGroup] | None = None  # in full layers, and in those with a window

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        self._tables.load(tables, contexts)

    def begin(self, batch: Batch) -> None:
        ends = self._tables.lengths.long()
        table = self._tables.tables.long().flatten()
        window = self._attention.window
        firsts = torch.zeros_like(ends)
        full = self._group(batch, table, firsts, ends)
        local = full if window is None else self._group(batch, table, (ends - window).clamp(min=0), ends)
        self._groups = (full, local)

    def _group(self, batch: Batch, table: Tensor, firsts: Tensor, ends: Tensor) -> DecodeGroup:
        rows = self._tables.rows
        at = torch.arange(batch.block_size * self._tables.width, device=ends.device)
        outside = (at >= ends[:, None]) | (at < firsts[:, None])
        mask = torch.zeros(outside.shape, dtype=self._dtype, device=ends.device).masked_fill_(outside, float("-inf"))
        return DecodeGroup(0, rows, None, table, mask[:, None, None, :], firsts, ends)

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        assert self._groups is not None
        return self._attention.decode(self._groups[local], qkv, cache)


def causal_mask(tokens: int, like: Tensor) -> Tensor:
    return torch.full((tokens, tokens), float("-inf"), dtype=like.dtype, device=like.device).triu_(1)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, cap: float) -> Tensor:
    """Attention whose scores cannot leave -cap..cap: cap * tanh(score / cap) (Gemma 2). Softmax in float32."""
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


class CompiledAttention(GatherAttention):
    """Single tokens by the compiled kernel, which reads the cache through the block table where it lies; the rest by torch."""

    name = "compiled"

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__(config)
        self.kernels = kernels

    @staticmethod
    def suits(config: ModelConfig, dtype: torch.dtype) -> bool:
        """Whether the kernel can do it: float32, heads of a multiple of 8 numbers, no cap."""
        return dtype is torch.float32 and config.head_dim % 8 == 0 and config.attention_cap is None

    def decode(self, group: DecodeGroup, qkv: Tensor, cache: LayerCache) -> Tensor:
        if not isinstance(cache, PlainLayer):
            return super().decode(group, qkv, cache)
        rows = group.end - group.begin
        out = qkv.new_empty(rows, self.heads, self.head_dim)
        self.kernels.attention(
            qkv[group.begin : group.end],
            cache.slots,
            group.table.view(rows, -1),
            (group.firsts, group.lengths),
            cache.block_size,
            self.groups,
            self.head_dim**-0.5 if self.scale is None else self.scale,
            out,
        )
        return out.view(rows, self.q_width)
