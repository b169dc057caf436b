"""Which product is fastest on this machine: tried at load, on a weight of the model, not told by the processor's name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.native import Kernels
from engine.linear import Kernel, Linear, Packed, Plain
from engine.quantized import Compiled, Int4, Int8, TorchInt4, TorchInt8, Widened, as_short_as_exact

Tensor = torch.Tensor
Log = Callable[[str], None]

ROWS = (1, 8, 64)
"""Decoding alone, decoding in company, and a piece of a prompt."""

TRIAL_S, LEAST_ROUNDS, MOST_ROUNDS = 0.08, 5, 200

EXACT, HALF = 1e-4, 2e-2
"""How far a product may lie from the reference, as a share of its length: within rounding, and with bfloat16 on the way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen kernel. `speedups` say how many times as fast as full precision it is, for the numbers of rows of ROWS."""

    kernel: Kernel
    name: str
    head: Kernel  # for the product that ends in the vocabulary
    compiled: Kernels | None = None  # where the compiled kernels were chosen
    speedups: tuple[float, ...] = (1.0,) * len(ROWS)

    @property
    def speedup(self) -> float:
        """Over all sizes, by geometric mean."""
        return math.prod(self.speedups) ** (1 / len(self.speedups))


def choose_kernel(sample: Tensor, log: Log, compiled: Kernels | None, scheme: str = "none", group: int = 32) -> Choice:
    """The fastest kernel of a scheme (none, int8, int4): it must work, agree with the reference and be faster than that.

    torch's packing operators are not promised to stay; where they are missing or fail, another one is the answer.
    """
    if sample.device.type != "cpu":
        return Choice(Plain, "plain", Plain)
    inputs = _inputs(sample)
    full = _working(_full_candidates(sample.dtype, compiled), sample, inputs, {}, log)
    times = _times({name: kernel(sample, None) for name, kernel in full.items()}, inputs)
    best = _fastest(times)
    if scheme == "none":
        log(f"linear kernel: {best}, beside plain: {told(_speedups(times['plain'], times[best]))}")
        return Choice(full[best], best, full[best], compiled if "compiled" in best else None)
    candidates = _candidates(scheme, group, full[best], compiled)
    found = _working(candidates, sample, inputs, {"bfloat16": HALF}, log)
    tried = {name: kernel(sample, None) for name, kernel in found.items()} | {"full": full[best](sample, None)}
    times = _times(tried, inputs)
    base = times.pop("full")
    name = _fastest(times)
    # The head weighs most in what quantisation costs: in 4 bits it alone raised perplexity of SmolLM2-135M by 6 %
    head = _candidates("int8", group, full[best], compiled)[name]
    chosen = Choice(found[name], name, head, compiled if "compiled" in name else None, _speedups(base, times[name]))
    log(f"linear kernel: {scheme} {name}, beside full weights ({best}): {told(chosen.speedups)}")
    return chosen


def _speedups(base: Sequence[float], times: Sequence[float]) -> tuple[float, ...]:
    return tuple(b / t for b, t in zip(base, times, strict=True))


def told(speedups: Sequence[float]) -> str:
    """In words, for a log."""
    return ", ".join(f"{x:.1f}x at {rows}" for rows, x in zip(ROWS, speedups, strict=True)) + " rows"


def _full_candidates(dtype: torch.dtype, compiled: Kernels | None) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {"plain": Plain, "packed": Packed}
    if compiled is not None and dtype is torch.float32:
        found[f"compiled {compiled.name}"] = lambda weight, bias: Compiled(compiled, as_short_as_exact(weight), bias)
    return found


def _candidates(scheme: str, group: int, full: Kernel, compiled: Kernels | None) -> Mapping[str, Kernel]:
    """Kernels by name, the reference ("widened") among them."""

    def quantised(weight: Tensor) -> Int8 | Int4:
        return Int8.of(weight, group) if scheme == "int8" else Int4.of(weight, group)

    found: dict[str, Kernel] = {"widened": lambda weight, bias: Widened(full, quantised(weight), bias)}
    if compiled is not None:
        found[f"compiled {compiled.name}"] = lambda weight, bias: Compiled(compiled, quantised(weight), bias)
    if scheme == "int8":
        found["bfloat16"] = TorchInt8
    else:
        found["bfloat16"] = lambda weight, bias: TorchInt4(Int4.of(weight, group), bias)
    return found


def _working(
    candidates: Mapping[str, Kernel], sample: Tensor, inputs: Sequence[Tensor], bounds: Mapping[str, float], log: Log
) -> dict[str, Kernel]:
    """The first candidate, which is the reference, and those that agree with it."""
    working: dict[str, Kernel] = {}
    expected: list[Tensor] = []
    for name, kernel in candidates.items():
        try:
            products = [kernel(sample, None)(x).float() for x in inputs]
            expected = expected or products
            error = max(float(torch.dist(y, e) / e.norm()) for y, e in zip(products, expected, strict=True))
            if not error <= bounds.get(name, EXACT if sample.dtype is torch.float32 else HALF):
                raise RuntimeError(f"its product lies {error:.2g} from the reference")
            working[name] = kernel
        except (RuntimeError, AttributeError) as error:
            log(f"linear kernel {name}: not used ({(str(error).splitlines() or [type(error).__name__])[0]})")
    return working


def _fastest(times: Mapping[str, Sequence[float]]) -> str:
    return min(times, key=lambda name: math.prod(times[name]))


def _inputs(sample: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, sample.shape[1], generator=generator).to(sample.dtype) for rows in ROWS]


def _times(linears: Mapping[str, Linear], inputs: Sequence[Tensor]) -> dict[str, list[float]]:
    """Best seconds of each for each input. In turns, so that a neighbour's burst meets all of them."""
    best = {name: [math.inf] * len(inputs) for name in linears}
    for at, x in enumerate(inputs):
        for linear in linears.values():
            linear(x)
        begun, rounds = time.perf_counter(), 0
        while rounds < LEAST_ROUNDS or (time.perf_counter() - begun < TRIAL_S and rounds < MOST_ROUNDS):
            rounds += 1
            for name, linear in linears.items():
                began = time.perf_counter()
                linear(x)
                best[name][at] = min(best[name][at], time.perf_counter() - began)
    return best
