"""Faults of the KV cache and of memory."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target

CRASH_EVERY_S = 45.0
CRASH_FOR_S = 14.0


def _blocks_leak(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.leaked_share = 0.76 * strength


def _fuller_pool(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.leaked_share = 0.15 * strength


def _fragmented(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.waste_tokens = 8 + 4200 * strength


def _slightly_fragmented(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.waste_tokens = 8 + 60 * strength


def _dies_of_memory(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    wrong.engines[target.engine].down = age_s % CRASH_EVERY_S < CRASH_FOR_S


def _died_once(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    wrong.engines[target.engine].down = age_s < CRASH_FOR_S


def _swaps(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.mem_pct = 68 * strength
    wrong.swap_bytes_s = 60e6 * strength
    wrong.io_pct = 35 * strength
    for engine in wrong.engines:
        engine.host_s = 0.022 * strength


def _swapped_a_little(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.mem_pct = 55 * strength
    wrong.swap_bytes_s = 0.3e6 * strength


def _crash(after_s: float) -> tuple[Happening, Happening]:
    return (
        Happening("oom", "engine", "CUDA out of memory", "killed by its own allocation", 137, after_s),
        Happening("restart", "engine", "started again", "after exit 137", 137, after_s + CRASH_FOR_S),
    )


FAULTS = (
    # blocks of ended requests are never given back; the twin holds more of the pool, and all still fits
    Fault("kv-full", "memory_kv", "node", 60, _blocks_leak, _fuller_pool),
    # every sequence wastes most of what it holds: the batch can't grow
    Fault("kv-fragmentation", "memory_kv", "node", 120, _fragmented, _slightly_fragmented),
    # the host's memory is over-committed: pages of the serving process go to disk and come back; the twin's are of sleepers
    Fault("swap-storm", "memory_kv", "node", 20, _swaps, _swapped_a_little),
    # out of memory again and again; the twin is one restart
    Fault(
        "oom-loop",
        "memory_kv",
        "engine",
        0,
        _dies_of_memory,
        _died_once,
        tuple(event for i in range(40) for event in _crash(i * CRASH_EVERY_S)),
        (Happening("restart", "engine", "started again", "by its operator", 0, CRASH_FOR_S),),
    ),
)
