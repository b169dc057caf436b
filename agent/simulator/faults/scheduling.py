"""Faults of scheduling: an engine that makes no progress, and work that is badly spread."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target

RESTART_S = 12.0


def _hung(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.engines[target.engine].hung = True


def _idle(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.engines[target.engine].arrivals = 0.0


def _spread(wrong: Conditions, more: float, target: Target) -> None:
    """`more` of what the others get goes to the struck engine; the sum stays."""
    others = target.engines - 1
    for i, engine in enumerate(wrong.engines):
        engine.arrivals = 1 + more * others if i == target.engine else 1 - more


def _one_gets_all(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    _spread(wrong, 0.8 / max(1, target.engines - 1) if target.engines > 2 else 0.7, target)


def _slightly_uneven(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    _spread(wrong, 0.03 / max(1, target.engines - 1), target)


def _gone(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.engines[target.engine].down = True


def _restarted(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    wrong.engines[target.engine].down = age_s < RESTART_S


FAULTS = (
    # a collective that never ends: util stays at 100, no step is made; the twin has no requests to serve
    Fault("hung-engine", "scheduling", "engine", 0, _hung, _idle),
    # the router sends most requests to one engine while the others have room
    Fault("uneven-routing", "scheduling", "engine", 0, _one_gets_all, _slightly_uneven),
    # the process ends and nobody starts it; the twin is started again
    Fault(
        "engine-gone",
        "scheduling",
        "engine",
        0,
        _gone,
        _restarted,
        (),
        (Happening("restart", "engine", "started again", "by its operator", 0, RESTART_S),),
    ),
)
