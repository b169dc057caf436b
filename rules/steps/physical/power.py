"""Power: a brake, or a lowered cap that binds. The cap's own bit at the full limit is normal boost and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import Evidence, GpuEvidence, ratio, value
from rules.finding import (
    Effect,
    Finding,
    cleared,
    confirmed,
    effect_of,
    fix,
    line,
    names,
    names_cause,
    no_data,
    pair_line,
    summary,
    unread,
)
from rules.priors import Strength
from rules.steps.physical.readings import (
    clock_line,
    draw_line,
    draw_share,
    fall,
    is_harmed,
    is_hot,
    temperature_line,
)
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line
from telemetry.catalogue import REDUNDANCY_STATES


def power(evidence: Evidence, bar: Bar) -> Finding:
    """R3, R4: a brake, or a lowered cap that binds."""
    known = [gpu for gpu in evidence.gpus if gpu.power is not None or gpu.duty or gpu.clock_ceiling]
    vanished = evidence.host is not None and evidence.host.vanished
    effect = effect_of(evidence, bar)
    if not known and evidence.room.supply_w is None and not vanished:
        nothing = no_data(Cause.POWER, line("no_gpu" if not evidence.gpus else "no_power"))
        return _as_told(evidence, effect, bar) or nothing
    return (
        _brake(evidence, known, effect, bar)
        or _cap(evidence, known, effect, bar)
        or _small_supply(evidence, effect)
        or _cap_too_early(evidence, known, effect, bar)
        or _ceiling(evidence, known, effect, bar)
        or _as_told(evidence, effect, bar)
        or _power_clean(evidence, known, bar)
    )


def _brake(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    braked = [gpu for gpu in gpus if bar.reached("power.brake_duty", value(gpu.duty.get("hw_power_brake")))]
    slowed = [gpu for gpu in braked if bar.reached("power.brake_clock_ratio", ratio(gpu.sm_clock))]
    if not braked:
        braked = [gpu for gpu in gpus if _slows_unnamed(gpu, bar)]
    if not braked or not (effect.hurts or slowed):
        return None
    worst = max(braked, key=lambda gpu: value(gpu.duty.get("hw_power_brake")) or 0.0)
    duty = worst.duty.get("hw_power_brake") or worst.duty["hw_slowdown"]
    named = bar.reached("power.brake_duty", value(worst.duty.get("hw_power_brake")))
    sinces = [seen.since_ns for gpu in braked if (seen := gpu.duty.get("hw_power_brake")) is not None]
    known = [since for since in sinces if since is not None]
    return confirmed(
        Cause.POWER,
        Strength.PROOF if named else Strength.STRONG if _supply_lines(evidence, bar) else Strength.FAIR,
        (
            line("told_brake" if named else "told_slowdown", duty.lane)
            if evidence.told or not named
            else line("brake", duty.lane, gpus=names(gpu.index for gpu in braked), duty_pct=100 * duty.value),
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


def _slows_unnamed(gpu: GpuEvidence, bar: Bar) -> bool:
    """The hardware halves the clock and names neither heat nor the brake, on a card that is not hot, beside a clock that is down."""
    bit = value(gpu.duty.get("hw_slowdown"))
    low = gpu.sm_clock is None or bar.reached("power.brake_clock_ratio", ratio(gpu.sm_clock))
    brake = bar.reached("power.brake_duty", value(gpu.duty.get("hw_power_brake")))
    return bar.reached("power.cap_duty", bit) and low and not brake and not is_hot(gpu, bar)


def _small_supply(evidence: Evidence, effect: Effect) -> Finding | None:
    """Cards and host may draw more at their limits than the supplies give: named once the host has gone away, or of an incident."""
    supply, limits = evidence.room.supply_w, evidence.room.limits_w
    vanished = evidence.host is not None and evidence.host.vanished
    small = supply is not None and limits is not None and limits > supply
    if not vanished and not (small and effect.hurts):
        return None
    return confirmed(
        Cause.POWER,
        Strength.STRONG if small and vanished else Strength.FAIR if small else Strength.WEAK,
        (
            line("supply_small", "psu.capacity_w", supply_w=supply or 0.0, limits_w=limits or 0.0) if small else None,
            line("host_vanished", "") if vanished else None,
        ),
        names_cause(Cause.POWER, effect),
        (
            fix("lower_limits", Cost.SOFTWARE_CHEAP),
            fix("check_supply", Cost.OPERATIONS_CHEAP),
            fix("bigger_supply", Cost.HARDWARE_COSTLY),
        ),
        alone=True,
    )


def _cap_too_early(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    """The cap's bit far below the limit (sensing, cabling, a supply that begs), or beside a clock far below usual at the limit."""
    found: list[tuple[GpuEvidence, Line | None]] = []
    for gpu in gpus:
        if not bar.reached("power.steady_cap_duty", value(gpu.duty.get("sw_power_cap"))) or is_hot(gpu, bar):
            continue
        share = draw_share(gpu)
        if share is None and evidence.told and gpu.power_limit is None:
            share = ratio(gpu.power)  # of usual: far below it the cap has nothing to hold, unless it was lowered
        if bar.reached("power.early_ratio", share):
            found.append((gpu, line("cap_early", "gpu.throttle_reasons", gpu=gpu.index, share_pct=100 * (share or 0))))
        elif effect.slow_work and bar.reached("power.cap_clock_ratio", ratio(gpu.sm_clock)):
            found.append((gpu, line("cap_holds", "gpu.throttle_reasons", gpu=gpu.index)))
    if not found or not effect.hurts:
        return None
    worst, seen = found[0]
    return confirmed(
        Cause.POWER,
        Strength.FAIR,
        (seen, draw_line(worst), clock_line(worst), temperature_line(worst), pair_line(evidence)),
        names_cause(Cause.POWER, effect),
        (fix("raise_cap", Cost.OPERATIONS_CHEAP), fix("check_supply", Cost.OPERATIONS_CHEAP)),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu, _ in found),
    )


