"""Clocks that are off by an hour: the node is named with its offset, is judged by its own newest samples, and no other is called silent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rules.clocks import Clocks, offsets_of
from rules.service import Service, TriageSettings
from rules.triage import JudgeSettings, judge
from rules.verdict import Cause, Diagnosis
from telemetry.sample import Sample
from telemetry.store import open_store
from tests.rules.plant import SECOND, T0, Node, bend, scene

HOUR = 3600 * SECOND
LOST = bend(gpu_state=1)


def shifted(samples: Iterable[Sample], node: str, by_ns: int) -> list[Sample]:
    return [replace(s, time_ns=s.time_ns + by_ns) if s.tags["node"] == node else s for s in samples]


def causes(diagnosis: Diagnosis) -> set[Cause]:
    return {verdict.cause for verdict in diagnosis.verdicts}


@pytest.mark.parametrize(("count", "hours"), [(2, 1), (3, 1), (3, -1)])
def test_a_recording_names_the_node_whose_clock_is_off_and_calls_no_other_silent(count: int, hours: int) -> None:
    nodes = [Node(f"n{i}", i) for i in range(1, count + 1)]
    nodes[-1].fault, nodes[-1].at = LOST, 140
    found = judge(shifted(scene(nodes, 180), f"n{count}", hours * HOUR), None, JudgeSettings(step_s=10.0))
    *others, off = found
    assert [causes(other) for other in others] == [set()] * (count - 1)
    assert causes(off) == {Cause.TELEMETRY, Cause.GPU_FAULT}
    (clock,) = [verdict for verdict in off.verdicts if verdict.cause is Cause.TELEMETRY]
    said = clock.summary.text("en")
    assert f"n{count}" in said and ("ahead" if hours > 0 else "behind") in said and "NTP" in said and "3600 s" in said
    assert clock.scope == "node" and clock.fixes


def test_a_node_that_came_late_or_fell_silent_has_no_clock_that_is_off() -> None:
    whole = scene([Node("n1", 1), Node("n2", 2), Node("n3", 3)], 900)
    late = [s for s in whole if s.tags["node"] != "n2" or s.time_ns > T0 + 400 * SECOND]
    gone = [s for s in whole if s.tags["node"] != "n2" or s.time_ns < T0 + 400 * SECOND]
    assert offsets_of(late) == offsets_of(gone) == offsets_of(whole) == {}


def test_a_clock_is_off_while_its_node_goes_on_and_not_where_it_stands() -> None:
    clocks = Clocks()
    for second in range(0, 100, 20):
        now = T0 + second * SECOND
        newest = {
            "ahead": now + HOUR,
            "behind": now - HOUR - second * SECOND // 50,
            "dead": T0 - HOUR,
            "right": now - 2 * SECOND,
        }
        clocks.look(newest, now)
        assert ("ahead" in clocks.offsets, "behind" in clocks.offsets) == (True, second > 0)
        assert {"dead", "right"}.isdisjoint(clocks.offsets)
    clocks.look({"ahead": T0 + HOUR + 80 * SECOND, "behind": T0 + 119 * SECOND}, T0 + 120 * SECOND)
    assert clocks.offsets == {}  # one ended, one was set right


@pytest.mark.parametrize("hours", [1, -1])
def test_a_host_whose_clock_is_off_is_judged_live_and_named(
    tmp_path: Path, hours: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = scene([Node("n1", 1), Node("n2", 2, at=200, fault=LOST)], 260)
    url = f"sqlite://{tmp_path}/store.db"
    service = Service(TriageSettings(store_url=url, state_dir=tmp_path / "state"), open_store(url))
    position = 0
    for t in range(0, 260, 5):
        begin = position
        while position < len(samples) and samples[position].time_ns <= T0 + t * SECOND:
            position += 1
        service.store.write(shifted(samples[begin:position], "n2", hours * HOUR))
        assert service.turn(T0 + t * SECOND, float(t))
        if t == 195:
            right, off = service.diagnoses
            assert causes(right) == set() and causes(off) == {Cause.TELEMETRY}
            assert off.output_pct == pytest.approx(100, abs=8) and off.tokens_per_s
    right, off = service.diagnoses
    assert causes(right) == set() and causes(off) == {Cause.TELEMETRY, Cause.GPU_FAULT}
    assert [alert.cause for alert in service.machine.open() if "n2" in alert.nodes].count("telemetry") == 1
    assert [record.message for record in caplog.records if "clock of node n2" in record.message]
