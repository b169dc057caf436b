"""How often each group of readings is taken, and how long a call may take: one record for both ends of the pipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReaderTiming:
    """Periods and limits, seconds. The fast group is read at every tick that the agent asks for.

    memory: used memory, link, fan, GPM. processes: costs 4.5 ms a call on some cards. health: ECC, row remapping, replays,
    recovery action, and PCIe throughput where it is only to be had by a call that blocks 20 ms. names: words, which are told at once
    where they change. limits: power and temperature limits, maxima.
    reprobe: calls that the card refused. retry: the library or driver that is not there. rediscover: all GPUs again when one
    is out, then less and less often. identity: whether the kernel driver has GPUs that NVML doesn't list. takeover: a GPU that
    holds its thread this long is left to it, and another thread goes on.
    """

    memory_s: float = 5.0
    processes_s: float = 10.0
    health_s: float = 30.0
    limits_s: float = 30.0
    names_s: float = 60.0
    reprobe_s: float = 3600.0
    retry_s: float = 30.0
    rediscover_s: float = 60.0
    identity_s: float = 3600.0
    takeover_s: float = 0.2


GROUPS: Mapping[str, tuple[str, ...]] = {
    "memory_s": (
        "mem_used_bytes",
        "mem_total_bytes",
        "pcie_gen",
        "pcie_width",
        "fan_pct",
        "sm_active_pct",
        "tensor_active_pct",
        "dram_active_pct",
    ),
    "processes_s": ("processes",),
    "health_s": (
        "ecc_corrected_total",
        "ecc_uncorrected_total",
        "remapped_rows_total",
        "remap_pending",
        "remap_failed",
        "pcie_replays_total",
        "recovery_action",
    ),
    "names_s": ("name", "driver", "memory_kind", "power_scope", "source"),
    "limits_s": (
        "temp_limit_c",
        "mem_temp_limit_c",
        "power_limit_default_w",
        "power_limit_requested_w",
        "sm_clock_max_mhz",
        "mem_clock_max_mhz",
        "pcie_gen_max",
        "pcie_width_max",
    ),
}
"""The fields that are not read at every tick, by their period."""

_OF_INSTANCES = {
    "memory_s": (
        "mem_used_bytes",
        "mem_total_bytes",
        "sm_active_pct",
        "tensor_active_pct",
        "dram_active_pct",
        "gr_active_pct",
    ),
    "processes_s": ("processes",),
    "names_s": ("profile",),
}

MISSES = 3


def kept_s(timing: ReaderTiming) -> dict[str, float]:
    """How long a slow field's last value is still the present one, seconds: three of its periods."""
    return _kept_s(timing, GROUPS)


def mig_kept_s(timing: ReaderTiming) -> dict[str, float]:
    """The same for the fields of a MIG instance, none of which is read at every tick."""
    return _kept_s(timing, _OF_INSTANCES)


def _kept_s(timing: ReaderTiming, groups: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {name: MISSES * getattr(timing, period) for period, names in groups.items() for name in names}


def to_argument(timing: ReaderTiming) -> str:
    """The record as one command-line argument."""
    return json.dumps(dataclasses.asdict(timing))


def from_argument(argument: str) -> ReaderTiming:
    """The inverse of `to_argument`; ValueError or TypeError for anything else."""
    return ReaderTiming(**{name: float(value) for name, value in json.loads(argument).items()})
