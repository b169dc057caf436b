"""From the driver's list of processes to an engine's GPUs: the real reader, a real process tree."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agent.collectors.interface import ListsGpuProcesses, Tick
from agent.engine_gpus import EngineGpus
from agent.engine_ownership import EngineOwnership
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from tests.agent.nvidia.conftest import Host

DOUBLE = Path(__file__).parents[2] / "doubles" / "engine_processes.py"


def test_an_engine_has_the_gpu_on_which_the_driver_lists_its_worker(host: Host, free_port: Callable[[], int]) -> None:
    port = free_port()
    command = [sys.executable, str(DOUBLE), "127.0.0.1", str(-port), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            pids = json.loads(engine.stdout.readline())
            host.scenario.gpu(1).pids[0] = pids["workers"][0]
            collector = host.collector()
            host.tick()
            assert isinstance(collector, ListsGpuProcesses)
            target = EngineTarget("a", f"http://127.0.0.1:{port}")
            ownership = EngineOwnership([target], ProcessTable(shows_host_pids=True))
            ownership.sources.gpus = [collector]
            give_up_s = time.monotonic() + 90
            tick = Tick(1, 1, time.monotonic())
            while ownership.gpus("a") is None and time.monotonic() < give_up_s:
                ownership.begin(tick)
                ownership.settle(tick, 1.0)
            assert ownership.gpus("a") == EngineGpus((1,), "nvml", 1.0)
        finally:
            engine.kill()
