"""What fails costs its own value, its own GPU or its own driver, and nothing else; what hangs holds nobody up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.amd_smi import codes
from agent.collectors.gpu import Patience
from agent.timing import ReaderTiming
from telemetry.catalogue import GPU_STATES
from telemetry.messages import say
from tests.agent.amd.conftest import NEW, OLD, Host, events, gpus, states
from tests.doubles.amdsmi.library import build
from tests.processes import eventually_ended

HUNG, ABSENT, LOST = (GPU_STATES.index(name) for name in ("hung", "absent", "lost"))
QUICK = ReaderTiming(retry_s=0.05, rediscover_s=0.05, takeover_s=0.5)


@pytest.mark.parametrize(
    ("feature", "fields"),
    [
        ("activity", {"util_pct", "mem_util_pct"}),
        ("power", {"power_w"}),
        ("energy", {"energy_j"}),
        ("temperature", {"temp_c", "mem_temp_c", "temp_limit_c", "mem_temp_limit_c", "temp_margin_c"}),
        ("pcie", {"pcie_gen", "pcie_width", "pcie_gen_max", "pcie_width_max"}),
        ("metrics", {"throttle_sw_power_s", "throttle_sw_thermal_s", "throttle_hw_thermal_s"}),
        ("processes", {"processes"}),
    ],
)
@pytest.mark.parametrize("code", [codes.NOT_SUPPORTED, codes.NO_PERM, codes.BUSY, 12])
def test_a_call_that_fails_costs_its_own_fields_only(host: Host, feature: str, fields: set[str], code: int) -> None:
    host.collector()
    whole = gpus(host.tick())
    host.scenario.refuse(0, feature, code=code)
    seen = gpus(host.tick())
    assert whole[NEW].fields.keys() - seen[NEW].fields.keys() == fields
    assert seen[NEW].fields["state"] == 0
    assert seen[OLD].fields.keys() == whole[OLD].fields.keys()
    host.scenario.refuse(0, feature, code=0)
    if code in (codes.BUSY, 12):
        assert gpus(host.tick())[NEW].fields.keys() == whole[NEW].fields.keys()


def test_what_is_refused_is_asked_again_after_a_while_and_not_before(host: Host) -> None:
    host.scenario.refuse(0, "energy")
    began_s = time.monotonic()
    host.collector(ReaderTiming(takeover_s=20.0, reprobe_s=0.3))
    host.tick()
    host.scenario.refuse(0, "energy", code=0)
    soon = gpus(host.tick())[NEW].fields
    assert "energy_j" not in soon or time.monotonic() - began_s > 0.3
    host.until(lambda samples: "energy_j" in gpus(samples)[NEW].fields)


def test_only_what_is_unexpected_counts_as_an_error(host: Host) -> None:
    collector = host.collector()
    host.scenario.refuse(0, "energy", code=codes.NO_DATA)
    host.scenario.refuse(0, "power", code=codes.RETRY)
    host.scenario.refuse(1, "power", code=codes.NO_PERM)
    host.tick()
    assert collector.errors == 0
    host.scenario.refuse(0, "energy", code=16)
    host.tick()
    assert collector.errors == 1


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        (codes.NOT_FOUND, "lost", "the GPU is not found"),
        (12, "lost", "AMD SMI status 12"),
        (codes.NO_PERM, "no_permission", "no permission"),
        (codes.BUSY, "absent", "the GPU is busy, as while it is being reset"),
        (codes.TIMEOUT, "hung", "the driver does not answer"),
    ],
)
def test_a_gpu_that_fails_altogether_is_told_by_state_and_event_and_comes_back(
    host: Host, code: int, state: str, why: str
) -> None:
    host.collector()
    host.tick()
    host.scenario.gpu(0).fault = code
    samples = host.tick()
    assert gpus(samples)[NEW].fields == {"state": GPU_STATES.index(state)}
    assert gpus(samples)[OLD].fields["power_w"] == 187.0
    [event] = events(samples, "gpu_lost")
    assert event.fields["text"] == f"GPU 0 {say(f'gpu.state.{state}')}: {why}"
    assert event.fields["code"] == code
    host.scenario.gpu(0).fault = 0
    host.until(lambda samples: states(samples).get(NEW) == 0)


def test_a_gpu_that_has_refused_all_is_asked_all_again_at_the_next_tick(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0, rediscover_s=3600.0))
    host.tick()
    host.scenario.gpu(0).fault = codes.NO_PERM
    assert gpus(host.tick())[NEW].fields == {"state": GPU_STATES.index("no_permission")}
    host.scenario.gpu(0).fault = 0
    assert gpus(host.tick())[NEW].fields["util_pct"] == 97.0


def test_a_gpu_that_is_out_costs_few_calls_in_a_sweep(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0))
    host.tick()
    host.scenario.gpu(0).fault = codes.NOT_FOUND
    before = sum(host.scenario.gpu(0).feature_calls)
    host.tick()
    assert sum(host.scenario.gpu(0).feature_calls) - before <= 4


def test_a_gpu_that_leaves_the_enumeration_is_reported_and_the_other_keeps_its_identity(host: Host) -> None:
    host.collector()
    host.tick()
    host.scenario.move(1, 0)
    host.scenario.state.gpu_count = 1
    host.scenario.reload_driver()
    samples = host.until(lambda samples: states(samples) == {NEW: ABSENT, OLD: 0})
    assert gpus(samples)[OLD].tags["gpu"] == "0"
    assert gpus(samples)[OLD].fields["power_w"] == 187.0


def test_a_driver_that_is_loaded_again_is_connected_again(host: Host) -> None:
    collector = host.collector()
    host.tick()
    pid = collector.reader_pid
    host.scenario.reload_driver()
    host.until(lambda samples: states(samples) == {NEW: 0, OLD: 0})
    assert collector.reader_pid == pid


def test_a_driver_that_is_not_loaded_is_no_fault_and_is_found_later(host: Host) -> None:
    host.scenario.state.init_code = codes.DRIVER_NOT_LOADED
    collector = host.collector()
    assert host.tick() == []
    assert collector.errors == 0
    assert [finding.level for finding in collector.findings("en")] == ["absent"]
    host.scenario.state.init_code = 0
    host.until(lambda samples: states(samples) == {NEW: 0, OLD: 0})


def test_a_library_older_than_the_package_is_told_and_a_right_one_is_taken_up(
    host: Host, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm = build(compiler, tmp_path / "rocm", without=["amdsmi_get_violation_status"])
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    collector = host.collector()
    assert host.tick() == []
    [finding] = collector.findings("en")
    assert finding.level == "error"
    assert "of different versions" in finding.text
    assert "of one version" in finding.remedy
    (rocm / "lib/libamd_smi.so").unlink()  # not written over: it is mapped
    build(compiler, rocm)
    host.until(lambda samples: states(samples) == {NEW: 0, OLD: 0})


@pytest.mark.parametrize("feature", [None, "metrics", "temperature"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_other_gpu_is_read_at_every_tick_while_one_hangs(host: Host, index: int, feature: str | None) -> None:
    collector = host.collector(QUICK)
    host.tick()
    reader = collector.reader_pid
    stuck, well = (NEW, OLD)[index], (NEW, OLD)[1 - index]
    host.scenario.hang(index, feature)
    told = []
    for _ in range(5):
        samples = host.tick()
        told += events(samples, "gpu_lost")
        assert "temp_c" in gpus(samples)[well].fields
    assert gpus(samples)[stuck].fields == {"state": HUNG}
    assert [event.fields["text"] for event in told] == [f"GPU {index} hung: the driver does not answer"]
    host.scenario.release()
    host.until(lambda samples: states(samples).get(stuck) == 0)
    assert collector.reader_pid == reader


def test_a_gpu_that_hangs_while_it_is_attached_leaves_the_other_alone(host: Host) -> None:
    host.scenario.hang(0, "uuid")
    host.collector(QUICK, Patience(answer_s=0.5))
    host.until(lambda samples: states(samples).get(OLD) == 0)
    host.scenario.release()
    host.until(lambda samples: states(samples) == {NEW: 0, OLD: 0})


def test_slow_calls_change_no_value(host: Host) -> None:
    host.scenario.gpu(0).latency_us = 10_000
    host.collector()
    seen = gpus(host.tick())
    assert (seen[NEW].fields["power_w"], seen[OLD].fields["power_w"]) == (612.0, 187.0)


def test_closing_ends_the_reader_that_hangs(host: Host) -> None:
    collector = host.collector(QUICK, Patience(answer_s=0.2))
    host.until(lambda samples: len(gpus(samples)) == 2)
    pid = collector.reader_pid
    assert pid is not None
    host.scenario.hang(0)
    host.scenario.hang(1)
    host.tick()
    collector.close()
    assert eventually_ended(pid)


def test_a_real_agent_reads_amd_gpus_end_to_end(host: Host, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "pairscope", "agent", "--once", "--json")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    power = {one["tags"]["uuid"]: one["fields"]["power_w"] for one in said if one["measurement"] == "gpu"}
    scenario = host.scenario
    assert power == {scenario.gpu(0).uuid.decode(): 612.0, scenario.gpu(1).uuid.decode(): 187.0}
