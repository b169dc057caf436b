"""The expected value follows the load, knows what it does not know, and is not bent by a few bad spans."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rules.expected import PEER_SPREAD, READY, Load, Point, StepModel, expect, point_of
from rules.triage import median_without


def true_step(batch: float, share: float, context: float) -> float:
    return 0.0075 + 0.00012 * batch + 0.00002 * batch * share + 4e-8 * batch * context


def points(
    count: int, batches: tuple[float, float], noise: float = 0.02, seed: int = 1, scale: float = 1.0
) -> list[Point]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        batch = math.exp(rng.uniform(*map(math.log, batches)))
        share, context = rng.uniform(1.5, 6), rng.uniform(300, 1500)
        made.append(Point(batch, share, context, scale * true_step(batch, share, context) * rng.gauss(1, noise)))
    return made


def model(made: list[Point]) -> StepModel:
    learned = StepModel()
    learned.learn(made)
    return learned


def test_nothing_is_expected_before_enough_was_seen() -> None:
    few = model(points(READY - 1, (20, 60)))
    assert not few.ready
    answer = few.predict(Point(40, 3, 700, 1))
    assert (answer.step_s, answer.baseline) == (None, "warming")
    assert model(points(READY, (20, 60))).ready


@pytest.mark.parametrize("batch", [8, 24, 64, 120])
def test_over_the_range_that_was_seen_it_is_right_within_three_percent(batch: float) -> None:
    learned = model(points(200, (5, 150)))
    for share, context in ((2, 400), (3, 700), (5, 1400)):
        answer = learned.predict(Point(batch, share, context, 1))
        assert answer.step_s == pytest.approx(true_step(batch, share, context), rel=0.03)
        assert answer.spread < 0.05


def test_a_fall_of_demand_is_expected_as_a_fall() -> None:
    learned = model(points(100, (10, 100)))
    rates = []
    for batch in (80, 20):
        step = learned.predict(Point(batch, 3, 700, 1)).step_s
        assert step is not None
        rates.append(batch / step)
    assert rates[1] / rates[0] == pytest.approx((20 / true_step(20, 3, 700)) / (80 / true_step(80, 3, 700)), rel=0.05)


def test_what_was_never_seen_is_expected_with_less_certainty() -> None:
    learned = model(points(60, (35, 45)))
    near, far, farther = (learned.predict(Point(batch, 3, 700, 1)) for batch in (40, 160, 640))
    assert near.spread < 0.04 < far.spread < farther.spread
    assert far.step_s == pytest.approx(true_step(160, 3, 700), rel=2.5 * far.spread)


def test_two_minutes_of_one_batch_give_a_level() -> None:
    learned = model(points(READY, (38, 42)))
    answer = learned.predict(Point(40, 3, 700, 1))
    assert answer.step_s == pytest.approx(true_step(40, 3, 700), rel=0.04)
    assert answer.spread < 0.06


def test_one_bad_span_in_eight_moves_it_less_than_two_percent() -> None:
    clean = points(80, (20, 60))
    dirty = [Point(p.batch, p.share, p.context, p.step_s * (3 if i % 8 == 0 else 1)) for i, p in enumerate(clean)]
    at = Point(40, 3, 700, 1)
    pure, bent = model(clean).predict(at).step_s, model(dirty).predict(at).step_s
    assert pure is not None and bent is not None
    assert bent / pure == pytest.approx(1, abs=0.02)


def test_noise_in_the_history_is_noise_in_the_answer() -> None:
    at = Point(40, 3, 700, 1)
    calm, rough = (model(points(80, (20, 60), noise=noise)).predict(at).spread for noise in (0.01, 0.2))
    assert rough > 3 * calm


def test_peers_speak_for_a_newcomer_and_with_less_certainty_than_its_own_past_would() -> None:
    at = Point(40, 3, 700, 1)
    peers = [model(points(60, (20, 60), seed=i, scale=scale)) for i, scale in ((1, 0.97), (2, 1.0), (3, 1.04))]
    answer = expect(at, StepModel(), peers)
    assert answer.baseline == "peers"
    assert answer.step_s == pytest.approx(true_step(40, 3, 700), rel=0.05)
    assert PEER_SPREAD <= answer.spread < 0.2
    own = model(points(60, (20, 60), scale=1.3))
    assert expect(at, own, peers).step_s == pytest.approx(1.3 * true_step(40, 3, 700), rel=0.03)
    assert expect(at, own, peers).baseline == "history"
    assert expect(at, StepModel(), []).baseline == "warming"


def test_where_its_own_past_ends_the_peers_take_over() -> None:
    at = Point(300, 3, 700, 1)
    own = model(points(20, (3, 5)))
    peers = [model(points(120, (100, 500), seed=i)) for i in (1, 2, 3)]
    answer = expect(at, own, peers)
    assert answer.baseline == "peers"
    assert answer.step_s == pytest.approx(true_step(300, 3, 700), rel=0.1)
    assert answer.spread < own.predict(at).spread


def test_the_usual_mix_is_held_and_the_usual_range_is_followed() -> None:
    learned = model(points(100, (20, 60)))
    assert learned.usual(Point(40, 4, 900, 1)) == Point(40, 4, 900, 1)
    held = learned.usual(Point(40, 30, 9000, 1))
    assert 5 < held.share < 8 and 1300 < held.context < 2000


def test_what_was_learned_survives_the_state_file() -> None:
    learned = model(points(80, (5, 100)))
    again = StepModel.of(json.loads(json.dumps(learned.state())))
    at = Point(40, 3, 700, 1)
    assert again.predict(at).step_s == pytest.approx(learned.predict(at).step_s, rel=0.02)
    for rubbish in ([[1, 2, 3]], [[0, 1, 1, 1]], [[1, 1, 1, -1]], [[1, 1, 1, float("nan")]], [["x", 1, 1, 1]]):
        with pytest.raises((ValueError, TypeError)):
            StepModel.of(rubbish)  # type: ignore[arg-type]


def test_a_span_in_which_hardly_anything_ran_teaches_nothing() -> None:
    assert point_of(Load(0.1, 0, 5.0, 1.0, 700)) is None
    assert point_of(Load(4, 0, 0.0, 1.0, 700)) is None
    learned = point_of(Load(0.5, 0, 50.0, 100.0, 700))
    assert learned == Point(1.0, 2.0, 700, 0.01)


FINITE = st.floats(min_value=1e-4, max_value=1e4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE, FINITE), min_size=READY, max_size=40), FINITE, FINITE, FINITE)
def test_whatever_was_seen_an_answer_is_finite_and_positive_or_honestly_none(
    seen: list[tuple[float, float, float, float]], batch: float, share: float, context: float
) -> None:
    learned = model([Point(max(b, 1.0), s, c, step) for b, s, c, step in seen])
    answer = learned.predict(Point(max(batch, 1.0), share, context, 1))
    if answer.step_s is None:
        assert answer.baseline == "warming"
    else:
        assert math.isfinite(answer.step_s) and answer.step_s > 0
        assert math.isfinite(answer.spread) and answer.spread >= 0.01


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12), st.integers(0, 11))
def test_the_median_of_the_others_is_that_of_a_list_without_one(values: list[float], place: int) -> None:
    own = values[place % len(values)]
    others = list(values)
    others.remove(own)
    expected = statistics.median(others) if others else None
    assert median_without(sorted(values), own) == expected
    assert median_without(sorted(values), None) == statistics.median(values)
