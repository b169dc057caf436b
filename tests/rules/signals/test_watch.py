"""Two readings of the engine in live samples: its own watch over progress, and what its KV use counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rules.triage import judge
from rules.verdict import Cause
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0, Moment, Node, bend, scene

AT, UNTIL = 150, 210


def with_fields(samples: list[Sample], after: int, **fields: int | str) -> list[Sample]:
    """The engine's samples from the second `after` on with these fields as well."""
    return [
        replace(sample, fields={**sample.fields, **fields})
        if sample.measurement == "engine" and sample.time_ns >= T0 + after * SECOND
        else sample
        for sample in samples
    ]


def causes(samples: list[Sample]) -> list[Cause]:
    return [verdict.cause for diagnosis in judge(samples) for verdict in diagnosis.verdicts]


@pytest.mark.parametrize(("stalled", "found"), [(1, [Cause.SCHEDULING]), (0, [])])
def test_an_engine_that_counts_at_the_end_of_requests_is_hung_if_its_watch_says_so(
    stalled: int, found: list[Cause]
) -> None:
    nodes = [Node("n1", seed=3, fault=bend(frozen=True), at=AT)]
    samples = with_fields(scene(nodes, UNTIL), 0, counter_style="finish", stalled=0)
    assert causes(with_fields(samples, AT, stalled=stalled)) == found


def full(moment: Moment) -> None:
    moment.kv, moment.running, moment.preemptions = 99.0, 22.0, 0.4
    moment.waiting = min(60.0, (moment.t - AT) * 0.8)


@pytest.mark.parametrize("kind", ["live", "reserved", "live_plus_cached"])
def test_a_full_pool_is_pressure_only_where_it_counts_what_is_live(kind: str) -> None:
    samples = with_fields(scene([Node("n1", seed=5, fault=full, at=AT)], UNTIL), 0, kv_used_kind=kind)
    assert (Cause.MEMORY_KV in causes(samples)) is (kind == "live")


def test_a_sensor_that_stopped_is_told_while_work_goes_on_and_not_of_an_engine_that_stands_still() -> None:
    def dead(samples: list[Sample]) -> list[Sample]:
        return [
            replace(sample, fields={**sample.fields, "sm_active_pct": 0.0})
            if sample.measurement == "gpu" and sample.time_ns >= T0 + AT * SECOND
            else sample
            for sample in samples
        ]

    assert causes(dead(scene([Node("n1", seed=7)], UNTIL))) == [Cause.TELEMETRY]
    hung = [Node("n1", seed=7, fault=bend(frozen=True), at=AT)]
    for seconds in range(AT + 5, UNTIL, 9):
        assert Cause.TELEMETRY not in causes(dead(scene(hung, seconds)))
