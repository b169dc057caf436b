"""Open arrivals: when requests come and how long their prompts and answers are.

The lengths are quantiles of a public production trace of a chat service (Azure LLM inference trace 2023, conversation part,
19,366 requests, CC-BY 4.0: 1,155 prompt and 211 output tokens on average); arrivals are Poisson with a wandering rate and a
slow daily wave, as that trace has them (coefficient of variation of the gaps 1.1, busiest minute 1.56 times the mean).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution given by its quantiles, straight lines between them."""

    at: tuple[float, ...]  # 0..1, ascending
    value: tuple[float, ...]

    def pick(self, uniform: float) -> float:
        """The value at quantile `uniform` in [0, 1)."""
        i = bisect_right(self.at, uniform) - 1
        low, high = self.at[i], self.at[i + 1]
        return self.value[i] + (self.value[i + 1] - self.value[i]) * (uniform - low) / (high - low)

    @property
    def mean(self) -> float:
        return sum(
            (high - low) * (self.value[i] + self.value[i + 1]) / 2
            for i, (low, high) in enumerate(zip(self.at, self.at[1:], strict=False))
        )


_AT = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0)
PROMPT_TOKENS = Quantiles(
    _AT, (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4098, 4142, 6212, 14050)
)
OUTPUT_TOKENS = Quantiles(_AT, (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 540, 601, 954, 1000))

PREFIX_HIT = 0.65
"""Share of prompt tokens found in the prefix cache: a chat's earlier turns (public traces: 0.37 to 0.64 by block)."""

DAY_S = 86_400.0
WAVE_DEPTH = 0.35  # the quietest hour has this much less than the busiest
BURST_SPREAD = 0.03  # of the wandering rate, one standard deviation: a balancer has evened out the rest
BURST_S = 45.0  # how long it remembers


def wave(elapsed_s: float) -> float:
    """The daily wave, 1 at the start (the busiest hour) and 1 - WAVE_DEPTH half a day later."""
    return 1 - WAVE_DEPTH * (1 - math.cos(2 * math.pi * elapsed_s / DAY_S)) / 2


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it comes: lengths in tokens, and the share of the prompt that is found in the prefix cache."""

    offset_s: float
    prompt: float
    output: float
    hit: float


class Traffic(Protocol):
    rate: float

    def draw(self, elapsed_s: float, seconds: float, scale: float) -> list[Asked]:
        """The requests of the next `seconds`, in order; `scale` times as many as usual."""


class Arrivals:
    """Request arrivals of one engine. `rate` is the mean in requests/s at the busiest hour."""

    __slots__ = ("_bend", "_due", "_random", "rate")

    def __init__(self, rate: float, random: Random) -> None:
        self.rate = rate
        self._random = random
        self._bend = 0.0  # log of the wandering rate
        self._due = random.expovariate(1.0)

    def draw(self, elapsed_s: float, seconds: float, scale: float) -> list[Asked]:
        keep = math.exp(-seconds / BURST_S)
        self._bend = self._bend * keep + self._random.gauss(0, BURST_SPREAD) * math.sqrt(1 - keep * keep)
        rate = self.rate * scale * wave(elapsed_s) * math.exp(self._bend - BURST_SPREAD**2 / 2)
        expected = rate * seconds
        offsets: list[float] = []
        due = self._due
        while due < expected:
            offsets.append(due / rate)
            due += self._random.expovariate(1.0)
        self._due = due - expected
        pick = self._random.random
        return [
            Asked(offset, PROMPT_TOKENS.pick(pick()), OUTPUT_TOKENS.pick(pick()), PREFIX_HIT * (0.9 + 0.2 * pick()))
            for offset in offsets
        ]
