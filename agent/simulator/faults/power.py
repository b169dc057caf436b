"""Faults of power delivery and power limits."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target


def _feed_lost(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.psus_lost = 4


def _one_supply_lost(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.psus_lost = 1


def _capped_low(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.power_limit_w = 350.0


def _capped_above_need(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.power_limit_w = 690.0


FAULTS = (
    # four of six supplies go: the others can't carry the load, the board asserts the brake; the twin keeps its redundancy
    Fault(
        "power-brake",
        "power",
        "node",
        0,
        _feed_lost,
        _one_supply_lost,
        (Happening("bmc", "node", "power supplies 2 to 5: input lost", "redundancy lost", 4),),
        (Happening("bmc", "node", "power supply 5: input lost", "redundancy degraded", 1),),
    ),
    # a limit set out of band, far below what the load draws; the twin's limit is one that the load does not reach
    Fault("power-cap", "power", "node", 0, _capped_low, _capped_above_need),
)