def _ceiling(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    """A lock or a ceiling on the clock, and the clock is down; or not the core's, and the memory's, which may be it, is not told."""
    locked = [gpu for gpu in gpus if gpu.clock_ceiling and not is_hot(gpu, bar)]
    low = [gpu for gpu in locked if gpu.sm_clock is None or bar.reached("power.clock_ratio", ratio(gpu.sm_clock))]
    other = [gpu for gpu in locked if gpu.mem_clock is None and evidence.told and effect.slow_work]
    bound = low or other
    if not bound or not effect.hurts:
        return None
    return confirmed(
        Cause.POWER,
        Strength.STRONG if low else Strength.WEAK,
        (line("clock_ceiling", "gpu.sm_clock_mhz"), clock_line(bound[0]), draw_line(bound[0]), pair_line(evidence)),
        names_cause(Cause.POWER, effect),
        (fix("reset_clocks", Cost.OPERATIONS_CHEAP),),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in bound),
    )


def _as_told(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """Of a loss that is told without its draw and its reasons: a lowered limit, or else a clock that is down on a card at work."""
    if not evidence.told or not effect.slow:
        return None
    silent = [gpu for gpu in evidence.gpus if not gpu.duty and draw_share(gpu) is None and not is_hot(gpu, bar)]
    capped = [gpu for gpu in silent if _cap_reference(gpu, bar) is not None]
    slowed = [gpu for gpu in silent if effect.slow_work and _slows_at_work(gpu, bar)]
    if not capped and not slowed:
        return None
    worst = (capped or slowed)[0]
    limit, default = value(worst.power_limit), worst.power_limit_default
    seen = line("clock_unreasoned", "gpu.throttle_reasons")
    if capped:
        seen = line("cap_share", "gpu.power_limit_w", share_pct=100 * (limit or 0.0) / (default or 1.0))
    return confirmed(
        Cause.POWER,
        Strength.FAIR if capped and slowed else Strength.WEAK,
        (seen, clock_line(worst), draw_line(worst), temperature_line(worst), pair_line(evidence)),
        names_cause(Cause.POWER, effect),
        (fix("raise_cap", Cost.OPERATIONS_CHEAP) if capped else fix("read_reasons", Cost.SOFTWARE_CHEAP),),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in capped or slowed),
    )


