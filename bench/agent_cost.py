"""What the agent costs its host, beside nvitop-exporter: `python bench/agent_cost.py [--gpus 8] [--seconds 300]`.

The whole agent at 1 Hz with its NVML reader over the double of NVML, a vLLM-like endpoint that it scrapes, and delivery to a SQLite
store: share of one core and resident memory of both processes, start-up left out. At the same time nvitop-exporter reads the same
double once a second; it finds fewer calls there than on a real card (no encoder, NVLink or process utilisation), which is in its
favour. Prints a table with the ratio; exits 1 above 2 % of a core, 90 MB together, or half the peer's CPU time a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.doubles.engine_endpoint import EngineEndpoint  # noqa: E402
from tests.doubles.engine_texts.vllm import vllm  # noqa: E402
from tests.doubles.nvml.library import build  # noqa: E402
from tests.doubles.nvml.scenario import ULLONG, Scenario, add_ampere, add_hopper  # noqa: E402

MOST_CPU_PCT = 2.0
MOST_OF_PEER = 0.5
MOST_RSS_MB = 90.0
START_UP_TICKS = 8  # by then every tier has been read once
START_UP_AT_MOST_S = 60.0

AGENT = """
import sys
from pathlib import Path
from agent.daemon import run
from agent.settings import AgentSettings, EngineTarget
folder = Path(sys.argv[1])
store = f"sqlite://{folder}/store.db"
engines = (EngineTarget("bench", sys.argv[3]),)
settings = AgentSettings(node="bench", state_dir=folder / "state", store_url=store, port=int(sys.argv[2]), engines=engines)
raise SystemExit(run(settings))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--port", type=int, default=8699)
    options = parser.parse_args()
    compiler = shutil.which("cc")
    if compiler is None:
        print("a C compiler (cc) is needed to build the double of NVML", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), compiler, options.gpus, options.seconds, options.port)


def measure(folder: Path, compiler: str, gpus: int, seconds: float, port: int) -> int:
    build(compiler, folder / "lib")
    scenario = Scenario(folder / "nvml")
    for index in range(gpus):
        add = add_ampere if index == gpus - 1 and gpus > 1 else add_hopper
        add(scenario, index, f"GPU-{index:08x}-bench")
    scenario.state.gpu_count = gpus
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "NVML_DOUBLE_STATE": str(scenario.path),
        "PYTHONPATH": str(ROOT),
    }
    (folder / "state").mkdir(mode=0o700)
    engine = EngineEndpoint()
    engine.metrics(vllm())
    with ExitStack() as running:
        running.callback(engine.close)
        command = (sys.executable, "-c", AGENT, str(folder), str(port), engine.url)
        agent = running.enter_context(process(command, environment))
        peer_command = (str(Path(sys.executable).with_name("nvitop-exporter")), "--bind-address", "127.0.0.1")
        peer_command += ("--port", str(port + 1), "--interval", "1")
        with (folder / "peer.log").open("wb") as log:
            peer = running.enter_context(process(peer_command, environment, log))
        until_s = time.monotonic() + START_UP_AT_MOST_S
        while ticks_of(port) < START_UP_TICKS and time.monotonic() < until_s:
            live(scenario, gpus, 1.0)
        for name, started in (("agent", agent), ("peer", peer)):
            if started.poll() is not None:
                print(f"the {name} ended at its start", file=sys.stderr)
                return 2
        processes = {"agent": agent, "reader": agent.children()[0], "nvitop-exporter": peer}
        before = {name: cpu_s(process) for name, process in processes.items()}
        ticks = ticks_of(port)
        began_s = time.monotonic()
        live(scenario, gpus, seconds)
        took_s = time.monotonic() - began_s
        ticks = ticks_of(port) - ticks
        used_s = {name: cpu_s(process) - before[name] for name, process in processes.items()}
        memory_mb = {name: process.memory_info().rss / 1e6 for name, process in processes.items()}
    own_s, own_mb = used_s["agent"] + used_s["reader"], memory_mb["agent"] + memory_mb["reader"]
    peer_sweeps = took_s  # one a second, by its own setting
    print(f"{gpus} GPUs at 1 Hz for {took_s:.0f} s ({ticks} ticks), {os.cpu_count()} cores")
    print(f"{'process':<18}{'CPU, % of a core':>18}{'CPU a sweep, ms':>18}{'resident, MB':>15}")
    rows = [(name, used_s[name], memory_mb[name]) for name in ("agent", "reader")]
    for name, cpu, memory in (*rows, ("together", own_s, own_mb)):
        print(f"{name:<18}{100 * cpu / took_s:>18.2f}{1000 * cpu / ticks:>18.2f}{memory:>15.1f}")
    peer_s = used_s["nvitop-exporter"]
    print(
        f"{'nvitop-exporter':<18}{100 * peer_s / took_s:>18.2f}{1000 * peer_s / peer_sweeps:>18.2f}"
        f"{memory_mb['nvitop-exporter']:>15.1f}"
    )
    ratio = (own_s / ticks) / (peer_s / peer_sweeps)
    print(f"{'limit, together':<18}{MOST_CPU_PCT:>18.2f}{'':>18}{MOST_RSS_MB:>15.1f}")
    print(f"ours / nvitop-exporter, CPU time a sweep: {ratio:.2f} (limit {MOST_OF_PEER})")
    return int(100 * own_s / took_s > MOST_CPU_PCT or own_mb > MOST_RSS_MB or ratio > MOST_OF_PEER)


@contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> Iterator[psutil.Popen]:
    started = psutil.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield started
    finally:
        with suppress(psutil.NoSuchProcess):
            started.terminate()
            _, alive = psutil.wait_procs([started], timeout=10)
            for survivor in alive:
                survivor.kill()


def ticks_of(port: int) -> int:
    """How many ticks the agent has made; 0 while it does not answer yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return int(json.load(answer)["ticks"])
    except OSError:
        return 0


def live(scenario: Scenario, gpus: int, seconds: float) -> None:
    """Numbers that move, as a working host's do; the samples of a host that stands still compress too well."""
    chance = random.Random(7)
    until_s = time.monotonic() + seconds
    energy = 0.0
    while (left_s := until_s - time.monotonic()) > 0:
        energy += 500
        for index in range(gpus):
            gpu = scenario.gpu(index)
            gpu.gpu_util, gpu.mem_util = chance.randint(80, 100), chance.randint(20, 70)
            gpu.temperature, gpu.margin = chance.randint(60, 84), chance.randint(3, 25)
            gpu.clock[1] = chance.randint(1300, 1980)
            gpu.mem_used = chance.randint(10, 30) * 2**30
            scenario.field(index, 185, chance.randint(300_000, 700_000))
            scenario.field(index, 83, energy * 1000, ULLONG)
            scenario.field(index, 197, energy * 1e6, ULLONG)
        time.sleep(min(1.0, left_s))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
