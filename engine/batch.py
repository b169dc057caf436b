"""A step plan as tensors: what the model needs to know about the tokens of one step, built once for all layers."""

from __future__ import annotations

import itertools
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

    `table` is [rows * blocks]; a row attends to the tokens `firsts` to before `lengths` of its part of the table, both [rows].
    `view` is (first block, tokens) when the group is one sequence whose blocks lie next to each other: then nothing needs
    gathering, and the view's first `skip` tokens are out of reach. `mask` is [rows, 1, 1, tokens that are read], 0 or -inf; None
    when all are within reach. `shared`: the rows are a token and its draft, so their parts of the table are alike.
    """

    begin: int
    end: int
    view: tuple[int, int] | None
    table: Tensor
    mask: Tensor | None
    firsts: Tensor
    lengths: Tensor
    skip: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `begin` to `end` of the step: consecutive tokens of one sequence. `table` only when earlier tokens are in the cache:
    then `context` tokens are read by it. `mask` [tokens, context] only when something else than causal is wanted.
    """

    begin: int
    end: int
    context: int
    table: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Reach:
    """What a step's tokens attend to in one kind of layer."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


NOWHERE = Reach((), ())


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [padded tokens]; what lies beyond `tokens` is computed and thrown away
    positions: Tensor  # [padded tokens]
    tokens: int
    slots: Tensor  # [tokens], where K and V go
    full: Reach
    local: Reach  # in layers with a window; `full` itself as long as nothing is out of the window
    block_size: int  # of the cache, in tokens
    sampled: Tensor | None  # [samples] rows of which the next token is chosen; None: all
    rows: tuple[Row, ...]  # in the order of the tensors

    @property
    def sampled_rows(self) -> list[Row]:
        return [row for row in self.rows if row.samples]


def build(
    plan: StepPlan,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    padded: Callable[[int], int] = int,
    window: int | None = None,
    gathers: bool = True,
) -> Batch:
    """Tensors for a plan. Single tokens come first, longest context first, then drafts, then chunks, then padding up to `padded`.
    `window` is the model's, if it has layers with one. Unless attention `gathers`, it needs no `Reach`, and gets empty ones.
    """
    single = sorted((row for row in plan.rows if row.count == 1), key=lambda row: -row.context)
    drafted = [row for row in plan.rows if row.draft.tokens]
    chunks = [row for row in plan.rows if row.count > 1 and not row.draft.tokens]
    rows = (*single, *drafted, *chunks)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    for row in rows:
        blocks = row.request.blocks
        ids += row.tokens
        positions += range(row.start, row.context)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(row.start, row.context)]
        samples += range(len(ids) - row.num_samples, len(ids))
    tokens = len(ids)
    padding = [0] * (padded(tokens) - tokens)
    full = _reach(single, drafted, chunks, None, block_size, dtype, device) if gathers else NOWHERE
    windowed = gathers and window is not None and any(row.context > window for row in rows)
    return Batch(
        ids=torch.tensor(ids + padding, device=device),
        positions=torch.tensor(positions + padding, device=device),
        tokens=tokens,
        slots=torch.tensor(slots, device=device),
        full=full,
        local=_reach(single, drafted, chunks, window, block_size, dtype, device) if windowed else full,
        block_size=block_size,
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


def _reach(
    single: Sequence[Row],
    drafted: Sequence[Row],
    chunks: Sequence[Row],
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Reach:
    begins = list(itertools.accumulate((row.count for row in (*drafted, *chunks)), initial=len(single)))
    return Reach(
        tuple(
            _decode_group(single[a:b], a, window, block_size, dtype, device)
            for a, b in group_bounds(single, block_size)
        )
        + tuple(
            _draft_group(row, begin, window, block_size, dtype, device)
            for row, begin in zip(drafted, begins, strict=False)  # and where the last one ends
        ),
        tuple(
            _prefill_chunk(row, begin, window, block_size, dtype, device)
            for row, begin in zip(chunks, begins[len(drafted) :], strict=False)
        ),
    )


def _blocks(row: Row, window: int | None, block_size: int) -> tuple[list[int], int]:
    """The blocks that a row attends to, and the position of their first token. A windowed token sees the last `window`, itself
    among them.
    """
    first = 0 if window is None else max(0, row.start + 1 - window) // block_size
    return row.request.blocks[first : -(-row.context // block_size)], first * block_size


def _decode_group(
    rows: Sequence[Row], begin: int, window: int | None, block_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    end = begin + len(rows)
    spans = [_blocks(row, window, block_size) for row in rows]
    if len(rows) == 1:
        blocks, offset = spans[0]
        if blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == list(range(blocks[0], blocks[-1] + 1)):
            tokens = rows[0].context - offset
            skip = 0 if window is None else max(0, tokens - window)
            own, first, last = (torch.tensor(numbers, device=device) for numbers in (blocks, [skip], [tokens]))
            return DecodeGroup(begin, end, (blocks[0], tokens), own, None, first, last, skip)
    width = max(len(blocks) for blocks, _ in spans)
    table: list[int] = []
    for blocks, _ in spans:
        table += blocks
        table += [0] * (width - len(blocks))
    ends = torch.tensor([row.context - offset for row, (_, offset) in zip(rows, spans, strict=True)], device=device)
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
    at = torch.arange(width * block_size, device=device)
    outside = (at >= ends[:, None]) | (at < firsts[:, None])
    mask = torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))
    return DecodeGroup(begin, end, None, torch.tensor(table, device=device), mask[:, None, None, :], firsts, ends)


def _draft_group(
    row: Row, begin: int, window: int | None, block_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    """A token and its draft: as many rows of one token each, so that each is computed just as it would be alone."""
    blocks, offset = _blocks(row, window, block_size)
    side_by_side = blocks == list(range(blocks[0], blocks[-1] + 1))
    ends = torch.arange(row.start + 1 - offset, row.context + 1 - offset, device=device)
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
    skip = 0 if window is None or not side_by_side else max(0, row.start + 1 - offset - window)
    read = row.context - offset if side_by_side else len(blocks) * block_size
    at = torch.arange(skip, read, device=device)
    outside = (at >= ends[:, None]) | (at < firsts[:, None])
    mask = torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill_(outside, float("-inf"))
    return DecodeGroup(
        begin,
        begin + row.count,
        (blocks[0], read) if side_by_side else None,
        torch.tensor(blocks * row.count, device=device),
        mask[:, None, None, :],
        firsts,
        ends,
        skip,
        shared=True,
    )


def _prefill_chunk(
    row: Row, begin: int, window: int | None, block_size: int, dtype: torch.dtype, device: torch.device
) -> PrefillChunk:
    blocks, offset = _blocks(row, window, block_size)
    start, context = row.start - offset, row.context - offset
    narrowed = window is not None and row.context > window
    table = torch.tensor(blocks, device=device) if row.start else None
    mask = None
    if row.start or narrowed:
        barred = torch.full((row.count, context), float("-inf"), dtype=dtype, device=device)
        mask = barred.triu(start + 1)  # what comes after
        if window is not None and narrowed:
            mask += barred.tril_(start - window)  # what is too long ago
    return PrefillChunk(begin, begin + row.count, context, table, mask)
