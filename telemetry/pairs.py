"""The pairs that are drawn and judged: which field is what the hardware spends, and which is what the engine yields.

The pair view is one chart of lanes over one time axis. The first lane carries the pair itself; the others explain it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trace:
    """One line of a lane: `measurement.field`, drawn in `role`'s colour."""

    measurement: str
    field: str
    role: str  # tokens, util, temp, inlet, clock, kv, psu, queue, limit


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of the pair view. `share` is its part of the height; `needs_gpu` lanes are left out where no GPU reports."""

    name: str
    traces: tuple[Trace, ...]
    share: float
    needs_gpu: bool = False


PAIR_LANE = Lane("pair", (Trace("pair", "output_pct", "tokens"), Trace("pair", "util_pct", "util")), 0.27)

LANES: tuple[Lane, ...] = (
    PAIR_LANE,
    Lane("tokens", (Trace("engine", "tokens_per_s", "tokens"), Trace("pair", "expected_tokens_per_s", "limit")), 0.12),
    Lane(
        "temperature",
        (Trace("gpu", "temp_c", "temp"), Trace("gpu", "temp_limit_c", "limit"), Trace("thermal", "inlet_c", "inlet")),
        0.14,
        True,
    ),
    Lane("clock", (Trace("gpu", "sm_clock_mhz", "clock"), Trace("gpu", "sm_clock_max_mhz", "limit")), 0.11, True),
    Lane("reasons", (Trace("gpu", "throttle_reasons", "temp"),), 0.12, True),
    Lane("power", (Trace("gpu", "power_w", "util"), Trace("gpu", "power_limit_w", "limit")), 0.10, True),
    Lane("headroom", (Trace("power", "headroom_pct", "psu"),), 0.08, True),
    Lane("cpu", (Trace("host", "cpu_pct", "util"), Trace("host", "cpu_core_max_pct", "psu")), 0.12),
    Lane("kv", (Trace("engine", "kv_used_pct", "kv"), Trace("engine", "kv_fragmentation_pct", "temp")), 0.11),
    Lane("queue", (Trace("engine", "requests_waiting", "queue"), Trace("engine", "requests_running", "tokens")), 0.09),
)

THROTTLE_REASONS: tuple[tuple[int, str], ...] = (
    # bit, name; the four that are drawn and judged come first. Source: nvml.h, nvmlClocksEventReasons
    (0x40, "hw_thermal"),
    (0x20, "sw_thermal"),
    (0x04, "sw_power_cap"),
    (0x80, "hw_power_brake"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x02, "application_clocks"),
    (0x100, "display_clocks"),
    (0x01, "gpu_idle"),
)
"""0x200 and 0x400 are known to the newest headers only; unknown bits are kept in the raw mask and never judged."""
