"""Traffic: an honest mix, and it steps aside for others but never for itself."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairscope.traffic import WAVE_DEPTH, Others, TrafficSettings, draw, rate_at


def test_the_mix_has_short_and_long_prompts_and_bounded_answers() -> None:
    source = random.Random(1)
    mix = [draw(source) for _ in range(2000)]
    lengths = [len(request.prompt) for request in mix]
    assert statistics.median(lengths) < 120
    assert max(lengths) > 1200
    assert {8 <= request.max_tokens <= 192 for request in mix} == {True}
    assert 35 <= statistics.median(request.max_tokens for request in mix) <= 60


def test_the_same_seed_asks_the_same() -> None:
    assert [draw(random.Random(7)) for _ in range(3)] == [draw(random.Random(7)) for _ in range(3)]


def test_the_rate_waves_around_its_base() -> None:
    rates = [rate_at(2.0, float(second)) for second in range(600)]
    assert abs(statistics.mean(rates) - 2.0) < 0.01
    assert max(rates) <= 2.0 * (1 + WAVE_DEPTH) + 1e-9


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=50), st.integers(0, 1000))
def test_a_count_that_lags_behind_our_own_requests_is_never_taken_for_others(
    steps: list[tuple[int, int]], before: int
) -> None:
    others = Others(before, before)
    sent = seen = 0
    for second, (new, lag) in enumerate(steps):
        sent += new
        seen = max(seen, sent - lag)
        assert not others.look(before + seen, sent, float(second))


def test_a_request_of_somebody_else_is_noticed() -> None:
    others = Others(10, 10)
    assert not others.look(13, 3, 0.0)
    assert others.look(15, 4, 2.0)
    assert not others.look(16, 5, 4.0)


def test_a_restarted_engine_is_not_taken_for_others() -> None:
    others = Others(10, 10)
    assert not others.look(40, 30, 0.0)
    assert not others.look(0, 33, 2.0)
    assert not others.look(3, 34, 4.0)


@pytest.mark.parametrize(
    "wrong", [{"url": "nonsense"}, {"rate_per_s": math.nan}, {"rate_per_s": -1.0}, {"running": 0.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrafficSettings(**wrong)


@pytest.mark.parametrize("url", ["http://é..b", "http://", "ftp://a", "http://a\nb", "http://a:99999"])
def test_an_address_that_nobody_can_have_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        TrafficSettings(url=url)
