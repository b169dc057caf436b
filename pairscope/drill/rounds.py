"""A round: a small simulated fleet in which one thing goes wrong, or nothing does, and what the ordinary triage made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from agent.simulator.faults import FAULTS
from agent.simulator.fleet import Fleet, Truth
from agent.simulator.recording import START_NS, scenario
from agent.simulator.settings import SimulatorSettings
from rules.course import Course, PairKey, follow
from rules.triage import JudgeSettings, walk
from rules.verdict import Cause
from telemetry.sample import Sample

SECOND = 10**9
PAST_S = 480.0
EARLIEST_S, LATEST_S = 30.0, 120.0  # after the past, a fault strikes
JUDGE_EVERY_S = 10.0
READ_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How large the fleet is, how slowly its faults may grow, how often nothing is wrong, and how often that looks as if."""

    nodes: int
    gpus: int
    slowest_onset_s: float
    shared: bool  # faults of a whole rack too
    healthy: float  # share of rounds in which nothing is wrong
    twins: float  # of those, the share in which something harmless happens
    seconds: float  # after the past


DIFFICULTIES = {
    "easy": Difficulty(1, 4, 30.0, False, 0.15, 0.0, 420.0),
    "medium": Difficulty(2, 4, 120.0, False, 0.25, 0.5, 480.0),
    "hard": Difficulty(3, 4, 600.0, True, 0.30, 0.8, 780.0),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Everything of one round. `truth` is None in a healthy one; a harmless twin's cause is `none`."""

    number: int
    nodes: tuple[str, ...]
    samples: tuple[Sample, ...]
    courses: dict[PairKey, Course]
    start_ns: int
    end_ns: int
    truth: Truth | None

    @property
    def cause(self) -> Cause:
        return Cause(self.truth.cause) if self.truth is not None else Cause.NONE

    @property
    def right_nodes(self) -> frozenset[str]:
        """The nodes that may be named: the struck one, or any of a struck rack; none where nothing is wrong."""
        if self.truth is None or self.cause is Cause.NONE:
            return frozenset()
        node = self.truth.subject.get("node")
        if node is not None:
            return frozenset((node,))
        (level, name), *_ = self.truth.subject.items()
        return frozenset(s.tags["node"] for s in self.samples if s.tags.get(level) == name)


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance has chosen for a round."""

    seed: int
    fault: str | None
    node: str
    twin: bool
    after_s: float
    gpu: int | None = None  # None: the simulator's own choice


def draw(seed: int, number: int, difficulty: Difficulty) -> Draw:
    """The same seed and number draw the same round. No cause comes a second time before all have come."""
    random = Random(f"{seed}/{number}")
    by_cause = faults_of(difficulty)
    lap, place = divmod(number - 1, len(by_cause))
    order = Random(f"{seed}/lap {lap}").sample(sorted(by_cause), len(by_cause))
    fault: str | None = random.choice(by_cause[order[place]])
    twin, healthy = random.random() < difficulty.twins, random.random() < difficulty.healthy
    if healthy and not twin:
        fault = None
    return Draw(
        seed=random.randrange(1, 2**31),
        fault=fault,
        node=random.choice(SimulatorSettings(nodes=difficulty.nodes).node_names),
        twin=healthy and twin,
        after_s=round(random.uniform(EARLIEST_S, LATEST_S)),
        gpu=random.randrange(difficulty.gpus),
    )


def faults_of(difficulty: Difficulty) -> dict[str, list[str]]:
    """Cause -> the faults of it that can come up."""
    by_cause: dict[str, list[str]] = {}
    for name, fault in FAULTS.items():
        if fault.onset_s <= difficulty.slowest_onset_s and (
            difficulty.shared or fault.scope in ("gpu", "engine", "node")
        ):
            by_cause.setdefault(fault.cause, []).append(name)
    return by_cause


def make(
    number: int, drawn: Draw, difficulty: Difficulty, tell: Callable[[float], None] = lambda _share: None
) -> Round:
    """Simulate and judge. `tell` hears what share (0..1) is done."""
    settings = SimulatorSettings(
        nodes=difficulty.nodes,
        gpus_per_node=difficulty.gpus,
        fault=drawn.fault,
        fault_node=drawn.node if drawn.fault else None,
        fault_gpu=drawn.gpu if drawn.fault else None,
        fault_after_s=drawn.after_s,
        null_twin=drawn.twin,
        seed=drawn.seed,
        history_s=PAST_S,
        interval_s=READ_EVERY_S,
    )
    total_s = PAST_S + difficulty.seconds
    samples: list[Sample] = []
    for step in scenario(settings, difficulty.seconds):
        samples += step
        tell(0.6 * (step[0].time_ns - START_NS) / SECOND / total_s)
    judged = JudgeSettings(step_s=JUDGE_EVERY_S, history_s=total_s + 1)
    courses = follow(walk(samples, None, judged), lambda at_ns: tell(0.6 + 0.4 * (at_ns - START_NS) / SECOND / total_s))
    return Round(
        number=number,
        nodes=tuple(settings.node_names),
        samples=tuple(samples),
        courses=courses,
        start_ns=START_NS,
        end_ns=samples[-1].time_ns,
        truth=_truth(settings),
    )


def _truth(settings: SimulatorSettings) -> Truth | None:
    return next(iter(Fleet(settings).truth), None) if settings.fault else None
