"""The knee: where more requests at once stop paying, which limits come before, and that none is claimed where there is none."""

from __future__ import annotations

import math
import random

import pytest

from pairscope.load_sweep.knee import Judged, Limits, Point, judge
from pairscope.load_sweep.wording import advice

# "Token production efficiency": batch, tokens/s, TTFT in ms, memory in %; one engine at one card, lengths of real traffic.
# The same text puts the knee between 32 and 48, and runs at 40, below it, with slack for long requests.
PUBLISHED = ((8, 210, 45, 38), (16, 380, 62, 52), (32, 620, 98, 74), (48, 680, 156, 89), (64, 655, 240, 96))
DOUBLINGS = (8, 16, 32, 64, 128, 256)
USUAL = Limits()


def published(limits: Limits = USUAL) -> Judged:
    points = [Point(b, tps, ttft_p50_s=ms / 1e3, memory_pct=memory) for b, tps, ms, memory in PUBLISHED]
    return judge(points, limits)


def saturating(half: float, batches: tuple[int, ...] = DOUBLINGS, top: float = 1000.0) -> list[Point]:
    """tokens/s = top x batch / (batch + half): its elasticity at a batch is half / (batch + half)."""
    return [Point(b, top * b / (b + half)) for b in batches]


def test_the_published_table_has_its_knee_above_32_and_not_above_48_and_40_is_recommended() -> None:
    judged = published()
    assert judged.knee is not None
    assert (judged.knee.above, judged.knee.upto) == (32, 48)
    assert judged.knee.elasticity == pytest.approx(math.log(680 / 620) / math.log(48 / 32))
    assert judged.recommended == 40
    assert judged.decided_by == "knee"
    assert [(cap.what, round(cap.batch, 1)) for cap in judged.caps] == [("memory", 43.7)]


def test_the_published_table_is_judged_the_same_in_any_order_and_without_its_memory() -> None:
    points = [Point(b, tps) for b, tps, _, _ in reversed(PUBLISHED)]
    judged = judge(points, USUAL)
    assert judged.recommended == 40
    assert "memory" in judged.unknown


@pytest.mark.parametrize(("limit_s", "batch"), [(0.099, 32), (0.0975, 28), (0.063, 16), (0.046, 8)])
def test_a_limit_on_ttft_wins_over_the_knee(limit_s: float, batch: int) -> None:
    judged = published(Limits(ttft_s=limit_s))
    assert judged.recommended == batch
    assert judged.decided_by == "ttft"


def test_nothing_is_recommended_where_the_smallest_batch_is_past_a_limit() -> None:
    judged = published(Limits(ttft_s=0.044))
    assert judged.recommended is None
    assert "already 8 requests" in advice(judged, "en")[0]


@pytest.mark.parametrize(("headroom", "batch"), [(15, 40), (27, 28), (48, 16), (0, 40)])
def test_memory_headroom_is_kept(headroom: float, batch: int) -> None:
    assert published(Limits(memory_headroom_pct=headroom)).recommended == batch


@pytest.mark.parametrize("half", [11.0, 40.0, 90.0])
def test_a_saturating_curve_has_its_knee_where_its_own_elasticity_crosses(half: float) -> None:
    judged = judge(saturating(half, (*DOUBLINGS, 512, 1024)), USUAL)
    crossing = half / 0.3 - half  # half / (batch + half) = 0.3
    assert judged.knee is not None
    assert judged.knee.above / 2 <= crossing <= judged.knee.upto
    assert judged.recommended is not None
    assert judged.knee.above <= judged.recommended <= judged.knee.upto


def test_a_linear_curve_has_no_knee_and_says_up_to_where_that_is_known() -> None:
    judged = judge([Point(b, 20.0 * b) for b in DOUBLINGS], USUAL)
    assert judged.knee is None
    assert judged.recommended == 256
    assert judged.decided_by == "range"
    assert any("No knee up to 256" in line for line in advice(judged, "en"))
    assert any("至 256 未见拐点" in line for line in advice(judged, "zh"))


