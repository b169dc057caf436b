"""Faults of the host: processors, neighbours, disks."""

from __future__ import annotations

from agent.simulator.conditions import Conditions
from agent.simulator.faults.fault import Fault, Target


def _host_bound(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.core_busy = strength > 0.3
    wrong.cpu_pct = 9 * strength
    for engine in wrong.engines:
        engine.host_s = 0.020 * strength


def _busy_elsewhere(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.cpu_pct = 30 * strength


def _crowded(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.core_busy = strength > 0.3
    wrong.cpu_pct = 88 * strength
    for engine in wrong.engines:
        engine.host_s = 0.020 * strength


def _half_busy_elsewhere(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.cpu_pct = 38 * strength


def _quota(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.cgroup_throttled_pct = 46.0
    for engine in wrong.engines:
        engine.host_s = 0.022


def _wide_quota(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.cgroup_throttled_pct = 1.5


def _neighbour(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.foreign_processes = 1
    for engine in wrong.engines:
        engine.stolen = 0.38


def _quiet_neighbour(wrong: Conditions, _strength: float, _age_s: float, _target: Target) -> None:
    wrong.foreign_processes = 1


def _slow_disk(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.io_pct = 92 * strength
    for engine in wrong.engines:
        engine.host_s = 0.024 * strength


def _busy_disk(wrong: Conditions, strength: float, _age_s: float, _target: Target) -> None:
    wrong.io_pct = 35 * strength


FAULTS = (
    # one core does all the launching and is full; the twin's load runs on other cores
    Fault("host-cpu", "host_cpu", "node", 20, _host_bound, _busy_elsewhere),
    Fault("cpu-quota", "host_cpu", "node", 0, _quota, _wide_quota),
    # other work on all cores: the engine's loop waits for its turn; the twin's leaves cores free
    Fault("cpu-crowded", "host_cpu", "node", 20, _crowded, _half_busy_elsewhere),
    # another process computes on the same boards; the twin's only holds memory
    Fault("noisy-neighbour", "contention", "node", 0, _neighbour, _quiet_neighbour),
    # every step waits for a log line to reach a full disk queue; the twin's disk is busy and nobody waits for it
    Fault("slow-disk", "storage", "node", 45, _slow_disk, _busy_disk),
)
