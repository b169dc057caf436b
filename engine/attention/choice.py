"""Which way of attending is used: what is installed and suits the model, agrees with torch's own and is faster, tried at load."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention import flash, flashinfer, flex
from engine.attention.gather import GatherAttention
from engine.attention.interface import Attention, Place, Unfit
from engine.batch import Batch, build
from engine.kvstore import KVStore
from engine.request import Request, Sampling
from engine.scheduler import Row, StepPlan
from engine.settings import SettingsError

Tensor = torch.Tensor
Log = Callable[[str], None]

EXACT, HALF = 1e-4, 2e-2
"""How far an output may lie from the reference, as a share of its length: within rounding, and with half precision on the way."""

LEAST_ROUNDS, MOST_ROUNDS, TRIAL_S = 3, 100, 0.1


@dataclass(frozen=True, slots=True)
class Backend:
    """`package` is what is to be installed, `module` what is imported; none: it is part of torch."""

    make: Callable[[Place, Any], Attention]
    unfit: Callable[[Place], str | None]
    package: str | None = None
    module: str | None = None


BACKENDS: Mapping[str, Backend] = {
    "flashinfer": Backend(flashinfer.FlashInfer, flashinfer.FlashInfer.unfit, "flashinfer-python", "flashinfer"),
    "flash": Backend(flash.Flash, flash.Flash.unfit, "flash-attn", "flash_attn"),
    "flex": Backend(flex.Flex, flex.Flex.unfit),
}


def choose_attention(
    wanted: str, place: Place, log: Log, on_cuda: bool, found: Callable[[str], Any] = importlib.import_module
) -> Attention | None:
    """The way that a setting names, or the fastest for `auto`; None where the one that came with the weights is to stay.
    SettingsError where one is asked for that isn't there, doesn't suit or computes something else.
    """
    reference = GatherAttention(place.config)
    if wanted == "sdpa":
        return reference
    if wanted != "auto":
        return _wanted(wanted, place, reference, log, on_cuda, found)
    if not on_cuda:
        return None
    trial = Trial(place)
    times = {"sdpa": trial.times(reference)}
    tried: dict[str, Attention] = {"sdpa": reference}
    for name in BACKENDS:
        try:
            tried[name] = _made(name, place, found)
            trial.hold(tried[name], reference)
            times[name] = trial.times(tried[name])
        except Exception as error:  # another library's code: whatever it raises, torch's own way is there
            log(f"attention {name}: not used ({first_line(error)})")
    best = min(times, key=lambda name: math.prod(times[name]))
    log(f"attention: {best}" + (f", beside sdpa: {_told(times['sdpa'], times[best])}" if best != "sdpa" else ""))
    return tried[best]


def _wanted(
    name: str, place: Place, reference: Attention, log: Log, on_cuda: bool, found: Callable[[str], Any]
) -> Attention:
    """SettingsError says why it can't be had."""
    backend = BACKENDS[name]
    if backend.module is not None and not on_cuda:
        raise SettingsError(f"attention is {name!r}: {backend.package} runs on CUDA only; use auto, sdpa or flex")
    if (reason := backend.unfit(place)) is not None:
        raise SettingsError(f"attention is {name!r}: {reason}, or use auto")
    trial = Trial(place)
    try:
        library = _library(name, found)
    except ImportError as error:
        raise SettingsError(
            f"attention is {name!r}: {backend.module} can't be imported ({first_line(error)}); "
            f"run pip install {backend.package}, or use auto"
        ) from None
    try:
        attention = backend.make(place, library)
        trial.hold(attention, reference)
        times = trial.times(attention)
    except Exception as error:  # another library's code, or a compiler's
        raise SettingsError(f"attention is {name!r}: it failed its trial ({first_line(error)}); use auto") from None
    log(f"attention: {name}, beside sdpa: {_told(trial.times(reference), times)}")
    return attention


def _made(name: str, place: Place, found: Callable[[str], Any]) -> Attention:
    """ImportError when it isn't installed, Unfit when it doesn't suit."""
    backend = BACKENDS[name]
    if (reason := backend.unfit(place)) is not None:
        raise Unfit(reason)
    return backend.make(place, _library(name, found))


def _library(name: str, found: Callable[[str], Any]) -> Any:
    """What a backend computes with. ImportError when it isn't installed."""
    module = BACKENDS[name].module
    if module is None:
        return flex.compiled_kernel()
    try:
        return found(module)
    except OSError as error:  # built for another torch or CUDA
        raise ImportError(first_line(error)) from None


