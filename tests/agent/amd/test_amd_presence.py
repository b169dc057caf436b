"""A host without AMD's library or devices costs nothing; one with a part of them is told what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.amd_smi import codes
from agent.amd_smi import library as library_module
from agent.collectors.amd import AmdCollector, amd_collector
from agent.collectors.gpu import Patience
from agent.collectors.interface import Examined, Tick
from agent.sampler import COLLECTORS
from agent.settings import AgentSettings
from telemetry.catalogue import GPU_STATES
from tests.agent.amd.conftest import EVERY_TICK, NEW, OLD, UNHURRIED, Host, add_device, gpus, states

SOURCE = str(Path(__file__).parents[3])


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root without anything of AMD's, and an environment that names nothing."""
    for name in ("ROCM_HOME", "ROCM_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def texts(collector: AmdCollector, language: str = "en") -> list[tuple[str, str, str]]:
    return [(finding.level, finding.text, finding.remedy) for finding in collector.findings(language)]


def test_without_library_and_device_no_process_is_started(bare: Path) -> None:
    collector = AmdCollector({"node": "n"}, EVERY_TICK, UNHURRIED, root=bare)
    for number in range(5):
        assert collector.collect(Tick(number, number, float(number))) == ()
    assert collector.reader_pid is None
    assert not collector.pending
    assert texts(collector) == [("absent", "this host has no AMD GPU", "")]
    collector.close()


def test_switched_off_there_is_no_collector(tmp_path: Path) -> None:
    off = AgentSettings(tmp_path, "sqlite:///x.db", amd=False)
    assert COLLECTORS["amd"](off, {}, None) is None
    made = COLLECTORS["amd"](AgentSettings(tmp_path, "sqlite:///x.db"), {}, None)
    assert isinstance(made, AmdCollector)
    assert isinstance(made, Examined)


def test_devices_are_counted_by_card_and_vendor(bare: Path) -> None:
    assert library_module.devices(bare) == 0
    add_device(bare, 0x10, vendor="0x10de")
    assert library_module.devices(bare) == 0
    add_device(bare, 0x83)
    add_device(bare, 0xC1)
    assert library_module.devices(bare) == 2


def test_the_library_is_found_where_rocm_and_the_loader_have_it(bare: Path) -> None:
    folder = bare / "somewhere/lib"
    folder.mkdir(parents=True)
    (folder / library_module.FILE).touch()
    assert not library_module.has_library(bare, {})
    assert library_module.has_library(bare, {"ROCM_PATH": str(bare / "somewhere")})
    assert library_module.has_library(bare, {"LD_LIBRARY_PATH": f"/nowhere:{folder}"})
    usual = bare / "opt/rocm/lib"
    usual.mkdir(parents=True)
    (usual / library_module.FILE).touch()
    assert library_module.has_library(bare, {})


def test_devices_without_the_python_package_name_it_and_start_nothing(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_device(bare, 0x83)
    monkeypatch.setattr(library_module, "PACKAGE", "amdsmi_that_nobody_has")
    collector = AmdCollector({"node": "n"}, EVERY_TICK, UNHURRIED, root=bare)
    assert collector.collect(Tick(1, 1, 1.0)) == ()
    assert collector.reader_pid is None
    [(level, text, remedy)] = texts(collector)
    assert (level, text) == ("error", "AMD GPUs of this host that are not read: 1; " + codes.name_of(codes.NO_PACKAGE))
    assert "pairscope[amd]" in remedy
    collector.close()


def test_devices_without_the_library_name_it_and_nothing_is_printed(
    bare: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add_device(bare, 0x83)
    collector = AmdCollector({"node": "n"}, EVERY_TICK, UNHURRIED, root=bare)
    assert not collector.collect(Tick(1, 1, 1.0))  # no sample, and the reader lives on to look again
    assert collector.reader_pid is not None
    [(level, text, remedy)] = texts(collector)
    assert (level, text) == ("error", "AMD GPUs of this host that are not read: 1; libamd_smi.so is not found")
    assert "amd-smi-lib" in remedy
    [(_, chinese, _)] = texts(collector, "zh")
    assert "找不到 libamd_smi.so" in chinese
    assert collector.errors == 0
    collector.close()
    assert capfd.readouterr() == ("", "")


def test_an_import_without_the_library_neither_raises_nor_prints(bare: Path) -> None:
    code = "from agent.amd_smi.library import load; print(load())"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "ROCM_PATH": str(bare)}
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, env=environment, check=True)
    assert (ran.stdout, ran.stderr) == (f"(None, {codes.FAIL_LOAD_MODULE})\n", "")


def test_a_library_that_is_installed_later_is_found(host: Host, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCM_PATH", "/nowhere")
    collector = host.collector()
    assert host.tick() == []
    assert collector.reader_pid is None
    monkeypatch.setenv("ROCM_PATH", str(library))
    host.until(lambda samples: set(gpus(samples)) == {NEW, OLD})


def test_a_collector_that_reads_all_says_how_many(host: Host) -> None:
    collector = host.collector()
    assert texts(collector) == [("absent", "this host has no AMD GPU", "")]
    host.tick()
    assert not collector.pending
    assert texts(collector) == [("ok", "AMD GPUs that are read: 2", "")]
    assert texts(collector, "zh") == [("ok", "已读取的 AMD GPU 数:2", "")]


def test_a_first_reading_under_way_is_pending(host: Host) -> None:
    host.scenario.state.init_hang = 1
    collector = host.collector(EVERY_TICK, patience=Patience(answer_s=0.05))
    host.tick()
    assert collector.pending
    assert [level for level, _, _ in texts(collector)] == ["warning"]
    host.scenario.release()
    host.until(lambda samples: set(gpus(samples)) == {NEW, OLD})
    assert not collector.pending


def test_an_initialisation_that_hangs_is_told_and_keeps_nobody_waiting(host: Host) -> None:
    host.scenario.state.init_hang = 1
    collector = host.collector(EVERY_TICK, Patience(answer_s=0.05, hung_s=3.0))
    host.until(lambda _: not collector.pending)
    [(level, text, remedy)] = texts(collector)
    assert (level, text) == ("error", "the driver does not answer")
    assert "amdgpu" in remedy


def test_a_library_that_kills_its_reader_is_told_and_keeps_nobody_waiting(host: Host) -> None:
    host.scenario.state.init_crash = 1
    collector = host.collector(EVERY_TICK, Patience(answer_s=0.5))
    host.until(lambda _: not collector.pending)
    [(level, text, _)] = texts(collector)
    assert level == "error"
    assert "dies as soon as it starts (2 times)" in text
    host.scenario.state.init_crash = 0
    host.until(lambda samples: set(gpus(samples)) == {NEW, OLD})
    assert texts(collector) == [("ok", "AMD GPUs that are read: 2", "")]


def test_a_gpu_that_refuses_what_every_card_tells_is_named_with_the_fields(host: Host) -> None:
    host.scenario.refuse(1, "power", "clock")
    collector = host.collector()
    host.tick()
    assert texts(collector)[1:] == [("warning", "AMD GPU 1 does not tell power_w, sm_clock_mhz, mem_clock_mhz", "")]


def test_more_devices_than_the_library_lists_are_told(host: Host) -> None:
    for card in (1, 2, 3):
        add_device(host.root, card)
    collector = host.collector()
    host.tick()
    assert ("error", "the kernel shows more AMD GPUs (3) than the library lists (2)", "") in texts(collector)


def test_without_permission_the_groups_are_named(host: Host) -> None:
    host.scenario.gpu(0).fault = codes.NO_PERM
    collector = host.collector()
    host.tick()
    host.scenario.gpu(1).fault = codes.NO_PERM
    host.tick()
    assert [remedy for level, _, remedy in texts(collector) if level == "error"] == [
        "let the agent's user into the groups render and video"
    ] * 2


def test_the_collector_of_a_host_keeps_within_its_tick(tmp_path: Path) -> None:
    made = amd_collector(AgentSettings(tmp_path, "sqlite:///x.db", interval_s=0.5), {"node": "n"}, None)
    assert made is not None
    assert made.patience.answer_s < 0.5


def test_a_gpu_that_is_gone_after_a_reboot_is_missed(host: Host, tmp_path: Path) -> None:
    first = host.collector(memory=tmp_path)
    host.tick()
    first.close()
    host.scenario.state.gpu_count = 1
    host.collector(memory=tmp_path)
    seen = host.until(lambda samples: len(gpus(samples)) == 2)
    assert states(seen) == {NEW: 0, OLD: GPU_STATES.index("absent")}
    [counts] = [dict(sample.fields) for sample in seen if sample.measurement == "host"]
    assert counts == {"gpus_seen": 1, "gpus_expected": 2}


def test_gpus_that_were_once_there_are_missed_without_library_and_device(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host.collector(memory=tmp_path)
    host.tick()
    first.close()
    monkeypatch.setenv("ROCM_PATH", "/nowhere")
    later = host.collector(memory=tmp_path)
    host.until(lambda samples: states(samples) == dict.fromkeys((NEW, OLD), GPU_STATES.index("absent")))
    assert [finding.level for finding in later.findings("en")] == ["error"]


def test_a_paused_collector_lets_go_of_the_devices_and_takes_them_up_again(host: Host) -> None:
    collector = host.collector()
    host.tick()
    collector.pause()
    assert [host.tick() for _ in range(3)] == [[], [], []]
    assert collector.reader_pid is None
    assert not collector.pending
    assert [level for level, _, _ in texts(collector)] == ["warning"]
    collector.resume()
    host.until(lambda samples: states(samples) == {NEW: 0, OLD: 0})


def test_asked_to_look_again_it_asks_what_was_refused(host: Host) -> None:
    host.scenario.refuse(0, "energy")
    collector = host.collector()
    host.tick()
    host.scenario.refuse(0, "energy", code=0)
    assert "energy_j" not in gpus(host.tick())[NEW].fields
    collector.reprobe()
    assert "energy_j" in gpus(host.tick())[NEW].fields
