"""Simulated faults and their null twins, judged the way the service judges: ordinary samples of every second into the same judge.

A node's healthy past is simulated and learned once for each seed and load, and each fault, its twin and a healthy course go on from
a copy of it. Requests arrive alike in all of them, so that what a fault costs is known exactly: what the healthy course yields there.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

from agent.simulator.faults import FAULTS
from agent.simulator.faults.fault import Fault
from agent.simulator.fleet import Fleet, Truth
from agent.simulator.settings import SimulatorSettings
from rules.course import PASSING_S, Course, Incident, Spell, follow, incidents_of
from rules.service import LEARN_STEP_S, TriageSettings
from rules.triage import Triage
from rules.verdict import Diagnosis
from rules.window import SECOND
from telemetry.sample import Sample

GPUS, GROUP = 6, 2
"""Of the one node: three engines, so that each has peers."""

LOADS = (0.6, 0.83)
"""Shares of the engines' capacity: a quiet hour and the busiest."""

PAST_S = 900.0
STEP_S = 1.0
JUDGED_EVERY_S = TriageSettings(store_url="", state_dir=Path()).evaluate_every_s
BESIDE = {
    "hot-inlet": "bad-deploy",
    "power-cap": "demand-fall",
    "clock-stuck": "kv-full",
    "kv-full": "long-prompts",
    "long-prompts": "slow-disk",
    "prefix-lost": "bad-config",
    "hung-engine": "demand-fall",
    "host-cpu": "noisy-neighbour",
    "noisy-neighbour": "cold-start",
    "bad-deploy": "hot-inlet",
}
"""Fault -> something harmless that happens shortly before it and looks like another cause: a twin, or a change of demand."""

KINDS = (*FAULTS, *(f"{fault}+{other}" for fault, other in BESIDE.items()))
BESIDE_S = 75.0  # so long before the fault

NAMED_S, LOST_PCT = 60.0, 10.0
"""A fault is owed its name within so long of its strike. One that grows, by itself or since heat builds up slowly, has until so much of
the output is lost, if that takes longer."""

