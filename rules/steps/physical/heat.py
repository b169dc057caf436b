"""Heat: slowdown bits or a temperature on its limit, with the clock down, beside a loss."""

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
    harmless,
    line,
    names,
    names_cause,
    no_data,
    pair_line,
    ruled_out,
    summary,
    unread,
    unread_gpus,
)
from rules.priors import Strength
from rules.steps.physical.readings import (
    clock_line,
    fall,
    heat_bits,
    heat_duty,
    is_at_limit,
    is_harmed,
    is_hot,
    temperature_line,
)
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Fix, Line


def thermal(evidence: Evidence, bar: Bar) -> Finding:
    """R1, R8: slowdown bits or a temperature on its limit, with the clock down, beside a loss."""
    known = [gpu for gpu in evidence.gpus if _tells_heat(gpu)]
    if not known:
        return no_data(Cause.THERMAL, line("no_gpu" if not evidence.gpus else "no_temperature"))
    hot = [gpu for gpu in known if is_hot(gpu, bar)]
    if not hot:
        missing = [] if evidence.told else _not_seen(evidence, bar)
        return _poor_cooling(evidence, known, bar) or cleared(Cause.THERMAL, _coolness(known), missing)
    effect = effect_of(evidence, bar)
    slowed = [gpu for gpu in hot if bar.reached("thermal.clock_ratio", ratio(gpu.sm_clock))]
    if not is_harmed(effect, bool(slowed)):
        return _harmless(evidence, hot, effect)
    both = any(bar.reached("thermal.duty", heat_duty(gpu)) and is_at_limit(gpu, bar) for gpu in hot)
    worst = max(hot, key=lambda gpu: (heat_duty(gpu), value(gpu.temp) or 0.0))
    hardware = any(value(gpu.duty.get("hw_thermal")) for gpu in hot)
    room = _room_lines(evidence, bar)
    sinces = [seen.since_ns for gpu in hot for seen in (*heat_bits(gpu), gpu.sm_clock) if seen and seen.since_ns]
    return confirmed(
        Cause.THERMAL,
        Strength.STRONG if both else Strength.FAIR,
        (
            _duty_line(evidence, hot, worst),
            temperature_line(worst),
            clock_line(worst),
            *room,
            pair_line(evidence),
        ),
        summary("thermal_hw" if hardware else "thermal", **fall(evidence, effect)),
        _heat_fixes(bool(room)),
        since_ns=min(sinces) if sinces else evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu in hot),
        support=(3.0 if slowed else 1.0) * (2.0 if room else 1.0),
    )


def _harmless(evidence: Evidence, hot: Sequence[GpuEvidence], effect: Effect) -> Finding:
    """Hot, and neither the clock nor the output is down: as far as one of them is known."""
    duty = max(heat_duty(gpu) for gpu in hot)
    seen = line("heat_harmless", "gpu.temp_c", gpus=names(gpu.index for gpu in hot), duty_pct=100 * duty)
    if not effect.known and all(ratio(gpu.sm_clock) is not None for gpu in hot):
        return ruled_out(Cause.THERMAL, seen, clock_line(min(hot, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)))
    return harmless(Cause.THERMAL, effect, seen, pair_line(evidence))


def _tells_heat(gpu: GpuEvidence) -> bool:
    """What is told as an incident may be a fan or a slope alone."""
    return _reads_heat(gpu) or any(entry is not None for entry in (gpu.peer_temp, gpu.temp_slope, gpu.fan))


def _reads_heat(gpu: GpuEvidence) -> bool:
    return bool(heat_bits(gpu)) or any(entry is not None for entry in (gpu.temp, gpu.temp_margin, gpu.mem_temp))


def _not_seen(evidence: Evidence, bar: Bar) -> list[Line]:
    """The cards of which no heat is read; and those so hot that only their clock could tell, where nobody knows their limit."""
    found = unread_gpus(evidence, "gpu.temp_c", _reads_heat)
    blind = [
        gpu.index
        for gpu in evidence.gpus
        if not heat_bits(gpu)
        and gpu.temp_margin is None
        and bar.reached("thermal.hot_c", value(gpu.temp))
        and ratio(gpu.sm_clock) is None
    ]
    return [*found, *([unread("gpu.temp_limit_c", blind)] if blind else [])]


def _duty_line(evidence: Evidence, hot: Sequence[GpuEvidence], worst: GpuEvidence) -> Line | None:
    if evidence.told:
        return line("told_heat", "gpu.throttle_reasons") if heat_duty(worst) else line("told_limit", "gpu.temp_c")
    which = names(gpu.index for gpu in hot)
    return line("heat_duty", "gpu.throttle_reasons", gpus=which, duty_pct=100 * heat_duty(worst))


def _poor_cooling(evidence: Evidence, gpus: Sequence[GpuEvidence], bar: Bar) -> Finding | None:
    """Hotter than its neighbours, warming fast, fans stopped or at their end: two of these, or one beside a clock that is down."""
    effect = effect_of(evidence, bar)
    if not effect.hurts:
        return None
    found: list[tuple[GpuEvidence, list[Line]]] = []
    for gpu in gpus:
        signs: list[Line] = []
        if gpu.peer_temp is not None and bar.reached("thermal.peer_c", gpu.peer_temp.rise):
            signs.append(line("hotter", "gpu.temp_c", gpu=gpu.index, rise_c=gpu.peer_temp.rise or 0.0))
        if gpu.temp_slope is not None and bar.reached("thermal.slope_c_min", gpu.temp_slope.value):
            signs.append(line("warming", "gpu.temp_c", gpu=gpu.index, c_min=gpu.temp_slope.value))
        if (
            gpu.fan is not None
            and gpu.util is not None
            and gpu.loaded
            and bar.reached("thermal.fan_still", gpu.fan.value)
        ):
            signs.append(line("fan_still", "gpu.fan_pct", gpu=gpu.index, fan_pct=gpu.fan.value))
        elif gpu.fan is not None and bar.reached("thermal.fan_full", gpu.fan.value):
            signs.append(line("fan_full", "gpu.fan_pct", gpu=gpu.index, fan_pct=gpu.fan.value))
        if signs:
            found.append((gpu, signs))
    if not found:
        return None
    worst, signs = max(found, key=lambda entry: len(entry[1]))
    slowed = bar.reached("thermal.clock_ratio", ratio(worst.sm_clock))
    if len(signs) + slowed < 2:
        return None
    return confirmed(
        Cause.THERMAL,
        Strength.FAIR,
        (*signs, temperature_line(worst), clock_line(worst), pair_line(evidence)),
        names_cause(Cause.THERMAL, effect),
        _heat_fixes(False),
        since_ns=evidence.output.since_ns,
        gpus=tuple(gpu.index for gpu, _ in found),
    )


def _coolness(gpus: Sequence[GpuEvidence]) -> list[Line | None]:
    hottest = max(gpus, key=lambda gpu: value(gpu.temp) or 0.0)
    duty = max(heat_duty(gpu) for gpu in gpus)
    read = any(heat_bits(gpu) for gpu in gpus)
    bits = line("heat_none", "gpu.throttle_reasons", duty_pct=100 * duty) if read else None
    return [temperature_line(hottest), bits]


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
