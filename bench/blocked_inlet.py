"""Six of 32 cards behind a blocked intake: four nodes of a rack, engines on four cards each, every card's own samples.

What is asked: all six are named, no other, one cause for the rack, told once. And what mending them is worth: a group runs at its slowest
card, so six cards hold up 24.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.simulator.conditions import healthy
from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorSettings
from rules.alerts import FIRING, AlertMachine
from rules.coupling import Coupling, coupling_of
from rules.course import follow, incidents_of
from rules.loss import group_pace
from rules.triage import Triage
from rules.verdict import Diagnosis
from telemetry.sample import Sample

SECOND = 10**9
GROUP, CARDS = 4, 8
HISTORY_S, LASTS_S = 200.0, 240.0
STEP_S = 2.0
BLOCKED = {"sim-n01": (1, 5), "sim-n02": (1, 5), "sim-n03": (2, 6)}
"""The covered cards of the three lower nodes: one of each of their engines."""

INTAKE_RISE_C = 9.0  # what the blocked intake does to the node's air
AIRFLOW = 3.25  # and to the air of the covered cards: so many times the resistance
PACE = 0.774
"""Of a throttled card, published: 480 of 620 tokens/s."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What triage made of the scene."""

    named: frozenset[tuple[str, str]]  # (node, GPU) of every verdict since the strike
    causes: frozenset[str]
    scope: str
    place: dict[str, str]
    told: tuple[str, ...]  # scopes of the alerts that fired
    before: int  # verdicts before the strike
    evidence: tuple[str, ...]
    named_after_s: float | None
    coupling: Coupling | None

    @property
    def right(self) -> bool:
        wanted = {(node, str(card)) for node, cards in BLOCKED.items() for card in cards}
        return (
            self.named == wanted
            and self.causes == {"thermal"}
            and self.scope == "rack"
            and self.told == ("rack",)
            and not self.before
            and self.coupling is not None
            and (self.coupling.slow, self.coupling.held_up) == (6, 24)
        )


def samples() -> Iterator[list[Sample]]:
    fleet = Fleet(
        SimulatorSettings(nodes=4, gpus_per_node=CARDS, group=GROUP, nodes_per_rack=4, history_s=HISTORY_S, seed=32)
    )
    while fleet.elapsed_s < HISTORY_S + LASTS_S:
        if fleet.elapsed_s >= HISTORY_S:
            for node in fleet.nodes:
                if node.name in BLOCKED:
                    node.wrong = healthy(len(node.gpus), len(node.engines))
                    node.wrong.inlet_rise_c = INTAKE_RISE_C
                    for card in BLOCKED[node.name]:
                        node.wrong.gpus[card].airflow = AIRFLOW
        yield fleet.step(STEP_S)


def judged() -> Outcome:
    triage, machine = Triage(), AlertMachine()
    walked: list[tuple[Triage, list[Diagnosis]]] = []
    told: list[str] = []
    strike_ns = next_ns = 0

    def moments() -> Iterator[tuple[Triage, list[Diagnosis]]]:
        nonlocal strike_ns, next_ns
        for arrived in samples():
            triage.add(arrived)
            now_ns = arrived[-1].time_ns
            strike_ns = strike_ns or now_ns + round((HISTORY_S - STEP_S) * SECOND)
            if now_ns >= next_ns:
                next_ns = now_ns + 6 * SECOND
                diagnoses = triage.evaluate(now_ns)
                told.extend(t.alert.scope for t in machine.step(diagnoses, now_ns, 6.0) if t.state == FIRING)
                walked.append((triage, diagnoses))
                yield triage, diagnoses

    courses = follow(moments())
    found = [(d, v) for _, diagnoses in walked for d in diagnoses for v in d.verdicts]
    since = [(d, v) for d, v in found if d.at_ns > strike_ns]
    last = [v for d in walked[-1][1] for v in d.verdicts]
    incidents = incidents_of(courses.values(), strike_ns, walked[-1][1][0].at_ns)
    return Outcome(
        named=frozenset((d.subject["node"], gpu) for d, v in since for gpu in v.gpus),
        causes=frozenset(str(v.cause) for _, v in since),
        scope=last[0].scope if last else "",
        place=dict(last[0].subject) if last else {},
        told=tuple(told),
        before=len(found) - len(since),
        evidence=tuple(entry.text() for entry in last[0].evidence) if last else (),
        named_after_s=(since[0][0].at_ns - strike_ns) / SECOND if since else None,
        coupling=coupling_of(incidents[0], list(courses.values())) if incidents else None,
    )


def told(outcome: Outcome) -> Iterator[str]:
    """The verdict with its evidence, and the arithmetic of groups."""
    wanted = sum(len(cards) for cards in BLOCKED.values())
    yield (
        f"32 cards, 6 behind a blocked intake: {'+' if outcome.right else '-'} {', '.join(sorted(outcome.causes)) or 'nothing'} on "
        f"{outcome.scope} {outcome.place}, {len(outcome.named)}/{wanted} cards named: "
        f"{', '.join('/'.join(card) for card in sorted(outcome.named))}; alerts {list(outcome.told)}; "
        f"first named after {outcome.named_after_s} s"
    )
    yield from (f"  {sentence}" for sentence in outcome.evidence)
    if outcome.coupling is not None:
        yield f"  {outcome.coupling.line().text()}"
    cards = [PACE if place % 5 == 0 and place < 30 else 1.0 for place in range(32)]  # no two in one group of four
    worth = ", ".join(f"groups of {size} {100 * (1 / group_pace(cards, size) - 1):+.1f} %" for size in (1, 2, 4, 8))
    yield f"  mending 6 of 32 cards at {100 * PACE:.1f} % of their pace is worth: {worth}"
