"""The sequences of a step as kernels over pages want them: one after another, each with its table, no padding, no mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.attention.interface import Unfit
from engine.batch import Batch
from engine.kvstore import LayerCache, PlainLayer
from engine.modelconfig import ModelConfig
from engine.scheduler import Row

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """Neighbouring rows of a step, each a sequence with `counts` new tokens, the last of its `contexts` tokens, in the blocks of
    its table. `begin` is the first token's place in the step.
    """

    begin: int
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    tables: tuple[Sequence[int], ...]

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + sum(self.counts))

    @cached_property
    def bounds(self) -> list[int]:
        """Where each sequence's tokens begin, counted from the first one's, and where the last one's end."""
        return list(itertools.accumulate(self.counts, initial=0))

    @property
    def width(self) -> int:
        """Blocks of the longest table."""
        return max(len(table) for table in self.tables)


def sequences_of(batch: Batch, block_size: int) -> tuple[Sequences, Sequences]:
    """A step's single tokens, which come first, and its sequences of several, drafts and chunks of prompts."""
    several = next((at for at, row in enumerate(batch.rows) if row.count > 1), len(batch.rows))
    return _sequences(batch.rows[:several], 0, block_size), _sequences(batch.rows[several:], several, block_size)


def _sequences(rows: Sequence[Row], begin: int, block_size: int) -> Sequences:
    return Sequences(
        begin,
        tuple(row.count for row in rows),
        tuple(row.context for row in rows),
        tuple(row.request.blocks[: -(-row.context // block_size)] for row in rows),
    )


def padded_tables(tables: Sequence[Sequence[int]], width: int, filler: int) -> list[int]:
    """Tables one after another, each filled up to `width` blocks."""
    return [block for table in tables for block in (*table, *[filler] * (width - len(table)))]


def pages(cache: LayerCache, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """K and V, each a view [blocks, block_size, KV heads, head_dim] of the cache's own memory, with equal strides. Unfit where
    it keeps something else than the numbers.
    """
    if not isinstance(cache, PlainLayer):
        raise Unfit("the cache keeps 8 bits and scales, which only torch's own way reads: set kv_dtype to auto")
    both = cache.blocks.view(-1, cache.block_size, 2, config.num_kv_heads, config.head_dim)
    return both[:, :, 0], both[:, :, 1]


def scale_of(config: ModelConfig) -> float:
    return config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale


class StaticTables:
    """Lengths and tables of a fixed number of rows in one tensor of int32, filled by one copy."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self._whole = torch.zeros(rows * (1 + width), dtype=torch.int32, device=device)
        self.lengths = self._whole[:rows]
        self.tables = self._whole[rows:].view(rows, width)

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int], filler: int = 0) -> None:
        """ValueError where they are not as many as there is room for."""
        if len(tables) != self.rows or len(contexts) != self.rows or max(map(len, tables)) > self.width:
            raise ValueError(f"{len(tables)} tables don't fit into {self.rows} of {self.width} blocks")
        numbers = [*contexts, *padded_tables(tables, self.width, filler)]
        self._whole.copy_(torch.tensor(numbers, dtype=torch.int32))
