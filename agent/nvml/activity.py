"""What the GPU does right now: utilisation, clocks, performance state and the reasons why clocks are held down."""

from __future__ import annotations

from typing import Any

import pynvml

from agent.nvml.calls import Calls, FieldId, Number

SM_CLOCK = 1  # nvmlClockType_t
MEM_CLOCK = 2
PSTATE_UNKNOWN = 32
MASK_63 = 2**63 - 1  # the store's integers are signed

THROTTLE_FIELDS = {
    74: "throttle_sw_power_s",
    76: "throttle_sync_boost_s",
    269: "throttle_sw_thermal_s",
    270: "throttle_hw_thermal_s",
    271: "throttle_hw_power_brake_s",
}
"""Nanosecond counters of time spent held down, by field id. The reasons mask shows only the moment of the call."""


def read(calls: Calls, handle: Any, values: dict[FieldId, Number]) -> dict[str, Number]:
    """Percent, MHz, the raw reasons mask with bits of any driver kept, and throttle times in seconds."""
    fields: dict[str, Number] = {}
    rates = calls.ask("utilization", pynvml.nvmlDeviceGetUtilizationRates, handle)
    if rates is not None:
        for name, percent in (("util_pct", rates.gpu), ("mem_util_pct", rates.memory)):
            if percent <= 100:
                fields[name] = float(percent)
    for name, kind in (("sm_clock_mhz", SM_CLOCK), ("mem_clock_mhz", MEM_CLOCK)):
        mhz = calls.ask(name, pynvml.nvmlDeviceGetClockInfo, handle, kind)
        if mhz is not None:
            fields[name] = float(mhz)
    reasons = calls.ask("event_reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # drivers before R535
        reasons = calls.ask("throttle_reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if reasons is not None:
        fields["throttle_reasons"] = int(reasons) & MASK_63
    pstate = calls.ask("pstate", pynvml.nvmlDeviceGetPerformanceState, handle)
    if pstate is not None and pstate != PSTATE_UNKNOWN:
        fields["pstate"] = int(pstate)
    for fid, name in THROTTLE_FIELDS.items():
        if fid in values:
            fields[name] = values[fid] / 1e9
    return fields


def read_maxima(calls: Calls, handle: Any) -> dict[str, Number]:
    """The highest clocks the card can run at, MHz; a locked clock lowers what it does, not these."""
    fields: dict[str, Number] = {}
    for name, kind in (("sm_clock_max_mhz", SM_CLOCK), ("mem_clock_max_mhz", MEM_CLOCK)):
        mhz = calls.ask(name, pynvml.nvmlDeviceGetMaxClockInfo, handle, kind)
        if mhz:
            fields[name] = float(mhz)
    return fields


def read_fan(calls: Calls, handle: Any) -> dict[str, Number]:
    """The *intended* fan speed, percent of maximum; may exceed 100. Cards without fans of their own have none."""
    percent = calls.ask("fan_v2", pynvml.nvmlDeviceGetFanSpeed_v2, handle, 0)
    if percent is None:
        percent = calls.ask("fan", pynvml.nvmlDeviceGetFanSpeed, handle)
    return {} if percent is None else {"fan_pct": float(percent)}
