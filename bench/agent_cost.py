"""What the agent costs its host, beside nvitop-exporter: `python bench/agent_cost.py [--gpus 8] [--seconds 300]`.

Three programs read one double of NVML at the same time, once a second, start-up left out: nvitop-exporter; an agent that reads the
GPUs and the host, as that one does (and spools and delivers to a SQLite store besides); and an agent with every other source on too: a
vLLM-like engine, dcgm-exporter, a BMC over Redfish and, where snmpd is installed, a PDU. nvitop-exporter finds fewer calls at the double
than on a real card (no encoder, NVLink or process utilisation), which is in its favour. Prints a table; exits 1 when the full agent
takes more than 2 % of a core or 90 MB with its reader, or the like one more than half of nvitop-exporter's CPU time a sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
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

from tests.doubles.engine_endpoint import EngineEndpoint
from tests.doubles.engine_texts.vllm import vllm
from tests.doubles.exporter_endpoint import ExporterEndpoint
from tests.doubles.nvml.library import build
from tests.doubles.nvml.scenario import ULLONG, Scenario, add_ampere, add_hopper
from tests.doubles.redfish import documents
from tests.doubles.redfish.server import PASSWORD, USER, RedfishBmc
from tests.doubles.redfish.state import NodeState
from tests.doubles.snmp.agent import COMMUNITY, SnmpAgent

APC, APC_ID = "1.3.6.1.4.1.318.1.1.26", "1.3.6.1.4.1.318.1.3.4.5"
APC_ROWS = {f"{APC}.6.3.1.2.1": 1, f"{APC}.6.3.1.4.1": 2, f"{APC}.6.3.1.5.1": 113, f"{APC}.6.3.1.6.1": 207}
MOST_CPU_PCT = 2.0
MOST_OF_PEER = 0.5
MOST_RSS_MB = 90.0
START_UP_TICKS = 8  # by then every tier has been read once
START_UP_AT_MOST_S = 60.0

AGENT = """
import json, sys
from pathlib import Path
from agent.daemon import run
from agent.settings import AgentSettings, BmcTarget, EngineTarget, PduTarget
folder, sources = Path(sys.argv[1]), json.loads(sys.argv[3])
store = f"sqlite://{folder}/store.db"
if "engine" in sources:
    sources["engines"] = (EngineTarget("bench", sources.pop("engine")),)
if "bmc" in sources:
    sources["bmc"] = BmcTarget(**sources["bmc"])
if "pdu" in sources:
    sources["pdus"] = (PduTarget("bench", "127.0.0.1", **sources.pop("pdu")),)
settings = AgentSettings(node="bench", state_dir=folder / "state", store_url=store, port=int(sys.argv[2]), **sources)
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
    with ExitStack() as running:
        peer_command = (str(Path(sys.executable).with_name("nvitop-exporter")), "--bind-address", "127.0.0.1")
        peer_command += ("--port", str(port + 2), "--interval", "1")
        log = running.enter_context((folder / "peer.log").open("wb"))
        peer = running.enter_context(process(peer_command, environment, log))
        like = running.enter_context(agent(folder / "like", port, {}, environment))
        full = running.enter_context(agent(folder / "full", port + 1, every_source(running, folder), environment))
        until_s = time.monotonic() + START_UP_AT_MOST_S
        while min(ticks_of(port), ticks_of(port + 1)) < START_UP_TICKS and time.monotonic() < until_s:
            live(scenario, gpus, 1.0)
        for name, started in (("agent", like), ("agent with all sources", full), ("peer", peer)):
            if started.poll() is not None:
                print(f"the {name} ended at its start", file=sys.stderr)
                return 2
        programs = {
            "nvitop-exporter": [peer],
            "agent, GPUs and host": [like, *like.children()],
            "agent, all sources": [full, *full.children()],
        }
        before = {name: sum(map(cpu_s, family)) for name, family in programs.items()}
        ticks = {name: ticks_of(at) for name, at in (("agent, GPUs and host", port), ("agent, all sources", port + 1))}
        began_s = time.monotonic()
        live(scenario, gpus, seconds)
        took_s = time.monotonic() - began_s
        sweeps = {"nvitop-exporter": took_s}  # one a second, by its own setting
        sweeps |= {name: ticks_of(at) - ticks[name] for name, at in zip(ticks, (port, port + 1), strict=True)}
        used_s = {name: sum(map(cpu_s, family)) - before[name] for name, family in programs.items()}
        memory_mb = {name: sum(one.memory_info().rss for one in family) / 1e6 for name, family in programs.items()}
    print(f"{gpus} GPUs at 1 Hz for {took_s:.0f} s, {os.cpu_count()} cores; agents with their readers")
    print(f"{'':<22}{'sweeps':>8}{'CPU, % of a core':>18}{'CPU a sweep, ms':>18}{'resident, MB':>14}{'/ peer':>8}")
    each = {name: used_s[name] / sweeps[name] for name in programs}
    for name in programs:
        ratio = each[name] / each["nvitop-exporter"]
        numbers = f"{sweeps[name]:>8.0f}{100 * used_s[name] / took_s:>18.2f}{1000 * each[name]:>18.2f}"
        print(f"{name:<22}{numbers}{memory_mb[name]:>14.1f}{ratio:>8.2f}")
    print(
        f"limits: {MOST_CPU_PCT} % and {MOST_RSS_MB} MB with all sources; {MOST_OF_PEER} of nvitop-exporter's time with the like"
    )
    too_much = (
        100 * used_s["agent, all sources"] / took_s > MOST_CPU_PCT or memory_mb["agent, all sources"] > MOST_RSS_MB
    )
    return int(too_much or each["agent, GPUs and host"] / each["nvitop-exporter"] > MOST_OF_PEER)


def every_source(running: ExitStack, folder: Path) -> dict[str, object]:
    """Doubles of everything but the GPUs, as settings of the agent."""
    engine, exporter = EngineEndpoint(), ExporterEndpoint()
    engine.metrics(vllm())
    bmc = RedfishBmc(documents.new_schema(NodeState()))
    for double in (engine, exporter, bmc):
        running.callback(double.close)
    sources: dict[str, object] = {
        "engine": engine.url,
        "dcgm_url": f"{exporter.url}/metrics",
        "bmc": {"url": bmc.url, "user": USER, "password": PASSWORD},
    }
    if shutil.which("snmpd") is None:
        print("snmpd is not installed: without a PDU", file=sys.stderr)
        return sources
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    running.enter_context(SnmpAgent(folder / "snmp", port, APC_ID, APC_ROWS))
    return {**sources, "pdu": {"port": port, "community": COMMUNITY}}


@contextmanager
def agent(
    folder: Path, port: int, sources: Mapping[str, object], environment: Mapping[str, str]
) -> Iterator[psutil.Popen]:
    (folder / "state").mkdir(parents=True, mode=0o700)
    command = (sys.executable, "-c", AGENT, str(folder), str(port), json.dumps(sources))
    with process(command, environment) as started:
        yield started


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
