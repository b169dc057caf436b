"""Triage over a thousand GPUs: python bench/fleet_triage.py [--nodes 125] [--gpus 8] measures the judging alone, without a store.

The window is filled to its whole length with samples of a simulated fleet, what is usual is learned to its whole length too, and
then every pair is judged some times: seconds of one evaluation, and resident memory. `bench/fleet.py` starts the same file with
`service URL FOLDER TURNS`: as the service does it, against a store. The first turn reads the window and what is usual; the turns
after it, one each five seconds, read what is new, judge every pair and write. Prints one JSON object: wall and CPU seconds of each
part, and the resident memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorSettings
from rules.observation.reader import BACK_S
from rules.service import Service, TriageSettings
from rules.triage import Triage
from rules.usual import KEPT
from telemetry.sample import Sample
from telemetry.store import open_store

EVERY_S = 5.0
ALIKE = 25  # hosts that one simulated node's figures serve
NODES_PER_RACK, NODES_PER_CIRCUIT = 4, 2


class Clocked:
    """Wall and CPU seconds of the calls of one function."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._work = work

    def __call__(self, *args: Any) -> Any:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            return self._work(*args)
        finally:
            self.wall_s.append(time.perf_counter() - began_s)
            self.cpu_s.append(time.process_time() - cpu_s)


class Hosts:
    """A fleet whose hosts share the figures of a few simulated nodes, each under its own name."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.nodes = nodes
        self._fleet = Fleet(SimulatorSettings(nodes=max(2, -(-nodes // ALIKE)), gpus_per_node=gpus))
        self._tags: dict[tuple[int, int], Mapping[str, str]] = {}

    def step(self) -> Iterator[Sample]:
        """One second of every host."""
        simulated = len(self._fleet.nodes)
        by_node: dict[str, list[Sample]] = {}
        for sample in self._fleet.step(1.0):
            by_node.setdefault(sample.tags["node"], []).append(sample)
        for host in range(self.nodes):
            name = self._fleet.nodes[host % simulated].name
            for sample in by_node.get(name, ()):
                if sample.measurement not in ("event", "circuit"):
                    yield Sample(sample.measurement, self._renamed(host, name, sample), sample.fields, sample.time_ns)

    def _renamed(self, host: int, name: str, sample: Sample) -> Mapping[str, str]:
        key = (host, id(sample.tags))  # a device keeps its tags
        if key not in self._tags:
            tags = {tag: value.replace(name, f"n{host:03}") for tag, value in sample.tags.items()}
            place = {"rack": f"r{host // NODES_PER_RACK:02}", "circuit": f"c{host // NODES_PER_CIRCUIT:02}"}
            self._tags[key] = {**tags, **place}
        return self._tags[key]


def alone(nodes: int, gpus: int, evaluations: int, seconds: float) -> dict[str, float]:
    """Fill, learn, judge. Seconds of one evaluation are CPU seconds of this process, which has one thread."""
    hosts, triage = Hosts(nodes, gpus), Triage()
    process = psutil.Process()
    bare_mb = process.memory_info().rss / 1e6
    now_ns, second = 0, 0
    adding_s = 0.0
    judged_s: list[float] = []
    wall_s: list[float] = []
    while len(judged_s) < evaluations:
        samples = list(hosts.step())
        began_s = time.process_time()
        triage.add(samples)
        adding_s += time.process_time() - began_s
        now_ns, second = samples[0].time_ns, second + 1
        if second % int(EVERY_S):
            continue
        began_s, began_wall_s = time.process_time(), time.perf_counter()
        diagnoses = triage.evaluate(now_ns)
        if second > seconds:
            judged_s.append(time.process_time() - began_s)
            wall_s.append(time.perf_counter() - began_wall_s)
        elif second + EVERY_S > seconds:
            learn_whole(triage)
    rows = [len(device.times) for node in triage.window.nodes() for device in triage.window.devices(node, "gpu")]
    del samples
    gc.collect()
    return {
        "GPUs": nodes * gpus,
        "pairs": len(diagnoses),
        "named": sum(bool(diagnosis.verdicts) for diagnosis in diagnoses),
        "rows of a GPU": statistics.median(rows),
        "an evaluation, s (median)": statistics.median(judged_s),
        "an evaluation, s (longest)": max(judged_s),
        "an evaluation, wall s (median)": statistics.median(wall_s),
        "a second's samples taken in, s": adding_s / second,
        "resident before, MB": bare_mb,
        "resident, MB": process.memory_info().rss / 1e6,
    }


def learn_whole(triage: Triage) -> None:
    """As after an hour of health: every habit holds as many readings as it ever will."""
    for memory in triage.memories.values():
        readings = {
            (lane, source): habit.range()[1]
            for lane, sources in memory.usual._habits.items()
            for source, habit in sources.items()
        }
        for _ in range(KEPT):
            memory.usual.learn(readings)


def main() -> None:
    if sys.argv[1:2] == ["service"]:
        service_turns(*sys.argv[2:])
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--nodes", type=int, default=125)
    arguments.add_argument("--gpus", type=int, default=8, help="of a node")
    arguments.add_argument("--evaluations", type=int, default=12)
    arguments.add_argument("--seconds", type=float, default=1.5 * BACK_S, help="filled before it is measured")
    given = arguments.parse_args()
    for row, number in alone(given.nodes, given.gpus, given.evaluations, given.seconds).items():
        print(f"{row:<32} {number:10,.3f}")


def service_turns(url: str, folder: str, turns: str) -> None:
    settings = TriageSettings(store_url=url, state_dir=Path(folder), evaluate_every_s=EVERY_S)
    service = Service(settings, open_store(url))
    parts = {
        "read": Clocked(service._read),
        "judge": Clocked(service.triage.evaluate),
        "write": Clocked(service._write),
    }
    service._read = parts["read"]  # type: ignore[method-assign]
    service.triage.evaluate = parts["judge"]  # type: ignore[method-assign]
    service._write = parts["write"]  # type: ignore[method-assign]
    turn = Clocked(service.turn)
    rss = []
    for _ in range(int(turns)):
        began_s = time.monotonic()
        turn(time.time_ns(), time.monotonic())
        rss.append(psutil.Process().memory_info().rss / 1e6)
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - began_s)))
    json.dump(
        {
            "pairs": len(service.diagnoses),
            "named": sum(bool(diagnosis.verdicts) for diagnosis in service.diagnoses),
            "turn": [turn.wall_s, turn.cpu_s],
            **{name: [part.wall_s, part.cpu_s] for name, part in parts.items()},
            "rss_mb": rss,
        },
        sys.stdout,
    )
    service.stop()


if __name__ == "__main__":
    main()
