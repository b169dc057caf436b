"""The KV cache's memory, cut into blocks: as the model computes, or in 8 bits. Which block belongs to whom is the scheduler's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.modelconfig import ModelConfig

Tensor = torch.Tensor


class LayerCache(Protocol):
    """One layer's K and V. A token's row holds K of all KV heads, then V of all KV heads: `width` numbers."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All its memory, each [blocks, whatever one block holds]."""

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Put `rows` [tokens, width] into `slots` [tokens]. Where the cache keeps less than they say, `rows` become what it
        keeps: attention sees the same numbers whether a token was computed in this step or long ago.
        """

    def gather(self, table: Tensor) -> Tensor:
        """The rows of the blocks in `table`, [blocks * block_size, width]."""

    def run(self, first: int, tokens: int) -> Tensor:
        """The first `tokens` rows from block `first` on, without gathering: [tokens, width]."""


class PlainLayer:
    """The numbers themselves.

    Zeroed, because padding reads slots that nobody has written: their weight is 0, and 0 times an old NaN would be NaN.
    """

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.width = width
        self.blocks = _zeros(num_blocks, block_size * width, dtype, device)
        self.slots = self.blocks.view(-1, width)
        self.parts: tuple[Tensor, ...] = (self.blocks,)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.slots.index_copy_(0, slots, rows)

    def gather(self, table: Tensor) -> Tensor:
        return self.blocks.index_select(0, table).view(-1, self.width)

    def run(self, first: int, tokens: int) -> Tensor:
        begin = first * self.block_size
        return self.slots[begin : begin + tokens]


class Int8Layer:
    """8 bits a number, symmetric, and a float32 scale for each token and head: an outlier spoils its own head's row only."""

    def __init__(
        self, num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.rows = (-1, heads, head_dim)  # of one token: K heads, then V heads
        blocks = _zeros(num_blocks, block_size * heads * head_dim, torch.int8, device)
        scales = _zeros(num_blocks, block_size * heads, torch.float32, device)
        self.slots, self.slot_scales = blocks.view(-1, heads * head_dim), scales.view(-1, heads)
        self.parts: tuple[Tensor, ...] = (blocks, scales)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        heads = rows.reshape(self.rows)
        scales = heads.abs().amax(dim=-1).float().div_(127.0)
        # a head of zeros has scale 0: divided by 1 instead, it stays 0
        numbers = (heads / scales.where(scales > 0, 1.0).unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8)
        self.slots.index_copy_(0, slots, numbers.flatten(1))
        self.slot_scales.index_copy_(0, slots, scales)
        rows.copy_(self._numbers(numbers, scales))

    def gather(self, table: Tensor) -> Tensor:
        numbers, scales = (part.index_select(0, table) for part in self.parts)
        return self._numbers(numbers.view(self.rows), scales.view(-1, self.rows[1]))

    def run(self, first: int, tokens: int) -> Tensor:
        at = slice(first * self.block_size, first * self.block_size + tokens)
        return self._numbers(self.slots[at].view(self.rows), self.slot_scales[at])

    def _numbers(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """[tokens, heads, head_dim] int8 and [tokens, heads] -> [tokens, width] in the model's type."""
        return (numbers * scales.unsqueeze(-1)).to(self.dtype).flatten(1)


class KVStore:
    """All layers' caches on the device and, for preempted requests, as many blocks in host memory as are wanted."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
        host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.bytes_per_token = bytes_per_token(config, dtype, int8)

        def layer() -> LayerCache:
            if int8:
                return Int8Layer(num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim, dtype, device)
            return PlainLayer(num_blocks, block_size, config.kv_width, dtype, device)

        self.layers = [layer() for _ in range(config.num_layers)]
        cpu = torch.device("cpu")
        self._host = [
            tuple(_zeros(host_blocks, part.shape[1], part.dtype, cpu) for part in layer.parts) for layer in self.layers
        ]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to host memory: (device's block, host's block) each."""
        ours, hosts = (torch.tensor(numbers) for numbers in zip(*pairs, strict=True))
        for layer, kept in zip(self.layers, self._host, strict=True):
            for part, host in zip(layer.parts, kept, strict=True):
                host[hosts] = part.index_select(0, ours.to(part.device)).cpu()

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back: (host's block, device's block) each."""
        hosts, ours = (torch.tensor(numbers) for numbers in zip(*pairs, strict=True))
        for layer, kept in zip(self.layers, self._host, strict=True):
            for part, host in zip(layer.parts, kept, strict=True):
                part.index_copy_(0, ours.to(part.device), host[hosts].to(part.device))

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], tokens: int) -> memoryview:
        """What a table's blocks hold of its first `tokens` tokens, layer by layer: `tokens * bytes_per_token` bytes, the same
        whatever the size of a block.
        """
        whole = torch.empty(tokens * self.bytes_per_token, dtype=torch.uint8)
        for slots, rows in self._slots_and_rows(blocks, tokens, whole):
            rows.copy_(slots)
        return whole.numpy().data

    @torch.inference_mode()
    def fill(self, blocks: Sequence[int], tokens: int, data: bytes | memoryview) -> None:
        """Write what `read` gave into a table's blocks. ValueError when it has another length, or holds numbers that are not
        finite: these would spoil others that read the blocks later, as padding.
        """
        if len(data) != tokens * self.bytes_per_token:
            raise ValueError(
                f"{len(data)} bytes of cache for {tokens} tokens, expected {tokens * self.bytes_per_token}"
            )
        pairs = list(self._slots_and_rows(blocks, tokens, torch.from_numpy(np.frombuffer(data, np.uint8).copy())))
        # no real cache comes near the largest number, so that its sum is finite if it is
        if not all(bool(r.sum(dtype=torch.float32).isfinite()) for _, r in pairs if r.dtype.is_floating_point):
            raise ValueError("the cache holds numbers that are not finite")
        for slots, rows in pairs:
            slots.copy_(rows)

    def _slots_and_rows(self, blocks: Sequence[int], tokens: int, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The slots of a table's first `tokens` tokens beside what stands for them in `whole`, bytes in the order of layers: one
        pair for each part and each run of neighbouring blocks.
        """
        if not tokens:
            return
        size = self.block_size
        runs: list[list[int]] = []
        for number, block in enumerate(blocks[: -(-tokens // size)]):
            if runs and block == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([block, block + 1, number * size])
        for part in self._parts():
            width = part.shape[1] // size
            taken = tokens * width * part.element_size()
            rows, whole = whole[:taken].view(part.dtype).view(tokens, width), whole[taken:]
            slots = part.view(-1, width)
            for first, end, at in runs:
                count = min((end - first) * size, tokens - at)
                yield slots[first * size : first * size + count], rows[at : at + count]

    def _parts(self) -> Iterator[Tensor]:
        return (part for layer in self.layers for part in layer.parts)


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On CPU through numpy, whose zeros are pages that the kernel gives only when they are touched: unlike torch's, a cache
    costs the memory that is used, not all that it may grow to.
    """
    if device.type != "cpu" or not rows:
        return torch.zeros(rows, width, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(rows * width * dtype.itemsize, dtype=np.uint8)).view(dtype).view(rows, width)


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, int8: bool = False) -> int:
    """Cache bytes of one token over all layers: layers x 2 x KV heads x head_dim x bytes per number; in 8 bits one byte a
    number and four a head.
    """
    if int8:
        return config.num_layers * 2 * config.num_kv_heads * (config.head_dim + 4)
    return config.num_layers * config.kv_width * dtype.itemsize
