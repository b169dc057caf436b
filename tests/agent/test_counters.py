"""Rates never go negative, never span a restart, and no series that joins or leaves makes a jump."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.counters import Rate


def test_the_first_reading_has_no_rate() -> None:
    assert Rate().per_second({"a": 5.0}, 10.0) is None


def test_a_rate_is_growth_over_the_time_that_really_passed() -> None:
    rate = Rate()
    rate.per_second({"a": 100.0}, 10.0)
    assert rate.per_second({"a": 130.0}, 11.5) == 20.0


def test_a_reset_gives_no_rate_and_the_next_one_is_right() -> None:
    rate = Rate()
    rate.per_second({"a": 1000.0}, 10.0)
    assert rate.per_second({"a": 40.0}, 11.0) is None
    assert rate.per_second({"a": 65.0}, 12.0) == 25.0


def test_a_series_that_joins_counts_from_its_second_reading() -> None:
    rate = Rate()
    rate.per_second({"a": 100.0}, 10.0)
    assert rate.per_second({"a": 110.0, "b": 90_000.0}, 11.0) == 10.0
    assert rate.per_second({"a": 120.0, "b": 90_007.0}, 12.0) == 17.0


def test_a_series_that_leaves_makes_no_drop() -> None:
    rate = Rate()
    rate.per_second({"a": 100.0, "b": 900.0}, 10.0)
    assert rate.per_second({"a": 103.0}, 11.0) == 3.0


def test_after_forgetting_there_is_no_rate_across_the_gap() -> None:
    rate = Rate()
    rate.per_second({"a": 100.0}, 10.0)
    rate.forget()
    assert rate.per_second({"a": 100_000.0}, 60.0) is None


def test_no_time_has_no_rate() -> None:
    rate = Rate()
    rate.per_second({"a": 1.0}, 10.0)
    assert rate.per_second({"a": 2.0}, 10.0) is None


def test_a_windowed_rate_is_the_mean_over_the_window_once_it_is_filled() -> None:
    rate = Rate(window_s=60.0)
    answers = [rate.per_second({"a": float(20 * (second // 20))}, float(second)) for second in range(0, 200, 5)]
    assert answers[:12] == [None] * 12
    assert all(answer is not None and 0.6 < answer < 1.4 for answer in answers[12:])


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 5)), min_size=2))
def test_no_sequence_of_readings_gives_a_negative_rate(readings: list[tuple[int, int]]) -> None:
    rate, now_s = Rate(), 0.0
    for value, passed_s in readings:
        now_s += passed_s
        answer = rate.per_second({"a": float(value)}, now_s)
        assert answer is None or answer >= 0


def test_a_window_may_be_asked_to_be_longer_and_is_then_filled_first() -> None:
    rate = Rate(window_s=60.0)
    answers = [rate.per_second({"a": 3.0 * n}, 10.0 * n, window_s=120.0) for n in range(14)]
    assert answers == [None] * 12 + [0.3, 0.3]


def test_rounded_numbers_need_twenty_of_their_last_digit() -> None:
    def printed(value: float) -> float:
        return float(f"{value:.6g}")

    rate = Rate(significant_digits=6)
    answers = [rate.per_second({"a": printed(5e8 + 120 * n)}, float(n)) for n in range(400)]
    told = [answer for answer in answers if answer is not None]
    assert answers[:160] == [None] * 160
    assert told
    assert all(abs(answer - 120) < 0.06 * 120 for answer in told)


def test_numbers_that_fit_into_their_digits_are_exact() -> None:
    rate = Rate(significant_digits=6)
    rate.per_second({"a": 999_000.0}, 0.0)
    assert rate.per_second({"a": 999_003.0}, 1.0) == 3.0


def test_rounded_numbers_that_stand_still_are_a_rate_of_zero_after_the_longest_window() -> None:
    rate = Rate(significant_digits=6)
    answers = [rate.per_second({"a": 5e8}, 10.0 * n) for n in range(62)]
    assert answers[:60] == [None] * 60
    assert answers[60:] == [0.0, 0.0]


def test_a_series_that_comes_back_smaller_than_it_left_gives_no_negative_rate() -> None:
    rate = Rate(window_s=20.0)
    readings = [{"a": 90.0, "b": 5.0}, {"b": 6.0}, {"a": 1.0, "b": 7.0}]
    assert [rate.per_second(reading, 10.0 * n) for n, reading in enumerate(readings)] == [None, None, None]
