"""What of a verdict is written when: numbers each half minute, words when they are news; and how a reader gets both together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rules.verdict import Cause, Diagnosis, Line, Status, Step, StepReport, Verdict, from_sample
from rules.verdict_record import VerdictRecord, text_of
from telemetry.catalogue import check
from telemetry.sample import Sample
from telemetry.store import Store, open_store

SECOND = 10**9
T0 = 1_790_000_000 * SECOND


def judged(t: float, cause: Cause | None = None, *, loss: float = 30.0, output: float = 98.0) -> Diagnosis:
    """A judgement of n1's engine; every one has figures of its own in its words, as real ones do."""
    words = Line("rules.summary.healthy_gpu", {"output_pct": output, "util_pct": 90 + t / 1e4})
    verdict = Verdict(
        cause or Cause.NONE,
        Step.PHYSICAL,
        0.8,
        loss,
        "engine",
        {"node": "n1", "engine": "e"},
        None,
        (words,),
        (),
        words,
    )
    steps = tuple(StepReport(step, Status.RULED_OUT, (words,)) for step in Step)
    found = (verdict,) if cause else ()
    return Diagnosis({"node": "n1", "engine": "e"}, round(T0 + t * SECOND), steps, found, words, output, 97.0)


def written(diagnoses: Sequence[Diagnosis]) -> list[Sample]:
    record = VerdictRecord()
    return [sample for diagnosis in diagnoses for sample in record.samples([diagnosis])]


def seconds(samples: Sequence[Sample], *, with_text: bool) -> list[float]:
    return [(s.time_ns - T0) / SECOND for s in samples if not with_text or "evidence" in s.fields]


def test_a_pair_without_a_fault_has_its_numbers_each_half_minute_and_its_words_each_quarter_of_an_hour() -> None:
    samples = written([judged(t) for t in range(0, 3600, 5)])
    assert seconds(samples, with_text=False) == [*range(0, 3600, 30)]
    assert seconds(samples, with_text=True) == [0, 900, 1800, 2700]


def test_a_standing_cause_has_its_numbers_each_half_minute_and_its_words_each_two_minutes() -> None:
    samples = written([judged(t, Cause.THERMAL) for t in range(0, 600, 5)])
    assert seconds(samples, with_text=False) == [*range(0, 600, 30)]
    assert seconds(samples, with_text=True) == [0, 120, 240, 360, 480]
    for sample in samples:
        check(sample)
        assert sample.fields["confidence"] == 0.8 and sample.fields["loss_pct"] == 30.0
        assert ("summary" in sample.fields) == ("evidence" in sample.fields)


def test_another_cause_is_told_at_once_and_so_is_its_end() -> None:
    causes = {t: None if t < 40 or t >= 95 else Cause.THERMAL if t < 65 else Cause.POWER for t in range(0, 120, 5)}
    samples = written([judged(t, cause) for t, cause in causes.items()])
    assert seconds(samples, with_text=True) == [0, 40, 65, 95]
    assert [s.tags["cause"] for s in samples if "evidence" in s.fields] == ["none", "thermal", "power", "none"]


@pytest.mark.parametrize(("points", "told"), [(4.0, [0]), (6.0, [0, 60])])
def test_figures_that_moved_materially_are_worth_words_but_no_more_than_one_a_minute(
    points: float, told: list[float]
) -> None:
    samples = written([judged(t, Cause.THERMAL, loss=30.0 + (points if t else 0)) for t in range(0, 120, 5)])
    assert seconds(samples, with_text=True) == told


def test_a_step_that_flickers_between_two_answers_costs_a_text_a_minute_at_most() -> None:
    def flickering(t: int) -> Diagnosis:
        diagnosis = judged(t)
        status = Status.NO_DATA if t % 10 else Status.RULED_OUT
        return replace(diagnosis, steps=(replace(diagnosis.steps[0], status=status), *diagnosis.steps[1:]))

    told = seconds(written([flickering(t) for t in range(0, 600, 5)]), with_text=True)
    assert 5 <= len(told) <= 10
    assert all(b - a >= 60 for a, b in itertools.pairwise(told))


def test_a_clock_that_went_back_leaves_nobody_without_words() -> None:
    samples = written([judged(5000), judged(100)])
    assert seconds(samples, with_text=True) == [5000, 100]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite://{tmp_path}/store.db")
    yield opened
    opened.close()


def test_a_reader_gets_the_newest_words_of_the_verdicts_own_series(store: Store) -> None:
    store.write(written([judged(t, None if t < 300 else Cause.POWER) for t in range(0, 1000, 5)]))
    other = [replace(judged(t, Cause.POWER), subject={"node": "n1", "engine": "f"}) for t in range(900, 1000, 5)]
    store.write(written(other))
    verdict = next(
        s for s in store.latest("verdict", since_ns=T0) if s.tags["cause"] == "power" and s.tags["engine"] == "e"
    )
    assert "evidence" not in verdict.fields
    told = text_of(store, verdict)
    assert told is not None and (told.time_ns - T0) / SECOND == 900
    diagnosis = from_sample(told)
    assert diagnosis.verdicts[0].cause is Cause.POWER and diagnosis.subject["engine"] == "e"


def test_words_of_a_later_verdict_are_not_taken_for_an_earlier_one(store: Store) -> None:
    store.write(written([judged(t) for t in range(0, 1000, 5)]))
    at_600 = store.samples("verdict", start_ns=T0 + 600 * SECOND, end_ns=T0 + 601 * SECOND)
    told = text_of(store, at_600[0])
    assert told is not None and told.time_ns == T0


def test_a_verdict_of_which_the_words_are_gone_has_none(store: Store) -> None:
    lone = [sample for sample in written([judged(t) for t in range(0, 40, 5)]) if "evidence" not in sample.fields]
    store.write(lone)
    assert text_of(store, lone[-1]) is None
