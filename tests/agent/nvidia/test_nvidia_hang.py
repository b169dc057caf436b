"""A driver call that never returns holds up its own GPU's readings only: not the other GPUs', the agent's, or the agent's end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agent.collectors.gpu import Patience
from agent.timing import ReaderTiming
from telemetry.catalogue import GPU_STATES
from telemetry.sample import Sample
from tests.agent.nvidia.conftest import EVERY_TICK, Host, events, gpus, states
from tests.doubles.nvml.layout import UNINTERRUPTIBLE
from tests.processes import eventually_ended

HUNG = GPU_STATES.index("hung")
QUICK = ReaderTiming(retry_s=0.05, rediscover_s=0.05, takeover_s=0.5)


def readers() -> list[psutil.Process]:
    """Reader processes of this test, living ones."""
    living = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it may end while it is looked at
            if child.status() != psutil.STATUS_ZOMBIE and "agent.reader" in child.cmdline():
                living.append(child)
    return living


@pytest.mark.parametrize("feature", [None, "field_values", "pstate"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_other_gpu_is_read_at_every_tick_and_the_hung_one_is_told_within_five(
    host: Host, index: int, feature: str | None
) -> None:
    host.collector(QUICK)
    host.tick()
    names = ("0001", "0002")
    stuck, well = names[index], names[1 - index]
    host.scenario.hang(index, feature)
    told, states = [], []
    for _ in range(6):
        samples = host.tick()
        told += events(samples, "gpu_lost")
        assert "temp_c" in gpus(samples)[well].fields
        states.append(dict(gpus(samples)[stuck].fields) if stuck in gpus(samples) else None)
    assert states == [None, None, {"state": HUNG}, {"state": HUNG}, {"state": HUNG}, {"state": HUNG}]
    assert [event.tags["subject"] for event in told] == [f"gpu{index}"]
    assert len(readers()) == 1


def test_a_hung_gpu_comes_back_by_itself(host: Host) -> None:
    collector = host.collector(QUICK)
    host.tick()
    reader = collector.reader_pid
    host.scenario.hang(0)
    for _ in range(4):
        host.tick()
    host.scenario.release()
    samples = host.until(lambda samples: states(samples).get("0001") == 0)
    assert gpus(samples)["0001"].fields["power_w"] == 512.25
    assert collector.reader_pid == reader


def test_what_a_call_brings_after_its_hang_is_not_written_as_fresh(host: Host) -> None:
    host.collector(QUICK)
    host.tick()
    host.scenario.hang(0, "pstate")
    for _ in range(12):
        host.tick()
    host.scenario.gpu(0).temperature, host.scenario.gpu(0).gpu_util = 30, 7  # one is read after what hangs, one before
    host.scenario.refuse_field(0, 308)
    host.scenario.release()
    late: list[Sample] = []

    def read_again(samples: list[Sample]) -> bool:
        late.extend(sample for sample in samples if sample.tags.get("gpu") == "0" and sample.fields["state"] == 0)
        return len(late) >= 5

    host.until(read_again)
    assert {(sample.fields["util_pct"], sample.fields["temp_c"]) for sample in late} == {(7.0, 30.0)}


def test_all_gpus_may_hang_and_the_reader_stays_one_process(host: Host) -> None:
    host.collector(QUICK, Patience(answer_s=0.3))
    host.until(lambda samples: len(gpus(samples)) == 2)
    host.scenario.hang(0)
    host.scenario.hang(1)
    host.until(lambda samples: [sample.fields for sample in gpus(samples).values()] == [{"state": HUNG}] * 2)
    for _ in range(5):
        host.tick()
    assert len(readers()) == 1
    assert psutil.Process(readers()[0].pid).num_threads() <= 4  # its own, one for each hung GPU, one to go on
    host.scenario.release()
    host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})


def test_an_initialisation_that_hangs_holds_nobody_up(host: Host) -> None:
    host.scenario.state.init_hang = 1
    host.collector(QUICK, Patience(answer_s=0.05))
    for _ in range(5):
        assert host.tick() == []
    host.scenario.release()
    host.until(lambda samples: len(gpus(samples)) == 2)


def test_a_hang_that_lasts_gets_a_new_reader_and_the_other_gpu_goes_on_in_it(host: Host) -> None:
    collector = host.collector(QUICK, Patience(answer_s=20.0, restart_partly_s=10.0))
    host.tick()
    first = collector.reader_pid
    host.scenario.hang(0)
    pids, gaps = [], 0
    for _ in range(28):
        samples = host.tick()
        pids.append(collector.reader_pid)
        gaps += "0002" not in gpus(samples)
        assert len(readers()) <= 1
    assert pids[0] == first
    # killed after 10 s and, since it hung again, after 20 s more, not every 10 s
    assert len(set(pids)) == 2
    assert gaps <= 3  # while the killed one ends
    host.scenario.release()
    host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})


def test_a_reader_that_sleeps_in_the_kernel_is_neither_killed_nor_joined_by_another(host: Host) -> None:
    collector = host.collector(QUICK, Patience(answer_s=20.0, restart_partly_s=5.0))
    host.tick()
    first = collector.reader_pid
    host.scenario.hang(0, how=UNINTERRUPTIBLE)
    for _ in range(20):
        samples = host.tick()
        assert "temp_c" in gpus(samples)["0002"].fields
    assert gpus(samples)["0001"].fields == {"state": HUNG}
    assert collector.reader_pid == first
    assert len(readers()) == 1
    host.scenario.release()
    host.until(lambda samples: states(samples).get("0001") == 0)


def test_a_reader_that_dies_is_replaced_and_counted(host: Host) -> None:
    collector = host.collector(QUICK)
    host.tick()
    first = collector.reader_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    host.until(lambda samples: collector.reader_pid not in (None, first) and states(samples).get("0001") == 0)
    assert collector.errors == 1
    assert len(readers()) == 1


def test_slow_calls_change_no_value(host: Host) -> None:
    host.scenario.gpu(0).latency_us = 30_000
    host.scenario.gpu(1).latency_us = 20_000
    host.collector(EVERY_TICK)
    seen = gpus(host.tick())
    assert (seen["0001"].fields["temp_c"], seen["0002"].fields["temp_c"]) == (86.0, 57.0)
    assert (seen["0001"].fields["pcie_gen_max"], seen["0002"].fields["pcie_gen_max"]) == (5, 6)


def test_an_answer_that_comes_late_is_dated_with_the_tick_it_was_asked_in(host: Host) -> None:
    host.collector(ReaderTiming(takeover_s=20.0), Patience(answer_s=1.0))
    host.until(lambda samples: len(gpus(samples)) == 2)
    host.scenario.hang(0, "pstate")
    read_before = host.scenario.calls(1, "temperature_v")
    assert gpus(host.tick()) == {}
    asked = host.number
    host.scenario.release()
    while host.scenario.calls(1, "temperature_v") == read_before:  # GPU 0 has been read and answered for by then
        time.sleep(0.01)
    samples: list[Sample] = []
    while len(samples) < 2:  # on a busy machine the late answer and the next sweep's come in two ticks
        samples += [sample for sample in host.tick() if sample.tags.get("gpu") == "0"]
    assert [sample.time_ns % 1_000_000 for sample in samples] == [asked, asked + 1]


AGENT = """
import sys, threading, time
from agent.collectors.interface import Tick
from agent.collectors.gpu import Patience
from agent.collectors.nvidia import NvidiaCollector
from telemetry.process import stop_event

