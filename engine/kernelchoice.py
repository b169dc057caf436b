"""Which product is fastest on this machine: tried at load, on a weight of the model, not told by the processor's name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.native import Kernels
from engine.linear import Keep, Kernel, Linear, Packed, Plain
from engine.numbers import ACTIVATION_GROUP, Int4, Int8, NotKept, Quantised
from engine.quantized import Compiled, TorchInt4, TorchInt8, Widened, as_short_as_exact

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
    keep: Keep | None = None  # what is served by the checkpoint's own numbers
    speedups: tuple[float, ...] = (1.0,) * len(ROWS)

    @property
    def speedup(self) -> float:
        """Over all sizes, by geometric mean."""
        return math.prod(self.speedups) ** (1 / len(self.speedups))


KEPT: Mapping[str, tuple[tuple[type[Int8 | Int4], ...], tuple[type[Int8 | Int4], ...]]] = {
    "none": ((Int8, Int4), (Int8, Int4)),
    "int8": ((Int8,), (Int8,)),
    "int4": ((Int4,), (Int8,)),
}
"""For each scheme the numbers of a checkpoint that are served as they are: those of layers, those of the head."""


def choose_kernel(
    sample: Tensor | Quantised, log: Log, compiled: Kernels | None, scheme: str = "none", group: int = 32
) -> Choice:
    """The fastest kernel of a scheme (none, int8, int4): it must work, agree with the reference and be faster than that.
    `sample` is a weight of the model, or a checkpoint's own numbers if these may be served.

    torch's packing operators are not promised to stay; where they are missing or fail, another one is the answer.
    """
    own = None if isinstance(sample, Tensor) else sample
    weight = sample if isinstance(sample, Tensor) else sample.full()
    if weight.device.type != "cpu":
        return Choice(Plain, "plain", Plain)
    inputs = _inputs(weight)
    full = _working(_full_candidates(weight.dtype, compiled), weight, inputs, {}, log)
    times = _times({name: kernel(weight, None) for name, kernel in full.items()}, inputs)
    best = _fastest(times)
    if scheme == "none":
        log(f"linear kernel: {best}, beside plain: {told(_speedups(times['plain'], times[best]))}")
        keep = None if own is None or compiled is None else _exactly(own, full[best], compiled, log)
        used = compiled if keep is not None or "compiled" in best else None
        return Choice(full[best], best, full[best], used, keep)
    candidates = _candidates(scheme, group, full[best], compiled)
    found = _working(candidates, weight, inputs, {"bfloat16": HALF}, log)
    tried = {name: kernel(weight, None) for name, kernel in found.items()} | {"full": full[best](weight, None)}
    times = _times(tried, inputs)
    base = times.pop("full")
    name = _fastest(times)
    # The head weighs most in what quantisation costs: in 4 bits it alone raised perplexity of SmolLM2-135M by 6 %
    head = _candidates("int8", group, full[best], compiled)[name]
    speedups = _speedups(base, times[name])
    log(f"linear kernel: {scheme} {name}, beside full weights ({best}): {told(speedups)}")
    used = compiled if "compiled" in name else None
    return Choice(found[name], name, head, used, _keep(scheme, name, full[best], compiled), speedups)


def _exactly(own: Quantised, full: Kernel, compiled: Kernels, log: Log) -> Keep | None:
    """A checkpoint's own numbers widened on their way into the sum, if that works here. It costs a quarter of the memory or less,
    and is taken whatever its speed.
    """

    def numbers(own: Quantised, bias: Tensor | None) -> Compiled:
        if own.inputs % ACTIVATION_GROUP:
            raise NotKept(f"of {own.inputs} inputs, no multiple of {ACTIVATION_GROUP}")
        return Compiled(compiled, own, bias, exact=True)

    weight, name = own.full(), "of the checkpoint's own numbers"
    inputs = _inputs(weight)
    found = _working({"full": full, name: lambda weight, bias: numbers(own, bias)}, weight, inputs, {}, log)
    if name not in found:
        return None
    times = _times({way: kernel(weight, None) for way, kernel in found.items()}, inputs)
    log(f"linear kernel {name}: exact, beside full weights: {told(_speedups(times['full'], times[name]))}")
    return Keep(numbers, *KEPT["none"])


def _keep(scheme: str, name: str, full: Kernel, compiled: Kernels | None) -> Keep | None:
    """How the chosen kernel takes numbers as they are; none: it doesn't."""
    if compiled is not None and "compiled" in name:
        return Keep(lambda numbers, bias: Compiled(compiled, numbers, bias), *KEPT[scheme])
    return Keep(lambda numbers, bias: Widened(full, numbers, bias), *KEPT[scheme]) if name == "widened" else None


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

    def quantised(weight: Tensor) -> Quantised:
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
        except (RuntimeError, AttributeError, NotKept) as error:
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
