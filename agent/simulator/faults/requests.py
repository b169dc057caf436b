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


def _long_answers(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.output = 1 + 1.3 * strength


def _longer_answers_but_fewer(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.output = 1 + 0.5 * strength
        engine.arrivals = 1 - 0.38 * strength


def _prefix_cache_useless(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.prefix_hit = 0.0


def _prefix_cache_weaker(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.prefix_hit = 0.95


def _fewer(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.arrivals = 1 - 0.6 * strength


def _slightly_fewer(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.arrivals = 1 - 0.05 * strength


def _more(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.arrivals = 1 + 0.6 * strength


def _slightly_more(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.arrivals = 1 + 0.05 * strength


FAULTS = (
    # documents instead of chats: prompts several times as long, and new each time; the twin's work stays what it was
    Fault("long-prompts", "request_mix", "node", 30, _long_prompts, _longer_but_fewer),
    Fault("long-answers", "request_mix", "node", 30, _long_answers, _longer_answers_but_fewer),
    # the same lengths, but nothing repeats
    Fault("prefix-lost", "request_mix", "node", 0, _prefix_cache_useless, _prefix_cache_weaker),
    # no fault at all: fewer people ask. Tokens/s fall, and nothing is wrong
    Fault("demand-fall", "none", "node", 60, _fewer, _slightly_fewer),
    # and more people ask than the engines were meant for: a queue, full batches, and each step as fast as ever
    Fault("demand-rise", "none", "node", 60, _more, _slightly_more),
)
