"""Healthy days of simulated nodes whose requests come as in public traces: whatever is said of them is wrong.

Each node has 8 GPUs in engines of four, for most of a day, so that it goes from the busiest hour to the quietest and back. To be done in
minutes it is coarser than a live agent (`COARSE`): a judgement comes in half of what counts as now, so that every sample is still judged
twice, and the node itself moves on in longer slices, since nothing throttles it. `LIVE` is what an agent and the service do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent.simulator.fleet import Fleet
from agent.simulator.node import SLICE_S
from agent.simulator.settings import SimulatorSettings
from agent.simulator.trace import read_trace
from rules.course import follow, incidents_of
from rules.service import TriageSettings
from rules.triage import Triage
from rules.verdict import Diagnosis
from rules.window import SECOND

GPUS, GROUP = 8, 4
NODE_GPU_DAYS = 7.5
LOAD = 0.5
"""Of the capacity, mean of the busiest hour: the busiest minute of these traces has 1.5 to 4 times the mean."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """Seconds from sample to sample, from judgement to judgement, and in one slice of the simulation."""

    step_s: float
    judged_every_s: float
    slice_s: float

    def __str__(self) -> str:
        return f"a sample in {self.step_s:g} s, a judgement in {self.judged_every_s:g} s"


COARSE = Cadence(5.0, 15.0, 0.5)
LIVE = Cadence(1.0, TriageSettings(store_url="", state_dir=Path()).evaluate_every_s, SLICE_S)


@dataclass(frozen=True, slots=True)
class NodeDay:
    trace: Path
    seed: int
    gpu_days: float
    cadence: Cadence = COARSE


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of one node, all of it wrong: `incidents` stood, `passing` verdicts did not."""

    trace: str
    seed: int
    gpu_days: float
    incidents: tuple[str, ...]
    passing: tuple[str, ...]
    requests: int
    cadence: Cadence


def nodes_of(
    folder: Path, gpu_days: float, first_seed: int = 1, named: str = "", cadence: Cadence = COARSE
) -> list[NodeDay]:
    """The nodes that make up so many GPU-days, the traces in `folder` (and below) in turns, or only the one `named` by its stem.

    A seed has the same trace whichever seed is the first. ValueError when there is no such trace.
    """
    traces = sorted(path for form in ("*Trace*.csv", "*trace*.jsonl") for path in folder.rglob(form))
    if not traces:
        raise ValueError(f"{folder} has no trace: neither *Trace*.csv nor *trace*.jsonl")
    chosen = [path for path in traces if named in ("", path.stem)]
    if not chosen:
        raise ValueError(f"no trace is named {named}; there are {', '.join(path.stem for path in traces)}")
    found: list[NodeDay] = []
    while gpu_days > 1e-9:
        part = min(gpu_days, NODE_GPU_DAYS)
        seed = first_seed + len(found)
        found.append(NodeDay(chosen[(seed - 1) % len(chosen)], seed, part, cadence))
        gpu_days -= part
    return found


def live(node: NodeDay) -> Told:
    cadence = node.cadence
    settings = SimulatorSettings(
        nodes=1, gpus_per_node=GPUS, group=GROUP, nodes_per_rack=1, load=LOAD, seed=node.seed, interval_s=cadence.step_s
    )
    fleet, triage = Fleet(settings, trace=read_trace(node.trace), slice_s=cadence.slice_s), Triage()
    steps = round(node.gpu_days / GPUS * 86_400 / cadence.step_s)
    courses = follow(walked(fleet, triage, steps, cadence))
    incidents = incidents_of(courses.values(), 0, fleet.time_ns)
    spells = [spell for course in courses.values() for spell in course.spells]
    return Told(
        trace=node.trace.stem,
        seed=node.seed,
        gpu_days=node.gpu_days,
        incidents=tuple(f"{i.cause} after {(i.since_ns - fleet.start_ns) / SECOND:.0f} s" for i in incidents),
        passing=tuple(
            f"{spell.cause} {spell.diagnosis.verdicts[0].confidence:.2f} after {(spell.first_ns - fleet.start_ns) / SECOND:.0f} s"
            for spell in spells
        ),
        requests=sum(engine.batch.finished for member in fleet.nodes for engine in member.engines),
        cadence=cadence,
    )


def walked(fleet: Fleet, triage: Triage, steps: int, cadence: Cadence) -> Iterator[tuple[Triage, list[Diagnosis]]]:
    for step in range(1, steps + 1):
        triage.add(fleet.step(cadence.step_s))
        if step * cadence.step_s % cadence.judged_every_s == 0:
            yield triage, triage.evaluate(fleet.time_ns)


def live_all(nodes: Sequence[NodeDay], jobs: int, tell: Callable[[int], None]) -> list[Told]:
    found: list[Told] = []
    if jobs <= 1:
        for node in nodes:
            found.append(live(node))
            tell(len(found))
        return found
    with ProcessPoolExecutor(jobs) as pool:
        for told in pool.map(live, nodes):
            found.append(told)
            tell(len(found))
    return found


def told(days: Sequence[Told]) -> list[str]:
    """What was said, line by line, and the total."""
    found = [f"healthy node, {day.trace}, seed {day.seed}: {incident}" for day in days for incident in day.incidents]
    incidents = sum(len(day.incidents) for day in days)
    passing = sum(len(day.passing) for day in days) - incidents
    cadences = {day.cadence for day in days}
    coarse = f"; an agent and the service have {LIVE}" if cadences != {LIVE} else ""
    return [
        *found,
        f"{sum(day.gpu_days for day in days):g} healthy GPU-days with {sum(day.requests for day in days):,} requests of "
        f"{len({day.trace for day in days})} traces: {incidents} incidents (bar 0), {max(0, passing)} verdicts that passed",
        f"{'; '.join(map(str, cadences))}{coarse}",
    ]


def holds(days: Sequence[Told]) -> bool:
    return not any(day.incidents for day in days)
