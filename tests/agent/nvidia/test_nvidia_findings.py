"""What doctor says of the GPUs: each condition has its own sentence and, where something can be done, what to do, in both languages.

| public issue | what it is tested by |
|---|---|
| datadog-agent PR#53192 | a missing library is said, not passed over |
| gpud#940, nvtop#95 | a driver that isn't loaded and one of another version have distinct words |
| nvidia-container-toolkit#48, #251, #1227 | a container that has lost its devices is told to start again |
| NVSentinel#1748, DCGM#313 | a hang is the finding |
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.collectors.gpu import Patience
from agent.collectors.interface import Examined
from agent.collectors.nvidia import NvidiaCollector
from agent.kernel_log import KernelLog
from agent.nvml import kernel_lines
from agent.timing import ReaderTiming
from tests.agent.nvidia.conftest import EVERY_TICK, UNHURRIED, Host, gpus
from tests.doubles.nvml.scenario import add_mig


def said(collector: NvidiaCollector, language: str = "en") -> list[tuple[str, str, str]]:
    found = collector.findings(language)
    assert {finding.source for finding in found} <= {"gpu"}
    return [(finding.level, finding.text, finding.remedy) for finding in found]


def level_of(collector: NvidiaCollector, words: str) -> str:
    """The level of the one finding that holds these words; it has a remedy if it isn't fine."""
    [(level, _, remedy)] = [line for line in said(collector) if words in line[1]]
    assert remedy or level in ("ok", "absent")
    return level


def test_gpus_that_are_well_are_named_with_their_driver(host: Host) -> None:
    collector = host.collector()
    assert isinstance(collector, Examined)
    host.tick()
    level, text, _ = said(collector)[0]
    assert level == "ok"
    for part in ("2", "NVIDIA H100 80GB HBM3", "NVIDIA A100-PCIE-40GB", "570.124.06"):
        assert part in text
    assert not [line for line in said(collector) if line[0] in ("error", "warning")]


def test_what_a_card_does_not_tell_is_one_short_line(host: Host) -> None:
    host.scenario.refuse(0, "ecc", "pstate", "fan")
    collector = host.collector()
    host.tick()
    lines = [text for level, text, _ in said(collector) if level == "absent"]
    assert lines == [
        "GPU 0: not told by this card or driver: ECC uncorrected",
        "GPU 1: no activity of SMs, tensor cores and DRAM (cards before Hopper don't tell it)",
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (9, "the driver is not loaded"),
        (18, "different versions"),
        (4, "no permission"),
        (999, "unknown error"),
    ],
)
def test_a_driver_that_is_out_says_how_and_what_to_do(host: Host, code: int, words: str) -> None:
    host.scenario.state.init_code = code
    collector = host.collector()
    host.tick()
    assert level_of(collector, words) == "error"
    assert not collector.pending


def test_the_words_for_what_to_do_differ_by_what_is_wrong(host: Host) -> None:
    remedies = set()
    for code in (9, 18, 4, 999):
        host.scenario.state.init_code = code
        collector = host.collector()
        host.tick()
        remedies.add(said(collector)[0][2])
    assert len(remedies) == 4


def test_a_host_without_the_library_is_no_fault_unless_gpus_are_expected(host: Host) -> None:
    (host.folder / "libnvidia-ml.so.1").unlink()
    collector = host.collector()
    host.tick()
    assert level_of(collector, "libnvidia-ml.so.1") == "absent"
    made = NvidiaCollector({"node": "n"}, EVERY_TICK, UNHURRIED, expected=8)
    host.collectors.append(made)
    host.tick()
    assert level_of(made, "libnvidia-ml.so.1") == "error"


