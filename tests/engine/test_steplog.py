"""Every step is kept for a while, and on request in a file that never grows beyond its bound, loses nothing unsaid, and delays nobody."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import OutOfMemory
from engine.endpoints import _from_here
from engine.scheduler import StepPlan
from engine.settings import EngineSettings, SettingsError, check
from engine.stepfile import StepFile
from engine.steplog import StepLog
from tests.engine.checkpoints import write_checkpoint
from tests.engine.fakes import ask, make, run_out
from tests.engine.running import ThreadServer, until


def test_a_step_tells_its_prefill_and_decode_tokens_who_waits_and_what_stands_in_the_way() -> None:
    engine, _, clock = make(blocks=12, block_size=4, max_seqs=2, budget=8)
    for name, prompt in (("a", 5), ("b", 9), ("c", 3)):
        engine.add(ask(name, prompt, 3, clock))
    engine.step()
    engine.step()
    first, second = (step.body() for step in engine.steps.last(5))
    assert first.pop("time") > 1.7e9
    assert first == {
        "step": 0,
        "seconds": 0.01,
        "sequences": 2,
        "prefill_tokens": 8,
        "decode_tokens": 0,
        "waiting": 1,
        "kv_blocks_free": 9,
        "preempted": 0,
        "blocked": "seqs",
    }
    assert (second["sequences"], second["prefill_tokens"], second["decode_tokens"]) == (2, 6, 1)
    run_out(engine)
    assert engine.steps.last(1)[0].blocked is None


def test_what_is_computed_again_after_preemption_is_prefill_and_the_preemption_is_told() -> None:
    engine, _, clock = make(blocks=5, block_size=2, max_seqs=4, budget=16)
    engine.add(ask("a", 3, 5, clock))
    engine.add(ask("b", 3, 5, clock))
    run_out(engine)
    steps = engine.steps.last(100)
    assert sum(step.preempted for step in steps) == engine.stats.counters.preemptions_total > 0
    counters = engine.stats.counters
    again = counters.prompt_tokens_computed_total + counters.recomputed_tokens_total
    resumed = counters.preemptions_total  # each brings the token that it was preempted before, in a prefill row
    assert sum(step.prefill_tokens for step in steps) == again + resumed
    assert sum(step.prefill_tokens + step.decode_tokens for step in steps) == again + 2 * (5 - 1)


def test_a_step_without_memory_is_told_without_a_duration() -> None:
    engine, runner, clock = make()
    engine.add(ask("a", 3, 5, clock))
    runner.fail_next = OutOfMemory("no room")
    engine.step()
    body = engine.steps.last(1)[0].body()
    assert body["out_of_memory"] is True
    assert "seconds" not in body


def filled(log: StepLog, count: int) -> None:
    for number in range(count):
        log.add(StepPlan(), 10**18 + number, 0.5 + number, 7, 8, None)


def test_the_ring_keeps_the_last_steps_and_hands_out_what_is_asked_for() -> None:
    log = StepLog(most=4)
    assert log.last(3) == log.since(0) == []
    filled(log, 6)
    assert [step.number for step in log.last(2)] == [4, 5]
    assert [step.number for step in log.last(99)] == [2, 3, 4, 5]
    assert log.last(0) == log.since(6) == []
    assert [step.number for step in log.since(0)] == [2, 3, 4, 5]
    assert [step.number for step in log.since(5)] == [5]


def lines_of(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_file_rotates_within_its_bound_and_skips_nothing_unsaid(tmp_path: Path) -> None:
    path, log = tmp_path / "steps.jsonl", StepLog(most=20)
    file = StepFile(log, path, most_bytes=8000)
    for _ in range(10):
        filled(log, 15)
        file._write()
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 8000
    filled(log, 50)
    file._write()
    file._write()
    found = lines_of(tmp_path / "steps.jsonl.1", path)
    assert found[-21] == {"skipped": 30}
    assert [line["step"] for line in found[-20:]] == list(range(180, 200))
    before = [line["step"] for line in found[:-21]]
    assert before == list(range(before[0], 150))
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


def test_a_batch_larger_than_the_whole_file_leaves_its_end_in_whole_lines(tmp_path: Path) -> None:
    path, log = tmp_path / "steps.jsonl", StepLog(most=100)
    filled(log, 100)
    StepFile(log, path, most_bytes=2000)._write()
    assert path.stat().st_size <= 1000
    assert lines_of(path)[-1]["step"] == 99


def test_a_disk_that_fails_costs_no_step_once_it_works_again_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "steps.jsonl", StepLog()
    file = StepFile(log, path, most_bytes=1 << 20)
    filled(log, 2)
    file._write()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 30:
            return write(descriptor, data[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    for _ in range(3):
        filled(log, 1)
        file._write()
    assert [line["step"] for line in lines_of(path)] == [0, 1]  # no half line either
    assert [record.getMessage() for record in caplog.records] == [
        f"the step log {path} can't be written: No space left on device"
    ]
    monkeypatch.undo()
    file._write()
    assert [line["step"] for line in lines_of(path)] == [0, 1, 2, 3, 4]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / "steps").symlink_to(tmp_path / "other")
    log = StepLog()
    filled(log, 2)
    StepFile(log, tmp_path / "steps", most_bytes=1 << 20)._write()
    assert (tmp_path / "other").read_text() == "mine"


def test_the_server_tells_its_steps_and_writes_all_of_them_before_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    folder = write_checkpoint(tmp_path / "tiny")
    settings = EngineSettings(model=str(folder), kv_blocks=64, threads=1, step_log=str(path))
    with ThreadServer(settings) as server:
        assert server.http.get("/debug/steps").json() == {"model": "tiny", "steps": []}
        body = {"prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        steps = server.http.get("/debug/steps", params={"last": 4000}).json()["steps"]
        assert [(step["prefill_tokens"], step["decode_tokens"]) for step in steps] == [(5, 0)] + [(0, 1)] * 29
        for step in steps:
            inside = sum(step["stages"][name] for name in ("embed", "attention", "mlp", "sample"))
            assert 0 < inside <= step["seconds"] + 1e-5
        last = server.http.get("/debug/steps", params={"last": 3}).json()["steps"]
        assert last == steps[-3:]
        foreign = server.http.get("/debug/steps", headers={"Origin": "http://elsewhere.example"})
        assert foreign.status_code == 403
        for wrong in ("-1", "x", "1.5", "", "9" * 30):
            refused = server.http.get("/debug/steps", params={"last": wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last")
        until(path.exists, "the file")
        assert server.http.post("/v1/completions", json=body).status_code == 200
    assert lines_of(path)[:30] == steps
    assert [line["step"] for line in lines_of(path)] == list(range(60))


@pytest.mark.parametrize(
    ("client", "here"),
    [
        *((address, True) for address in ("127.0.0.1", "127.8.0.3", "::1", "::ffff:127.0.0.1")),
        *((address, False) for address in ("10.0.0.2", "::ffff:10.0.0.2", "fe80::1", "", None)),
    ],
)
def test_only_this_machine_is_told(client: str | None, here: bool) -> None:
    request = SimpleNamespace(client=None if client is None else SimpleNamespace(host=client))
    assert _from_here(request) is here  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    check(replace(EngineSettings(), step_log=str(tmp_path / "steps")))
    with pytest.raises(SettingsError, match=r"step_log is .*nowhere/steps: there is no such folder"):
        check(replace(EngineSettings(), step_log=str(tmp_path / "nowhere" / "steps")))
    with pytest.raises(SettingsError, match=r"step_log is .*: that is a folder; name a file in it"):
        check(replace(EngineSettings(), step_log=str(tmp_path)))
    assert replace(EngineSettings(), step_log="x").fingerprint() == EngineSettings().fingerprint()
