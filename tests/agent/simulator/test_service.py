"""The running part: past, live seconds, fault, progress, stop and restart, seen from outside as its supervisor sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.simulator.service import describe_faults, missing_past_s
from agent.simulator.settings import SimulatorSettings
from telemetry.messages import LANGUAGES
from telemetry.sample import Sample
from telemetry.store import open_store

ROOT = Path(__file__).parents[3]
HISTORY_S = 60
RUN = """
import pathlib, sys
from agent.simulator.service import run
from agent.simulator.settings import SimulatorSettings
sys.exit(run(SimulatorSettings(nodes=2, gpus_per_node=2, interval_s=0.2, history_s={history}, fault="power-brake", fault_after_s=1,
    store_url={store!r}, state_dir=pathlib.Path({state!r}))))
"""


class Supervised:
    """The part as a child process, and what it said over its notify socket."""

    def __init__(self, store_url: str, state_dir: Path, address: Path) -> None:
        self.said: list[str] = []
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(address))
        code = RUN.format(history=HISTORY_S, store=store_url, state=str(state_dir))
        environment = {**os.environ, "NOTIFY_SOCKET": str(address), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        self.channel.settimeout(timeout_s)
        while not any(text in said for said in self.said):
            self.said.append(self.channel.recv(4096).decode())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@contextmanager
def supervised(store_url: str, folder: Path) -> Iterator[Supervised]:
    part = Supervised(store_url, folder / "state", folder / f"notify{time.monotonic_ns()}")
    try:
        yield part
    finally:
        part.process.kill()
        part.process.communicate()
        part.channel.close()


def stored(store_url: str, measurement: str) -> list[Sample]:
    store = open_store(store_url)
    try:
        return store.samples(measurement, start_ns=0, end_ns=2**62)
    finally:
        store.close()


def braked(sample: Sample) -> bool:
    return bool(int(sample.fields["throttle_reasons"]) & 0x80)


def until(holds: Callable[[], object], what: str) -> None:
    give_up_s = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < give_up_s, f"never came: {what}"
        time.sleep(0.1)


def test_past_and_present_reach_the_store_and_a_second_run_continues_them(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'store.db'}"
    began_ns = time.time_ns()
    with supervised(url, tmp_path) as part:
        part.wait_for("READY=1")
        ready_ns = time.time_ns()
        assert any("STATUS=" in said and "%" in said for said in part.said)
        part.wait_for("power-brake")
        until(lambda: len([s for s in stored(url, "host") if s.time_ns > ready_ns]) > 5, "samples of the present")
        until(lambda: stored(url, "event") and any(braked(s) for s in stored(url, "gpu")), "the fault")
        assert part.stop() == 0
    hosts = [s for s in stored(url, "host") if s.tags["node"] == "sim-n01"]
    assert all(s.tags["origin"] == "simulated" for s in hosts)
    times = sorted(s.time_ns for s in hosts)
    assert len([t for t in times if t <= ready_ns]) >= HISTORY_S / 5 - 1
    # the past ends where the part began, some time after its process did
    assert began_ns - HISTORY_S * 10**9 <= times[0] <= ready_ns - (HISTORY_S - 10) * 10**9
    (event,) = stored(url, "event")
    assert event.tags["node"] == "sim-n02"
    held_down = [s for s in stored(url, "gpu") if braked(s)]
    assert {s.tags["node"] for s in held_down} == {"sim-n02"}
    assert min(s.time_ns for s in held_down) >= event.time_ns

    again_ns = time.time_ns()
    with supervised(url, tmp_path) as part:
        part.wait_for("READY=1")
        assert part.stop() == 0
    again = [s.time_ns for s in stored(url, "host") if s.tags["node"] == "sim-n01"]
    assert [t for t in again if t <= times[-1]] == times  # none is made twice
    assert max(again) > again_ns - 10e9


def test_the_whole_past_is_made_for_an_empty_store(tmp_path: Path) -> None:
    settings = SimulatorSettings(history_s=600, store_url=f"sqlite://{tmp_path / 'new.db'}")
    assert missing_past_s(settings, time.time_ns()) == 600


def test_a_large_fleet_gets_a_shorter_past(tmp_path: Path) -> None:
    settings = SimulatorSettings(nodes=125, history_s=7200, store_url=f"sqlite://{tmp_path / 'new.db'}")
    assert 120 <= missing_past_s(settings, time.time_ns()) < 600


@pytest.mark.parametrize("in_the_way", ["state", "store"])
def test_a_place_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path, in_the_way: str) -> None:
    (tmp_path / in_the_way).write_text("in the way")
    with supervised(f"sqlite://{tmp_path / 'store' / 'store.db'}", tmp_path) as part:
        assert part.process.wait(120) == 2
        assert part.process.stderr is not None
        lines = part.process.stderr.read().strip().splitlines()
    assert len(lines) == 1
    assert str(tmp_path / in_the_way) in lines[0]


@pytest.mark.parametrize("language", LANGUAGES)
def test_faults_are_listed_with_what_they_do(language: str) -> None:
    listed = describe_faults(language)
    assert {"hot-inlet", "power-brake", "power-cap", "kv-full", "long-prompts", "hung-engine", "bad-deploy"} <= set(
        listed
    )
    assert len(set(listed.values())) == len(listed)
