"""Faults that come with a change of software, of its configuration, or with a start."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Happening, Target

RESTART_S = 12.0
WARM_UP_S = 300.0


def _restarted(wrong: Conditions, age_s: float, version: str | None = None, config: str | None = None) -> None:
    for engine in wrong.engines:
        engine.down = age_s < RESTART_S
        engine.version = version
        engine.config = config


def _slower_kernels(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s, "1.9.0")
    for engine in wrong.engines:
        engine.step_scale = 1.5


def _as_fast_as_before(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s, "1.9.0")


def _small_batch(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s, config="b")
    for engine in wrong.engines:
        engine.max_running = 24


def _same_batch(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s, config="b")


def _long_warm_up(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s)
    for engine in wrong.engines:
        engine.step_scale = 1 + 2.0 * max(0.0, 1 - age_s / WARM_UP_S)


def _warm_at_once(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    _restarted(wrong, age_s)


_STARTED = Happening("restart", "engines", "started", "", 0, RESTART_S)
_DEPLOYED = (Happening("deploy", "engines", "engine 1.8.2 -> 1.9.0", "rolling update"), _STARTED)
_CONFIGURED = (Happening("config", "engines", "configuration changed", "max running sequences", 0), _STARTED)

FAULTS = (
    # the new version falls back to a slower attention kernel: longer steps at lower power, clean hardware
    Fault("bad-deploy", "software", "node", 0, _slower_kernels, _as_fast_as_before, _DEPLOYED, _DEPLOYED),
    # the batch may hold far fewer sequences than before
    Fault("bad-config", "software", "node", 0, _small_batch, _same_batch, _CONFIGURED, _CONFIGURED),
    # kernels are compiled and caches filled while requests already come
    Fault("cold-start", "cold_start", "node", 0, _long_warm_up, _warm_at_once, (_STARTED,), (_STARTED,)),
)
