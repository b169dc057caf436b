"""Power: a brake, or a lowered cap that binds. The cap's own bit at the full limit is normal boost and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import Evidence, GpuEvidence, ratio, value
from rules.finding import (
    Effect,
    Finding,
    confirmed,
    effect_of,
    fix,
    line,
    names,
    no_data,
    pair_line,
    ruled_out,
    summary,
)
from rules.priors import Strength
from rules.steps.physical.readings import clock_line, draw_line, fall, is_harmed, temperature_line
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def power(evidence: Evidence, bar: Bar) -> Finding:
    """R3, R4: a brake, or a lowered cap that binds."""
    known = [gpu for gpu in evidence.gpus if gpu.power is not None or gpu.duty]
    if not known:
        return no_data(Cause.POWER, line("no_gpu" if not evidence.gpus else "no_power"))
    effect = effect_of(evidence, bar)
    return (
        _brake(evidence, known, effect, bar) or _cap(evidence, known, effect, bar) or _power_clean(evidence, known, bar)
    )


def _brake(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    braked = [gpu for gpu in gpus if bar.reached("power.brake_duty", value(gpu.duty.get("hw_power_brake")))]
    slowed = [gpu for gpu in braked if bar.reached("power.brake_clock_ratio", ratio(gpu.sm_clock))]
    if not braked or not (effect.slow or slowed):
        return None
    worst = max(braked, key=lambda gpu: value(gpu.duty["hw_power_brake"]) or 0.0)
    duty = worst.duty["hw_power_brake"]
    sinces = [gpu.duty["hw_power_brake"].since_ns for gpu in braked]
    known = [since for since in sinces if since is not None]
    return confirmed(
        Cause.POWER,
        Strength.PROOF,
        (
            line("brake", duty.lane, gpus=names(gpu.index for gpu in braked), duty_pct=100 * duty.value),
            clock_line(worst),
            draw_line(worst),
            temperature_line(worst),
            *_supply_lines(evidence, bar),
            pair_line(evidence),
        ),
        summary("power_brake", **fall(evidence, effect)),
        (
            fix("check_supply", Cost.OPERATIONS_CHEAP),
            fix("spread_load", Cost.SOFTWARE_CHEAP),
            fix("bigger_supply", Cost.HARDWARE_COSTLY),
        ),
        since_ns=min(known) if known else evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in braked),
        alone=True,
    )


def _cap_reference(gpu: GpuEvidence, bar: Bar) -> tuple[str, float] | None:
    """What the enforced limit is below, and by how much it should be higher: usual, requested or default. None if it is not."""
    if gpu.power_limit is None:
        return None
    limit = gpu.power_limit.value
    references = (
        ("usual", gpu.power_limit.usual if gpu.power_limit.usual_from == "history" else None),
        ("requested", gpu.power_limit_requested),
        ("default", gpu.power_limit_default),
    )
    for name, reference in references:
        if reference and bar.reached("power.cap_ratio", limit / reference):
            return name, reference
    return None


def _binds(gpu: GpuEvidence, bar: Bar) -> bool:
    if gpu.power is None or gpu.power_limit is None:
        return False
    at_cap = bar.reached("power.draw_ratio", gpu.power.value / gpu.power_limit.value)
    return at_cap or bar.reached("power.cap_duty", value(gpu.duty.get("sw_power_cap")))


def _cap(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    low = {gpu.index: found for gpu in gpus if (found := _cap_reference(gpu, bar)) is not None}
    binding = [gpu for gpu in gpus if gpu.index in low and _binds(gpu, bar)]
    slowed = [gpu for gpu in binding if bar.reached("power.clock_ratio", ratio(gpu.sm_clock))]
    if not binding or not is_harmed(effect, bool(slowed)):
        return None
    worst = min(binding, key=lambda gpu: (value(gpu.power_limit) or 0.0) / low[gpu.index][1])
    name, reference = low[worst.index]
    limit = value(worst.power_limit) or 0.0
    changed = worst.power_limit.since_ns if worst.power_limit else None
    bit = value(worst.duty.get("sw_power_cap"))
    return confirmed(
        Cause.POWER,
        Strength.STRONG if name == "usual" or slowed else Strength.FAIR,
        (
            line(f"cap_{name}", "gpu.power_limit_w", gpus=names(low), limit_w=limit, reference_w=reference),
            draw_line(worst),
            line("cap_bit", "gpu.throttle_reasons", gpu=worst.index, duty_pct=100 * bit) if bit is not None else None,
            clock_line(worst),
            temperature_line(worst),
            pair_line(evidence),
        ),
        summary("power_cap", limit_w=limit, reference_w=reference, **fall(evidence, effect)),
        (fix("raise_cap", Cost.OPERATIONS_CHEAP), fix("spread_load", Cost.SOFTWARE_CHEAP)),
        since_ns=changed or evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in binding),
        support=3.0 if slowed else 1.0,
    )


def _supply_lines(evidence: Evidence, bar: Bar) -> list[Line]:
    room = evidence.room
    found = []
    if room.psu_failed and room.psu_count:
        found.append(line("psu_failed", "psu.ok", failed=room.psu_failed, count=room.psu_count))
    headroom = value(room.headroom_redundant)
    if headroom is not None and bar.reached("power.headroom_redundant_pct", headroom):
        found.append(line("headroom", "power.headroom_redundant_pct", headroom_pct=headroom))
    return found


def _power_clean(evidence: Evidence, gpus: Sequence[GpuEvidence], bar: Bar) -> Finding:
    lines: list[Line | None] = []
    drawing = max(gpus, key=lambda gpu: (value(gpu.power) or 0.0) / (value(gpu.power_limit) or 1e9))
    lines.append(draw_line(drawing))
    bit = max((value(gpu.duty.get("sw_power_cap")) or 0.0 for gpu in gpus), default=0.0)
    low = [gpu.index for gpu in gpus if _cap_reference(gpu, bar) is not None]
    if low:
        lines.append(line("cap_harmless", "gpu.power_limit_w", gpus=names(low)))
    elif bar.reached("power.cap_duty", bit):
        lines.append(line("cap_bit_normal", "gpu.throttle_reasons", duty_pct=100 * bit))
    brake = max((value(gpu.duty.get("hw_power_brake")) or 0.0 for gpu in gpus), default=0.0)
    lines.append(line("brake_none", "gpu.throttle_reasons", duty_pct=100 * brake))
    return ruled_out(Cause.POWER, *lines, *_supply_lines(evidence, bar))