SEEN_S = 60.0  # a fault is watched for so long at least
STEADY_S = 30.0  # and for so long after it was named
LOST_OVER_S = 30  # what the page shows, too
TOP_1, TOP_3 = 0.97, 1.0
BINS = (0.3, 0.6, 0.8, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Everything that shares one healthy past."""

    seed: int
    load: float
    sku: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """A verdict as it was first given, and whether it was right."""

    cause: str
    confidence: float
    right: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `said` are the incidents that were told, as cause@place; empty for a run that was taken for healthy."""

    kind: str
    seed: int
    load: float
    twin: bool
    cause: str  # that had to be named; none for a twin
    said: tuple[str, ...]
    top_1: bool
    top_3: bool
    named_s: float | None  # after the strike
    lost_pct: float | None  # of the struck engines' output, when it was named
    most_lost_pct: float
    given: tuple[Given, ...]

    @property
    def late(self) -> bool:
        """Named, and not as soon as is owed."""
        if self.named_s is None or self.named_s <= NAMED_S:
            return False
        grows = fault_of(self.kind).onset_s > 0 or self.cause == "thermal"
        return not grows or (self.lost_pct or 0.0) >= LOST_PCT


def fault_of(kind: str) -> Fault:
    return FAULTS[kind.partition("+")[0]]


Tokens = dict[str, list[float]]
"""Engine -> tokens/s of each second."""


@dataclass(slots=True)
class Healthy:
    """What the engines yield when nothing strikes, simulated as far as it is asked for."""

    fleet: Fleet
    tokens: Tokens = field(default_factory=dict)

    def until(self, seconds: int) -> Tokens:
        while len(next(iter(self.tokens.values()), ())) < seconds:
            note_tokens(self.tokens, self.fleet, self.fleet.step(STEP_S))
        return self.tokens


def note_tokens(tokens: Tokens, fleet: Fleet, samples: Sequence[Sample]) -> None:
    yields = {s.tags["engine"]: s.fields.get("tokens_per_s", 0.0) for s in samples if s.measurement == "engine"}
    for node in fleet.nodes:
        for engine in node.engines:
            tokens.setdefault(engine.name, []).append(float(yields.get(engine.name, 0.0)))


def learned(group: Group) -> bytes:
    """A node's fleet and its judge after a healthy past, as a copy to go on from."""
    settings = SimulatorSettings(
        nodes=1,
        gpus_per_node=GPUS,
        group=GROUP,
        nodes_per_rack=1,
        sku=group.sku,
        load=group.load,
        seed=group.seed,
        fault_gpu=group.seed % GPUS,
    )
    fleet, triage = Fleet(settings), Triage()
    for second in range(1, round(PAST_S) + 1):
        triage.add(fleet.step(STEP_S))
        if second % LEARN_STEP_S == 0:
            triage.evaluate(fleet.time_ns)
    return pickle.dumps((fleet, triage), pickle.HIGHEST_PROTOCOL)


def play_group(group: Group) -> list[Outcome]:
    past = learned(group)
    healthy = Healthy(pickle.loads(past)[0])
    return [play(past, healthy, group, kind, twin) for kind in group.kinds for twin in (False, True)]


class Watch:
    """One run, judged as it goes. It ends when the right name has stood for a while, or when nothing is owed any more."""

    def __init__(self, past: bytes, group: Group, kind: str, twin: bool) -> None:
        self.fleet, self.triage = pickle.loads(past)
        self.well: Fleet | None = None  # where something harmless happens, too, that changes what is asked
        chance = Random(f"{group.seed}/{group.load}/{kind}")
        self.phase_s = chance.randrange(round(JUDGED_EVERY_S))
        self.struck_s = self.fleet.elapsed_s + 5 + chance.randrange(10)
        fault, (_, _, beside) = fault_of(kind), kind.partition("+")
        if beside:
            self.well = pickle.loads(past)[0]
            for fleet in (self.fleet, self.well):
                fleet.plan(beside, at_s=self.struck_s, null_twin=FAULTS[beside].cause != "none")
            self.struck_s += BESIDE_S
        self.truth: Truth = self.fleet.plan(fault.name, at_s=self.struck_s, null_twin=twin)
        self.last_s = fault.onset_s + SEEN_S + (0.0 if twin else STEADY_S)
        self.tokens: Tokens = {}
        self.named_ns: int | None = None

    def walk(self) -> Iterator[tuple[Triage, list[Diagnosis]]]:
        second = 0
        while not self._is_over():
            second += 1
            samples = self.fleet.step(STEP_S)
            note_tokens(self.tokens, self.fleet, samples)
            self.triage.add(samples)
            if second % JUDGED_EVERY_S == self.phase_s:
                diagnoses = self.triage.evaluate(self.fleet.time_ns)
                named = any(d.verdicts and d.verdicts[0].cause == self.truth.cause for d in diagnoses)
                self.named_ns = (self.named_ns or self.fleet.time_ns) if named else None
                yield self.triage, diagnoses

    def _is_over(self) -> bool:
        age_s = self.fleet.elapsed_s - self.struck_s
        stood_s = 0.0 if self.named_ns is None else (self.fleet.time_ns - self.named_ns) / SECOND
        return age_s >= self.last_s or (age_s >= SEEN_S and stood_s >= STEADY_S)


def play(past: bytes, healthy: Healthy, group: Group, kind: str, twin: bool) -> Outcome:
    watch = Watch(past, group, kind, twin)
    courses = follow(watch.walk())
    truth, end_ns = watch.truth, watch.fleet.time_ns
    found = incidents_of(courses.values(), 0, end_ns)
    right = bool(found) and all(is_right(incident.cause, incident.subject, truth) for incident in found)
    if truth.cause == "none":
        right = not found
    named_s = None
    if truth.cause != "none" and any(incident.cause == truth.cause for incident in found):
        first = min(spell.first_ns for spell in spells_of(courses.values()) if spell.cause == truth.cause)
        named_s = (first - truth.since_ns) / SECOND
    usual = (Healthy(watch.well) if watch.well else healthy).until(len(next(iter(watch.tokens.values()))))
    struck = [truth.subject["engine"]] if "engine" in truth.subject else list(watch.tokens)
    losses = lost(watch.tokens, usual, struck)
    strike = round(watch.struck_s - PAST_S)
    return Outcome(
        kind=kind,
        seed=group.seed,
        load=group.load,
        twin=twin,
        cause=truth.cause,
        said=tuple(f"{incident.cause}@{place_of(incident)}" for incident in found),
        top_1=right,
        top_3=right or among_three(courses.values(), truth),
        named_s=named_s,
        lost_pct=None if named_s is None else losses[min(strike + round(named_s), len(losses)) - 1],
        most_lost_pct=max(losses[strike:], default=0.0),
        given=tuple(given(spell, course, truth) for course in courses.values() for spell in course.spells),
    )


def spells_of(courses: Iterable[Course]) -> list[Spell]:
    return [spell for course in courses for spell in course.spells]


def is_right(cause: str, subject: Mapping[str, str], truth: Truth) -> bool:
    """The cause, at a place that holds the one that was struck or lies in it."""
    return cause == truth.cause and all(truth.subject.get(tag, name) == name for tag, name in subject.items())


def among_three(courses: Iterable[Course], truth: Truth) -> bool:
    """Whether any pair's last judgement has the true cause among its first three."""
    return any(verdict.cause == truth.cause for course in courses for verdict in course.last.verdicts[:3])


def given(spell: Spell, course: Course, truth: Truth) -> Given:
    """The verdict that began a spell, whether it stood or passed, with the confidence that it was first given."""
    first = next(moment for moment in course.moments if moment.time_ns == spell.first_ns)
    return Given(str(spell.cause), first.confidence, is_right(spell.cause, spell.verdict.subject, truth))


def lost(tokens: Tokens, usual: Tokens, engines: Sequence[str]) -> list[float]:
    """Percent of the healthy output that the engines did not yield, over the last `LOST_OVER_S` before each second."""
    mine = [sum(tokens[name][i] for name in engines) for i in range(len(tokens[engines[0]]))]
    theirs = [sum(usual[name][i] for name in engines) for i in range(len(mine))]
    found = []
    for end in range(1, len(mine) + 1):
        start = max(0, end - LOST_OVER_S)
        expected = sum(theirs[start:end])
        found.append(100 * (1 - sum(mine[start:end]) / expected) if expected else 0.0)
    return found


def place_of(incident: Incident) -> str:
    return "/".join(incident.subject.get(tag, "") for tag in ("node", "engine", "gpu") if incident.subject.get(tag))


def play_all(groups: Sequence[Group], jobs: int, tell: Callable[[int], None]) -> list[Outcome]:
    """All groups, `jobs` at a time; `tell` hears how many are done."""
    found: list[Outcome] = []
    if jobs <= 1:
        for done, group in enumerate(groups, 1):
            found += play_group(group)
            tell(done)
        return found
    with ProcessPoolExecutor(jobs) as pool:
        for done, outcomes in enumerate(pool.map(play_group, groups), 1):
            found += outcomes
            tell(done)
    return found


# --- what is printed


@dataclass(frozen=True, slots=True)
class KindRow:
    kind: str
    cause: str
    runs: int
    top_1: int
    top_3: int
    named_median_s: float | None
    named_worst_s: float | None
    lost_worst_pct: float | None
    late: int


def rows_of(outcomes: Sequence[Outcome]) -> list[KindRow]:
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.kind == kind and not outcome.twin]
        times = sorted(outcome.named_s for outcome in runs if outcome.named_s is not None)
        losses = [outcome.lost_pct for outcome in runs if outcome.lost_pct is not None]
        rows.append(
            KindRow(
                kind,
                fault_of(kind).cause,
                len(runs),
                sum(outcome.top_1 for outcome in runs),
                sum(outcome.top_3 for outcome in runs),
                times[len(times) // 2] if times else None,
                times[-1] if times else None,
                max(losses, default=None),
                sum(outcome.late for outcome in runs),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class Bin:
    """Verdicts given with a confidence in [low, high) and how many of them were right."""

    low: float
    high: float
    count: int
    right: int


def reliability(outcomes: Sequence[Outcome]) -> list[Bin]:
    verdicts = [entry for outcome in outcomes for entry in outcome.given]
    bins = []
    for low, high in pairwise(BINS):
        here = [v for v in verdicts if low <= v.confidence < high]
        bins.append(Bin(low, high, len(here), sum(v.right for v in here)))
    return bins


def told(outcomes: Sequence[Outcome]) -> list[str]:
    """The tables, line by line."""
    faults = [outcome for outcome in outcomes if not outcome.twin]
    twins = [outcome for outcome in outcomes if outcome.twin]
    return [*_kinds(outcomes), "", *_failures(faults, twins), "", *_confidences(outcomes), "", _totals(faults, twins)]


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    found = [
        f"{'kind':<27} {'cause':<12} {'runs':>5} {'top-1':>7} {'top-3':>7} {'median s':>9} {'worst s':>8} {'lost %':>7} "
        f"{'late':>5} {'twins':>6}"
    ]
    alarms = Counter(outcome.kind for outcome in outcomes if outcome.twin and outcome.said)
    for row in rows_of(outcomes):
        known = (row.named_median_s, row.named_worst_s, row.lost_worst_pct)
        times = ["" if value is None else f"{value:.0f}" for value in known]
        found.append(
            f"{row.kind:<27} {row.cause:<12} {row.runs:>5} {100 * row.top_1 / row.runs:>6.1f}% {100 * row.top_3 / row.runs:>6.1f}% "
            f"{times[0]:>9} {times[1]:>8} {times[2]:>7} {row.late or '':>5} {alarms[row.kind] or '':>6}"
        )
    return found


def _failures(faults: Sequence[Outcome], twins: Sequence[Outcome]) -> list[str]:
    found = []
    for run in faults:
        if not run.top_1 or run.late:
            when = "" if run.named_s is None else f" after {run.named_s:.0f} s, {run.lost_pct or 0:.0f} % lost"
            found.append(
                f"{run.kind} seed {run.seed} load {run.load:g}: {run.cause} was said {', '.join(run.said) or 'nothing'}{when}; "
                f"at worst {run.most_lost_pct:.0f} % lost"
            )
    for run in twins:
        if run.said:
            found.append(f"twin of {run.kind} seed {run.seed} load {run.load:g}: said {', '.join(run.said)}")
    return found


def _confidences(outcomes: Sequence[Outcome]) -> list[str]:
    found = ["confidence    verdicts  right"]
    for entry in reliability(outcomes):
        share = f"{100 * entry.right / entry.count:.1f} %" if entry.count else ""
        found.append(f"{entry.low:.2f} - {entry.high:.2f}   {entry.count:>7}  {share}")
    return found


def _totals(faults: Sequence[Outcome], twins: Sequence[Outcome]) -> str:
    passing = sum(bool(outcome.given) and not outcome.said for outcome in twins)
    return (
        f"{len(faults)} fault runs: top-1 {100 * share_of(faults, 1):.2f} % (bar {100 * TOP_1:.0f}), top-3 "
        f"{100 * share_of(faults, 3):.2f} % (bar {100 * TOP_3:.0f}), late {sum(run.late for run in faults)}; {len(twins)} null "
        f"twins: {sum(bool(run.said) for run in twins)} incidents (bar 0), {passing} with a verdict that passed within {PASSING_S:.0f} s"
    )


def share_of(faults: Sequence[Outcome], rank: int) -> float:
    """The share, 0..1, of the fault runs whose cause was the first, or among the first three."""
    return sum(run.top_1 if rank == 1 else run.top_3 for run in faults) / len(faults) if faults else 1.0


def holds(outcomes: Sequence[Outcome]) -> bool:
    faults = [outcome for outcome in outcomes if not outcome.twin]
    alarms = any(outcome.said for outcome in outcomes if outcome.twin)
    return (
        share_of(faults, 1) >= TOP_1 and share_of(faults, 3) >= TOP_3 and not alarms and not any(r.late for r in faults)
    )
