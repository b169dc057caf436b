"""A stray sample of a clock that was wrong for a moment does not end a recording; a fleet that goes on after a night does."""

from __future__ import annotations

import pytest

from rules.strays import passed_by, without_strays
from rules.window import SECOND
from telemetry.sample import Sample

HOUR = 3600


def at(*seconds: float) -> list[Sample]:
    return [Sample("host", {"node": "n1"}, {"cpu_pct": 20.0}, int(second * SECOND)) for second in seconds]


BODY = [float(second) for second in range(400)]


@pytest.mark.parametrize(
    "late", [[400 + 2 * HOUR], [9 * HOUR, 9 * HOUR + 1], [5 * HOUR, 2 * 10**6], [9 * HOUR, 9 * HOUR, 9e9]]
)
def test_what_lies_hours_after_all_the_others_is_put_aside(late: list[float]) -> None:
    mixed = [*at(*late[:1]), *at(*BODY), *at(*late[1:])]
    kept, strays = without_strays(mixed)
    assert kept == at(*BODY)
    assert strays == at(*late)


@pytest.mark.parametrize(
    "late",
    [
        [],
        [400 + HOUR - 2],
        [9 * HOUR, 9 * HOUR + 11],
        [9.0 * HOUR + tenth / 10 for tenth in range(60)],
    ],
    ids=["nothing", "within the hour", "it goes on", "a whole tick"],
)
def test_a_recording_that_goes_on_after_a_silence_is_left_whole(late: list[float]) -> None:
    samples = at(*BODY, *late)
    assert without_strays(samples) == (samples, [])


def test_two_samples_hours_apart_are_both_kept_or_told() -> None:
    kept, strays = without_strays(at(0, 9 * HOUR))
    assert (kept, strays) == (at(0), at(9 * HOUR))
    assert without_strays([]) == ([], [])


def passed(*seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of what went by, and of what was put aside; each must keep its line."""
    strays: list[Sample] = []
    numbered = list(zip(at(*seconds), range(len(seconds)), strict=True))
    kept = list(passed_by(numbered, strays))
    assert [pair for pair in numbered if pair in kept] == kept
    return [sample.time_ns / SECOND for sample, _ in kept], [sample.time_ns / SECOND for sample in strays]


@pytest.mark.parametrize("place", [1, 57, 399, 400])
@pytest.mark.parametrize("late", [[9 * HOUR], [9 * HOUR, 9 * HOUR + 1, 9 * HOUR + 1]])
def test_a_stray_in_passing_is_put_aside_wherever_it_stands(place: int, late: list[float]) -> None:
    assert passed(*BODY[:place], *late, *BODY[place:]) == (BODY, late)


@pytest.mark.parametrize(
    "after",
    [[9.0 * HOUR, 9.0 * HOUR + 12], [9.0 * HOUR + second for second in range(30)], [9.0 * HOUR] * 70, [3000.0]],
    ids=["it goes on", "a second part", "a whole fleet at once", "within the hour"],
)
def test_what_goes_on_after_a_silence_passes_by_whole(after: list[float]) -> None:
    assert passed(*BODY, *after) == ([*BODY, *after], [])


def test_a_sparse_recording_passes_by_whole() -> None:
    seldom = [2.0 * HOUR * time for time in range(200)]
    assert passed(*seldom) == (seldom, [])
    assert passed(*seldom[:2]) == (seldom[:2], [])
