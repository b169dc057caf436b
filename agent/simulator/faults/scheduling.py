"""Faults of scheduling: an engine that makes no progress."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _hung(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.engines[target.engine].hung = True


def _idle(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.engines[target.engine].arrivals = 0.0


FAULTS = (
    # a collective that never ends: util stays at 100, no step is made; the twin has no requests to serve
    Fault("hung-engine", "scheduling", "engine", 0, _hung, _idle),
)
