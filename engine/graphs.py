"""Decoding steps that are captured once for each size and replayed: a step then costs the host two copies and one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.interface import Staged
from engine.batch import NOWHERE, Batch
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.scheduler import Row
from engine.settings import EngineSettings
from engine.stages import Untimed

Tensor = torch.Tensor
Log = Callable[[str], None]

MOST_GATHERED = 1 << 16
"""Where attention reads tables of padded width, steps of more slots than that (rows times width) are not captured: they read so
much that the host's time doesn't show, and would hold as much memory."""
LEAST_WIDTH = 256
"""Tokens of the narrowest table then; the next ones are twice as wide each."""
WARM_UPS = 2
"""So often a step runs before it is captured: libraries choose and load their kernels in the first ones."""


class Capturer(Protocol):
    """Records work of the device and starts it again."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `step` and record it: what replays it, and the tensor that each replay fills anew. What it reads must lie in
        memory that stays. RuntimeError when something of it can't be captured.
        """

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""


class CudaGraphs:
    """torch.cuda's graphs. They share a pool of memory, as no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        own = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        own.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = step()
        return graph.replay, out

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of a captured step, and blocks of each one's table."""

    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Captured:
    inputs: Tensor  # [3, rows]: token ids, positions, slots
    staged: Staged
    replay: Callable[[], None]
    logits: Tensor  # [rows, vocab]


def sizes_of(max_seqs: int, context: int, block_size: int, gathers: bool) -> list[Size]:
    """1, 2, 4, ... rows up to all; tables for the whole context, or of several widths where attention reads padding too. The
    largest first: the smaller ones find their memory in its.
    """
    rows = [1 << n for n in range(max_seqs.bit_length()) if 1 << n < max_seqs] + [max_seqs]
    most = -(-context // block_size)
    if not gathers:
        return [Size(count, most) for count in reversed(rows)]
    widths, tokens = [], LEAST_WIDTH
    while tokens < context:
        widths.append(-(-tokens // block_size))
        tokens *= 2
    widths.append(most)
    sizes = [Size(n, width) for n in rows for width in widths if n * width * block_size <= MOST_GATHERED]
    return sorted(sizes, key=lambda size: (-size.rows * size.width, -size.rows))


class DecodeGraphs:
    """Steps of single tokens over one cache. Rows that only fill up a size write to a block that no sequence has, and read it."""

    def __init__(self, decoder: Decoder, cache: KVStore, spare: int, sizes: Iterable[Size], capturer: Capturer) -> None:
        """Capture them all. `spare` is that block. RuntimeError when one can't be captured."""
        self._decoder, self._cache, self._spare = decoder, cache, spare
        self._device = decoder.embedding.device
        self._captured = {size: self._capture(size, capturer) for size in sizes}
        self._sizes = sorted(self._captured, key=lambda size: (size.rows, size.width))
        self.replays = 0

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor | None:
        """Compute single tokens, write their K and V: [rows, vocab], to be used before the next replay. None for a step that was
        not captured: one with prompts, with guesses, or too large.
        """
        if not rows or any(row.count > 1 for row in rows):
            return None
        blocks = -(-max(row.context for row in rows) // self._cache.block_size)
        size = next((size for size in self._sizes if size.rows >= len(rows) and size.width >= blocks), None)
        if size is None:
            return None
        captured = self._captured[size]
        self._load(captured.inputs, captured.staged, size, rows)
        captured.replay()
        self.replays += 1
        return captured.logits[: len(rows)]

    @torch.inference_mode()
    def _capture(self, size: Size, capturer: Capturer) -> Captured:
        decoder = self._decoder
        inputs = torch.zeros(3, size.rows, dtype=torch.int64, device=self._device)
        staged = decoder.attention.stage(size.rows, size.width, decoder.embedding.dtype, self._device)
        batch = Batch(
            ids=inputs[0],
            positions=inputs[1],
            tokens=size.rows,
            slots=inputs[2],
            full=NOWHERE,
            local=NOWHERE,
            block_size=self._cache.block_size,
            sampled=None,
            rows=(),
        )

        def step() -> Tensor:
            return decoder.logits(decoder.forward(batch, self._cache, staged))

        clock, decoder.clock = decoder.clock, Untimed()  # its marks would become a part of what is replayed
        try:
            self._load(inputs, staged, size, ())
            return Captured(inputs, staged, *capturer.capture(step))
        finally:
            decoder.clock = clock

    def _load(self, inputs: Tensor, staged: Staged, size: Size, rows: Sequence[Row]) -> None:
        block_size, spare = self._cache.block_size, self._spare
        filling = size.rows - len(rows)
        ids = [row.tokens[0] for row in rows] + [0] * filling
        positions = [row.start for row in rows] + [0] * filling
        slots = [row.request.blocks[row.start // block_size] * block_size + row.start % block_size for row in rows]
        slots += [spare * block_size + number % block_size for number in range(filling)]
        inputs.copy_(torch.tensor([ids, positions, slots]))
        tables = [row.request.blocks[: -(-row.context // block_size)] for row in rows] + [[spare]] * filling
        staged.load(tables, [row.context for row in rows] + [1] * filling)


def capture_all(
    decoder: Decoder, cache: KVStore, spare: int, sizes: Sequence[Size], capturer: Capturer, log: Log
) -> DecodeGraphs | None:
    """None, and one line in the log, where they can't be captured: then steps are computed as they come."""
    try:
        graphs = DecodeGraphs(decoder, cache, spare, sizes, capturer)
    except Exception as error:  # kernels of other libraries among them; whatever they raise, steps can go on without
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        log(f"CUDA graphs: not used ({reason})")
        return None
    return graphs


def graph_bytes(decoder: Decoder, cache: KVStore, sizes: Sequence[Size], capturer: Capturer, log: Log) -> int | None:
    """What captured steps will take of the device's memory, by capturing them over a cache of one block. None as `capture_all`."""
    before = capturer.free_bytes()
    if (graphs := capture_all(decoder, cache, 0, sizes, capturer, log)) is None:
        return None
    taken = max(0, before - capturer.free_bytes())
    del graphs
    most = max(size.rows for size in sizes)
    log(f"CUDA graphs: {len(sizes)} sizes, up to {most} sequences, {taken / 2**20:.0f} MiB")
    return taken


CapturerOf = Callable[[EngineSettings, torch.device], Capturer | None]


def capturer_of(settings: EngineSettings, device: torch.device) -> Capturer | None:
    """None where steps are not to be captured: on CPU, and where ranks exchange sums within a step."""
    if device.type != "cuda" or not settings.cuda_graphs or settings.tensor_parallel > 1:
        return None
    return CudaGraphs(device)
