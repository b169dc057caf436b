"""What a fault costs: the arithmetic by hand, and what is not known stays unknown."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rules import loss
from rules.loss import Reading, lost_over
from rules.triage import judge, walk
from rules.verdict import from_sample, to_sample, verdict_json
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0, bend, fleet, scene

FULL, SLOW = 1200.0, 740.0


def readings(*entries: tuple[int, float | None, float | None]) -> list[Reading]:
    return [Reading(T0 + second * SECOND, expected, actual) for second, expected, actual in entries]


def test_a_steady_loss_is_rate_times_time() -> None:
    lost = lost_over(readings(*((s, FULL, SLOW) for s in range(0, 601, 5))), T0, T0 + 600 * SECOND)
    assert lost.tokens == pytest.approx(460 * 600)
    assert lost.share_s == pytest.approx(460 / 1200 * 600)
    assert (lost.known_s, lost.unknown_s) == (600, 0)


def test_only_the_part_within_the_span_is_counted() -> None:
    steady = readings(*((s, FULL, SLOW) for s in range(0, 61, 10)))
    assert lost_over(steady, T0 + 13 * SECOND, T0 + 37 * SECOND).tokens == pytest.approx(460 * 24)


def test_output_above_the_expected_pays_for_nothing() -> None:
    lost = lost_over(readings((0, 100.0, 40.0), (10, 100.0, 120.0), (20, 100.0, 120.0)), T0, T0 + 20 * SECOND)
    # 60 missing falls to 20 too many over 10 s: above zero for 7.5 s, a triangle of 60 x 7.5 / 2
    assert lost.tokens == pytest.approx(225)


@pytest.mark.parametrize("hole", [(None, 50.0), (100.0, None), (None, None), (0.0, 50.0)])
def test_where_a_side_is_unknown_the_loss_is_unknown_and_its_time_is_told(hole: tuple[float | None, ...]) -> None:
    lost = lost_over(
        readings((0, 100.0, 60.0), (10, 100.0, 60.0), (20, *hole), (30, 100.0, 60.0)), T0, T0 + 30 * SECOND
    )  # type: ignore[arg-type]
    assert (lost.tokens, lost.known_s, lost.unknown_s) == (pytest.approx(400), 10, 20)


def test_a_gap_longer_than_a_reading_holds_is_unknown() -> None:
    lost = lost_over(readings((0, 100.0, 60.0), (31, 100.0, 60.0)), T0, T0 + 31 * SECOND)
    assert lost == loss.Lost(None, None, 0.0, 31.0)


def test_without_a_reading_nothing_is_known() -> None:
    assert lost_over([], T0, T0 + 5 * SECOND) == loss.Lost(None, None, 0.0, 5.0)


numbers = st.none() | st.floats(0, 1e6)


@given(st.lists(st.tuples(st.integers(1, 40), numbers, numbers), max_size=12), st.integers(0, 100), st.integers(0, 200))
def test_a_loss_is_never_negative_and_never_more_than_was_expected(
    steps: list[tuple[int, float | None, float | None]], first: int, length: int
) -> None:
    at, entries = 0, []
    for step, expected, actual in steps:
        at += step
        entries.append((at, expected, actual))
    lost = lost_over(readings(*entries), T0 + first * SECOND, T0 + (first + length) * SECOND)
    assert lost.known_s + lost.unknown_s == pytest.approx(length)
    if lost.tokens is not None and lost.share_s is not None:
        most = max(expected for _, expected, _ in entries if expected is not None)
        assert 0 <= lost.tokens <= most * lost.known_s * (1 + 1e-9)
        assert 0 <= lost.share_s <= lost.known_s * (1 + 1e-9)


def test_a_rate_of_loss_needs_both_sides_and_is_never_negative() -> None:
    assert loss.lost_tokens_per_s(1000.0, 640.0) == 360
    assert loss.lost_tokens_per_s(1000.0, 1100.0) == 0
    assert loss.lost_tokens_per_s(None, 640.0) is None
    assert loss.lost_tokens_per_s(1000.0, None) is None
    assert loss.lost_tokens_per_s(0.0, 0.0) is None


def test_money_is_the_lost_share_of_what_all_gpus_of_the_engine_cost() -> None:
    assert loss.money_per_hour(40.0, 4, 2.5) == pytest.approx(4.0)
    assert loss.gpu_hours(1800.0, 4) == pytest.approx(2.0)
    assert loss.money_per_hour(40.0, 4, None) is None
    assert loss.money_per_hour(None, 4, 2.5) is None
    assert loss.gpu_hours(None, 4) is None and loss.gpu_hours(60.0, 0) is None


def test_the_price_of_a_million_tokens_falls_with_the_rate() -> None:
    # 32 cards at 2,160 a day that make 1.2e8 tokens a day: 18 a million
    assert loss.price_per_million(1.2e8 / 86_400, 32, 2160 / 24 / 32) == pytest.approx(18.0)
    assert loss.price_per_million(0.0, 32, 2.0) is None
    assert loss.price_per_million(100.0, 32, None) is None


def test_a_group_runs_at_its_slowest_member() -> None:
    """Six of 32 cards at 77.4 %, spread so that no group has two: what mending them is worth, by group size."""
    paces = [0.774 if place in (0, 5, 10, 15, 20, 25) else 1.0 for place in range(32)]
    worth = {group: 100 * (1 / loss.group_pace(paces, group) - 1) for group in (1, 2, 4, 8)}
    assert worth == pytest.approx({1: 4.4, 2: 9.3, 4: 20.4, 8: 29.2}, abs=0.05)
    with pytest.raises(ValueError, match="groups of 5"):
        loss.group_pace(paces, 5)


def test_a_verdict_carries_what_is_lost_each_second_through_json_and_store() -> None:
    hot = bend(work=1.6, temp=87.5, clock=1100.0, mask=0x20)
    found = judge(scene(fleet(hot, at=240), 330))
    wrong = next(diagnosis for diagnosis in found if diagnosis.verdicts)
    verdict = wrong.verdicts[0]
    assert wrong.expected_tokens_per_s is not None and wrong.tokens_per_s is not None
    assert verdict.loss_tokens_per_s == wrong.expected_tokens_per_s - wrong.tokens_per_s > 0
    assert verdict_json(wrong)[0]["loss_tokens_per_s"] == round(verdict.loss_tokens_per_s, 1)
    sample = to_sample(wrong)
    assert sample.fields["loss_tokens_per_s"] == verdict.loss_tokens_per_s
    assert from_sample(sample) == wrong


def test_an_engine_that_is_away_loses_nobody_knows_how_much() -> None:
    found = judge(scene(fleet(bend(up=0, gpu_state=1), at=240), 330))
    verdicts = [verdict for diagnosis in found for verdict in diagnosis.verdicts]
    assert verdicts and all(verdict.loss_tokens_per_s is None for verdict in verdicts)


def test_a_verdict_of_before_there_was_this_number_can_still_be_read() -> None:
    found = judge(scene(fleet(bend(work=1.6, temp=87.5, clock=1100.0, mask=0x20), at=240), 330))
    sample = to_sample(next(diagnosis for diagnosis in found if diagnosis.verdicts))
    plain = json.loads(str(sample.fields["evidence"]))
    for verdict in plain["verdicts"]:
        del verdict["loss_tokens_per_s"]
    old = Sample("verdict", sample.tags, {**sample.fields, "evidence": json.dumps(plain)}, sample.time_ns)
    assert from_sample(old).verdicts[0].loss_tokens_per_s is None


def test_the_walk_ends_with_the_judgement() -> None:
    samples = scene(fleet(None), 200)
    walked = list(walk(samples))
    assert walked[-1][1] == judge(samples)
    assert len(walked) == 40
