"""What is said of an engine to somebody who sets it up: how it answers, whose its GPUs are, and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.collectors.engine import EngineCollector
from agent.collectors.engine_findings import Examination, findings
from agent.collectors.engine_probe import Probed
from agent.collectors.interface import Examined, Finding, GpuProcesses, Tick
from agent.engine_gpus import EngineGpus
from agent.engine_ownership import EngineOwnership
from agent.engine_status import EngineStatus
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from tests.doubles.engine_endpoint import EngineEndpoint, Page, nothing_listens
from tests.doubles.engine_texts.vllm import vllm
from tests.doubles.proc_tree import ProcTree

READY = EngineStatus("chat", "http://127.0.0.1:8000", "ready")
NVML = EngineGpus((0, 1), "nvml", 0.95)


def said(seen: Examination) -> list[tuple[str, str]]:
    found = findings(seen, "en")
    assert {finding.source for finding in found} <= {"engine chat"}
    assert [f.level for f in findings(seen, "zh")] == [f.level for f in found]
    return [(finding.level, f"{finding.text} | {finding.remedy}") for finding in found]


def test_a_ready_engine_with_its_gpus_and_its_token() -> None:
    (first, gpus, token) = said(Examination(READY, "vllm", "m", gpus=NVML, has_gpus=True, probed=Probed(0.25)))
    assert first == ("ok", "http://127.0.0.1:8000 answers as vllm with the model m | ")
    assert gpus[0] == "ok"
    assert "GPU 0+1" in gpus[1]
    assert "0.95" in gpus[1]
    assert token == ("ok", "gave the one token that it was asked for in 0.25 s | ")


def test_a_probe_that_gives_no_token_is_said_once() -> None:
    refused = Probed(0.1, "refused", "HTTP 401")
    (_, probe) = said(Examination(READY, "vllm", "m", probed=refused))
    assert probe[0] == "warning"
    assert "api_key_file" in probe[1]
    known = EngineStatus(
        "chat", "u", "ready", problem=findings(Examination(READY, "", "", probed=refused), "en")[1].text
    )
    assert len(findings(Examination(known, "vllm", "m", probed=refused), "en")) == 1


def test_a_configuration_that_the_driver_contradicts_is_a_warning() -> None:
    manual = EngineGpus((2,), "manual", 1.0)
    (_, gpus) = said(Examination(READY, "vllm", "m", gpus=manual, driver_says=NVML))
    assert gpus[0] == "warning"
    assert "says GPU 2, but its processes are on GPU 0+1" in gpus[1]
    (_, fits) = said(Examination(READY, "vllm", "m", gpus=manual, driver_says=EngineGpus((2,), "nvml", 1.0)))
    assert fits[0] == "ok"


def test_gpus_that_are_not_known_are_a_warning_only_where_there_are_gpus() -> None:
    assert len(said(Examination(READY, "vllm", "m"))) == 1
    (_, unseen) = said(Examination(READY, "vllm", "m", has_gpus=True))
    assert unseen[0] == "warning"
    assert "CAP_SYS_PTRACE" in unseen[1]
    (_, unlisted) = said(Examination(READY, "vllm", "m", has_gpus=True, pid=77))
    assert "root 77" in unlisted[1]


@pytest.mark.parametrize(
    ("status", "level", "words"),
    [
        (EngineStatus("chat", "u", "down", problem="nothing listens"), "error", "nothing listens"),
        (EngineStatus("chat", "u", "loading", "weights", 0.25), "warning", "weights 25 %"),
        (EngineStatus("chat", "u", "starting"), "warning", "still starting"),
        (EngineStatus("chat", "u", "ready", problem="its metrics are off"), "warning", "its metrics are off"),
    ],
)
def test_what_is_wrong_is_said(status: EngineStatus, level: str, words: str) -> None:
    ((found, text),) = said(Examination(status, "", "", has_gpus=status.state != "ready"))
    assert found == level
    assert words in text


def examined(*targets: EngineTarget, proc: Path | None = None, gpus: Sequence[GpuProcesses] = ()) -> list[Finding]:
    ownership = EngineOwnership(targets, ProcessTable(str(proc or "/no/processes"), shows_host_pids=True))
    collector = EngineCollector({"node": "n"}, targets, wait_s=10.0, ownership=ownership)
    collector.beside([Gpu(gpus)])  # type: ignore[list-item]
    assert isinstance(collector, Examined)
    give_up_s = time.monotonic() + 90
    number = 0
    while (number < 2 or collector.pending) and time.monotonic() < give_up_s:
        number += 1
        collector.collect(Tick(number, number, time.monotonic()))
        time.sleep(0.01)
    assert not collector.pending
    found = list(collector.findings("en"))
    collector.close()
    return found


class Gpu:
    name = "gpu"
    errors = 0

    def __init__(self, gpus: Sequence[GpuProcesses]) -> None:
        self.gpu_processes = gpus

    def collect(self, tick: Tick) -> list[object]:
        return []

    def close(self) -> None:
        pass


def test_a_collector_says_all_of_its_engines() -> None:
    server = EngineEndpoint()
    server.metrics(vllm())
    server.json("/v1/completions", {"choices": [{"text": "x"}]})
    off = EngineEndpoint()
    off.pages["/metrics"] = Page(status=404)
    try:
        found = examined(
            EngineTarget("a", server.url, gpus="1", probe_every_s=60.0),
            EngineTarget("b", off.url),
            EngineTarget("c", nothing_listens()),
        )
        assert [(finding.source, finding.level) for finding in found] == [
            ("engine a", "ok"),
            ("engine a", "ok"),
            ("engine a", "ok"),
            ("engine b", "warning"),
            ("engine c", "error"),
        ]
    finally:
        server.close()
        off.close()


def test_a_host_without_engines_is_told_so() -> None:
    (finding,) = examined()
    assert (finding.source, finding.level) == ("engine", "absent")
    assert "[[agent.engines]]" in finding.remedy


def test_an_engine_whose_process_is_not_permitted_to_be_seen_is_told_so(tmp_path: Path) -> None:
    server = EngineEndpoint()
    server.metrics(vllm())
    try:
        gpus = [GpuProcesses(0, "GPU-0", (5,))]
        found = examined(EngineTarget("a", server.url), proc=ProcTree(tmp_path / "proc").root, gpus=gpus)
        assert [finding.level for finding in found] == ["ok", "warning"]
        assert "name the engine's gpus" in found[1].remedy
    finally:
        server.close()
