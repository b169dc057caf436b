"""The GPUs that a host should have: counted, remembered across restarts of agent and host, let go on request, asked anew.

| public issue | what it is tested by |
|---|---|
| dcgm-exporter#348 | seen and expected GPUs are told beside each other |
| gpud#604, #810 | a GPU that is gone is told with the uuid it had |
| NVSentinel#1533, #1587 | a card that was replaced is no loss for ever |
| dcgm-exporter#706, #716; dra-driver#1076 | the devices are let go of and taken up again |
| NVSentinel#1362 | a driver's version is not kept when another is loaded |
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.collectors.gpu import Patience
from agent.collectors.gpu_memory import GpuMemory, RememberedGpu
from agent.collectors.interface import Pausable, Reprobable
from agent.collectors.nvidia import NvidiaCollector
from agent.timing import ReaderTiming
from telemetry.catalogue import GPU_STATES
from telemetry.sample import Sample
from tests.agent.nvidia.conftest import EVERY_TICK, UNHURRIED, Host, events, gpus, states
from tests.processes import eventually_ended, zombies

STATE = {name: number for number, name in enumerate(GPU_STATES)}
SLOW = ReaderTiming(takeover_s=20.0, retry_s=0.05)


def agent(
    host: Host,
    memory: Path,
    timing: ReaderTiming = EVERY_TICK,
    patience: Patience = UNHURRIED,
    *,
    expected: int | None = None,
) -> NvidiaCollector:
    """A collector as after a start of the agent: the one before it is closed."""
    for before in host.collectors:
        before.close()
    made = NvidiaCollector({"node": "n07"}, timing, patience, memory=memory, expected=expected)
    host.collectors.append(made)
    return made


def counts(samples: list[Sample]) -> tuple[object, object] | None:
    """(seen, expected), or None where nothing is said of them."""
    for sample in samples:
        if sample.measurement == "host":
            return sample.fields["gpus_seen"], sample.fields["gpus_expected"]
    return None


def test_seen_and_expected_are_told_and_a_lost_gpu_is_expected_still(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    assert counts(host.tick()) == (2, 2)
    host.scenario.gpu(0).fault = 15
    assert counts(host.tick()) == (1, 2)


def test_the_number_that_was_configured_stands_above_what_was_seen(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path, expected=8)
    assert counts(host.tick()) == (2, 8)


def test_without_a_driver_nothing_is_counted_unless_gpus_are_expected(host: Host, tmp_path: Path) -> None:
    host.scenario.state.init_code = 9
    agent(host, tmp_path)
    assert counts(host.tick()) is None
    agent(host, tmp_path, expected=2)
    assert counts(host.tick()) == (0, 2)


def test_a_host_without_the_library_says_nothing_even_if_gpus_are_expected(host: Host, tmp_path: Path) -> None:
    """They may be another vendor's."""
    (host.folder / "libnvidia-ml.so.1").unlink()
    agent(host, tmp_path, expected=2)
    assert host.tick() == []


def test_a_gpu_that_is_gone_after_a_reboot_is_absent_with_its_uuid(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.move(1, 0)
    host.scenario.state.gpu_count = 1
    agent(host, tmp_path)
    samples = host.tick()
    assert states(samples) == {"0001": STATE["absent"], "0002": STATE["ok"]}
    assert gpus(samples)["0001"].tags["uuid"] == "GPU-5c0a1e77-0001"
    assert counts(samples) == (1, 2)
    assert [event.fields["detail"] for event in events(samples, "gpu_lost")] == ["GPU-5c0a1e77-0001"]
    assert events(host.tick(), "gpu_lost") == []


def test_a_driver_that_is_not_loaded_after_a_reboot_leaves_every_remembered_gpu_absent(
    host: Host, tmp_path: Path
) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.state.init_code = 9
    agent(host, tmp_path)
    samples = host.tick()
    assert states(samples) == {"0001": STATE["absent"], "0002": STATE["absent"]}
    assert counts(samples) == (0, 2)
    host.scenario.state.init_code = 0
    host.until(lambda samples: counts(samples) == (2, 2))


def test_gpus_of_a_driver_that_hangs_from_the_agents_start_are_hung(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.state.init_hang = 1
    agent(host, tmp_path, SLOW, Patience(answer_s=0.05))
    samples = host.until(lambda samples: bool(gpus(samples)))
    assert states(samples) == {"0001": STATE["hung"], "0002": STATE["hung"]}
    host.scenario.release()
    host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})


