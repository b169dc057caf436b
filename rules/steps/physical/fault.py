"""Faults of the board: lost or hung, a hardware Xid, memory errors, a clock that stays low without a reason."""

from __future__ import annotations

import statistics

from rules.evidence import Evidence, GpuEvidence, ratio, value
from rules.finding import (
    Finding,
    against,
    cleared,
    confirmed,
    effect_of,
    fix,
    line,
    names,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    summary,
    unread_gpus,
)
from rules.priors import Strength
from rules.steps.memory import is_stalled
from rules.steps.physical.readings import clock_line, draw_line, draw_share, fall, is_hot, temperature_line
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line
from rules.window import Event
from telemetry.catalogue import GPU_STATES
from telemetry.xid import MEANINGS, is_of_link

FAULT_STATES = frozenset((1, 2, 4, 6))  # lost, reset required, hung, absent


def gpu_fault(evidence: Evidence, bar: Bar) -> Finding:
    """A GPU that is lost or hung, a hardware Xid, an uncorrectable memory error, a failed row remap."""
    if not evidence.gpus and not evidence.events and not evidence.group.power:
        return no_data(Cause.GPU_FAULT, line("no_gpu"))
    lines: list[Line] = []
    gpus: list[str] = []
    since: list[int] = []
    for gpu in evidence.gpus:
        found = _faults_of(gpu)
        if found:
            gpus.append(gpu.index)
            lines += found
    recent = evidence.at_ns - int(bar.enter("gpu_fault.recent_s") * 1e9)
    for event in evidence.events:
        if event.time_ns >= recent and (event.kind == "gpu_lost" or _severity(event) == "critical"):
            lines.append(line(event.kind, "gpu.xid_total", subject=event.subject or "?", code=event.code or 0))
            since.append(event.time_ns)
            gpus += [gpu.index for gpu in evidence.gpus if gpu.index == event.subject and gpu.index not in gpus]
    if lines:
        return confirmed(
            Cause.GPU_FAULT,
            Strength.PROOF,
            (*lines, pair_line(evidence)),
            summary("gpu_fault", gpus=names(gpus) or "?"),
            (fix("drain_reset", Cost.OPERATIONS_CHEAP), fix("replace_gpu", Cost.HARDWARE_COSTLY)),
            since_ns=min(since) if since else None,
            gpus=tuple(gpus),
            alone=True,
        )
    stuck = _warned(evidence, bar) or _stuck_clock(evidence, bar) or _remapped(evidence, bar) or _odd_one(evidence, bar)
    if stuck is not None:
        return stuck
    if evidence.told:
        return _healthy_as_told(evidence)
    return _healthy(evidence) if evidence.gpus else no_data(Cause.GPU_FAULT, line("no_gpu"))


def _healthy(evidence: Evidence) -> Finding:
    """No fault in what is read. Ruled out only where all of it is: state, clock, Xids and uncorrected errors. A card that never tells one
    of them (a consumer card has no ECC, an AMD card no Xids) may have just that fault; one that speaks of its own health has told.
    """
    gpus = evidence.gpus
    pending = [gpu.index for gpu in gpus if gpu.remap_pending]
    told, listened = [gpu for gpu in gpus if _tells_state(gpu)], [gpu for gpu in gpus if gpu.xids is not None]
    counted = [gpu for gpu in gpus if gpu.ecc_uncorrected_new is not None]
    seen = [
        line("state_ok", "gpu.state", gpus=names(gpu.index for gpu in told)) if told else None,
        line("no_xid", "gpu.xid_total", gpus=names(gpu.index for gpu in listened)) if listened else None,
        line("no_ecc", "gpu.ecc_uncorrected_total") if counted else None,
        clock_line(min(gpus, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)),
        line("remap_pending", "gpu.remap_pending", gpus=names(pending)) if pending else None,
    ]
    missing = [
        *unread_gpus(evidence, "gpu.state", _tells_state),
        *unread_gpus(evidence, "gpu.sm_clock_mhz", lambda gpu: gpu.sm_clock is not None),
        *unread_gpus(evidence, "gpu.xid_total", lambda gpu: gpu.xids is not None or gpu.healthy is not None),
        *unread_gpus(
            evidence,
            "gpu.ecc_uncorrected_total",
            lambda gpu: gpu.ecc_uncorrected_new is not None or gpu.healthy is not None,
        ),
    ]
    return cleared(Cause.GPU_FAULT, seen, missing)


