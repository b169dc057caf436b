"""The doctor, one sweep and a pause of the whole agent on a host with two GPUs, one of which falls off the bus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent.collectors.nvidia import NvidiaCollector
from agent.daemon import Agent
from agent.doctor import examination
from agent.doctor.examination import Patient, examine, worst
from agent.pause import ask, withdraw
from agent.settings import AgentSettings
from agent.sweep import sweep
from pairscope.sweep import print_sweep
from tests.agent.nvidia.conftest import Host
from tests.processes import eventually_ended


def settings(folder: Path, language: str = "en") -> AgentSettings:
    return AgentSettings(
        state_dir=folder / "agent", store_url="sqlite:///x.db", node="n7", amd=False, ascend=False, language=language
    )


def lose(host: Host) -> None:
    host.scenario.refuse(0, "handle", code=15)


@pytest.fixture(autouse=True)
def of_the_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "QUESTIONS", {})


def test_two_gpus_that_answer_are_well(host: Host, tmp_path: Path) -> None:
    found = [finding for finding in examine(Patient(settings(tmp_path)), wait_s=30.0) if "gpu" in finding.source]
    assert found
    assert worst(found) != "error"
    assert "2" in " ".join(finding.text for finding in found)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_lost_gpu_is_an_error_with_a_remedy_and_the_other_is_shown(host: Host, tmp_path: Path, language: str) -> None:
    lose(host)
    found = examine(Patient(settings(tmp_path, language)), wait_s=30.0)
    errors = [finding for finding in found if finding.level == "error"]
    assert errors
    assert all(finding.source.startswith("gpu") and finding.remedy for finding in errors)
    assert any(any("\u4e00" <= c <= "\u9fff" for c in finding.text) for finding in errors) == (language == "zh")


def test_a_sweep_shows_both_with_their_state_in_words(host: Host, tmp_path: Path) -> None:
    lose(host)
    swept = sweep(settings(tmp_path), wait_s=30.0)
    console = Console(file=StringIO(), width=100, highlight=False)
    print_sweep(swept, console, "en")
    file: Any = console.file
    text = file.getvalue()
    assert "GPU 0" in text and "GPU 1" in text
    assert "lost" in text and "GiB" in text and "MHz" in text
    assert not (tmp_path / "agent").exists()


def test_a_pause_ends_the_process_that_holds_the_gpus_and_a_reload_meanwhile_starts_none(
    host: Host, tmp_path: Path
) -> None:
    wanted = replace(settings(tmp_path), port=0, interval_s=0.2, store_url=f"sqlite://{tmp_path}/s.db")
    agent = Agent(wanted)
    stop = threading.Event()
    thread = threading.Thread(target=agent.run, args=(stop,))
    thread.start()
    try:
        pid = until(lambda: reader_of(agent))
        ask(wanted.state_dir, 600.0)
        until(lambda: agent.health()[1]["paused_until"])
        assert reader_of(agent) is None
        assert eventually_ended(pid)
        agent.reload(lambda: replace(wanted, gpus_expected=2))  # the collector is another one from here on
        ticks = int(str(agent.health()[1]["ticks"]))
        until(lambda: int(str(agent.health()[1]["ticks"])) > ticks + 3)
        assert reader_of(agent) is None
        withdraw(wanted.state_dir)
        assert until(lambda: reader_of(agent)) != pid
        until(lambda: any(sample.measurement == "gpu" for sample in agent._latest.fresh(time.monotonic())))
    finally:
        stop.set()
        thread.join(120)


def reader_of(agent: Agent) -> int | None:
    source = agent._sources["gpu"]
    assert isinstance(source, NvidiaCollector)
    return source.reader_pid


def until(holds: Callable[[], Any]) -> Any:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it never came")
