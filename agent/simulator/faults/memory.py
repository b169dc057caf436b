"""Faults of the KV cache and of memory."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _blocks_leak(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.leaked_share = 0.76 * strength


def _fuller_pool(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.leaked_share = 0.15 * strength


FAULTS = (
    # blocks of ended requests are never given back; the twin holds more of the pool, and all still fits
    Fault("kv-full", "memory_kv", "node", 60, _blocks_leak, _fuller_pool),
)
