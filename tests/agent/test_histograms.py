"""Windows of cumulative histograms: exact means, quantiles within their bucket, nothing across a restart."""

from __future__ import annotations

import random
from bisect import bisect_left

import pytest

from agent.exposition import parse
from agent.histograms import Histogram, Window, gather, needed

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
    values = sorted(dice.uniform(0, 0.99) for _ in range(1000))
    made = histogram(values)
    for share in (0.5, 0.95, 0.99):
        truth = values[int(share * 1000) - 1]
        upper = bisect_left(BOUNDS, truth)
        found = made.quantile(share)
        assert found is not None
        assert (BOUNDS[upper - 1] if upper else 0.0) <= found <= BOUNDS[upper]


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert histogram([7.0] * 100).quantile(0.99) == 1.0


@pytest.mark.parametrize(("share", "count"), [(0.5, 5), (0.95, 20), (0.99, 100)])
def test_a_quantile_of_too_few_observations_is_not_given(share: float, count: int) -> None:
    assert needed(share) == count
    assert histogram([0.3] * (count - 1)).quantile(share) is None
    assert histogram([0.3] * count).quantile(share) is not None


def test_a_window_holds_only_what_happened_within_it() -> None:
    window = Window(60.0)
    slow = [0.9] * 1000
    made: list[float] = list(slow)
    for second in range(0, 181, 5):
        made += [0.15] * 10
        window.add(frozenset(), histogram(made), float(second))
    recent = window.recent()
    assert recent is not None
    assert recent.count == 120
    assert recent.mean == pytest.approx(0.15)
    assert recent.quantile(0.99) is not None and recent.quantile(0.99) <= 0.2  # type: ignore[operator]
    assert window.recent(10.0).count == 20  # type: ignore[union-attr]


def test_a_restart_starts_the_window_anew() -> None:
    window = Window(60.0)
    window.add(frozenset(), histogram([0.3] * 500), 0.0)
    window.add(frozenset(), histogram([0.3] * 20), 1.0)
    assert window.recent() is None
    window.add(frozenset(), histogram([0.3] * 26), 2.0)
    assert window.recent().count == 6  # type: ignore[union-attr]


def test_other_bounds_start_the_window_anew() -> None:
    window = Window(60.0)
    window.add(frozenset(), histogram([0.3] * 5), 0.0)
    window.add(frozenset(), histogram([0.3] * 9, (0.4, float("inf"))), 1.0)
    assert window.recent() is None


def test_label_sets_are_added() -> None:
    owners, joined = gather(parse(text("x", [0.15] * 3, 'engine="0"') + text("x", [0.6] * 4, 'engine="1"')), "x")  # type: ignore[misc]
    assert len(owners) == 2
    assert joined.counts == (0.0, 3.0, 3.0, 7.0, 7.0)
    assert joined.total == pytest.approx(0.45 + 2.4)


def test_label_sets_with_different_bounds_are_added_where_both_are_exact() -> None:
    one = text("x", [0.15] * 3, 'engine="0"', (0.1, 0.2, 1.0, float("inf")))
    two = text("x", [0.6] * 4, 'engine="1"', (0.2, 0.5, 1.0, float("inf")))
    _, joined = gather(parse(one + two), "x")  # type: ignore[misc]
    assert (joined.bounds, joined.counts) == ((0.2, 1.0, float("inf")), (3.0, 7.0, 7.0))


def test_a_family_without_its_last_bucket_or_sum_is_not_used() -> None:
    assert gather(parse('x_bucket{le="1"} 3\nx_sum 2\nx_count 3\n'), "x") is None
    assert gather(parse('x_bucket{le="+Inf"} 3\nx_count 3\n'), "x") is None


def test_disorder_of_one_is_mended_and_more_is_not_believed() -> None:
    window = Window(60.0)
    window.add(frozenset(), Histogram(BOUNDS, (0, 0, 0, 0, 0), 0.0), 0.0)
    window.add(frozenset(), Histogram(BOUNDS, (5, 4, 6, 6, 6), 1.0), 1.0)
    assert window.recent().counts == (5, 5, 6, 6, 6)  # type: ignore[union-attr]
    window.add(frozenset(), Histogram(BOUNDS, (9, 4, 9, 9, 9), 2.0), 2.0)
    assert window.recent() is None
