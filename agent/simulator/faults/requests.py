"""Faults of the request mix, and changes of demand that are none."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _long_prompts(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.prompt = 1 + 3.5 * strength
        engine.prefix_hit = 1 - 0.6 * strength


def _longer_but_fewer(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.prompt = 1 + 0.4 * strength
        engine.arrivals = 1 - 0.25 * strength


FAULTS = (
    # documents instead of chats: prompts several times as long, and new each time; the twin's work stays what it was
    Fault("long-prompts", "request_mix", "node", 30, _long_prompts, _longer_but_fewer),
)
