"""Faults of what is seen, not of what is."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _silent(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.silent = True


def _one_read_missed(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    for engine in wrong.engines:
        engine.silent = age_s < 3


def _no_samples(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.silent = True


def _a_gap(wrong: Conditions, _strength: float, age_s: float, _target: Target) -> None:
    wrong.silent = age_s < 8


def _clock_off(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.clock_offset_s = 4.0


def _clock_slightly_off(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.clock_offset_s = 0.3


FAULTS = (
    # the endpoint answers without statistics (they were switched off); the twin misses a read or two
    Fault("stats-off", "telemetry", "node", 0, _silent, _one_read_missed),
    # nothing comes from the node any more; the twin is a gap of some seconds
    Fault("node-silent", "telemetry", "node", 0, _no_samples, _a_gap),
    # its clock runs away from the others': what it writes can't be put beside what they write
    Fault("clock-skew", "telemetry", "node", 0, _clock_off, _clock_slightly_off),
)
