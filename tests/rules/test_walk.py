"""The walk through a recording: how many moments of it are judged, and when."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rules.triage import LONGEST_GAP_S, JudgeSettings, judge, walk
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0

YEARS_S = 10**9
WALKED = JudgeSettings(history_s=10 * YEARS_S, step_s=5.0)


def gpu(at_ns: int) -> Sample:
    return Sample("gpu", {"node": "n1", "gpu": "0", "uuid": "U"}, {"util_pct": 5.0}, at_ns)


def moments(times_ns: list[int], at_ns: int | None = None) -> list[int]:
    found = []
    for _, diagnoses in walk([gpu(t) for t in times_ns], at_ns, WALKED):
        found.append(diagnoses[0].at_ns)
        assert len(found) < 5000, "it is walked without end"
    return found


def test_years_of_silence_before_within_and_after_a_recording_are_not_walked() -> None:
    minutes = [T0 + second * SECOND for second in range(0, 60, 5)]
    later = [t + YEARS_S * SECOND for t in minutes]
    end_ns = later[-1] + YEARS_S * SECOND
    judged = moments([1, *minutes, *later], end_ns)
    assert judged[-1] == end_ns
    assert set(minutes) <= set(judged) and set(later) <= set(judged)
    apart = {after - before for before, after in pairwise(judged)}
    assert min(apart) == 5 * SECOND and all(length % (5 * SECOND) == 0 for length in apart)


def test_an_hour_of_silence_is_walked_moment_by_moment() -> None:
    last = T0 + int(LONGEST_GAP_S) * SECOND
    assert moments([T0, last]) == list(range(T0, last + 1, 5 * SECOND))


def test_a_node_of_which_only_the_supplies_are_known_is_judged_and_so_is_a_time_before_1970(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supply = [
        Sample("psu", {"node": "n1", "psu": "1"}, {"ok": 1, "output_w": 411.0}, T0 + t * SECOND) for t in range(60)
    ]
    (alone,) = judge(supply)
    assert not alone.verdicts and alone.headline.key == "rules.summary.node_ok"
    (early,) = judge([gpu(-t * SECOND) for t in range(60, 0, -1)])
    assert not early.verdicts and early.headline.key == "rules.summary.gap"
    assert not caplog.records
