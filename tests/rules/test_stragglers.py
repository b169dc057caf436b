"""A rank that computes longer while the others wait is named, beside what its hardware says, and only where it can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import pytest

from rules.finding import Finding
from rules.steps import WALK
from rules.thresholds import Bar
from rules.triage import JudgeSettings, walk
from rules.verdict import Cause, Diagnosis, Status
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0, Moment, Node, bend, scene

LAST_S, AT_S = 300, 220
Times = Callable[[int, int], tuple[float, float]]
"""(rank, second) -> (what it computes, what it waits) in each step, milliseconds."""


def even(rank: int, second: int) -> tuple[float, float]:
    return 10.0 + 0.1 * rank, 1.0 - 0.1 * rank


def slow_second(rank: int, second: int) -> tuple[float, float]:
    """From AT_S on rank 1 takes half as long again, and the others wait it out."""
    if second < AT_S:
        return even(rank, second)
    return (15.3, 0.6) if rank == 1 else (10.2, 5.7)


def uneven_ever_since(rank: int, second: int) -> tuple[float, float]:
    return (15.3, 0.6) if rank == 1 else (10.2, 5.7)


def slow_and_nobody_waits(rank: int, second: int) -> tuple[float, float]:
    return (15.3, 0.6) if rank == 1 and second >= AT_S else (10.2, 0.7)


def ranks(times: Times, told: Iterable[int] = (0, 1), gpus: str = "0+1") -> Iterator[Sample]:
    noise = random.Random(7)
    tags = {"node": "n1", "rack": "r1", "engine": "chat", "kind": "vllm", "model": "qwen2-7b", "gpus": gpus}
    for second in range(LAST_S):
        for rank in told:
            compute, wait = (part / 1000 * noise.gauss(1, 0.01) for part in times(rank, second))
            fields: dict[str, float] = {"step_compute_mean_s": compute, "step_wait_mean_s": wait}
            yield check(Sample("rank", {**tags, "rank": str(rank)}, fields, T0 + second * SECOND))


def judged(samples: Iterable[Sample], **fault: float) -> tuple[Diagnosis, dict[Cause, Finding]]:
    """The judgement of n1 at the end, and what each step found."""
    plant = scene([Node("n1", 1, fault=bend(**fault) if fault else None, at=AT_S), Node("n2", 2)], LAST_S)
    together = sorted([*plant, *samples], key=lambda sample: sample.time_ns)
    triage, diagnoses = [*walk(together, None, JudgeSettings(step_s=10.0))][-1]
    evidence = next(seen for key, seen in triage.last.items() if key.startswith("n1"))
    found = {each.cause: each for examine in WALK.values() for each in examine(evidence, Bar())}
    return next(diagnosis for diagnosis in diagnoses if diagnosis.subject["node"] == "n1"), found


def lines(finding: Finding) -> str:
    return "\n".join(entry.text("en") for entry in finding.evidence)


def test_a_rank_that_the_others_wait_for_is_named_on_its_gpu_with_both_sides() -> None:
    diagnosis, found = judged(ranks(slow_second), work=1.5)
    top = diagnosis.verdicts[0]
    assert (top.cause, top.scope, top.subject["gpu"], top.gpus) == (Cause.SCHEDULING, "gpu", "1", ("1",))
    assert top.confidence > 0.8
    assert "rank 1 computes 1.5 times as long" in top.summary.text("en")
    said = "\n".join(entry.text("en") for entry in top.evidence)
    assert "rank 1 (GPU 1) computes 15.3 ms in each step and waits 0.6" in said
    assert "the others 10.2 and 5.7" in said
    assert top.since_ns is not None and abs(top.since_ns - (T0 + AT_S * SECOND)) <= 12 * SECOND
    assert found[Cause.GPU_FAULT].status is Status.RULED_OUT


@pytest.mark.parametrize(
    ("times", "work"),
    [(even, 1.5), (slow_second, 1.0), (uneven_ever_since, 1.5), (slow_and_nobody_waits, 1.5)],
    ids=["all alike", "no loss beside it", "it always was so", "nobody waits for it"],
)
def test_no_rank_is_called_slow_where_one_side_is_missing(times: Times, work: float) -> None:
    diagnosis, found = judged(ranks(times), work=work)
    assert found[Cause.SCHEDULING].status is not Status.CONFIRMED
    assert Cause.SCHEDULING not in {verdict.cause for verdict in diagnosis.verdicts}


def test_what_the_slow_ranks_card_suffers_from_stands_first_with_the_rank_in_its_evidence() -> None:
    def stuck(moment: Moment) -> None:
        moment.work, moment.clock, moment.power = 1.5, 900.0, 210.0

    plant = scene([Node("n1", 1, fault=stuck, at=AT_S), Node("n2", 2)], LAST_S)
    healthy = {s.time_ns: s for s in scene([Node("n1", 1)], LAST_S) if s.tags.get("gpu") == "0"}
    one = [healthy[s.time_ns] if s.tags.get("gpu") == "0" and s.tags["node"] == "n1" else s for s in plant]
    together = sorted([*one, *ranks(slow_second)], key=lambda sample: sample.time_ns)
    _, diagnoses = [*walk(together, None, JudgeSettings(step_s=10.0))][-1]
    (top,) = next(diagnosis for diagnosis in diagnoses if diagnosis.subject["node"] == "n1").verdicts
    assert (top.cause, top.gpus) == (Cause.GPU_FAULT, ("1",))
    assert "rank 1 (GPU 1) computes 15.3 ms" in "\n".join(entry.text("en") for entry in top.evidence)


def test_a_second_process_on_the_card_makes_its_rank_slow_and_not_the_other_way_round() -> None:
    diagnosis, found = judged(ranks(slow_second), work=1.5, processes=2)
    assert [verdict.cause for verdict in diagnosis.verdicts] == [Cause.CONTENTION]
    assert "rank 1 (GPU 1) computes 15.3 ms" in lines(found[Cause.CONTENTION])


@pytest.mark.parametrize("work", [1.0, 1.5])
def test_of_one_rank_alone_it_is_not_known_whether_it_is_slow(work: float) -> None:
    _, found = judged(ranks(slow_second, told=(1,)), work=work)
    scheduling = found[Cause.SCHEDULING]
    assert scheduling.status is Status.NO_DATA
    assert "only rank 1 tells how long it computes, so whether one is slow is not known" in lines(scheduling)


def test_an_engine_that_tells_nothing_of_ranks_is_judged_as_ever() -> None:
    _, found = judged(())
    assert found[Cause.SCHEDULING].status is Status.RULED_OUT


def test_a_rank_whose_gpu_is_not_known_is_named_without_one() -> None:
    def third_slow(rank: int, second: int) -> tuple[float, float]:
        return slow_second(1 if rank == 2 else 0, second)

    diagnosis, _ = judged(ranks(third_slow, told=(0, 1, 2)), work=1.5)
    (top,) = diagnosis.verdicts
    assert (top.cause, top.gpus, top.scope) == (Cause.SCHEDULING, (), "engine")
    assert any(entry.text("en").startswith("rank 2 computes 15.3 ms") for entry in top.evidence)
