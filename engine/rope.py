"""Rotary positions (Su et al. 2021): frequencies, and how they are stretched beyond the trained context. No tensors here."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    kind: none, linear (Chen et al. 2023: positions divided by `factor`), llama3 (low frequencies divided by `factor`, high
    ones kept, a smooth ramp between; Llama 3.1 model card), yarn (the same with a ramp over the frequencies' numbers, and
    longer vectors; Peng et al. 2023) or factors (each frequency divided by its own number, as GGUF files store llama3 scaling).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # turns within the original context, below which a frequency is divided
    high_freq_factor: float = 4.0  # and above which it is kept
    original_context: int = 8192
    factors: tuple[float, ...] = ()
    amplitude: float = 1.0  # of cos and sin: yarn sharpens attention by it
    truncate: bool = True  # yarn: the ramp begins and ends at whole numbers


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Radians per token, head_dim / 2 of them: theta ** (-2i / head_dim), then scaled."""
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "factors":
        return [f / by for f, by in zip(plain, scaling.factors, strict=True)]
    if scaling.kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    return [_llama3(f, scaling) for f in plain]


def yarn_amplitude(factor: float) -> float:
    """0.1 ln(factor) + 1: the square root of 1/t, formula 22 of Peng et al. 2023."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)  # turns within the original context
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(plain: list[float], head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    def number_with(turns: float) -> float:  # of the frequency that turns so often within the original context
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = number_with(scaling.high_freq_factor), number_with(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    divided = [min(1.0, max(0.0, (i - first) / width)) for i in range(len(plain))]
    return [f / scaling.factor * share + f * (1 - share) for f, share in zip(plain, divided, strict=True)]