def _tells_state(gpu: GpuEvidence) -> bool:
    return gpu.state is not None or gpu.healthy is not None


def _severity(event: Event) -> str:
    """How bad an XID is; one that the catalogue does not name is bad until it is known to be less, empty for any other event."""
    if event.kind != "xid":
        return ""
    meaning = MEANINGS.get(event.code or 0)
    return meaning.severity if meaning is not None else "critical"


def _warned(evidence: Evidence, bar: Bar) -> Finding | None:
    """An XID that only warns (links, many corrected errors), or a fault that the card's own monitor tells, beside a loss."""
    effect = effect_of(evidence, bar)
    recent = evidence.at_ns - int(bar.enter("gpu_fault.recent_s") * 1e9)
    warnings = [
        event
        for event in evidence.events
        if event.time_ns >= recent and (event.kind == "gpu_fault" or _severity(event) == "warning")
    ]
    if not warnings or not effect.hurts:
        return None
    since = min(event.time_ns for event in warnings)
    engine = evidence.engine
    linked = any(event.kind == "xid" and is_of_link(event.code or 0) for event in warnings)
    torn = (
        linked and engine is not None and is_stalled(engine, bar)
    )  # ranks wait for ever for one that they can't reach
    indices = {gpu.index for gpu in evidence.gpus}
    return confirmed(
        Cause.GPU_FAULT,
        Strength.PROOF if torn else Strength.FAIR,
        (
            *(
                line(event.kind, "gpu.xid_total", subject=event.subject or "?", code=event.code or 0)
                for event in warnings
            ),
            pair_line(evidence),
        ),
        names_cause(Cause.GPU_FAULT, effect),
        (fix("drain_reset", Cost.OPERATIONS_CHEAP), fix("replace_gpu", Cost.HARDWARE_COSTLY)),
        since_ns=since or None,
        gpus=tuple(sorted({event.subject for event in warnings} & indices)),
    )


def _healthy_as_told(evidence: Evidence) -> Finding:
    """Ruled out by what is told of clocks and errors; of what nobody looked at nothing is known."""
    lines: list[Line | None] = [line("xid_ignored", "", code=e.code or 0) for e in evidence.events if e.kind == "xid"]
    for gpu in evidence.gpus:
        lines += [
            clock_line(gpu),
            line("remap_pending", "gpu.remap_pending", gpus=gpu.index) if gpu.remap_pending else None,
        ]
        if gpu.ecc_uncorrected_new is not None:
            lines.append(line("no_ecc", "gpu.ecc_uncorrected_total"))
    if not any(lines):
        return no_data(Cause.GPU_FAULT, line("no_fault_signals"))
    return ruled_out(Cause.GPU_FAULT, *lines)


def _faults_of(gpu: GpuEvidence) -> list[Line]:
    found = []
    if gpu.state in FAULT_STATES:
        found.append(line("gpu_state", "gpu.state", gpu=gpu.index, state=GPU_STATES[gpu.state or 0]))
    if gpu.healthy is False:
        found.append(line("unhealthy", "gpu.healthy", gpu=gpu.index))
    if gpu.remap_failed:
        found.append(line("remap_failed", "gpu.remap_failed", gpu=gpu.index))
    if gpu.contained_error:
        found.append(line("contained", "gpu.xid_total", gpu=gpu.index))
    errors = value(gpu.ecc_uncorrected_new)
    if errors:
        found.append(line("ecc", "gpu.ecc_uncorrected_total", gpu=gpu.index, errors=errors))
    return found


