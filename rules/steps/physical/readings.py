"""What the physical rules read off a GPU, and the lines that say it."""

from __future__ import annotations

from rules.evidence import Evidence, GpuEvidence, Observation, ratio, value
from rules.finding import Effect, against, line
from rules.thresholds import Bar
from rules.verdict import Line, Number


def temperature_line(gpu: GpuEvidence) -> Line | None:
    if gpu.temp is None:
        return None
    memory, limit = gpu.mem_temp, gpu.mem_temp_limit
    if memory is not None and limit is not None and limit - memory.value <= 3:
        return line("mem_temp", "gpu.mem_temp_c", gpu=gpu.index, temp_c=memory.value, limit_c=limit)
    if memory is not None and limit is None and memory.value > gpu.temp.value + 20:
        return line("mem_temp_only", "gpu.mem_temp_c", gpu=gpu.index, temp_c=memory.value)
    if gpu.temp_limit is not None:
        return line("temp", "gpu.temp_c", gpu=gpu.index, temp_c=gpu.temp.value, limit_c=gpu.temp_limit)
    return line("temp_only", "gpu.temp_c", gpu=gpu.index, temp_c=gpu.temp.value)


def clock_line(gpu: GpuEvidence) -> Line | None:
    if gpu.sm_clock is None or gpu.sm_clock.relative:
        return against(gpu.sm_clock)
    if gpu.sm_clock.usual is not None:
        return line("clock", "gpu.sm_clock_mhz", gpu=gpu.index, mhz=gpu.sm_clock.value, usual_mhz=gpu.sm_clock.usual)
    if gpu.sm_clock_max is not None:
        return line("clock_max", "gpu.sm_clock_mhz", gpu=gpu.index, mhz=gpu.sm_clock.value, max_mhz=gpu.sm_clock_max)
    return None


def draw_line(gpu: GpuEvidence) -> Line | None:
    if gpu.power is None or gpu.power.relative:
        return against(gpu.power)
    if gpu.power_limit is None:
        return line("draw_only", "gpu.power_w", gpu=gpu.index, power_w=gpu.power.value)
    return line("draw", "gpu.power_w", gpu=gpu.index, power_w=gpu.power.value, limit_w=gpu.power_limit.value)


def draw_share(gpu: GpuEvidence) -> float | None:
    """Draw over enforced limit; None while either is not known in watts."""
    if gpu.draw_to_limit is not None:
        return gpu.draw_to_limit
    if gpu.power is None or gpu.power_limit is None or gpu.power.relative or not gpu.power_limit.value:
        return None
    return gpu.power.value / gpu.power_limit.value


def fall(evidence: Evidence, effect: Effect) -> dict[str, Number]:
    """The numbers of a summary: what fell, what stayed."""
    return {
        "loss_pct": effect.loss_pct if effect.loss_pct is not None else 0.0,
        "util_pct": evidence.util_pct or 0.0,
        "effort": "GPU-Util" if evidence.effort == "gpu" else "CPU",
    }


def is_harmed(effect: Effect, clock_low: bool) -> bool:
    """A loss; or a clock that is low while nothing is expected yet, or beside a small loss after a start; or an incident of which no
    loss is told."""
    if effect.known:
        return effect.slow or (effect.unsettled and clock_low)
    return clock_low or effect.hurts


def heat_duty(gpu: GpuEvidence) -> float:
    return max((value(gpu.duty.get(name)) or 0.0 for name in ("hw_thermal", "sw_thermal")), default=0.0)


def heat_bits(gpu: GpuEvidence) -> list[Observation]:
    return [gpu.duty[name] for name in ("hw_thermal", "sw_thermal") if name in gpu.duty]


def is_at_limit(gpu: GpuEvidence, bar: Bar) -> bool:
    """On the card's own limit; where no limit is known, so hot that cards are known to slow down, with the clock down or so in memory,
    or hotter than any card allows."""
    if gpu.temp_margin is not None:
        return bar.reached("thermal.margin_c", gpu.temp_margin.value)
    slowed = bar.reached("thermal.clock_ratio", ratio(gpu.sm_clock))
    hot = bar.reached("thermal.beyond_c", value(gpu.temp)) or (slowed and bar.reached("thermal.hot_c", value(gpu.temp)))
    core = gpu.temp_limit is None and hot
    return core or (gpu.mem_temp_limit is None and bar.reached("thermal.mem_hot_c", value(gpu.mem_temp)))


def is_hot(gpu: GpuEvidence, bar: Bar) -> bool:
    return bar.reached("thermal.duty", heat_duty(gpu)) or ((gpu.loaded or gpu.util is None) and is_at_limit(gpu, bar))
