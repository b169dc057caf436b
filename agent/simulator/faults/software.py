"""Faults that come with a change of software."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target

RESTART_S = 12.0


def _deploy(wrong: Conditions, age_s: float) -> None:
    for engine in wrong.engines:
        engine.down = age_s < RESTART_S
        engine.version = "1.9.0"


def _slower_kernels(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _deploy(wrong, age_s)
    for engine in wrong.engines:
        engine.step_scale = 1.5


def _as_fast_as_before(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _deploy(wrong, age_s)


_DEPLOYED = (
    Happening("deploy", "engines", "engine 1.8.2 -> 1.9.0", "rolling update"),
    Happening("restart", "engines", "started", "after a deploy", 0, RESTART_S),
)

FAULTS = (
    # the new version falls back to a slower attention kernel: longer steps at lower power, clean hardware
    Fault("bad-deploy", "software", "node", 0, _slower_kernels, _as_fast_as_before, _DEPLOYED, _DEPLOYED),
)