stopping = stop_event()
collector = NvidiaCollector({"node": "n"}, patience=Patience(hung_s=0.2))
number = 0
while not stopping.is_set():
    number += 1
    samples = collector.collect(Tick(number, time.time_ns(), time.monotonic()))
    states = [gpu for _, gpu in sorted((s.tags["gpu"], s.fields["state"]) for s in samples if s.measurement == "gpu")]
    print(collector.reader_pid, *states, flush=True)
    stopping.wait(0.1)
collector.close()
"""


@pytest.fixture
def agent(host: Host) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the collector; every line of its output is the reader's pid and the states."""
    root = str(Path(__file__).parents[3])
    started = subprocess.Popen(
        (sys.executable, "-c", AGENT),
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )
    yield started
    started.kill()
    started.communicate()


def reader_when(agent: subprocess.Popen[str], states: list[str]) -> int:
    assert agent.stdout is not None
    for line in agent.stdout:
        pid, *now = line.split()
        if now == states:
            return int(pid)
    raise AssertionError("the agent ended")


@pytest.mark.parametrize("how", ["sleep", "kernel"])
def test_sigterm_ends_an_agent_whose_reader_hangs_and_the_reader_with_it(
    host: Host, agent: subprocess.Popen[str], how: str
) -> None:
    reader_when(agent, ["0", "0"])
    host.scenario.hang(0, how=UNINTERRUPTIBLE if how == "kernel" else 1)
    host.scenario.hang(1)
    reader = reader_when(agent, [str(HUNG), str(HUNG)])
    agent.terminate()
    assert agent.wait(timeout=120) == 0
    assert eventually_ended(reader)


def test_a_reader_does_not_outlive_an_agent_that_is_killed(host: Host, agent: subprocess.Popen[str]) -> None:
    reader_when(agent, ["0", "0"])
    host.scenario.hang(0)
    reader = reader_when(agent, [str(HUNG), "0"])
    agent.kill()
    agent.wait(timeout=120)
    assert eventually_ended(reader)
