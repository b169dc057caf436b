"""FlexAttention, a part of torch, over the paged cache where it lies: a mask of blocks says what is read, compiled to one kernel.

The keys are the whole cache; a row's table is its list of blocks in the mask (Dong et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.attention.interface import Place
from engine.attention.paged import StaticTables, padded_tables, pages, scale_of, sequences_of
from engine.batch import Batch
from engine.kvstore import LayerCache

Tensor = torch.Tensor
Kernel = Callable[..., Any]

QUERIES = 128
"""Queries that share a line of the mask."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many new tokens, at `begin` of the step. `tables` [sequences, blocks], filled up with a number
    beyond every block; `contexts` [sequences]; int32.
    """

    begin: int
    count: int
    tables: Tensor
    contexts: Tensor


class Flex:
    """`kernel` is flex_attention, compiled unless a test wants it plain."""

    name = "flex"
    gathers = False

    def __init__(self, place: Place, kernel: Kernel) -> None:
        self._kernel = kernel
        self.config, self.block_size = place.config, place.block_size
        self._device = place.device
        self._groups: list[Group] = []
        self._masks: dict[tuple[int, bool], BlockMask] = {}
        # a kernel on CUDA reads so many keys at once, and a block of the mask must hold a multiple of them
        self._options = {"BLOCK_N": min(64, place.block_size)} if place.device.type == "cuda" else None
        # a tensor: a number would be compiled in, or fail to be where it changes
        cap = place.config.attention_cap
        self._cap = None if cap is None else torch.tensor(cap, device=place.device)

    @staticmethod
    def unfit(place: Place) -> str | None:
        """Why it can't be used here; None when it can."""
        if place.int8:
            return "flex doesn't read a cache in 8 bits: set kv_dtype = auto"
        if place.block_size < 16 or place.block_size & (place.block_size - 1):
            return "flex wants blocks of 16, 32, 64, 128, ... tokens: set block_size"
        return None

    def begin(self, batch: Batch) -> None:
        self._masks.clear()
        single, several = sequences_of(batch, self.block_size)
        self._groups = [self._group(0, 1, single.tables, single.contexts)] if len(single) else []
        for number, count in enumerate(several.counts):
            at = slice(number, number + 1)
            begin = several.begin + several.bounds[number]
            self._groups.append(self._group(begin, count, several.tables[at], several.contexts[at]))

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        out = qkv.new_zeros(qkv.shape[0], self.config.q_width)
        for number, group in enumerate(self._groups):
            k, v = self.keys(cache)
            mask = self._masks.get((number, local))
            if mask is None:
                mask = self._masks[number, local] = self.mask(group, k.shape[2] // self.block_size, local)
            end = group.begin + group.count * len(group.contexts)
            out[group.begin : end] = self.attend(qkv[group.begin : end], group.count, k, v, mask)
        return out

    def stage(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> StagedFlex:
        return StagedFlex(self, rows, width, device)

    def keys(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """K and V of the whole cache, each a view [1, KV heads, slots, head_dim]."""
        k, v = pages(cache, self.config)
        # blocks and their slots are neighbours in memory, so that both are one dimension
        return k.flatten(0, 1).transpose(0, 1).unsqueeze(0), v.flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def attend(self, qkv: Tensor, count: int, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        """[sequences * count, q_width + kv_width] -> [sequences * count, q_width]"""
        config = self.config
        queries = qkv[:, : config.q_width].view(-1, count, config.num_heads, config.head_dim).transpose(1, 2)
        score = None if self._cap is None else capped(self._cap)
        out: Tensor = self._kernel(
            queries,
            k,
            v,
            score_mod=score,
            block_mask=mask,
            scale=scale_of(config),
            enable_gqa=config.num_heads > config.num_kv_heads,
            kernel_options=self._options,
        )
        return out.transpose(1, 2).reshape(-1, config.q_width)

    def mask(self, group: Group, blocks: int, local: bool) -> BlockMask:
        """For each piece of QUERIES new tokens, the blocks of the cache that hold what any of them attends to; within a block, a
        token is seen by those that come after it, and by itself, as far as the window reaches. `blocks` of the whole cache.
        """
        size, window = self.block_size, self.config.window if local else None
        width = group.tables.shape[1]
        starts = group.contexts - group.count
        pieces = torch.arange(0, group.count, QUERIES, dtype=torch.int32, device=starts.device)
        first_seen = starts[:, None] + pieces + (1 - window if window is not None else -(1 << 30))
        lows = first_seen.clamp(min=0) // size  # [sequences, pieces]
        highs = (starts[:, None] + (pieces + QUERIES).clamp(max=group.count) + size - 1) // size
        at = lows[..., None] + torch.arange(blocks, dtype=torch.int32, device=starts.device)
        table = group.tables[:, None].expand(-1, len(pieces), -1).gather(2, at.clamp(max=width - 1).long())
        indices = torch.where(at < highs[..., None], table, 0).clamp(max=blocks - 1)
        number = torch.arange(width, dtype=torch.int32, device=starts.device).expand_as(group.tables)
        # which part of its sequence a block of the cache holds; the last column takes what tables are filled up with
        part = torch.full((len(starts), blocks + 1), -1, dtype=torch.int32, device=starts.device)
        part.scatter_(1, group.tables.clamp(max=blocks).long(), number)
        counts, indices = (highs - lows)[:, None], indices[:, None].contiguous()
        return BlockMask.from_kv_blocks(
            counts,
            indices,
            # blocks that are seen whole: none is told apart, but the kernel for single tokens on CPU compiles only with some
            torch.zeros_like(counts),
            torch.zeros_like(indices),
            BLOCK_SIZE=(QUERIES, size),
            mask_mod=within(part, starts, size, window),
            seq_lengths=(group.count, blocks * size),
            compute_q_blocks=False,
        )

    def _group(self, begin: int, count: int, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> Group:
        width = max(map(len, tables))
        numbers = padded_tables(tables, width, NO_BLOCK)
        return Group(
            begin,
            count,
            torch.tensor(numbers, dtype=torch.int32, device=self._device).view(-1, width),
            torch.tensor(contexts, dtype=torch.int32, device=self._device),
        )


NO_BLOCK = (1 << 31) - 1


def within(part: Tensor, starts: Tensor, size: int, window: int | None) -> Callable[..., Tensor]:
    """Which slot of the cache a query sees: FlexAttention's mask_mod."""

    def causal(sequence: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        own = part[sequence, slot // size]
        return (own >= 0) & (own * size + slot % size <= starts[sequence] + query)

    def windowed(sequence: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        own = part[sequence, slot // size]
        at, here = own * size + slot % size, starts[sequence] + query
        return (own >= 0) & (at <= here) & (at > here - wide)

    if window is None:
        return causal
    wide = window  # the last of the enclosed names by the alphabet: torch goes by their places, and takes a number that differs
    return windowed  # from the one in its place before for one that varies, for which its C++ does not compile


def capped(cap: Tensor) -> Callable[..., Tensor]:
    """Scores that cannot leave -cap..cap: FlexAttention's score_mod."""

    def score_mod(score: Tensor, sequence: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


class StagedFlex:
    """The mask is made anew in each replay, from the tables."""

    def __init__(self, attention: Flex, rows: int, width: int, device: torch.device) -> None:
        self._attention = attention
        self._tables = StaticTables(rows, width, device)
        self._masks: dict[bool, BlockMask] = {}

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        self._tables.load(tables, contexts, NO_BLOCK)

    def begin(self, batch: Batch) -> None:
        self._masks.clear()

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        k, v = self._attention.keys(cache)
        if local not in self._masks:
            group = Group(0, 1, self._tables.tables, self._tables.lengths)
            self._masks[local] = self._attention.mask(group, k.shape[2] // self._attention.block_size, local)
        return self._attention.attend(qkv, 1, k, v, self._masks[local])


def allow_shapes() -> None:
    """Beyond eight kinds of shapes torch goes back to operators one by one, which here would make a matrix over the whole cache.
    There are more: one row or several, one token or several, with a window or without, in a trial's cache and the real one.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)


def compiled_kernel() -> Kernel:
    """Compiled when it is first called, for the shapes that it is called with; RuntimeError then where there is no compiler."""
    allow_shapes()
    kernel: Kernel = torch.compile(flex_attention)
    return kernel