def test_a_flat_curve_is_past_its_knee_at_the_smallest_batch() -> None:
    judged = judge([Point(b, 500.0 + b / 100) for b in DOUBLINGS], USUAL)
    assert judged.knee is not None
    assert judged.knee.at_start
    assert judged.recommended == 8


def test_one_slow_point_is_no_knee_when_later_ones_make_up_for_it() -> None:
    points = [Point(8, 160), Point(16, 320), Point(32, 330), Point(64, 1280), Point(128, 2560)]
    assert judge(points, USUAL).knee is None


def test_with_five_percent_of_noise_nine_of_ten_recommendations_are_near_the_knee_of_the_curve() -> None:
    clean = saturating(30.0, (8, 16, 32, 48, 64, 80, 96, 128, 256))  # crosses 0.3 at 70
    near = 0
    for seed in range(200):
        source = random.Random(seed)
        judged = judge([Point(p.batch, p.tokens_per_s * source.uniform(0.95, 1.05)) for p in clean], USUAL)
        assert judged.knee is not None
        near += 48 <= (judged.recommended or 0) <= 112
    assert near >= 180


@pytest.mark.parametrize("seed", range(20))
def test_noise_makes_no_knee_of_a_straight_line(seed: int) -> None:
    source = random.Random(seed)
    points = [Point(b, 20.0 * b * source.uniform(0.95, 1.05)) for b in DOUBLINGS]
    assert judge(points, USUAL).knee is None


def test_behind_a_collapse_through_preemptions_nothing_is_recommended() -> None:
    tokens = {8: 200.0, 16: 390.0, 32: 750.0, 64: 480.0, 128: 310.0}
    preempted = {64: 41, 128: 230}
    points = [Point(b, tps, preemptions=preempted.get(b, 0)) for b, tps in tokens.items()]
    judged = judge(points, USUAL)
    assert judged.knee is not None
    assert (judged.knee.above, judged.knee.upto) == (32, 64)
    assert judged.recommended == 32
    told = " ".join(advice(judged, "en"))
    assert "stand still or fall" in told
    assert "At 64 requests at once 41 were preempted" in told


def test_batches_at_which_requests_fail_are_not_recommended() -> None:
    points = [Point(b, 20.0 * b, errors=3 if b > 32 else 0) for b in DOUBLINGS]
    judged = judge(points, USUAL)
    assert judged.recommended == 32
    assert judged.decided_by == "errors"


def test_power_headroom_is_kept_and_can_be_given_up() -> None:
    points = [Point(b, 20.0 * b, power_used_pct=60.0 + 10 * place) for place, b in enumerate(DOUBLINGS)]
    assert judge(points, USUAL).recommended == 48
    assert judge(points, Limits(power_headroom_pct=0)).recommended == 128


def test_the_slowest_requests_are_held_against_the_limit_where_they_are_known() -> None:
    points = [Point(b, 20.0 * b, ttft_p50_s=0.001 * b, ttft_p95_s=0.01 * b) for b in DOUBLINGS]
    assert judge(points, Limits(ttft_s=0.32)).recommended == 32


def test_memory_that_is_taken_at_the_start_says_nothing_of_a_batch() -> None:
    points = [Point(b, 20.0 * b, gpu_mem_used_pct=91.0 + place / 10) for place, b in enumerate(DOUBLINGS)]
    judged = judge(points, USUAL)
    assert "memory" in judged.unknown
    assert judged.recommended == 256
    with_kv = [Point(p.batch, p.tokens_per_s, gpu_mem_used_pct=91.0, kv_used_pct=p.batch / 2) for p in points]
    assert judge(with_kv, USUAL).recommended == 160  # 170, down to a round number


def test_what_is_not_known_is_said() -> None:
    told = " ".join(advice(judge(saturating(40.0), USUAL), "en"))
    for words in ("how full memory is", "power against the cards' limit", "whether requests failed", "--ttft-limit"):
        assert words in told


def test_one_point_is_no_sweep() -> None:
    with pytest.raises(ValueError, match="two points"):
        judge([Point(8, 100.0)], USUAL)