def _slows_at_work(gpu: GpuEvidence, bar: Bar) -> bool:
    """The clock is down although the card works and draws what it usually does: neither idleness nor a state it is stuck in."""
    idle = bar.reached("gpu_fault.awake_pstate", gpu.pstate) or (gpu.util is not None and not gpu.loaded)
    starved = bar.reached("gpu_fault.stuck_power_ratio", ratio(gpu.power))
    return bar.reached("power.clock_ratio", ratio(gpu.sm_clock)) and not idle and not starved


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
    at_cap = bar.reached("power.draw_ratio", draw_share(gpu))
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
            line("cap_share", "gpu.power_limit_w", share_pct=100 * limit / reference)
            if worst.power_limit is not None and worst.power_limit.relative
            else line(f"cap_{name}", "gpu.power_limit_w", gpus=names(low), limit_w=limit, reference_w=reference),
            draw_line(worst),
            line("cap_bit", "gpu.throttle_reasons", gpu=worst.index, duty_pct=100 * bit) if bit is not None else None,
            clock_line(worst),
            temperature_line(worst),
            *_supply_lines(evidence, bar),
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
    if room.redundancy is not None and room.redundancy < len(REDUNDANCY_STATES) - 1:
        found.append(line(f"redundancy_{REDUNDANCY_STATES[room.redundancy]}", "power.redundancy"))
    load = value(room.circuit_load)
    if load is not None and bar.reached("power.circuit_load_pct", load):
        found.append(line("circuit_load", "circuit.load_pct", load_pct=load))
    drawn, cap = value(room.node_power), value(room.node_cap)
    if drawn is not None and cap and bar.reached("power.draw_ratio", drawn / cap):
        found.append(line("node_cap", "power.cap_w", node_w=drawn, cap_w=cap))
    headroom = value(room.headroom_redundant)
    if headroom is not None and bar.reached("power.headroom_redundant_pct", headroom):
        found.append(line("headroom", "power.headroom_redundant_pct", headroom_pct=headroom))
    return found


def _power_clean(evidence: Evidence, gpus: Sequence[GpuEvidence], bar: Bar) -> Finding:
    if not gpus:
        return cleared(Cause.POWER, _supply_lines(evidence, bar), [] if evidence.told else [line("no_power")])
    lines: list[Line | None] = []
    drawing = max(gpus, key=lambda gpu: draw_share(gpu) or 0.0)
    lines.append(draw_line(drawing))
    bit = max((value(gpu.duty.get("sw_power_cap")) or 0.0 for gpu in gpus), default=0.0)
    low = [gpu.index for gpu in gpus if _cap_reference(gpu, bar) is not None]
    if low:
        lines.append(line("cap_low", "gpu.power_limit_w", gpus=names(low)))
    elif bar.reached("power.cap_duty", bit):
        lines.append(line("cap_bit_normal", "gpu.throttle_reasons", duty_pct=100 * bit))
    brakes = [seen.value for gpu in gpus if (seen := gpu.duty.get("hw_power_brake")) is not None]
    if brakes:
        lines.append(line("brake_none", "gpu.throttle_reasons", duty_pct=100 * max(brakes)))
    if any("hw_power_brake" not in gpu.duty and _is_clock_up(gpu, bar) for gpu in gpus):
        lines.append(clock_line(min(gpus, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)))
    lines += _supply_lines(evidence, bar)
    missing = [] if evidence.told else _not_seen(evidence, bar)
    if low and not effect_of(evidence, bar).known and not all(_is_clock_up(gpu, bar) for gpu in gpus):
        missing.append(line("harm_unknown"))
    return cleared(Cause.POWER, lines, missing)


def _is_clock_up(gpu: GpuEvidence, bar: Bar) -> bool:
    """Whatever slows a card for its power does so by the clock: one at its usual value is a witness against all of it."""
    clock = ratio(gpu.sm_clock)
    return clock is not None and not bar.reached("power.clock_ratio", clock)


def _not_seen(evidence: Evidence, bar: Bar) -> list[Line]:
    """What would have to be read of the cards that neither their clock nor their own limits clear."""
    found: list[Line] = []
    open_ = [gpu for gpu in evidence.gpus if not _is_clock_up(gpu, bar)]
    braked = [gpu.index for gpu in open_ if "hw_power_brake" not in gpu.duty]
    capped = [gpu for gpu in open_ if not _is_uncapped(gpu, bar)]
    fields = (
        ("gpu.throttle_reasons", braked),
        ("gpu.power_w", [gpu.index for gpu in capped if gpu.power is None]),
        ("gpu.power_limit_w", [gpu.index for gpu in capped if gpu.power_limit is None]),
    )
    for lane, missing in fields:
        if missing:
            found.append(unread(lane, missing))
    return found


def _is_uncapped(gpu: GpuEvidence, bar: Bar) -> bool:
    """The cap's bit is read and clear, or the limit is known and is not reached or not lowered."""
    bit, share = value(gpu.duty.get("sw_power_cap")), draw_share(gpu)
    if bit is not None and not bar.reached("power.cap_duty", bit):
        return True
    if share is not None and not bar.reached("power.draw_ratio", share):
        return True
    usual = gpu.power_limit.usual if gpu.power_limit is not None else None
    compared = any(entry is not None for entry in (usual, gpu.power_limit_requested, gpu.power_limit_default))
    return gpu.power_limit is not None and compared