@pytest.mark.parametrize(
    ("code", "words"), [(15, "lost"), (16, "in need of a reset"), (4, "without permission"), (27, "not ready")]
)
def test_a_gpu_that_is_out_is_named_with_its_uuid_and_the_count_is_told(host: Host, code: int, words: str) -> None:
    collector = host.collector()
    host.tick()
    host.scenario.gpu(0).fault = code
    host.tick()
    [(level, text, remedy)] = [line for line in said(collector) if "GPU-5c0a1e77-0001" in line[1]]
    assert (level, bool(remedy)) == ("error", True)
    assert words in text
    assert level_of(collector, "GPUs that answer: 1, of 2") == "error"
    assert level_of(collector, "GPUs that are read: 1") == "ok"


def test_a_gpu_that_hangs_is_a_finding_and_so_is_a_driver_that_does(host: Host) -> None:
    collector = host.collector(ReaderTiming(takeover_s=0.5, retry_s=0.05))
    host.tick()
    host.scenario.hang(0)
    for _ in range(5):
        host.tick()
    assert level_of(collector, "hung") == "error"
    host.scenario.release()
    host.scenario.state.init_hang = 1
    collector = host.collector(ReaderTiming(takeover_s=20.0), Patience(answer_s=0.05))
    host.tick()
    assert (collector.pending, said(collector)[0][0]) == (True, "warning")
    for _ in range(4):
        host.tick()
    assert (collector.pending, level_of(collector, "the driver does not answer")) == (False, "error")


def test_persistence_mode_that_is_off_is_a_warning(host: Host) -> None:
    host.scenario.gpu(1).persistence = 0
    collector = host.collector()
    host.tick()
    assert level_of(collector, "persistence mode is off (GPU 1)") == "warning"


def test_mig_is_told_with_its_instances(host: Host) -> None:
    add_mig(host.scenario, 0)
    collector = host.collector()
    host.tick()
    assert level_of(collector, "GPU 0: MIG with 2 instances") == "ok"
    assert not [text for _, text, _ in said(collector) if text.startswith("GPU 0: not told")]


def test_a_kernel_log_that_cannot_be_read_is_a_warning_and_no_error(host: Host, tmp_path: Path) -> None:
    collector = NvidiaCollector(
        {"node": "n"}, EVERY_TICK, UNHURRIED, kernel_log=KernelLog(kernel_lines.WORD, tmp_path / "none")
    )
    host.collectors.append(collector)
    host.tick()
    assert level_of(collector, "the kernel's log can't be read (/dev/kmsg is not there)") == "warning"
    assert collector.errors == 0


def test_fewer_gpus_than_configured_are_a_fault(host: Host) -> None:
    collector = NvidiaCollector({"node": "n"}, EVERY_TICK, UNHURRIED, expected=8)
    host.collectors.append(collector)
    host.tick()
    assert level_of(collector, "GPUs that answer: 2, of 8") == "error"


def test_a_paused_collector_says_so_and_nothing_else(host: Host) -> None:
    collector = host.collector()
    host.tick()
    collector.pause()
    host.tick()
    assert [level for level, _, _ in said(collector)] == ["warning"]
    assert not collector.pending


def test_it_speaks_chinese(host: Host) -> None:
    host.scenario.gpu(1).persistence = 0
    host.scenario.gpu(0).fault = 15
    collector = host.collector()
    host.tick()
    english, chinese = said(collector), said(collector, "zh")
    assert [level for level, _, _ in english] == [level for level, _, _ in chinese]
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) for _, text, _ in chinese)


def test_a_gpus_end_is_told_in_the_agents_language(host: Host) -> None:
    collector = NvidiaCollector({"node": "n"}, EVERY_TICK, UNHURRIED, language="zh")
    host.collectors.append(collector)
    host.tick()
    host.scenario.gpu(0).fault = 15
    host.scenario.xid(1, 79)
    texts = [str(sample.fields["text"]) for sample in host.tick() if sample.measurement == "event"]
    assert len(texts) == 2
    assert all("总线" in text for text in texts)
    assert set(gpus(host.tick())) == {"0001", "0002"}