def _told(base: Iterable[float], times: Iterable[float]) -> str:
    decoding, reading = (b / t for b, t in zip(base, times, strict=True))
    return f"{decoding:.1f}x in decoding, {reading:.1f}x in prompts"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


class Trial:
    """Steps over a small cache of random numbers, in blocks that lie all over it."""

    def __init__(self, place: Place) -> None:
        config = replace(place.config, num_layers=1, local_layers=frozenset())
        self._place = place
        size = place.block_size
        self._generator = torch.Generator().manual_seed(0)
        self._longest = min(1000, place.config.context)
        self._blocks = 8 * (-(-self._longest // size) + 1)
        self._cache = KVStore(config, self._blocks, size, place.dtype, place.device)
        slots = self._cache.layers[0].parts[0]
        slots.copy_(torch.randn(slots.shape, generator=self._generator).to(slots.dtype))
        self._free = torch.randperm(self._blocks, generator=self._generator).tolist()
        near = place.config.window or size
        middle = min(max(near + 3, size + 1), self._longest)
        lengths = [1, min(size, self._longest), middle, self._longest]
        parts = [(0, min(130, self._longest)), (middle - 1, self._longest - middle + 1), (max(0, self._longest - 5), 5)]
        self._mixed = self._rows([(length - 1, 1) for length in lengths] + parts)
        self._decoding = self._rows([(self._longest - 1, 1)] * 4)
        self._reading = self._rows([(0, self._longest)])

    def hold(self, attention: Attention, reference: Attention) -> None:
        """RuntimeError unless both say the same of single tokens, chunks and continued chunks, with windows and without."""
        bound = EXACT if self._place.dtype is torch.float32 else HALF
        for local in (False, True) if self._place.config.local_layers else (False,):
            for rows in (self._mixed, self._decoding, self._reading):
                qkv = self._qkv(rows)
                own, expected = (
                    self._attended(way, self._batch(way, rows), local, qkv).float() for way in (attention, reference)
                )
                error = float(torch.dist(own, expected) / expected.norm())
                if not error <= bound:
                    raise RuntimeError(f"its output lies {error:.2g} from torch's")

    def times(self, attention: Attention) -> tuple[float, float]:
        """Best seconds of single tokens, and of a prompt."""
        return self._best_s(attention, self._decoding), self._best_s(attention, self._reading)

    def _best_s(self, attention: Attention, rows: list[Row]) -> float:
        batch, qkv = self._batch(attention, rows), self._qkv(rows)
        best, begun, rounds = math.inf, time.perf_counter(), 0
        while rounds < LEAST_ROUNDS or (time.perf_counter() - begun < TRIAL_S and rounds < MOST_ROUNDS):
            rounds += 1
            began = time.perf_counter()
            self._attended(attention, batch, False, qkv)
            if self._place.device.type == "cuda":
                torch.cuda.synchronize(self._place.device)
            best = min(best, time.perf_counter() - began)
        return best

    def _attended(self, attention: Attention, batch: Batch, local: bool, qkv: Tensor) -> Tensor:
        attention.begin(batch)
        return attention(batch, local, qkv, self._cache.layers[0])

    def _batch(self, attention: Attention, rows: list[Row]) -> Batch:
        place = self._place
        window = place.config.window
        plan = StepPlan(rows=rows)
        return build(plan, place.block_size, place.dtype, place.device, window=window, gathers=attention.gathers)

    def _qkv(self, rows: list[Row]) -> Tensor:
        """Of a step: K and V of its tokens are those that the cache holds."""
        place = self._place
        batch = build(StepPlan(rows=rows), place.block_size, place.dtype, place.device, gathers=False)
        config = place.config
        queries = torch.randn(batch.tokens, config.q_width, generator=self._generator)
        kept = self._cache.layers[0].run(0, self._blocks * place.block_size)[batch.slots]
        return torch.cat([queries.to(place.device, place.dtype), kept], dim=1)

    def _rows(self, spans: Iterable[tuple[int, int]]) -> list[Row]:
        """One row for each (tokens before, new tokens), in blocks of its own as far as there are enough."""
        rows = []
        for number, (start, count) in enumerate(spans):
            request = Request(f"trial-{number}", [0] * (start + count), Sampling(), 0.0)
            needed = -(-(start + count) // self._place.block_size)
            begin = number * 7 % max(1, self._blocks - needed)
            request.blocks = self._free[begin : begin + needed]
            rows.append(Row(request, start, count))
        return rows
