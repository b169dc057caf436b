"""The slope of the memory is told with an uncertainty that holds, also where one sample is like the one before it."""

from __future__ import annotations

import random

import pytest

from bench.engine_rss import trend


def test_a_straight_line_has_its_slope_and_no_uncertainty() -> None:
    slope, uncertain = trend([(float(n), 100.0 + 3.0 * n) for n in range(50)])
    assert slope == pytest.approx(3.0)
    assert uncertain == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_noise_without_a_trend_is_within_the_uncertainty_nearly_always(alike: float) -> None:
    within = 0
    for seed in range(200):
        source = random.Random(seed)
        noise, samples = 0.0, []
        for n in range(150):
            noise = alike * noise + source.gauss(0.0, 1.0)
            samples.append((float(n), noise))
        slope, uncertain = trend(samples)
        within += abs(slope) <= uncertain
    assert within >= 170  # 190 would be 95 %; strong likeness is underestimated from so few


def test_a_leak_stands_out_of_its_noise() -> None:
    source = random.Random(1)
    slope, uncertain = trend([(float(n), 0.5 * n + source.gauss(0.0, 5.0)) for n in range(150)])
    assert slope == pytest.approx(0.5, abs=0.05)
    assert slope > 2 * uncertain
