"""A stray sample of a clock that was wrong for a moment does not end a recording; a fleet that goes on after a night does."""

from __future__ import annotations

import pytest

from rules.strays import without_strays
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
