"""Faults of the boards themselves and of their links."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target, nothing


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
)
