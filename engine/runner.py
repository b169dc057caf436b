"""Runs a step plan on the device: the only place where plans become tensors, and tensors become tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.accounting import ModelCost
from engine.batch import Batch, build
from engine.core import OutOfMemory, StepResult
from engine.graphs import DecodeGraphs
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.scheduler import Row, StepPlan
from engine.stages import DeviceClock, HostClock, Stage, StageClock, Untimed
from engine.threads import ThreadChooser
from engine.verification import choose


class Runner:
    def __init__(
        self, decoder: Decoder, cache: KVStore, threads: ThreadChooser, clock: StageClock | None = None
    ) -> None:
        self.decoder = decoder
        self.clock = decoder.clock = clock or Untimed()
        self.cache = cache
        self.threads = threads
        self.graphs: DecodeGraphs | None = None
        self._device = decoder.embedding.device
        self._dtype = decoder.embedding.dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy a plan's blocks, compute its tokens, write their K and V, choose the next ones. OutOfMemory leaves everything
        usable.
        """
        began = time.perf_counter()
        tokens = plan.num_tokens
        self.clock.begin(tokens)
        if plan.swap_out:
            self.cache.swap_out(plan.swap_out)
        if plan.swap_in:
            self.cache.swap_in(plan.swap_in)
        if not plan.rows:
            return StepResult((), time.perf_counter() - began)
        threads = self.threads.choose(tokens)
        if self._device.type == "cpu" and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        try:
            chosen = self._step(plan)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise OutOfMemory(f"out of memory in a step of {tokens} tokens") from error
            raise
        seconds = time.perf_counter() - began
        self.threads.learn(tokens, threads, seconds)
        return StepResult(chosen, seconds, self.clock.take(seconds))

    def _step(self, plan: StepPlan) -> tuple[tuple[Row, int], ...]:
        if self.graphs is not None and (logits := self.graphs.logits(plan.rows)) is not None:
            self.clock.in_one_piece()
            return self._chosen(logits, plan.rows)
        decoder, batch = self.decoder, self._batch(plan)
        self.clock.mark(Stage.SCHEDULE)
        x = decoder.forward(batch, self.cache)
        rows = batch.sampled_rows
        if not rows:
            return ()
        if batch.sampled is not None:
            x = x.index_select(0, batch.sampled)
        chosen = choose(self.decoder.logits(x), rows)
        self.clock.mark(Stage.SAMPLE)
        return chosen

    def _batch(self, plan: StepPlan) -> Batch:
        decoder = self.decoder
        padded, window, gathers = decoder.head.padded, decoder.config.window, decoder.attention.gathers
        return build(plan, self.cache.block_size, self._dtype, self._device, padded, window, gathers)

    def _chosen(self, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[tuple[Row, int], ...]:
        """Of rows of one token: the next token of each that samples."""
        sampled = [number for number, row in enumerate(rows) if row.samples]
        if not sampled:
            return ()
        wanted = logits if len(sampled) == len(rows) else logits[sampled]
        chosen = choose(wanted, [rows[number] for number in sampled])
        self.clock.mark(Stage.SAMPLE)
        return chosen


def stage_clock(device: torch.device) -> StageClock:
    """The stopwatch for steps on this device."""
    if device.type != "cuda":
        return HostClock()
    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def cost_of(decoder: Decoder, cache: KVStore) -> ModelCost:
    """The constants that count a step's work, from the loaded weights and the cache."""
    config, item = decoder.config, decoder.embedding.element_size()
    return ModelCost(
        layer_weights=decoder.num_layer_weights,
        head_weights=decoder.head.num_weights,
        layer_bytes=decoder.layer_bytes,
        head_bytes=decoder.head.nbytes,
        embedding_row_bytes=config.hidden * item,
        kv_bytes_per_token=cache.bytes_per_token,
        attention_width=config.num_layers * config.num_heads * config.head_dim,
        window=config.window,
        local_share=len(config.local_layers) / config.num_layers,
    )
