"""Arrivals and lengths are those of the published trace; the last minute's window forgets in time."""

from __future__ import annotations

from random import Random

import pytest

from agent.simulator.window import Window
from agent.simulator.workload import DAY_S, OUTPUT_TOKENS, PROMPT_TOKENS, WAVE_DEPTH, Arrivals, Quantiles, wave


@pytest.mark.parametrize(
    ("lengths", "mean", "median", "p99"), [(PROMPT_TOKENS, 1155, 1020, 4142), (OUTPUT_TOKENS, 211, 129, 601)]
)
def test_lengths_have_the_traces_mean_median_and_tail(
    lengths: Quantiles, mean: float, median: float, p99: float
) -> None:
    random = Random(3)
    drawn = sorted(lengths.pick(random.random()) for _ in range(20_000))
    assert lengths.mean == pytest.approx(mean, rel=0.03)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert drawn[10_000] == pytest.approx(median, rel=0.03)
    assert drawn[19_800] == pytest.approx(p99, rel=0.05)


def test_arrivals_come_at_their_rate_in_order_and_in_time() -> None:
    arrivals = Arrivals(10.0, Random(4))
    count, gaps, last = 0, [], 0.0
    for i in range(5_000):
        offsets = [asked.offset_s for asked in arrivals.draw(0.0, 0.2, 1.0)]
        assert offsets == sorted(offsets)
        assert all(0 <= offset < 0.2 for offset in offsets)
        for offset in offsets:
            gaps.append(i * 0.2 + offset - last)
            last = i * 0.2 + offset
        count += len(offsets)
    assert count == pytest.approx(10_000, rel=0.05)
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.95 < spread / mean < 1.15  # of an open arrival process; 1.1 in the trace


def test_nobody_comes_when_the_rate_is_nothing() -> None:
    arrivals = Arrivals(10.0, Random(4))
    assert [arrivals.draw(0.0, 0.2, 0.0) for _ in range(100)] == [[]] * 100


def test_the_day_is_busiest_at_the_start_and_quietest_half_a_day_later() -> None:
    assert wave(0) == wave(DAY_S) == 1
    assert wave(DAY_S / 2) == pytest.approx(1 - WAVE_DEPTH)
    assert wave(DAY_S / 4) == pytest.approx(1 - WAVE_DEPTH / 2)


def test_the_window_gives_quantiles_of_the_last_minute_only() -> None:
    window = Window(60)
    for second in range(200):
        window.add(float(second), float(1000 - second))
        window.expire(float(second))
    assert len(window) == 61
    assert window.quantile(0.0) == 801
    assert window.quantile(0.5) == 831
    assert window.quantile(1.0) == 861
    assert window.mean == pytest.approx(831)
    window.expire(1000.0)
    assert len(window) == 0
    with pytest.raises(IndexError):
        window.quantile(0.5)
