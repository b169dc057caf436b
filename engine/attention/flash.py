"""FlashAttention-2 (package flash-attn) over the paged cache where it lies: single tokens, and sequences of several, in one call each.

Signatures and limits: flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.interface import Place
from engine.attention.paged import Sequences, StaticTables, padded_tables, pages, scale_of, sequences_of
from engine.batch import Batch
from engine.kvstore import LayerCache

Tensor = torch.Tensor

PAGE = 256
"""flash-attn reads pages of a multiple of so many tokens."""
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the kernel is told of sequences, all int32: where their tokens begin, where those they attend to begin (as if these
    lay one after another), and their tables, [sequences, blocks].
    """

    queries: Tensor
    keys: Tensor
    contexts: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int


class Flash:
    """`library` is the module flash_attn."""

    name = "flash"
    gathers = False

    def __init__(self, place: Place, library: Any) -> None:
        self._library = library
        self.config, self.block_size = place.config, place.block_size
        self._device = place.device
        self._single: Sequences | None = None
        self._several: Sequences | None = None
        self._singles: Lengths | None = None
        self._lengths: Lengths | None = None

    @staticmethod
    def unfit(place: Place) -> str | None:
        """Why it can't be used here; None when it can."""
        if place.dtype not in (torch.float16, torch.bfloat16):
            return "flash-attn computes in float16 and bfloat16 only: set dtype"
        if place.block_size % PAGE:
            return f"flash-attn reads pages of a multiple of {PAGE} tokens: set block_size = {PAGE}"
        if place.int8:
            return "flash-attn doesn't read a cache in 8 bits: set kv_dtype = auto"
        if place.config.head_dim > LARGEST_HEAD or place.config.head_dim % 8:
            return f"flash-attn takes heads of a multiple of 8 numbers, {LARGEST_HEAD} at most"
        return None

    def begin(self, batch: Batch) -> None:
        self._single, self._several = sequences_of(batch, self.block_size)
        self._singles = self._told(self._single) if len(self._single) else None
        self._lengths = self._told(self._several) if len(self._several) else None

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        config = self.config
        out = qkv.new_zeros(qkv.shape[0], config.num_heads, config.head_dim)
        queries = qkv[:, : config.q_width].view(-1, config.num_heads, config.head_dim)
        if self._single is not None and self._singles is not None:
            at = self._single.tokens
            out[at] = self.single(queries[at], self._singles, local, cache)
        if self._several is not None and self._lengths is not None:
            at = self._several.tokens
            out[at] = self.several(queries[at], self._lengths, local, cache)
        return out.view(-1, config.q_width)

    def stage(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> StagedFlash:
        return StagedFlash(self, rows, width, device)

    def single(self, queries: Tensor, lengths: Lengths, local: bool, cache: LayerCache) -> Tensor:
        """One token each. The kernel may share out one long context over many processors. It looks at the lengths on the host,
        so it can't be captured.
        """
        k, v = pages(cache, self.config)
        out: Tensor = self._library.flash_attn_with_kvcache(
            queries.unsqueeze(1),
            k,
            v,
            cache_seqlens=lengths.contexts,
            block_table=lengths.tables,
            **self._way(local),
        )
        return out.squeeze(1)

    def several(self, queries: Tensor, lengths: Lengths, local: bool, cache: LayerCache) -> Tensor:
        """Any number of tokens each."""
        k, v = pages(cache, self.config)
        out: Tensor = self._library.flash_attn_varlen_func(
            queries,
            k,
            v,
            lengths.queries,
            lengths.keys,
            lengths.most_queries,
            lengths.most_keys,
            block_table=lengths.tables,
            **self._way(local),
        )
        return out

    def _way(self, local: bool) -> dict[str, object]:
        config = self.config
        before = config.window - 1 if local and config.window is not None else -1  # the token's own is not counted
        return {
            "softmax_scale": scale_of(config),
            "causal": True,
            "window_size": (before, 0 if before >= 0 else -1),
            "softcap": config.attention_cap or 0.0,
        }

    def _told(self, sequences: Sequences) -> Lengths:
        contexts = self._numbers(sequences.contexts)
        width = sequences.width
        return Lengths(
            self._numbers(sequences.bounds),
            starts_of(contexts),
            contexts,
            self._numbers(padded_tables(sequences.tables, width, 0)).view(-1, width),
            max(sequences.counts),
            max(sequences.contexts),
        )

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)


def starts_of(contexts: Tensor) -> Tensor:
    """[n] -> [n + 1], int32: sums from the first on."""
    starts = contexts.new_zeros(len(contexts) + 1)
    torch.cumsum(contexts, 0, dtype=torch.int32, out=starts[1:])
    return starts


class StagedFlash:
    """By the call for several tokens, with one each: it looks at nothing on the host."""

    def __init__(self, attention: Flash, rows: int, width: int, device: torch.device) -> None:
        self._attention = attention
        self._tables = StaticTables(rows, width, device)
        self._queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._lengths: Lengths | None = None

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        self._tables.load(tables, contexts)

    def begin(self, batch: Batch) -> None:
        contexts, tables = self._tables.lengths, self._tables.tables
        most = self._tables.width * self._attention.block_size
        self._lengths = Lengths(self._queries, starts_of(contexts), contexts, tables, 1, most)

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        config = self._attention.config
        assert self._lengths is not None
        queries = qkv[:, : config.q_width].view(-1, config.num_heads, config.head_dim)
        return self._attention.several(queries, self._lengths, local, cache).reshape(-1, config.q_width)
