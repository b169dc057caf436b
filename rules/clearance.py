"""What ends an alert: the readings that it was found by, taken again and well, under load, or what the hardware says of itself.

That a cause is not confirmed is not enough. A field that is no longer read, a card that is no longer reported and an engine that nobody
asks say nothing; only an engine's own trouble ends with its idleness, since it harms nobody then and is found again with the first load.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rules.evidence import EngineEvidence, Evidence, GpuEvidence, HostEvidence, Observation, RoomEvidence
from rules.finding import effect_of
from rules.straggler import told_ranks
from rules.thresholds import Bar
from rules.verdict import Cause, Diagnosis, Verdict

HARDWARE = frozenset((Cause.THERMAL, Cause.POWER, Cause.GPU_FAULT, Cause.PCIE_LINK))
"""What stays broken while nobody asks for anything."""

OF_LOAD = frozenset((Cause.HOST_CPU, Cause.STORAGE, Cause.REQUEST_MIX, Cause.SOFTWARE))
"""What shows under load only, and is nobody's ticket while there is none: an idle engine's readings are no proof of the contrary."""

SELF_TOLD = frozenset(
    f"gpu.{name}"
    for name in ("state", "healthy", "xid_total", "ecc_uncorrected_total", "remap_failed", "remapped_rows_total")
)
"""What a card says of itself, loaded or not."""

IDLE_TOO = frozenset(
    f"engine.{name}"
    for name in ("up", "requests_running", "requests_waiting", "kv_used_pct", "kv_blocks_count", "uptime_s", "probe_ok")
)
"""What an idle engine still tells; it has no lengths, latencies and rates."""

GPU_FIELDS = {
    "sm_clock_mhz": "sm_clock",
    "mem_clock_mhz": "mem_clock",
    "util_pct": "util",
    "temp_c": "temp",
    "mem_temp_c": "mem_temp",
    "power_w": "power",
    "power_limit_w": "power_limit",
    "fan_pct": "fan",
    "xid_total": "xids",
    "ecc_uncorrected_total": "ecc_uncorrected_new",
    "remapped_rows_total": "remapped_new",
    "pcie_replays_total": "replays_per_min",
    "pcie_rx_bytes_s": "link_bytes_s",
    "mem_util_pct": "mem_util",
    "sm_active_pct": "active",
}
"""Fields whose reading has another name in the evidence."""


@dataclass(frozen=True, slots=True)
class Basis:
    """What a verdict of one pair rested on: the fields that were read when it was given, and the GPUs that it was about (none: all)."""

    lanes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


def basis_of(diagnosis: Diagnosis, verdict: Verdict) -> Basis:
    seen = diagnosis.seen
    lanes = {entry.lane for entry in verdict.evidence if entry.lane and not entry.lane.startswith("pair.")}
    if seen is None:
        return Basis((), verdict.gpus)
    return Basis(tuple(sorted(lane for lane in lanes if is_read(seen, lane, verdict.gpus))), verdict.gpus)


def is_well(diagnosis: Diagnosis, cause: str, basis: Basis) -> bool:
    """Whether the pair shows that the cause is over, where it is not confirmed any more."""
    seen = diagnosis.seen
    if seen is None:
        return cause not in diagnosis.unknown
    if not all(is_read(seen, lane, basis.gpus) for lane in basis.lanes if not _is_moot(lane, seen)):
        return False
    if cause == Cause.GPU_FAULT and SELF_TOLD.intersection(basis.lanes):
        return True
    if cause in diagnosis.unknown and not (cause == Cause.GPU_FAULT and basis.lanes):
        return False  # of a card that has no ECC some fault is never ruled out: the one that was found is over by its own fields
    if cause in HARDWARE:
        limit = cause == Cause.POWER and "gpu.power_limit_w" in basis.lanes
        return limit or all(_works(seen, gpu, cause) for gpu in _of(seen, basis.gpus))
    return cause not in OF_LOAD or not is_idle(diagnosis)


def is_idle(diagnosis: Diagnosis) -> bool:
    """An engine that answers and of which it is read that no request runs or waits."""
    engine = diagnosis.seen.engine if diagnosis.seen is not None else None
    if engine is None or engine.away or engine.running is None or engine.waiting is None:
        return False
    return engine.running.value < 0.3 and engine.waiting.value < 1


def is_read(seen: Evidence, lane: str, gpus: Collection[str]) -> bool:
    """Whether the field is read now; of each of these GPUs (none: of all that the pair has), if it is one of theirs."""
    measurement, _, name = lane.partition(".")
    if measurement == "gpu":
        mine = _of(seen, gpus)
        return bool(mine) and {gpu.index for gpu in mine}.issuperset(gpus) and all(_gpu_tells(g, name) for g in mine)
    if measurement == "engine":
        return seen.engine is not None and _engine_tells(seen.engine, name)
    if measurement == "rank":
        return len(told_ranks(seen)) > 1
    if lane == "psu.ok":
        return seen.room.psu_count is not None
    if lane == "power.redundancy":
        return seen.room.redundancy is not None
    return any(_holds(part, lane) for part in (seen.host, seen.room))


def _of(seen: Evidence, gpus: Collection[str]) -> list[GpuEvidence]:
    return [gpu for gpu in seen.gpus if not gpus or gpu.index in gpus]


def _is_moot(lane: str, seen: Evidence) -> bool:
    """A field that an idle engine has none of."""
    engine = seen.engine
    idle = engine is not None and engine.running is not None and engine.running.value < 0.3
    return idle and lane.startswith("engine.") and lane not in IDLE_TOO


def _works(seen: Evidence, gpu: GpuEvidence, cause: str) -> bool:
    """Under load, where all of it shows; a clock that is up is not stuck. Without a reading of use the output says it."""
    if gpu.util is not None and gpu.loaded:
        return True
    clock = gpu.sm_clock.ratio if gpu.sm_clock is not None else None
    if cause == Cause.GPU_FAULT and clock is not None and not Bar().reached("gpu_fault.stuck_clock_ratio", clock):
        return True
    effect = effect_of(seen, Bar())
    return gpu.util is None and effect.known and not effect.slow


def _gpu_tells(gpu: GpuEvidence, name: str) -> bool:
    if name.startswith("throttle_"):
        return bool(gpu.duty)
    return getattr(gpu, GPU_FIELDS.get(name, name), None) is not None


def _engine_tells(engine: EngineEvidence, name: str) -> bool:
    if name in ("generation_tokens_total", "stalled"):
        return engine.frozen_s is not None or engine.tokens_per_s is not None
    if name in ("uptime_s", "probe_ok"):
        return getattr(engine, name) is not None
    return name in ("starting", "version", "config_hash") or _holds(engine, f"engine.{name}")


def _holds(part: EngineEvidence | HostEvidence | RoomEvidence | None, lane: str) -> bool:
    readings = (getattr(part, name) for name in part.__slots__) if part is not None else ()
    return any(isinstance(reading, Observation) and reading.lane == lane for reading in readings)
