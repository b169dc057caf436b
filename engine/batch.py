"""A step plan as tensors: what the model needs to know about the tokens of one step, built once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.scheduler import Row, StepPlan

Tensor = torch.Tensor

SPLIT_SAVES_SLOTS = 512
"""Decoding rows are cut into groups of similar length where that saves gathering so many padded slots: about what another
group costs in fixed time."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `begin` to `end` of the step, one token each, that attend together over tables of equal width.

    `view` is (first block, tokens) when the group is one sequence whose blocks lie next to each other; then nothing needs
    gathering. Else `table` is [rows * blocks] and `mask` [rows, 1, 1, blocks * block_size], 0 or -inf.
    """

    begin: int
    end: int
    view: tuple[int, int] | None
    table: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `begin` to `end` of the step: consecutive tokens of one sequence. `table` and `mask` [tokens, context] only when
    earlier tokens are in the cache.
    """

    begin: int
    end: int
    context: int
    table: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [padded tokens]; what lies beyond `tokens` is computed and thrown away
    positions: Tensor  # [padded tokens]
    tokens: int
    slots: Tensor  # [tokens], where K and V go
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]
    sampled: Tensor | None  # [samples] rows of which the next token is chosen; None: all
    rows: tuple[Row, ...]  # in the order of the tensors

    @property
    def sampled_rows(self) -> list[Row]:
        return [row for row in self.rows if row.samples]


def build(
    plan: StepPlan, block_size: int, dtype: torch.dtype, device: torch.device, padded: Callable[[int], int] = int
) -> Batch:
    """Tensors for a plan. Single tokens come first, longest context first; chunks follow, then padding up to `padded`."""
    single = sorted((row for row in plan.rows if row.count == 1), key=lambda row: -row.context)
    chunks = [row for row in plan.rows if row.count > 1]
    rows = (*single, *chunks)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    for row in rows:
        blocks = row.request.blocks
        ids += row.request.tokens[row.start : row.context]
        positions += range(row.start, row.context)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(row.start, row.context)]
        if row.samples:
            samples.append(len(ids) - 1)
    tokens = len(ids)
    padding = [0] * (padded(tokens) - tokens)
    return Batch(
        ids=torch.tensor(ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        tokens=tokens,
        slots=torch.tensor(slots, device=device),
        decode=tuple(
            _decode_group(single[a:b], a, block_size, dtype, device) for a, b in group_bounds(single, block_size)
        ),
        prefill=tuple(_prefill_chunks(chunks, len(single), block_size, dtype, device)),
        sampled=None if len(samples) == tokens else torch.tensor(samples, device=device),
        rows=rows,
    )


def group_bounds(rows: Sequence[Row], block_size: int) -> list[tuple[int, int]]:
    """Where to cut rows, sorted by falling context, so that short ones don't gather long padding: (begin, end) each."""
    bounds: list[tuple[int, int]] = []
    begin = 0
    for at in range(1, len(rows)):
        widest = -(-rows[begin].context // block_size)
        here = -(-rows[at].context // block_size)
        if (widest - here) * (len(rows) - at) * block_size > SPLIT_SAVES_SLOTS:
            bounds.append((begin, at))
            begin = at
    if rows:
        bounds.append((begin, len(rows)))
    return bounds


def _decode_group(
    rows: Sequence[Row], begin: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    end = begin + len(rows)
    width = -(-rows[0].context // block_size)
    if len(rows) == 1:
        blocks = rows[0].request.blocks[:width]
        if blocks[-1] - blocks[0] == width - 1 and blocks == list(range(blocks[0], blocks[-1] + 1)):
            return DecodeGroup(begin, end, (blocks[0], rows[0].context), None, None)
    table: list[int] = []
    for row in rows:
        used = row.request.blocks[: -(-row.context // block_size)]
        table += used
        table += [0] * (width - len(used))
    lengths = torch.tensor([row.context for row in rows], device=device)
    beyond = torch.arange(width * block_size, device=device) >= lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))
    return DecodeGroup(begin, end, None, torch.tensor(table, device=device), mask[:, None, None, :])


def _prefill_chunks(
    rows: Sequence[Row], begin: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[PrefillChunk]:
    chunks = []
    for row in rows:
        end = begin + row.count
        table = mask = None
        if row.start:
            used = row.request.blocks[: -(-row.context // block_size)]
            table = torch.tensor(used, device=device)
            mask = torch.full((row.count, row.context), float("-inf"), dtype=dtype, device=device).triu_(row.start + 1)
        chunks.append(PrefillChunk(begin, end, row.context, table, mask))
        begin = end
    return chunks
