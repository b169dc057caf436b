"""What the GPU does right now: utilisation, clocks, and how long each limit has held it down.

AMD's reasons have no mask whose bits mean what NVIDIA's do, so there is no throttle_reasons: only times.
"""

from __future__ import annotations

from typing import Any

from agent.amd_smi.calls import Calls, count, within
from agent.driver import Number

HIGHEST_MHZ = 20_000

POWER, HOT = "ppt_residency_acc", "prochot_residency_acc"
THERMAL = ("socket_thm_residency_acc", "vr_thm_residency_acc", "hbm_thm_residency_acc")


def read(calls: Calls, metrics: dict[str, Any]) -> dict[str, Number]:
    """Percent and MHz. `metrics` is the answer of amdsmi_get_gpu_metrics_info in the same sweep.

    A chip of several compute dies has a clock on each: sm_clock_mhz is the mean of those that tell one, as util_pct and power_w
    are the whole chip's too.
    """
    fields: dict[str, Number] = {}
    activity = calls.table("amdsmi_get_gpu_activity")
    for name, key in (("util_pct", "gfx_activity"), ("mem_util_pct", "umc_activity")):
        percent = within(activity.get(key), 0, 100)
        if percent is not None:
            fields[name] = percent
    dies = [
        mhz for told in _listed(metrics.get("current_gfxclks")) if (mhz := within(told, 1, HIGHEST_MHZ)) is not None
    ]
    core = sum(dies) / len(dies) if dies else _clock(calls, "GFX", "clk")
    memory = _clock(calls, "MEM", "clk")
    for name, mhz in (("sm_clock_mhz", core), ("mem_clock_mhz", memory)):
        if mhz is not None:
            fields[name] = mhz
    return fields


def read_maxima(calls: Calls) -> dict[str, Number]:
    """The highest clocks the card can run at, MHz."""
    told = {"sm_clock_max_mhz": _clock(calls, "GFX", "max_clk"), "mem_clock_max_mhz": _clock(calls, "MEM", "max_clk")}
    return {name: mhz for name, mhz in told.items() if mhz is not None}


def _clock(calls: Calls, domain: str, key: str) -> float | None:
    return within(calls.table("amdsmi_get_clock_info", calls.smi.AmdSmiClkType[domain]).get(key), 1, HIGHEST_MHZ)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Residency:
    """Time spent held down, from the firmware's accumulators.

    The firmware adds to `accumulation_counter` in each of its cycles, and to a reason's accumulator in each cycle that the reason
    holds the clock down (AMD SMI documentation, GPU violations: percentage = difference of the one / difference of the other). A
    cycle's length isn't told, so seconds are that share of the time between two readings, summed since the first.
    amdsmi_get_violation_status gives the same numbers and sleeps 100 ms in every call.

    PPT is the package power limit: throttle_sw_power_s. PROCHOT is the emergency cut at the critical temperature:
    throttle_hw_thermal_s. Socket, voltage regulator and memory over their thermal limits are the firmware's own slowdown:
    throttle_sw_thermal_s; they overlap, and the longest of the three counts. None of them is a power brake.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, dict[str, int]] | None = None
        self._held_s: dict[str, float] = {}

    def read(self, metrics: dict[str, Any], now: float) -> dict[str, Number]:
        """Seconds by field since this GPU was attached. `now`: monotonic seconds of the reading."""
        cycles = count(metrics.get("accumulation_counter"))
        if not cycles:
            return {}
        counts = {name: told for name in (POWER, HOT, *THERMAL) if (told := count(metrics.get(name))) is not None}
        shares = self._shares(now, cycles, counts)
        reasons = {"throttle_sw_power_s": (POWER,), "throttle_hw_thermal_s": (HOT,), "throttle_sw_thermal_s": THERMAL}
        for field, names in reasons.items():
            if any(name in counts for name in names):
                longest_s = max((shares.get(name, 0.0) for name in names), default=0.0)
                self._held_s[field] = self._held_s.get(field, 0.0) + longest_s
            else:
                self._held_s.pop(field, None)
        return dict(self._held_s)

    def _shares(self, now: float, cycles: int, counts: dict[str, int]) -> dict[str, float]:
        """Seconds by accumulator since the reading before; empty across a reset or within one firmware cycle."""
        before = self._before
        if before is not None and cycles == before[1]:
            return {}  # nothing new: the next reading counts from the one before
        self._before = (now, cycles, counts)
        if before is None or cycles < before[1]:
            return {}
        passed_s, passed = now - before[0], cycles - before[1]
        return {
            name: passed_s * min(1.0, (told - before[2][name]) / passed)
            for name, told in counts.items()
            if told >= before[2].get(name, told + 1)
        }
