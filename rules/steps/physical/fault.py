"""Faults of the board: lost or hung, a hardware Xid, memory errors, a clock that stays low without a reason."""

from __future__ import annotations

from rules.evidence import Evidence, GpuEvidence, ratio, value
from rules.finding import Finding, confirmed, effect_of, fix, line, names, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.steps.physical.readings import clock_line, draw_line, fall, is_hot, temperature_line
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line
from telemetry.catalogue import GPU_STATES

IGNORED_XIDS = frozenset((13, 31, 43, 45, 63, 69))
"""63 is a remap that was recorded (maintenance); the others come from the application. Source: NVIDIA's Xid catalogue."""

FAULT_STATES = frozenset((1, 2, 4, 6))  # lost, reset required, hung, absent


def gpu_fault(evidence: Evidence, bar: Bar) -> Finding:
    """A GPU that is lost or hung, a hardware Xid, an uncorrectable memory error, a failed row remap."""
    if not evidence.gpus:
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
        hardware = event.kind == "xid" and event.code not in IGNORED_XIDS
        if event.time_ns >= recent and (hardware or event.kind == "gpu_lost"):
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
    stuck = _stuck_clock(evidence, bar)
    if stuck is not None:
        return stuck
    pending = [gpu.index for gpu in evidence.gpus if gpu.remap_pending]
    return ruled_out(
        Cause.GPU_FAULT,
        line("no_fault", "gpu.state", gpus=len(evidence.gpus)),
        line("remap_pending", "gpu.remap_pending", gpus=names(pending)) if pending else None,
    )


def _faults_of(gpu: GpuEvidence) -> list[Line]:
    found = []
    if gpu.state in FAULT_STATES:
        found.append(line("gpu_state", "gpu.state", gpu=gpu.index, state=GPU_STATES[gpu.state or 0]))
    if gpu.remap_failed:
        found.append(line("remap_failed", "gpu.remap_failed", gpu=gpu.index))
    errors = value(gpu.ecc_uncorrected_new)
    if errors:
        found.append(line("ecc", "gpu.ecc_uncorrected_total", gpu=gpu.index, errors=errors))
    return found


def _stuck_clock(evidence: Evidence, bar: Bar) -> Finding | None:
    """Clock and power far below usual at high util, cool, no flag: the card sits in a low clock state."""
    stuck = [
        gpu
        for gpu in evidence.gpus
        if bar.reached("gpu_fault.stuck_util_pct", value(gpu.util))
        and bar.reached("gpu_fault.stuck_clock_ratio", ratio(gpu.sm_clock))
        and bar.reached("gpu_fault.stuck_power_ratio", ratio(gpu.power))
        and not is_hot(gpu, bar)
        and not any(bar.reached("gpu_fault.reason_duty", seen.value) for seen in gpu.duty.values())
    ]
    effect = effect_of(evidence, bar)
    if not stuck or not effect.slow:
        return None
    worst = min(stuck, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)
    return confirmed(
        Cause.GPU_FAULT,
        Strength.FAIR,
        (
            line("clock_stuck", "gpu.sm_clock_mhz", gpus=names(gpu.index for gpu in stuck)),
            clock_line(worst),
            draw_line(worst),
            temperature_line(worst),
            pair_line(evidence),
        ),
        summary("clock_state", **fall(evidence, effect)),
        (fix("reset_clocks", Cost.OPERATIONS_CHEAP), fix("drain_reset", Cost.OPERATIONS_CHEAP)),
        since_ns=worst.sm_clock.since_ns if worst.sm_clock else None,
        gpus=tuple(gpu.index for gpu in stuck),
    )
