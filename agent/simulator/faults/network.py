"""Faults of the links between the GPUs of a group."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target

DOWN_S = 4.0
RESTART_S = 12.0


def _never_joins(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    engine = wrong.engines[target.engine]
    engine.down, engine.joining = age_s < DOWN_S, age_s >= DOWN_S


def _joins(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    engine = wrong.engines[target.engine]
    engine.down, engine.joining = age_s < DOWN_S, DOWN_S <= age_s < RESTART_S


_STARTED = Happening("restart", "engine", "started again", "by its operator", 0, DOWN_S)

FAULTS = (
    # after a restart the ranks don't find each other: they spin in their first collective, no weight is read; the twin's do at once
    Fault("group-apart", "network", "engine", 0, _never_joins, _joins, (_STARTED,), (_STARTED,)),
)
