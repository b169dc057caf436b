"""Faults of cooling."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target


def _blocked_inlet(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.inlet_rise_c = 20 * strength
    wrong.airflow = 1 + 3.0 * strength


def _warm_inlet(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.inlet_rise_c = 5 * strength


def _hot_aisle(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.inlet_rise_c = 30 * strength
    wrong.airflow = 1 + 1.6 * strength


def _fans_stand(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.fans_lost = 1.0


def _one_fan_stands(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.fans_lost = 0.12


def _dust(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.airflow = 1 + 5.0 * strength


def _little_dust(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.airflow = 1 + 0.3 * strength


def _memory_hot(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].memory_rise_c = 62 * strength


def _memory_warm(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].memory_rise_c = 16 * strength


def _bad_contact(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].contact = 1 + 5.0 * strength


def _fair_contact(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].contact = 1 + 0.3 * strength


def _cards_covered(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    for board in wrong.gpus[: max(1, target.gpus * 3 // 4)]:
        board.airflow = 1 + 3.0 * strength


def _cards_half_covered(wrong: Conditions, strength: float, _age_s: float, target: Target) -> None:
    for board in wrong.gpus[: max(1, target.gpus * 3 // 4)]:
        board.airflow = 1 + 0.2 * strength


def _sink_off(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].contact = 15.0


def _older_paste(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].contact = 1.2


FAULTS = (
    # the node breathes its own exhaust: hot intake and a choked path; the twin is a warm afternoon
    Fault("hot-inlet", "thermal", "node", 30, _blocked_inlet, _warm_inlet),
    Fault(
        "fan-failure",
        "thermal",
        "node",
        0,
        _fans_stand,
        _one_fan_stands,
        (Happening("bmc", "node", "fans stand still", "fan wall", 8),),
        (Happening("bmc", "node", "fan 3 stands still", "others speed up", 1),),
    ),
    Fault("dust", "thermal", "node", 600, _dust, _little_dust),
    # the memory meets its limit while the core stays cool; the twin's memory is warm, below its limit
    Fault("hbm-thermal", "thermal", "gpu", 20, _memory_hot, _memory_warm),
    Fault("bad-contact", "thermal", "gpu", 60, _bad_contact, _fair_contact),
    # the sink comes off: the die heats faster than the clock is stepped down, and the hardware halves it
    Fault("sink-off", "thermal", "gpu", 0, _sink_off, _older_paste),
    # something covers the intake before three quarters of the cards: the others stay cool
    Fault("blocked-cards", "thermal", "node", 30, _cards_covered, _cards_half_covered),
    Fault("hot-aisle", "thermal", "rack", 120, _hot_aisle, _warm_inlet),
)
