"""What a fault costs: output lost against what was expected, as a rate, as tokens so far, as GPU time and as money.

A loss is never negative: output above the expected value at one time does not pay for output below it at another. Where the expected
value is not known the loss is not known either, and how long that was is told beside what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SECOND = 1_000_000_000
HELD_S = 30.0
"""A reading speaks for this long at most where the next one is missing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Output at one moment, tokens/s; None where it is not known."""

    time_ns: int
    expected: float | None
    actual: float | None

    @property
    def is_known(self) -> bool:
        return self.expected is not None and self.expected > 1e-9 and self.actual is not None


@dataclass(frozen=True, slots=True)
class Lost:
    """The loss over a span. `tokens` and `share_s` are None when nothing of the span could be compared.

    `share_s` is the integral of the lost share (0..1) over seconds: as long as an engine that yields nothing takes to lose as much.
    """

    tokens: float | None
    share_s: float | None
    known_s: float
    unknown_s: float


def lost_tokens_per_s(expected: float | None, actual: float | None) -> float | None:
    """Tokens/s that are missing, >= 0; None where either side is not known."""
    if expected is None or actual is None or expected <= 0:
        return None
    return max(0.0, expected - actual)


def lost_over(readings: Sequence[Reading], start_ns: int, end_ns: int) -> Lost:
    """The integral of max(0, expected - actual) from `start_ns` to `end_ns`, by the trapezoidal rule between neighbouring readings.

    `readings` are in the order of time. Between a known reading and an unknown one, or over more than `HELD_S`, nothing is counted.
    A straight line that crosses zero is counted only where it is above (the area of the triangle).
    """
    tokens = share_s = known_s = 0.0
    for before, after in pairwise(readings):
        low, high = max(before.time_ns, start_ns), min(after.time_ns, end_ns)
        if high <= low or after.time_ns - before.time_ns > HELD_S * SECOND:
            continue
        if not (before.is_known and after.is_known):
            continue
        seconds = (high - low) / SECOND
        known_s += seconds
        tokens += seconds * _mean_above_zero(_missing_at(before, after, low), _missing_at(before, after, high))
        share_s += seconds * _mean_above_zero(_share_at(before, after, low), _share_at(before, after, high))
    whole_s = max(0, end_ns - start_ns) / SECOND
    unknown_s = max(0.0, whole_s - known_s)
    if known_s == 0:
        return Lost(None, None, 0.0, unknown_s)
    return Lost(tokens, share_s, known_s, unknown_s)


def gpu_hours(share_s: float | None, gpus: int) -> float | None:
    """GPU hours that were paid for and yielded nothing: the lost share over time, times all GPUs of the engine.

    All of them, not only the slow one: a tensor-parallel group runs at the pace of its slowest member.
    """
    return None if share_s is None or gpus < 1 else share_s / 3600 * gpus


def money_per_hour(loss_pct: float | None, gpus: int, price_per_gpu_hour: float | None) -> float | None:
    """What an hour at this loss (0..100 of the expected output) wastes, in the price's currency. None without a price or a loss."""
    if loss_pct is None or price_per_gpu_hour is None or gpus < 1:
        return None
    return max(0.0, loss_pct) / 100 * gpus * price_per_gpu_hour


def price_per_million(tokens_per_s: float | None, gpus: int, price_per_gpu_hour: float | None) -> float | None:
    """What a million output tokens cost at this rate: GPUs x price of an hour / tokens of an hour x 10^6. None where unknown or 0."""
    if not tokens_per_s or tokens_per_s < 0 or price_per_gpu_hour is None or gpus < 1:
        return None
    return gpus * price_per_gpu_hour / (tokens_per_s * 3600) * 1e6


def group_pace(paces: Sequence[float], group: int) -> float:
    """Mean pace of cards in groups of `group` neighbours that each run at their slowest member's, as a share of full pace (1).

    Cards of a tensor-parallel group meet at every layer, so that none gets ahead of the slowest. Six of 32 cards at 0.774 are 0.958
    of the fleet where each card works alone, 0.915 in pairs and 0.831 in groups of four, if no group has two of them: mending them
    is worth 4 %, 9 % or 20 %. ValueError when the cards can't be split so.
    """
    if group < 1 or not paces or len(paces) % group:
        raise ValueError(f"{len(paces)} cards can't be split into groups of {group}")
    groups = [paces[first : first + group] for first in range(0, len(paces), group)]
    return sum(min(members) for members in groups) / len(groups)


def _mean_above_zero(first: float, last: float) -> float:
    """Mean of max(0, y) over a straight line from `first` to `last`."""
    if first >= 0 and last >= 0:
        return (first + last) / 2
    if first <= 0 and last <= 0:
        return 0.0
    above = max(first, last)
    return above / 2 * above / (abs(first) + abs(last))


def _between(before: Reading, after: Reading, time_ns: int, first: float, last: float) -> float:
    return first + (last - first) * (time_ns - before.time_ns) / (after.time_ns - before.time_ns)


def _missing_at(before: Reading, after: Reading, time_ns: int) -> float:
    return _between(before, after, time_ns, _missing(before), _missing(after))


def _share_at(before: Reading, after: Reading, time_ns: int) -> float:
    return _between(before, after, time_ns, _share(before), _share(after))


def _missing(reading: Reading) -> float:
    assert reading.expected is not None and reading.actual is not None
    return reading.expected - reading.actual


def _share(reading: Reading) -> float:
    assert reading.expected is not None
    return _missing(reading) / reading.expected
