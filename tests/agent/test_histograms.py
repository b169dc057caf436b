"""Windows of cumulative histograms: exact means, quantiles within their bucket, nothing across a restart."""

from __future__ import annotations

import math
import random
from bisect import bisect_left

import pytest

from agent.exposition import parse
from agent.histograms import Histogram, Quantile, Window, gather, joined, needed

BOUNDS = (0.1, 0.2, 0.5, 1.0, float("inf"))


def histogram(values: list[float], bounds: tuple[float, ...] = BOUNDS) -> Histogram:
    counts = [0] * len(bounds)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    total = 0
    cumulative = []
    for count in counts:
        total += count
        cumulative.append(float(total))
    return Histogram(bounds, tuple(cumulative), sum(values))


def text(name: str, values: list[float], labels: str = "", bounds: tuple[float, ...] = BOUNDS) -> str:
    made = histogram(values, bounds)
    comma = "," if labels else ""
    lines = [
        f'{name}_bucket{{{labels}{comma}le="{"+Inf" if bound == float("inf") else bound}"}} {count}'
        for bound, count in zip(made.bounds, made.counts, strict=True)
    ]
    return "\n".join([*lines, f"{name}_sum{{{labels}}} {made.total}", f"{name}_count{{{labels}}} {made.count}"]) + "\n"


def test_a_quantile_lies_in_the_bucket_of_the_true_one() -> None:
    dice = random.Random(4)
    values = sorted(dice.uniform(0.11, 0.99) for _ in range(1000))
    made = histogram(values)
    for share in (0.5, 0.95, 0.99):
        truth = values[int(share * 1000) - 1]
        upper = bisect_left(BOUNDS, truth)
        found = made.quantile(share)
        assert found is not None
        assert found.bound == ""
        assert BOUNDS[upper - 1] <= found.value <= BOUNDS[upper]


def test_a_quantile_beyond_the_last_bound_is_at_least_that_bound() -> None:
    assert histogram([7.0] * 300).quantile(0.99) == Quantile(1.0, ">=")


def test_a_quantile_in_the_first_bucket_is_at_most_its_bound() -> None:
    assert histogram([0.041] * 100).quantile(0.5) == Quantile(0.1, "<=")


def test_nothing_is_interpolated_within_a_coarse_bucket() -> None:
    assert histogram([0.11] * 100, (0.1, 0.26, math.inf)).quantile(0.5) == Quantile(0.26, "<=")
    fine = histogram([0.11] * 100, (0.1, 0.25, math.inf)).quantile(0.5)
    assert fine == Quantile(pytest.approx(0.175))


@pytest.mark.parametrize(("share", "count"), [(0.5, 20), (0.95, 60), (0.99, 300)])
def test_a_quantile_of_too_few_observations_is_not_given(share: float, count: int) -> None:
    assert needed(share) == count
    assert histogram([0.3] * (count - 1)).quantile(share) is None
    assert histogram([0.3] * count).quantile(share) is not None


def test_a_slow_minute_after_a_million_fast_requests_is_seen_at_once() -> None:
    bounds = (0.05, 0.1, 1.0, 2.5, 5.0, 10.0, math.inf)
    fast = Histogram(bounds, (0.0, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6), 70_000.0)
    slow = Histogram(bounds, (0.0, 1e6, 1e6, 1e6, 1e6, 1e6 + 600, 1e6 + 600), 70_000.0 + 600 * 5.2)
    window = Window(60.0)
    window.add({(): fast}, 0.0)
    window.add({(): slow}, 60.0)
    recent = window.recent()
    assert recent is not None
    assert recent.quantile(0.95) == Quantile(pytest.approx(5 + 5 * 0.95))
    assert recent.mean == pytest.approx(5.2)


def test_a_window_holds_only_what_happened_within_it() -> None:
    window = Window(60.0)
    slow = [0.9] * 1000
    made: list[float] = list(slow)
    for second in range(0, 181, 5):
        made += [0.15] * 10
        window.add({(): histogram(made)}, float(second))
    recent = window.recent()
    assert recent is not None
    assert recent.count == 120
    assert recent.mean == pytest.approx(0.15)
    assert recent.quantile(0.95) == Quantile(pytest.approx(0.195))
    assert window.recent(10.0).count == 20  # type: ignore[union-attr]


