"""Faults of power delivery and power limits."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target


def _feed_lost(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.psus_lost = 4


def _one_supply_lost(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.psus_lost = 1


def _capped(share: float, wrong: Conditions) -> None:
    wrong.power_limit_share = share


def _capped_low(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    _capped(0.5, wrong)


def _capped_slowly(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    _capped(1 - 0.55 * strength, wrong)


def _capped_above_need(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    _capped(0.985, wrong)


def _card_capped(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].limit_share = 0.5


def _card_capped_above_need(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].limit_share = 0.985


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
    # one card's limit, set on the host: its group waits for it
    Fault("card-cap", "power", "gpu", 0, _card_capped, _card_capped_above_need),
    # a budget for the whole rack that tightens step by step
    Fault("rack-power-cap", "power", "rack", 240, _capped_slowly, _capped_above_need),
)
