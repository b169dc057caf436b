"""What every way of attending offers, in a step that is computed once and in one that is captured and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import Batch
from engine.kvstore import LayerCache
from engine.modelconfig import ModelConfig

Tensor = torch.Tensor


class Attending(Protocol):
    """Grouped-query attention of one step's tokens; K and V of these tokens must be in the cache already."""

    def begin(self, batch: Batch) -> None:
        """A step begins: what all its layers need is made once."""

    def __call__(self, batch: Batch, local: bool, qkv: Tensor, cache: LayerCache) -> Tensor:
        """[padded tokens, q_width + kv_width] -> [padded tokens, q_width]; zeros beyond the tokens. `local`: a layer with a window."""


class Staged(Attending, Protocol):
    """Attention of a fixed number of single tokens, whose tables and lengths lie in memory that stays where it is: what `begin`
    and the calls do can be captured, and replayed after another `load`.
    """

    def load(self, tables: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        """Take in what each row attends to: its blocks, and how many tokens of them. As many rows as were staged."""


class Attention(Attending, Protocol):
    name: str
    gathers: bool
    """Whether it reads tables of padded width into one piece: then a batch carries them, and a wide table costs time and memory
    whatever is in it."""

    def stage(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Staged:
        """For `rows` single tokens whose tables have `width` blocks at most."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where attention is to work: what decides whether a backend suits."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    block_size: int
    int8: bool = False  # the cache is kept in 8 bits


class Unfit(ValueError):
    """A backend that can't do what this model and these settings need: one line that says why, and what would help."""
