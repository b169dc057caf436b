"""Faults of what is seen, not of what is."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _silent(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.silent = True


def _one_read_missed(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.silent = age_s < 3


FAULTS = (
    # the endpoint answers without statistics (they were switched off); the twin misses a read or two
    Fault("stats-off", "telemetry", "node", 0, _silent, _one_read_missed),
)
