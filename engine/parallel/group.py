"""What ranks do together: sums after the row-parallel products, the gathered logits, and the time for which each waits in them."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.checkpoints.interface import Checkpoint
from engine.linear import Kernel, Linear, few_sizes
from engine.model import Decoder
from engine.parallel.shard import Shard

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Tensor = torch.Tensor

MEET_S = 600.0
"""So long ranks wait for each other once, while they load: one may read its weights from a slow disk."""
JOIN_S = 120.0
"""So long a rank may take to come up, libraries and all, before it meets the others."""
TIMED_EVERY = 16
"""One step in so many is timed on a device that works beside the host; the wait of the others is taken to be as long."""


def meeting_place(port: int = 0) -> Store:
    """Where ranks find each other: the first opens one, the others come to its port."""
    first = port == 0
    wait = timedelta(seconds=JOIN_S)
    return dist.TCPStore("127.0.0.1", port, is_master=first, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]


def here(rank: int) -> str:
    """The key of the meeting place that says that a rank has come up."""
    return f"here/{rank}"


class Group:
    """One rank's way to the others. `wait_s` is what this step has spent in collectives so far: the others' delay and the transfer."""

    def __init__(self, shard: Shard, store: Store, device: torch.device, timeout_s: float) -> None:
        self.shard = shard
        self._device = device
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps = 0
        self._timed = device.type == "cpu"
        self.wait_s = 0.0
        store.set(here(shard.rank), "1")
        store.wait([here(rank) for rank in range(shard.size)], timedelta(seconds=JOIN_S))
        # gloo also on CUDA: for the numbers that are agreed on before any step
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=shard.rank, world_size=shard.size, timeout=timedelta(seconds=timeout_s)
        )

    def meet(self) -> None:
        """Wait until every rank has come here."""
        dist.monitored_barrier(timeout=timedelta(seconds=MEET_S))

    def least(self, number: int) -> int:
        """The smallest that any rank says."""
        said = torch.tensor([number])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return int(said)

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._begin()
        dist.all_reduce(x)
        self._end()
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """What every rank has, on the first; nothing elsewhere."""
        first = self.shard.rank == 0
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if first else None
        self._begin()
        dist.gather(x, parts)
        self._end()
        return parts or []

    def begin_step(self) -> None:
        self._steps += 1
        if self._device.type == "cpu":
            self.wait_s = 0.0
            return
        self._timed = self._steps % TIMED_EVERY == 1
        self._waits.clear()

    def end_step(self) -> float:
        """Seconds that this step spent in collectives. On CUDA the step must have come to its end."""
        if self._device.type != "cpu" and self._timed:
            torch.cuda.synchronize(self._device)
            self.wait_s = sum(begin.elapsed_time(end) for begin, end in self._waits) / 1000
        return self.wait_s

    def close(self) -> None:
        dist.destroy_process_group()

    def _begin(self) -> None:
        if self._device.type == "cpu":
            self.wait_s -= time.perf_counter()
        elif self._timed:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            pair[0].record()
            self._waits.append(pair)

    def _end(self) -> None:
        if self._device.type == "cpu":
            self.wait_s += time.perf_counter()
        elif self._timed:
            self._waits[-1][1].record()


class RowParallel:
    """A product cut by inputs: each rank has a part of every sum. The first rank adds the residual, so that it is added once."""

    def __init__(self, inner: Linear, group: Group) -> None:
        self._inner, self._group = inner, group
        self.nbytes, self.num_weights = inner.nbytes, inner.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum_(self._inner(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._group.sum_(self._inner.plus(x, self._once(residual)))

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._group.sum_(self._inner.normed(x, norm, eps))

    def gated_plus(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._group.sum_(self._inner.gated_plus(gate_up, self._once(residual)))

    def padded(self, rows: int) -> int:
        return self._inner.padded(rows)

    def _once(self, residual: Tensor) -> Tensor:
        return residual if self._group.shard.rank == 0 else residual.zero_()


class VocabularyParallel:
    """The head cut by outputs. The first rank gets all logits, the others' are of no use to anybody."""

    def __init__(self, kernel: Kernel, weight: Tensor, group: Group) -> None:
        self._group, self._vocab = group, weight.shape[0]
        share = -(-self._vocab // group.shard.size)  # padded, as all parts that are gathered must be of one size
        own = weight[group.shard.rank * share : (group.shard.rank + 1) * share]
        self._inner = kernel(F.pad(own, (0, 0, 0, share - own.shape[0])), None)
        self.nbytes, self.num_weights = self._inner.nbytes, self._inner.num_weights
        # ranks may have chosen different kernels, and must have as many rows all the same
        self._pads = group.least(int(self._inner.padded(17) == 17)) == 0

    def __call__(self, x: Tensor) -> Tensor:
        return self._whole(self._inner(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._whole(self._inner.normed(x, norm, eps))

    def gated_plus(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._whole(self._inner.gated_plus(gate_up, torch.zeros_like(residual))).add_(residual)

    def padded(self, rows: int) -> int:
        return few_sizes(rows) if self._pads else rows

    def _whole(self, part: Tensor) -> Tensor:
        parts = self._group.gather(part.contiguous())
        return torch.cat(parts, dim=1)[:, : self._vocab] if parts else part


def join(decoder: Decoder, checkpoint: Checkpoint, kernel: Kernel, group: Group) -> None:
    """Make a decoder that was loaded with a rank's share work with the others'."""
    decoder.layers = [
        replace(layer, attention_out=RowParallel(layer.attention_out, group), down=RowParallel(layer.down, group))
        for layer in decoder.layers
    ]
    decoder.fused = None  # it computes all layers in one call, without a word to the others
    tied = decoder.config.tied or not checkpoint.has("lm_head.weight")
    embedding = decoder.embedding
    head = embedding if tied else checkpoint.tensor("lm_head.weight").to(embedding.device, embedding.dtype)
    decoder.head = VocabularyParallel(kernel, head, group)