def test_a_card_that_was_replaced_is_not_missed(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.gpu(0).uuid = b"GPU-77777777-0007"
    agent(host, tmp_path)
    samples = host.tick()
    assert (states(samples), counts(samples)) == ({"0007": 0, "0002": 0}, (2, 2))


def test_one_that_is_exchanged_while_the_agent_runs_is_no_loss(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.gpu(0).uuid = b"GPU-77777777-0007"
    host.scenario.reload_driver()
    samples = host.until(lambda samples: states(samples) == {"0007": 0, "0002": 0})
    assert counts(samples) == (2, 2)


def gpu(number: int, pci: str = "") -> RememberedGpu:
    return RememberedGpu(f"GPU-{number:04d}", number, "n", pci or f"0000:{number:02x}:00")


def test_a_missing_gpu_is_known_until_the_count_is_back_or_its_slot_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    before = GpuMemory(path)
    before.update([gpu(1), gpu(2), gpu(3)], 1)
    before.file.keep(1)
    memory = GpuMemory(path)
    memory.update([gpu(1)], 1)
    assert (memory.known, memory.count) == ((gpu(1), gpu(2), gpu(3)), 3)
    memory.update([gpu(1), gpu(9, pci=gpu(2).pci)], 1)
    assert set(memory.known) == {gpu(1), gpu(9, pci=gpu(2).pci), gpu(3)}
    memory.update([gpu(1), gpu(9, pci=gpu(2).pci), gpu(8)], 1)
    assert gpu(3) not in memory.known
    assert GpuMemory(path).known == (gpu(1), gpu(2), gpu(3))  # what is not safe yet is not remembered
    memory.file.keep(1)
    assert GpuMemory(path).known == memory.known


def test_more_gpus_than_ever_raise_what_is_expected_and_a_configured_number_lowers_it(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    memory = GpuMemory(path)
    memory.update([gpu(1)], 1)
    memory.update([gpu(1), gpu(2)], 1)
    memory.file.keep(1)
    assert memory.count == 2
    fewer = GpuMemory(path, expected=1)
    fewer.update([gpu(1)], 1)
    fewer.file.keep(1)
    assert (fewer.count, fewer.known) == (1, (gpu(1),))
    assert GpuMemory(path).count == 1


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"count": 1}', '{"count": "x", "gpus": []}', '{"gpus": [7], "count": 1}'),
        *('{"gpus": [], "count": 1e999}', "[" * 100_000, " " * (1 << 20) + "{}", "\ud800"),
    ],
    ids=range(10),
)
def test_a_memory_that_is_broken_is_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(text, "utf-8", "surrogatepass")
    memory = GpuMemory(path)
    assert (memory.known, memory.count) == ((), 0)
    memory.update([gpu(1)], 1)
    memory.file.keep(1)
    assert json.loads(path.read_text())["count"] == 1


def test_another_driver_is_told_once_even_if_the_agent_did_not_run_meanwhile(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    assert events(host.tick(), "deploy") == []
    host.scenario.state.driver_text = b"580.95.05"
    agent(host, tmp_path)
    told = events(host.tick(), "deploy")
    assert [(event.tags["subject"], event.fields["text"]) for event in told] == [
        ("driver", "driver 570.124.06 -> 580.95.05")
    ]
    agent(host, tmp_path)
    assert events(host.tick(), "deploy") == []


def test_another_driver_is_told_again_after_a_kill_before_the_event_was_on_disk(host: Host, tmp_path: Path) -> None:
    agent(host, tmp_path)
    host.tick()
    host.scenario.state.driver_text = b"580.95.05"
    agent(host, tmp_path)
    assert len(events(host.tick(is_safe=False), "deploy")) == 1
    agent(host, tmp_path)
    assert len(events(host.tick(), "deploy")) == 1
    agent(host, tmp_path)
    assert events(host.tick(), "deploy") == []


def test_a_paused_collector_holds_no_device_and_says_nothing_not_even_that_they_are_lost(host: Host) -> None:
    collector = host.collector()
    host.tick()
    reader = collector.reader_pid
    assert reader is not None
    collector.pause()
    collector.pause()
    assert eventually_ended(reader)
    assert zombies() == []
    assert [host.tick(seconds=30.0) for _ in range(3)] == [[], [], []]
    assert (collector.reader_pid, list(collector.gpu_processes), collector.pids_by_gpu) == (None, [], {})
    collector.resume()
    collector.resume()
    samples = host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})
    assert events(samples, "gpu_lost") == []
    assert collector.errors == 0


def test_a_gpu_that_was_exchanged_during_a_pause_is_no_loss(host: Host, tmp_path: Path) -> None:
    collector = agent(host, tmp_path)
    host.tick()
    collector.pause()
    host.tick()
    host.scenario.gpu(0).uuid = b"GPU-77777777-0007"
    collector.resume()
    samples = host.until(lambda samples: bool(gpus(samples)))
    assert states(samples) == {"0007": 0, "0002": 0}


def test_a_collector_that_is_told_to_asks_again_what_was_refused_and_what_it_limits_to(host: Host) -> None:
    host.scenario.refuse(0, "utilization")
    collector = host.collector(SLOW)
    assert "util_pct" not in gpus(host.tick())["0001"].fields
    host.scenario.refuse(0, "utilization", code=0)
    host.scenario.field(0, 189, 444_000)
    assert not {"util_pct", "power_limit_default_w"} & gpus(host.tick())["0001"].fields.keys()
    collector.reprobe()
    fields = gpus(host.tick())["0001"].fields
    assert (fields["util_pct"], fields["power_limit_default_w"]) == (98.0, 444.0)
    assert "power_limit_default_w" not in gpus(host.tick())["0001"].fields


def test_it_can_be_paused_and_told_to_look_again(host: Host) -> None:
    collector = host.collector()
    assert isinstance(collector, Pausable)
    assert isinstance(collector, Reprobable)
