"""The doctor and one sweep on a host with two GPUs, one of which falls off the bus."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent.doctor import examination
from agent.doctor.examination import Patient, examine, worst
from agent.settings import AgentSettings
from agent.sweep import sweep
from pairscope.sweep import print_sweep
from tests.agent.nvidia.conftest import Host


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
