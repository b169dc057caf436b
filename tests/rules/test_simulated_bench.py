"""The bench over simulated faults: what it owes a name, what it counts as wrong, and its exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import triage_days, triage_simulated
from bench.triage import main
from bench.triage_simulated import Given, Outcome

FAULT = Outcome(
    "power-cap", 1, 0.6, False, "power", ("power@n",), True, True, 20.0, 30.0, 40.0, (Given("power", 0.93, True),)
)
TWIN = replace(FAULT, twin=True, cause="none", said=(), named_s=None, lost_pct=None, given=())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triage.py", *arguments])
    return main()


def test_a_fault_is_named_and_its_twin_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triage_simulated, "PAST_S", 240.0)
    asked = ("--simulated", "--kinds", "power-cap", "--seeds", "1", "--loads", "0.8")
    assert run(monkeypatch, *asked, "--json") == 0
    fault, twin = json.loads(capsys.readouterr().out)["runs"]
    assert (fault["said"], fault["top_1"], fault["twin"]) == (["power@sim-n01"], True, False)
    assert 5 <= fault["named_s"] <= 60
    assert fault["most_lost_pct"] > 15
    assert (twin["said"], twin["given"], twin["twin"]) == ([], [], True)


@pytest.mark.parametrize(
    ("outcomes", "held"),
    [
        ([FAULT, TWIN], True),
        ([replace(FAULT, top_1=False), TWIN], False),
        ([replace(FAULT, top_1=False), *[FAULT] * 40], True),
        ([replace(FAULT, top_1=False, top_3=False), *[FAULT] * 40], False),
        ([FAULT, replace(TWIN, said=("power@n",))], False),
        ([replace(FAULT, named_s=61.0)], False),
        ([replace(FAULT, kind="dust", named_s=61.0, lost_pct=9.0)], True),
        ([replace(FAULT, kind="dust", named_s=61.0, lost_pct=11.0)], False),
        ([replace(FAULT, kind="dust", named_s=40.0, lost_pct=11.0)], True),
    ],
    ids=[
        "all right", "one of one wrong", "one of many wrong", "not among three", "a twin told", "sudden and late",
        "growing", "growing and late", "growing and soon",
    ],
)  # fmt: skip
def test_the_bar_holds_or_not(outcomes: list[Outcome], held: bool) -> None:
    assert triage_simulated.holds(outcomes) is held
    failed = [line for line in triage_simulated.told(outcomes) if " seed 1 load 0.6: " in line]
    assert bool(failed) is any(run.late or not run.top_1 or (run.twin and bool(run.said)) for run in outcomes)


def test_the_reliability_table_counts_each_verdict_in_the_bin_of_its_confidence() -> None:
    verdicts = (Given("power", 0.5, False), Given("power", 0.91, True), Given("power", 0.94, False))
    bins = triage_simulated.reliability([replace(FAULT, given=verdicts)])
    assert {(b.low, b.count, b.right) for b in bins if b.count} == {(0.3, 1, 0), (0.9, 2, 1)}


def test_healthy_days_take_the_traces_in_turns(tmp_path: Path) -> None:
    for name in ("a/SomeTrace_x.csv", "b/some_trace.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    nodes = triage_days.nodes_of(tmp_path, 20.0)
    assert [(node.trace.name, node.gpu_days) for node in nodes] == [
        ("SomeTrace_x.csv", 7.5),
        ("some_trace.jsonl", 7.5),
        ("SomeTrace_x.csv", 5.0),
    ]


def test_a_seed_has_the_same_trace_alone_as_among_others_and_one_trace_can_be_asked_for(tmp_path: Path) -> None:
    for name in ("aTrace1.csv", "aTrace2.csv", "b_trace.jsonl"):
        (tmp_path / name).touch()
    every = triage_days.nodes_of(tmp_path, 45.0)
    assert triage_days.nodes_of(tmp_path, 7.5, first_seed=5) == [every[4]]
    assert every[4].trace.stem == "aTrace2"
    alone = triage_days.nodes_of(tmp_path, 10.0, 5, "b_trace", triage_days.LIVE)
    assert [(node.trace.stem, node.seed, node.cadence.step_s) for node in alone] == [
        ("b_trace", 5, 1.0),
        ("b_trace", 6, 1.0),
    ]
    with pytest.raises(ValueError, match="no trace is named c; there are aTrace1, aTrace2, b_trace"):
        triage_days.nodes_of(tmp_path, 1.0, named="c")


def test_a_healthy_part_of_a_day_is_no_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.5000000,{700 + 37 * i % 900},{60 + i % 90}" for i in range(600)]
    (tmp_path / "OneTrace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert run(monkeypatch, "--traces", str(tmp_path), "--gpu-days", "0.04") == 0
    said = capsys.readouterr().out
    assert "0.04 healthy GPU-days" in said
    assert (
        "a sample in 5 s, a judgement in 15 s; an agent and the service have a sample in 1 s, a judgement in 5 s"
        in said
    )


@pytest.mark.parametrize(
    "arguments", [[], ["--simulated", "--kinds", "nothing-such"], ["--traces", "."]], ids=["nothing", "kind", "traces"]
)
def test_what_can_not_be_asked_is_told_and_ends_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err
