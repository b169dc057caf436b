"""Faults of the boards themselves and of their links."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target, nothing

RESTARTED_AFTER_S = 14.0


def _lost(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].lost = True


def _clock_stuck(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].clock_limit_mhz = 900.0


def _clock_slightly_low(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].clock_limit_mhz = 1935.0


def _narrow_link(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].pcie_width = 1
    wrong.gpus[target.gpu].replays_s = 3.0


def _half_link(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].pcie_width = 8


def _first_generation(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].pcie_gen = 1


def _one_generation_down(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].pcie_gen = 4


def _rank_slow(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].rank_slow = 1.6


def _rank_slightly_slow(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].rank_slow = 1.015


def _memory_clock_halved(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].memory_slow = 2.0


def _memory_clock_slightly_low(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].memory_slow = 1.01


def _uncorrected(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].uncorrected = 1
    wrong.gpus[target.gpu].remap_pending = True
    wrong.engines[target.engine].down = age_s < RESTARTED_AFTER_S


def _corrected(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].corrected_s = 0.5


def _driver_hangs(wrong: Conditions, _strength: float, _age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].hung = True
    wrong.engines[target.engine].hung = True


def _one_call_overran(wrong: Conditions, _strength: float, age_s: float, target: Target) -> None:
    wrong.gpus[target.gpu].hung = age_s < 2


FAULTS = (
    # off the bus: its engine dies with it; the twin remaps a memory row and goes on
    Fault(
        "gpu-lost",
        "gpu_fault",
        "gpu",
        0,
        _lost,
        nothing,
        (
            Happening("xid", "gpu", "GPU has fallen off the bus", "Xid 79", 79),
            Happening("gpu_lost", "gpu", "GPU is lost", "", 79),
        ),
        (Happening("xid", "gpu", "row remapping recorded", "Xid 63", 63),),
    ),
    # cool, no throttle bit, and yet half the clock: its whole group waits for it
    Fault("clock-stuck", "gpu_fault", "gpu", 0, _clock_stuck, _clock_slightly_low),
    # one lane of sixteen: KV that comes back from host memory waits for it; half the lanes are still more than it needs
    Fault("pcie-width", "pcie_link", "gpu", 0, _narrow_link, _half_link),
    # trained down under load, all lanes there; the twin's generation still carries several times what moves
    Fault("pcie-generation", "pcie_link", "gpu", 0, _first_generation, _one_generation_down),
    # one rank takes longer over its share, its card at full clock, cool and uncapped: the others wait for it in every step
    Fault("slow-rank", "scheduling", "gpu", 0, _rank_slow, _rank_slightly_slow),
    # the memory stays in a lower clock state: decode waits for its traffic, the core is at full clock and idles more
    Fault("memory-clock", "gpu_fault", "gpu", 0, _memory_clock_halved, _memory_clock_slightly_low),
    # an error that can't be corrected kills the process that held the memory; the twin's errors are corrected
    Fault(
        "memory-error",
        "gpu_fault",
        "gpu",
        0,
        _uncorrected,
        _corrected,
        (
            Happening("xid", "gpu", "contained memory error", "Xid 94", 94),
            Happening("restart", "engine", "started again", "after exit 1", 1, RESTARTED_AFTER_S),
        ),
    ),
    # the board's own processor doesn't answer the driver: no reading, no progress; the twin is one slow call
    Fault(
        "driver-hang",
        "gpu_fault",
        "gpu",
        0,
        _driver_hangs,
        _one_call_overran,
        (Happening("xid", "gpu", "GSP RPC timeout", "Xid 119", 119, 6.0),),
    ),
)