def _is_stuck(gpu: GpuEvidence, told: bool, bar: Bar) -> bool:
    """Clock and power far below usual, or one of them where the other is not known and it is lower still (the power of a card that is
    told to be busy)."""
    clock, power, memory = ratio(gpu.sm_clock), ratio(gpu.power), ratio(gpu.mem_clock)
    if gpu.clock_ceiling or bar.reached("gpu_fault.awake_pstate", gpu.pstate):
        return False
    if bar.reached("power.draw_ratio", draw_share(gpu)):
        return False  # it draws all that it may: the limit is the reason, also where no reasons are read
    if bar.reached("gpu_fault.mem_clock_ratio", memory) or (
        power is None and bar.reached("gpu_fault.alone_ratio", clock)
    ):
        return True
    if told and clock is None and memory is None and gpu.util is not None:
        return bar.reached("gpu_fault.alone_ratio", power)
    return bar.reached("gpu_fault.stuck_clock_ratio", clock) and bar.reached("gpu_fault.stuck_power_ratio", power)


def _stuck_clock(evidence: Evidence, bar: Bar) -> Finding | None:
    """Clock and power far below usual at high util, cool, no flag: the card sits in a low clock state."""
    effect = effect_of(evidence, bar)
    stuck = [
        gpu
        for gpu in evidence.gpus
        if (bar.reached("gpu_fault.stuck_util_pct", value(gpu.util)) or (gpu.util is None and effect.told))
        and _is_stuck(gpu, effect.told, bar)
        and not is_hot(gpu, bar)
        and not any(bar.reached("gpu_fault.reason_duty", seen.value) for seen in gpu.duty.values())
    ]
    if not stuck or not effect.hurts:
        return None
    worst = min(stuck, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)
    return confirmed(
        Cause.GPU_FAULT,
        Strength.FAIR if worst.sm_clock is not None or worst.mem_clock is not None else Strength.WEAK,
        (
            line("clock_stuck", "gpu.sm_clock_mhz", gpus=names(gpu.index for gpu in stuck)),
            clock_line(worst),
            draw_line(worst),
            against(worst.mem_clock),
            temperature_line(worst),
            line("since_boot", "") if worst.since_boot else None,
            pair_line(evidence),
        ),
        summary("clock_state", **fall(evidence, effect)),
        (fix("reset_clocks", Cost.OPERATIONS_CHEAP), fix("drain_reset", Cost.OPERATIONS_CHEAP)),
        since_ns=worst.sm_clock.since_ns if worst.sm_clock else None,
        gpus=tuple(gpu.index for gpu in stuck),
    )


def _remapped(evidence: Evidence, bar: Bar) -> Finding | None:
    """Rows were remapped while the output fell: memory is failing, and the card has mended itself so far."""
    effect = effect_of(evidence, bar)
    worn = [gpu for gpu in evidence.gpus if value(gpu.remapped_new)]
    if not worn or not effect.hurts:
        return None
    rows = sum(value(gpu.remapped_new) or 0.0 for gpu in worn)
    return confirmed(
        Cause.GPU_FAULT,
        Strength.FAIR,
        (line("rows_remapped", "gpu.remapped_rows_total", gpus=names(g.index for g in worn), rows=rows),),
        names_cause(Cause.GPU_FAULT, effect),
        (fix("drain_reset", Cost.OPERATIONS_CHEAP), fix("replace_gpu", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in worn),
    )


def _odd_one(evidence: Evidence, bar: Bar) -> Finding | None:
    """Of a group whose GPUs all read busy, one draws far more or far less than the others: they wait for each other, at its pace."""
    group, effect = evidence.group, effect_of(evidence, bar)
    if len(group.power) < 2 or not effect.slow or group.running or group.mixed or (group.util and min(group.util) < 90):
        return None
    middle = statistics.median(group.power)
    odd = max(range(len(group.power)), key=lambda rank: abs(group.power[rank] - middle))
    apart = max(group.power[odd], middle) / max(min(group.power[odd], middle), 1.0)
    if not bar.reached("gpu_fault.power_apart", apart):
        return None
    return confirmed(
        Cause.GPU_FAULT,
        Strength.FAIR if len(group.power) > 2 else Strength.WEAK,  # of two, neither is the odd one
        (
            line("odd_rank", "gpu.power_w", rank=odd, power_w=group.power[odd], others_w=middle),
            pair_line(evidence),
        ),
        names_cause(Cause.GPU_FAULT, effect),
        (fix("drain_reset", Cost.OPERATIONS_CHEAP), fix("replace_gpu", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
    )
