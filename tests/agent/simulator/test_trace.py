"""A replayed trace brings its requests at their times and in their lengths, at the rate that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorSettings
from agent.simulator.trace import Replay, Trace, TraceError, read_trace
from agent.simulator.workload import Asked, wave


def csv_of(path: Path, rows: list[tuple[str, int, int]]) -> Path:
    lines = [f"2023-11-16 18:{at}0,{context},{generated}" for at, context, generated in rows]
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    return path


def test_a_csv_trace_has_times_from_its_first_request_and_its_own_lengths(tmp_path: Path) -> None:
    rows = [("01:02.250000", 374, 44), ("01:00.000000", 4808, 10), ("01:03.000000", 7, 601)]
    trace = read_trace(csv_of(tmp_path / "hour.csv", rows))
    assert [(r.offset_s, r.prompt, r.output) for r in trace.requests] == [(0, 4808, 10), (2.25, 374, 44), (3, 7, 601)]
    assert trace.name == "hour"
    assert trace.span_s == pytest.approx(4.5)  # as much again as between two of them, in the mean, before it repeats


def test_a_jsonl_trace_knows_which_blocks_of_a_prompt_came_before(tmp_path: Path) -> None:
    path = tmp_path / "blocks.jsonl"
    rows = [(0, 2048, 5, [1, 2, 3, 4]), (1500, 2048, 6, [1, 2, 9, 4]), (2000, 512, 7, [1])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    trace = read_trace(path)
    assert [r.hit for r in trace.requests] == [0, 0.5, 1]
    assert [r.offset_s for r in trace.requests] == [0, 1.5, 2]
    assert trace.means() == pytest.approx((1536, 6, (1024 + 512) / 4608))
    assert trace.shortened(1000).means()[0] == pytest.approx((1000 + 1000 + 512) / 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "time,in,out\n1,2,3\n"),
        ("a.jsonl", "{}\n"),
        ("a.jsonl", "nothing"),
        ("a.csv", ""),
        ("a.jsonl", "[1]\n"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=name):
        read_trace(path)


def steady(rate: float, span_s: float = 100.0) -> Trace:
    count = round(rate * span_s)
    return Trace("steady", tuple(Asked(i / rate, 100.0 + i, 10.0, 0.25) for i in range(count)), span_s)


@pytest.mark.parametrize("rate", [0.5, 4.0, 13.0])
def test_requests_come_at_the_rate_asked_for_and_over_the_end_of_the_trace(rate: float) -> None:
    replay = Replay(steady(4.0), rate, 37.0, Random(6))
    drawn = [(i * 0.5, replay.draw(i * 0.5, 0.5, 1.0)) for i in range(2000)]
    assert sum(len(found) for _, found in drawn) == pytest.approx(rate * 1000, rel=0.07)
    assert all(0 <= asked.offset_s < 0.5 for _, found in drawn for asked in found)
    early = next(found for at_s, found in drawn if found)
    assert early[0].prompt == pytest.approx(100 + 37 * 4, abs=12 * max(1, 4 / rate))


def test_at_night_fewer_come() -> None:
    replay = Replay(steady(4.0), 4.0, 0.0, Random(6))
    drawn = sum(len(replay.draw(43_200 + i * 0.5, 0.5, 1.0)) for i in range(2000))
    assert drawn == pytest.approx(4000 * wave(43_200), rel=0.07)


def test_a_fleet_serves_the_traces_lengths_without_a_queue() -> None:
    settings = SimulatorSettings(nodes=1, gpus_per_node=2, load=0.5, seed=2)
    fleet = Fleet(settings, trace=steady(3.0))
    last = [s for _ in range(60) for s in fleet.step(5.0) if s.measurement == "engine"][-20:]
    assert all(100 <= float(s.fields["prompt_len_mean"]) <= 400 for s in last)
    assert max(float(s.fields["requests_waiting"]) for s in last) < 5
    assert min(float(s.fields["tokens_per_s"]) for s in last) > 0
