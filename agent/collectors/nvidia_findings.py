"""What `pairscope doctor` says of NVIDIA GPUs: how the driver is, how each GPU is, and what this host's cards don't tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.collectors.gpu_roster import KnownGpu
from agent.collectors.interface import Finding, Level
from agent.driver import ABSENT, HUNG, NO_PERMISSION, OK, SUCCESS
from agent.nvml import codes
from telemetry.catalogue import GPU_STATES, title
from telemetry.messages import catalogue, say

USUAL = (
    *("util_pct", "mem_used_bytes", "temp_c", "mem_temp_c", "temp_margin_c", "power_w", "power_limit_w", "energy_j"),
    *("sm_clock_mhz", "throttle_reasons", "throttle_sw_thermal_s", "throttle_hw_power_brake_s", "pcie_gen"),
    *("ecc_uncorrected_total", "remapped_rows_total", "recovery_action", "processes"),
)
"""What a data-centre card with a driver of today tells; a fan isn't among it, nor what needs several readings."""

NOT_WITH_MIG = frozenset({"util_pct", "remapped_rows_total"})
"""What no card tells as a whole while it is parted into instances."""

Said = tuple[Level, str, str]

_REMEDIES = {
    codes.LIBRARY_NOT_FOUND: "no_library",
    codes.DRIVER_NOT_LOADED: "not_loaded",
    codes.LIB_RM_VERSION_MISMATCH: "mismatch",
    codes.NO_PERMISSION: "no_permission",
    codes.OPERATING_SYSTEM: "no_permission",
    codes.GPU_IS_LOST: "lost",
    codes.RESET_REQUIRED: "reset",
    codes.UNKNOWN: "unknown",
}
_STATE_REMEDIES = {HUNG: "hung", ABSENT: "absent", NO_PERMISSION: "no_permission"}


@dataclass(frozen=True, slots=True)
class Condition:
    """What the collector knows. `code`: the driver's. `silent`: it has not answered for long. `log`: why the kernel's log can't be
    read; empty when it can, None when nobody reads it.
    """

    code: int
    swept: bool
    paused: bool
    silent: bool
    gpus: Sequence[KnownGpu]
    expected: int
    log: str | None


def findings(condition: Condition, language: str) -> list[Finding]:
    """One line a fact, the worst first."""
    order = ("error", "warning", "ok", "absent")
    said = sorted(_said(condition, language), key=lambda line: order.index(line[0]))
    return [Finding("gpu", level, text, remedy) for level, text, remedy in said]


def _said(condition: Condition, language: str) -> Iterator[Said]:
    if condition.paused:
        yield "warning", say("gpu.finding.paused", language), ""
    elif condition.code != SUCCESS:
        yield _driver_out(condition, language)
    elif condition.silent:
        yield "error", say("gpu.finding.hung", language), say("gpu.remedy.hung", language)
    elif not condition.swept:
        yield "warning", say("gpu.finding.waiting", language), ""
    else:
        yield from _gpus(condition, language)
    if condition.log and condition.gpus:
        yield _log(condition.log, language)


def _driver_out(condition: Condition, language: str) -> Said:
    remedy = _remedy(_REMEDIES.get(condition.code, ""), language)
    if condition.code == codes.LIBRARY_NOT_FOUND and not condition.expected:
        return "absent", say("gpu.finding.no_library", language), remedy
    return "error", say("gpu.finding.out", language, why=codes.name_of(condition.code, language)), remedy


def _gpus(condition: Condition, language: str) -> Iterator[Said]:
    well = [gpu for gpu in condition.gpus if gpu.state == OK]
    if well:
        names = Counter(gpu.name or "?" for gpu in well)
        told = ", ".join(f"{count} x {name}" for name, count in names.items())
        driver = next((gpu.driver for gpu in well if gpu.driver), "?")
        yield "ok", say("gpu.finding.well", language, count=len(well), names=told, driver=driver), ""
    elif not condition.gpus:
        level: Level = "error" if condition.expected else "absent"
        yield level, say("gpu.finding.no_gpu", language), _remedy("absent" if condition.expected else "", language)
    for gpu in condition.gpus:
        if gpu.state != OK:
            yield _gpu_out(gpu, language)
    if len(well) < condition.expected:
        text = say("gpu.finding.fewer", language, seen=len(well), expected=condition.expected)
        yield "error", text, say("gpu.remedy.absent", language)
    yield from _shortcomings(well, language)


def _gpu_out(gpu: KnownGpu, language: str) -> Said:
    state = say(f"gpu.state.{GPU_STATES[gpu.state]}", language)
    key = _STATE_REMEDIES.get(gpu.state) or _REMEDIES.get(gpu.code, "lost")
    values = {"index": gpu.index, "uuid": gpu.uuid or "?", "state": state, "why": codes.name_of(gpu.code, language)}
    return "error", say("gpu.finding.gpu_out", language, **values), _remedy(key, language)


def _shortcomings(well: Sequence[KnownGpu], language: str) -> Iterator[Said]:
    off = [gpu for gpu in well if gpu.persistence == 0]
    if off:
        text = say("gpu.finding.persistence", language, indexes=_indexes(off))
        yield "warning", text, say("gpu.remedy.persistence", language)
    for gpu in well:
        if gpu.migs:
            yield "ok", say("gpu.finding.mig", language, index=gpu.index, count=len(gpu.migs)), ""
    refusing: dict[tuple[str, ...], list[KnownGpu]] = defaultdict(list)
    for gpu in well:
        if gpu.told:
            known = gpu.told | NOT_WITH_MIG if gpu.migs else gpu.told
            refusing[tuple(name for name in USUAL if name not in known)].append(gpu)
    for missing, gpus in refusing.items():
        if missing:
            fields = ", ".join(title("gpu", name, language) for name in missing)
            yield "absent", say("gpu.finding.refused", language, indexes=_indexes(gpus), fields=fields), ""
    blind = [gpu for gpu in well if gpu.activity == 0]
    if blind:
        text = say("gpu.finding.no_activity", language, indexes=_indexes(blind))
        yield "absent", text, say("gpu.remedy.no_activity", language)


def _log(problem: str, language: str) -> Said:
    key = f"gpu.log.{problem}"
    why = say(key, language) if key in catalogue() else problem
    return "warning", say("gpu.finding.log", language, why=why), _remedy(f"log_{problem}", language)


def _remedy(key: str, language: str) -> str:
    full = f"gpu.remedy.{key}"
    return say(full, language) if full in catalogue() else ""


def _indexes(gpus: Sequence[KnownGpu]) -> str:
    return ", ".join(str(gpu.index) for gpu in gpus)
