"""Step 1: does the hardware do less per unit of work? Faults, heat, power, clock state, link.

A throttle bit or a temperature is one side of a pair: without a loss beside it, it is written down and ruled out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rules.evidence import Evidence, GpuEvidence, Observation, ratio, rise, value
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
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Fix, Line
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


def thermal(evidence: Evidence, bar: Bar) -> Finding:
    """R1, R8: slowdown bits or a temperature on its limit, with the clock down, beside a loss."""
    known = [gpu for gpu in evidence.gpus if gpu.temp is not None or gpu.temp_margin is not None or gpu.duty]
    if not known:
        return no_data(Cause.THERMAL, line("no_gpu" if not evidence.gpus else "no_temperature"))
    hot = [gpu for gpu in known if _is_hot(gpu, bar)]
    if not hot:
        return ruled_out(Cause.THERMAL, *_coolness(known))
    effect = effect_of(evidence, bar)
    slowed = [gpu for gpu in hot if bar.reached("thermal.clock_ratio", ratio(gpu.sm_clock))]
    if not _harmed(effect, bool(slowed)):
        worst = max(hot, key=_heat_duty)
        return ruled_out(
            Cause.THERMAL,
            line("heat_harmless", "gpu.temp_c", gpus=names(g.index for g in hot), duty_pct=100 * _heat_duty(worst)),
            pair_line(evidence),
        )
    both = any(bar.reached("thermal.duty", _heat_duty(gpu)) and _at_limit(gpu, bar) for gpu in hot)
    worst = max(hot, key=lambda gpu: (_heat_duty(gpu), value(gpu.temp) or 0.0))
    hardware = any(value(gpu.duty.get("hw_thermal")) for gpu in hot)
    room = _room_lines(evidence, bar)
    sinces = [seen.since_ns for gpu in hot for seen in (*_heat_bits(gpu), gpu.sm_clock) if seen and seen.since_ns]
    return confirmed(
        Cause.THERMAL,
        Strength.STRONG if both else Strength.FAIR,
        (
            line(
                "heat_duty", "gpu.throttle_reasons", gpus=names(g.index for g in hot), duty_pct=100 * _heat_duty(worst)
            ),
            _temperature_line(worst),
            _clock_line(worst),
            *room,
            pair_line(evidence),
        ),
        summary("thermal_hw" if hardware else "thermal", **_fall(evidence, effect)),
        _heat_fixes(bool(room)),
        since_ns=min(sinces) if sinces else evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in hot),
        support=(3.0 if slowed else 1.0) * (2.0 if room else 1.0),
    )


def _is_hot(gpu: GpuEvidence, bar: Bar) -> bool:
    return bar.reached("thermal.duty", _heat_duty(gpu)) or (gpu.loaded and _at_limit(gpu, bar))


def _heat_bits(gpu: GpuEvidence) -> list[Observation]:
    return [gpu.duty[name] for name in ("hw_thermal", "sw_thermal") if name in gpu.duty]


def _heat_duty(gpu: GpuEvidence) -> float:
    return max((value(gpu.duty.get(name)) or 0.0 for name in ("hw_thermal", "sw_thermal")), default=0.0)


def _at_limit(gpu: GpuEvidence, bar: Bar) -> bool:
    return bar.reached("thermal.margin_c", value(gpu.temp_margin))


def _harmed(effect: Effect, clock_low: bool) -> bool:
    """A loss; or, while nothing is expected yet, a clock that is low."""
    return effect.slow if effect.known else clock_low


def _coolness(gpus: Sequence[GpuEvidence]) -> list[Line | None]:
    hottest = max(gpus, key=lambda gpu: value(gpu.temp) or 0.0)
    duty = max(_heat_duty(gpu) for gpu in gpus)
    return [_temperature_line(hottest), line("heat_none", "gpu.throttle_reasons", duty_pct=100 * duty)]


def _temperature_line(gpu: GpuEvidence) -> Line | None:
    if gpu.temp is None:
        return None
    memory, limit = gpu.mem_temp, gpu.mem_temp_limit
    if memory is not None and limit is not None and limit - memory.value <= 3:
        return line("mem_temp", "gpu.mem_temp_c", gpu=gpu.index, temp_c=memory.value, limit_c=limit)
    if gpu.temp_limit is not None:
        return line("temp", "gpu.temp_c", gpu=gpu.index, temp_c=gpu.temp.value, limit_c=gpu.temp_limit)
    return line("temp_only", "gpu.temp_c", gpu=gpu.index, temp_c=gpu.temp.value)


def _clock_line(gpu: GpuEvidence) -> Line | None:
    if gpu.sm_clock is None:
        return None
    if gpu.sm_clock.usual is not None:
        return line("clock", "gpu.sm_clock_mhz", gpu=gpu.index, mhz=gpu.sm_clock.value, usual_mhz=gpu.sm_clock.usual)
    if gpu.sm_clock_max is not None:
        return line("clock_max", "gpu.sm_clock_mhz", gpu=gpu.index, mhz=gpu.sm_clock.value, max_mhz=gpu.sm_clock_max)
    return None


def _room_lines(evidence: Evidence, bar: Bar) -> list[Line]:
    found = []
    inlet, peers, fan = evidence.room.inlet, evidence.room.peer_inlet, evidence.room.fan
    if inlet is not None and inlet.usual is not None and bar.reached("thermal.inlet_rise_c", inlet.rise):
        found.append(line("inlet_up", "thermal.inlet_c", inlet_c=inlet.value, usual_c=inlet.usual))
    elif peers is not None and peers.usual is not None and bar.reached("thermal.inlet_rise_c", peers.rise):
        found.append(line("inlet_peers", "thermal.inlet_c", inlet_c=peers.value, peers_c=peers.usual))
    if fan is not None and fan.usual is not None and bar.reached("thermal.fan_fall_pct", -(fan.rise or 0.0)):
        found.append(line("fan_down", "thermal.fan_pct", fan_pct=fan.value, usual_pct=fan.usual))
    return found


def _heat_fixes(room: bool) -> tuple[Fix, ...]:
    first = fix("clear_inlet" if room else "check_airflow", Cost.OPERATIONS_CHEAP)
    return (first, fix("route_away", Cost.SOFTWARE_CHEAP), fix("service_cooler", Cost.HARDWARE_COSTLY))


def _fall(evidence: Evidence, effect: Effect) -> dict[str, float | int | str]:
    """The numbers of a summary: what fell, what stayed."""
    return {
        "loss_pct": effect.loss_pct if effect.loss_pct is not None else 0.0,
        "util_pct": evidence.util_pct or 0.0,
        "effort": "GPU-Util" if evidence.effort == "gpu" else "CPU",
    }


def power(evidence: Evidence, bar: Bar) -> Finding:
    """R3, R4 and the clock state: a brake, a lowered cap that binds, or a clock that stays low, cool and unflagged."""
    known = [gpu for gpu in evidence.gpus if gpu.power is not None or gpu.duty]
    if not known:
        return no_data(Cause.POWER, line("no_gpu" if not evidence.gpus else "no_power"))
    effect = effect_of(evidence, bar)
    return (
        _brake(evidence, known, effect, bar)
        or _cap(evidence, known, effect, bar)
        or _stuck_clock(evidence, known, effect, bar)
        or _power_clean(evidence, known, bar)
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
            _clock_line(worst),
            _draw_line(worst),
            _temperature_line(worst),
            *_supply_lines(evidence, bar),
            pair_line(evidence),
        ),
        summary("power_brake", **_fall(evidence, effect)),
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
    if not binding or not _harmed(effect, bool(slowed)):
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
            _draw_line(worst),
            line("cap_bit", "gpu.throttle_reasons", gpu=worst.index, duty_pct=100 * bit) if bit is not None else None,
            _clock_line(worst),
            _temperature_line(worst),
            pair_line(evidence),
        ),
        summary("power_cap", limit_w=limit, reference_w=reference, **_fall(evidence, effect)),
        (fix("raise_cap", Cost.OPERATIONS_CHEAP), fix("spread_load", Cost.SOFTWARE_CHEAP)),
        since_ns=changed or evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in binding),
        support=3.0 if slowed else 1.0,
    )


def _stuck_clock(evidence: Evidence, gpus: Sequence[GpuEvidence], effect: Effect, bar: Bar) -> Finding | None:
    """Clock and power far below usual at high util, cool, no flag: the card sits in a low clock state."""
    stuck = [
        gpu
        for gpu in gpus
        if bar.reached("power.stuck_util_pct", value(gpu.util))
        and bar.reached("power.stuck_clock_ratio", ratio(gpu.sm_clock))
        and bar.reached("power.stuck_power_ratio", ratio(gpu.power))
        and not _is_hot(gpu, bar)
    ]
    if not stuck or not effect.slow:
        return None
    worst = min(stuck, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)
    return confirmed(
        Cause.POWER,
        Strength.FAIR,
        (
            line("clock_stuck", "gpu.sm_clock_mhz", gpus=names(gpu.index for gpu in stuck)),
            _clock_line(worst),
            _draw_line(worst),
            _temperature_line(worst),
            pair_line(evidence),
        ),
        summary("clock_state", **_fall(evidence, effect)),
        (fix("reset_clocks", Cost.OPERATIONS_CHEAP), fix("drain_reset", Cost.OPERATIONS_CHEAP)),
        since_ns=worst.sm_clock.since_ns if worst.sm_clock else None,
        gpus=tuple(gpu.index for gpu in stuck),
    )


def _draw_line(gpu: GpuEvidence) -> Line | None:
    if gpu.power is None or gpu.power_limit is None:
        return None
    return line("draw", "gpu.power_w", gpu=gpu.index, power_w=gpu.power.value, limit_w=gpu.power_limit.value)


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
    lines.append(_draw_line(drawing))
    bit = max((value(gpu.duty.get("sw_power_cap")) or 0.0 for gpu in gpus), default=0.0)
    low = [gpu.index for gpu in gpus if _cap_reference(gpu, bar) is not None]
    if low:
        lines.append(line("cap_harmless", "gpu.power_limit_w", gpus=names(low)))
    elif bar.reached("power.cap_duty", bit):
        lines.append(line("cap_bit_normal", "gpu.throttle_reasons", duty_pct=100 * bit))
    brake = max((value(gpu.duty.get("hw_power_brake")) or 0.0 for gpu in gpus), default=0.0)
    lines.append(line("brake_none", "gpu.throttle_reasons", duty_pct=100 * brake))
    return ruled_out(Cause.POWER, *lines, *_supply_lines(evidence, bar))


def pcie_link(evidence: Evidence, bar: Bar) -> Finding:
    """R24: under load, a generation or width below what this link usually has, beside a loss."""
    loaded = [
        gpu
        for gpu in evidence.gpus
        if gpu.pcie_gen is not None
        and bar.reached("pcie_link.util_pct", value(gpu.util))
        and (gpu.pstate is None or gpu.pstate <= bar.enter("pcie_link.idle_pstate"))
    ]
    if not loaded:
        return no_data(Cause.PCIE_LINK, line("no_gpu" if not evidence.gpus else "no_link"))
    bad = [gpu for gpu in loaded if _link_is_low(gpu)]
    if not bad or not effect_of(evidence, bar).slow:
        worst = min(loaded, key=lambda gpu: (value(gpu.pcie_gen) or 0, value(gpu.pcie_width) or 0))
        return ruled_out(Cause.PCIE_LINK, _link_line(worst, "link_harmless" if bad else "link"))
    worst = bad[0]
    noisy = bar.reached("pcie_link.replays_per_min", value(worst.replays_per_min))
    return confirmed(
        Cause.PCIE_LINK,
        Strength.FAIR,
        (
            _link_line(worst, "link_low"),
            line("replays", "gpu.pcie_replays_total", gpu=worst.index, per_min=value(worst.replays_per_min) or 0.0)
            if noisy
            else None,
            pair_line(evidence),
        ),
        summary("pcie_link", gpus=names(gpu.index for gpu in bad), **_fall(evidence, effect_of(evidence, bar))),
        (fix("reseat", Cost.OPERATIONS_CHEAP), fix("replace_riser", Cost.HARDWARE_COSTLY)),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in bad),
        support=2.0 if noisy else 1.0,
    )


def _link_is_low(gpu: GpuEvidence) -> bool:
    """Below its own usual where that is known; else below its maximum, for the generation only: narrow slots exist by design."""
    gen, width = gpu.pcie_gen, gpu.pcie_width
    narrow = width is not None and (rise(width) or 0.0) < 0
    if gen is None:
        return narrow
    if gen.usual is not None:
        return narrow or gen.value < gen.usual
    return narrow or (gpu.pcie_gen_max is not None and gen.value < gpu.pcie_gen_max)


def _link_line(gpu: GpuEvidence, key: str) -> Line:
    return line(
        key,
        "gpu.pcie_gen",
        gpu=gpu.index,
        gen=int(value(gpu.pcie_gen) or 0),
        gen_max=int(gpu.pcie_gen_max or value(gpu.pcie_gen) or 0),
        width=int(value(gpu.pcie_width) or 0),
    )


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [thermal(evidence, bar), power(evidence, bar), gpu_fault(evidence, bar), pcie_link(evidence, bar)]