def test_a_restart_starts_the_window_anew() -> None:
    window = Window(60.0)
    window.add({(): histogram([0.3] * 500)}, 0.0)
    window.add({(): histogram([0.3] * 20)}, 1.0)
    assert window.recent() is None
    window.add({(): histogram([0.3] * 26)}, 2.0)
    assert window.recent().count == 6  # type: ignore[union-attr]


def test_other_bounds_start_the_window_anew() -> None:
    window = Window(60.0)
    window.add({(): histogram([0.3] * 5)}, 0.0)
    window.add({(): histogram([0.3] * 9, (0.4, float("inf")))}, 1.0)
    assert window.recent() is None


def test_label_sets_are_added() -> None:
    parts = gather(parse(text("x", [0.15] * 3, 'engine="0"') + text("x", [0.6] * 4, 'engine="1"')), "x")
    assert len(parts) == 2
    whole = joined(parts.values())
    assert whole is not None
    assert whole.counts == (0.0, 3.0, 3.0, 7.0, 7.0)
    assert whole.total == pytest.approx(0.45 + 2.4)


def test_label_sets_with_different_bounds_are_added_where_both_are_exact() -> None:
    one = text("x", [0.15] * 3, 'engine="0"', (0.1, 0.2, 1.0, float("inf")))
    two = text("x", [0.6] * 4, 'engine="1"', (0.2, 0.5, 1.0, float("inf")))
    whole = joined(gather(parse(one + two), "x").values())
    assert whole is not None
    assert (whole.bounds, whole.counts) == ((0.2, 1.0, float("inf")), (3.0, 7.0, 7.0))


def test_a_family_without_its_last_bucket_or_sum_is_not_used() -> None:
    assert gather(parse('x_bucket{le="1"} 3\nx_sum 2\nx_count 3\n'), "x") == {}
    assert gather(parse('x_bucket{le="+Inf"} 3\nx_count 3\n'), "x") == {}


def test_a_family_without_buckets_still_tells_its_mean() -> None:
    window = Window(60.0)
    window.add(gather(parse("x_sum 2\nx_count 4\n"), "x"), 0.0)
    window.add(gather(parse("x_sum 5\nx_count 10\n"), "x"), 1.0)
    recent = window.recent()
    assert recent is not None
    assert recent.mean == 0.5
    assert recent.quantile(0.5) is None


def test_a_label_set_that_joins_counts_from_then_on_and_costs_the_others_nothing() -> None:
    window = Window(60.0)
    one, two = (("engine", "0"),), (("engine", "1"),)
    window.add({one: histogram([0.3] * 10)}, 0.0)
    window.add({one: histogram([0.3] * 15), two: histogram([0.6] * 900)}, 1.0)
    assert window.recent().count == 5  # type: ignore[union-attr]
    window.add({one: histogram([0.3] * 16), two: histogram([0.6] * 902)}, 2.0)
    assert window.recent(1.0).count == 3  # type: ignore[union-attr]


def test_a_label_set_that_was_away_and_comes_back_with_other_bounds_is_no_harm() -> None:
    window = Window(60.0)
    one, two = (("engine", "0"),), (("engine", "1"),)
    window.add({one: histogram([0.3] * 10), two: histogram([0.3] * 4)}, 0.0)
    window.add({one: histogram([0.3] * 12)}, 1.0)
    window.add({one: histogram([0.3] * 15), two: histogram([0.3] * 9, (0.4, math.inf))}, 2.0)
    assert window.recent().count == 5  # type: ignore[union-attr]


def test_a_window_of_few_readings_ends_at_the_newest() -> None:
    window = Window(300.0, 10.0)
    for second in range(601):
        window.add({(): histogram([0.3] * second)}, float(second))
    recent = window.recent()
    assert recent is not None
    assert 300 <= recent.count <= 312


def test_disorder_of_one_is_mended_and_more_is_not_believed() -> None:
    window = Window(60.0)
    window.add({(): Histogram(BOUNDS, (0, 0, 0, 0, 0), 0.0)}, 0.0)
    window.add({(): Histogram(BOUNDS, (5, 4, 6, 6, 6), 1.0)}, 1.0)
    assert window.recent().counts == (5, 5, 6, 6, 6)  # type: ignore[union-attr]
    window.add({(): Histogram(BOUNDS, (9, 4, 9, 9, 9), 2.0)}, 2.0)
    assert window.recent() is None
