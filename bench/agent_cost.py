"""What the agent costs its host: `python bench/agent_cost.py [--gpus 8] [--seconds 300]`.

The whole agent at 1 Hz with its NVML reader over the double of NVML, delivering to a SQLite store: share of one core and resident
memory of both processes, start-up left out. Prints a table; exits 1 above 2 % of a core or 90 MB together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.doubles.nvml.library import build  # noqa: E402
from tests.doubles.nvml.scenario import ULLONG, Scenario, add_ampere, add_hopper  # noqa: E402

MOST_CPU_PCT = 2.0
MOST_RSS_MB = 90.0
START_UP_S = 5.0

AGENT = """
import sys
from pathlib import Path
from agent.daemon import run
from agent.settings import AgentSettings
folder = Path(sys.argv[1])
store = f"sqlite://{folder}/store.db"
raise SystemExit(run(AgentSettings(node="bench", state_dir=folder / "state", store_url=store, port=int(sys.argv[2]))))
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
    agent = psutil.Popen((sys.executable, "-c", AGENT, str(folder), str(port)), env=environment, cwd=ROOT)
    try:
        live(scenario, gpus, START_UP_S)
        if agent.poll() is not None:
            print("the agent ended at its start", file=sys.stderr)
            return 2
        processes = {"agent": agent, "reader": agent.children()[0]}
        before = {name: cpu_s(process) for name, process in processes.items()}
        sweeps = scenario.calls(0, "utilization")
        began_s = time.monotonic()
        live(scenario, gpus, seconds)
        took_s = time.monotonic() - began_s
        sweeps = scenario.calls(0, "utilization") - sweeps
        rows = [
            (name, 100 * (cpu_s(process) - before[name]) / took_s, process.memory_info().rss / 1e6)
            for name, process in processes.items()
        ]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.terminate()
            _, alive = psutil.wait_procs([agent], timeout=10)
            for process in alive:
                process.kill()
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    print(f"{gpus} GPUs at 1 Hz for {took_s:.0f} s ({sweeps} sweeps), {os.cpu_count()} cores")
    print(f"{'process':<10}{'CPU, % of a core':>18}{'resident, MB':>15}")
    for name, cpu, memory in rows:
        print(f"{name:<10}{cpu:>18.2f}{memory:>15.1f}")
    print(f"{'limit':<10}{MOST_CPU_PCT:>18.2f}{MOST_RSS_MB:>15.1f}")
    return int(rows[-1][1] > MOST_CPU_PCT or rows[-1][2] > MOST_RSS_MB)


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
