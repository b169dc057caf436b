"""Faults of cooling."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _blocked_inlet(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.inlet_rise_c = 20 * strength
    wrong.airflow = 1 + 3.0 * strength


def _warm_inlet(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.inlet_rise_c = 5 * strength


FAULTS = (
    # the node breathes its own exhaust: hot intake and a choked path; the twin is a warm afternoon
    Fault("hot-inlet", "thermal", "node", 30, _blocked_inlet, _warm_inlet),
)
