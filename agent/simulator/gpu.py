"""One simulated GPU: clock control, power, two-stage heat path, and the counters that a driver would report.

Plain floats, not arrays: a GPU-second costs about 10 microseconds, a thousand GPUs run tens of times faster than real time, and
the agent needs no numpy.
"""

from __future__ import annotations

import math
from random import Random

from agent.simulator.conditions import GpuConditions
from agent.simulator.sku import Sku
from telemetry.sample import Value

IDLE, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, BRAKE = 0x1, 0x4, 0x8, 0x20, 0x40, 0x80
"""Throttle reason bits, nvml.h nvmlClocksEventReasons."""

STEP_MHZ_S = 150.0  # software thermal control: 15 MHz each 100 ms
MEMORY_TAU_S = 15.0
SPINNING = 0.06  # of the multiprocessors hold a collective's kernels while it waits


class Gpu:
    """State of one board. Temperatures in C, clocks in MHz, power in W.

    `mem_share`, `activity`, `busy` are set by the engine before each `advance`: share of time the memory moves data, SM activity,
    and share of time that any kernel runs (all 0..1).
    """

    __slots__ = (
        "_k_die",
        "_k_memory",
        "_step_s",
        "activity",
        "busy",
        "capped_mhz",
        "clock_mhz",
        "compute_share",
        "corrected",
        "die_c",
        "dynamic",
        "energy_j",
        "hw_thermal",
        "index",
        "leak",
        "limit_w",
        "lost",
        "mask",
        "mem_share",
        "memory_c",
        "memory_used_bytes",
        "pcie_bytes_s",
        "power_w",
        "random",
        "replays",
        "resistance",
        "rise_c",
        "sink_c",
        "sku",
        "thermal_mhz",
        "throttled_s",
        "uuid",
        "window_j",
        "window_s",
    )

    def __init__(self, index: int, uuid: str, sku: Sku, rise_c: float, random: Random) -> None:
        self.index = index
        self.uuid = uuid
        self.sku = sku
        self.random = random
        self.rise_c = rise_c  # air this much warmer than the inlet: further back in the stream
        # parts of one model differ: leakage, dynamic power and the mounting of the sink
        self.leak = min(1.25, max(0.8, random.gauss(1, 0.07)))
        self.dynamic = min(1.03, max(0.97, random.gauss(1, 0.012)))
        self.resistance = min(1.12, max(0.9, random.gauss(1, 0.04)))
        self.limit_w = sku.power_limit_w
        self.clock_mhz = sku.clock_idle_mhz
        self.capped_mhz = sku.clock_max_mhz
        self.thermal_mhz = sku.clock_max_mhz
        self.hw_thermal = False
        self.lost = False
        self.die_c, self.sink_c, self.memory_c = 58.0, 46.0, 58.0
        self.power_w = sku.leak_w
        self.energy_j = 0.0
        self.mask = IDLE
        self.throttled_s = {POWER_CAP: 0.0, SW_THERMAL: 0.0, HW_THERMAL: 0.0, BRAKE: 0.0}
        self.mem_share = self.compute_share = self.activity = self.busy = 0.0
        self.pcie_bytes_s = 0.0
        self.replays = 0.0
        self.corrected = 0.0
        self.memory_used_bytes = 0.0
        self.window_j = 0.0
        self.window_s = 0.0
        self._step_s = 0.0
        self._k_die = 0.0
        self._k_memory = 0.0

    def advance(self, seconds: float, inlet_c: float, sink_to_air: float, brake: bool, wrong: GpuConditions) -> None:
        """Move on by `seconds` (<= 0.25: the control loops are faster than that). `sink_to_air` in K/W."""
        sku = self.sku
        if wrong.lost:
            self.lost = True
            self.mem_share = self.activity = self.busy = self.compute_share = 0.0
            return
        self.lost = False
        if seconds != self._step_s:
            self._step_s = seconds
            self._k_die = 1 - math.exp(-seconds / (sku.die_to_sink_k_w * sku.die_j_k))
            self._k_memory = 1 - math.exp(-seconds / MEMORY_TAU_S)
        top = sku.clock_max_mhz
        die = self.die_c

        # thermal control: too hot steps the highest allowed clock down, 2 K cooler steps it up again
        memory_limit = sku.mem_temp_limit_c
        memory_hot = memory_limit is not None and self.memory_c > memory_limit
        memory_warm = memory_limit is not None and self.memory_c > memory_limit - 2
        if die > sku.temp_limit_c or memory_hot:
            self.thermal_mhz = max(sku.clock_idle_mhz, self.thermal_mhz - STEP_MHZ_S * seconds)
        elif self.thermal_mhz < top and die < sku.temp_limit_c - 2 and not memory_warm:
            self.thermal_mhz = min(top, self.thermal_mhz + STEP_MHZ_S * seconds)
        if die >= sku.temp_limit_c + 2:
            self.hw_thermal = True
        elif self.hw_thermal and die < sku.temp_limit_c - 3:
            self.hw_thermal = False

        allowed = min(top, self.thermal_mhz)
        if wrong.clock_limit_mhz is not None:
            allowed = min(allowed, wrong.clock_limit_mhz)
        if self.hw_thermal or brake:
            allowed = min(allowed, top / 2)
        mask = 0
        if self.thermal_mhz < top:
            mask |= SW_THERMAL
        if self.hw_thermal:
            mask |= HW_THERMAL | HW_SLOWDOWN
        if brake:
            mask |= BRAKE | HW_SLOWDOWN
        if self.busy < 0.01:
            clock = sku.clock_idle_mhz
            mask |= IDLE
        else:
            clock = min(allowed, self.capped_mhz)
            if self.capped_mhz < allowed - 1:
                mask |= POWER_CAP

        static = sku.leak_w * self.leak * math.exp(0.008 * (die - 45)) + sku.bandwidth_w * self.mem_share
        moving = sku.dynamic_w * self.dynamic * self.activity
        power = static + moving * sku.dynamic_scale(clock)
        over = power - self.limit_w
        if over > 0:
            # the board's own loop is faster than this step: it finds the clock at which power meets the limit
            for _ in range(3):
                clock = max(sku.clock_idle_mhz, clock - over / max(0.15, moving / top * 2.0))
                power = static + moving * sku.dynamic_scale(clock)
                over = power - self.limit_w
                if over <= 0.5:
                    break
            self.capped_mhz = clock
            if not mask & IDLE:
                mask |= POWER_CAP
        elif self.capped_mhz < top and over < -2:
            self.capped_mhz = min(top, self.capped_mhz + min(200 * seconds, -over))

        resistance = sku.die_to_sink_k_w * wrong.contact
        flow = (die - self.sink_c) / resistance
        self.die_c = die + (self.sink_c + power * resistance - die) * self._k_die
        air = inlet_c + self.rise_c
        self.sink_c += seconds * (flow - (self.sink_c - air) / (sink_to_air * self.resistance)) / sku.sink_j_k
        hbm = self.sink_c + 10 + 8 * self.mem_share + wrong.memory_rise_c * (0.3 + 0.7 * self.mem_share)
        self.memory_c += (hbm - self.memory_c) * self._k_memory

        self.replays += wrong.replays_s * seconds
        self.corrected += wrong.corrected_s * seconds
        self.clock_mhz = clock
        self.power_w = power
        self.mask = mask
        joules = power * seconds
        self.energy_j += joules
        self.window_j += joules
        self.window_s += seconds
        if mask & ~IDLE:
            for bit in self.throttled_s:
                if mask & bit:
                    self.throttled_s[bit] += seconds

    def fields(self, requested_w: float, processes: int, wrong: GpuConditions) -> dict[str, Value]:
        """What the driver reports now; `power_w` is the mean since the last call, so that energy is its integral."""
        if self.lost:
            return {"state": 1}
        if wrong.hung:
            return {"state": 4}
        sku = self.sku
        jitter = self.random.random
        power = self.window_j / self.window_s if self.window_s else self.power_w
        self.window_j = self.window_s = 0.0
        busy = self.busy
        temp = float(round(self.die_c))
        util = 0.0 if busy < 0.01 else min(100.0, 100 * busy - 2 * jitter() * busy)
        fields: dict[str, Value] = {
            "util_pct": float(round(util)),
            "mem_util_pct": float(round(78 * self.mem_share)),
            "sm_active_pct": round(
                100 * min(busy, 0.35 * self.mem_share + max(SPINNING, 0.72 * self.compute_share)), 1
            ),
            "dram_active_pct": round(82 * self.mem_share, 1),
            "tensor_active_pct": round(58 * self.compute_share, 1),
            "mem_used_bytes": float(round(self.memory_used_bytes)),
            "mem_total_bytes": float(sku.memory_bytes),
            "temp_c": temp,
            "temp_margin_c": float(sku.temp_limit_c - temp),
            "temp_limit_c": float(sku.temp_limit_c),
            "power_w": round(power, 3),
            "power_limit_w": float(self.limit_w),
            "power_limit_default_w": float(sku.power_limit_w),
            "power_limit_requested_w": float(requested_w),
            "sm_clock_mhz": 15.0 * (self.clock_mhz // 15),
            "sm_clock_max_mhz": float(sku.clock_max_mhz),
            "mem_clock_mhz": float(round(sku.mem_clock_mhz / wrong.memory_slow)),
            "mem_clock_max_mhz": float(sku.mem_clock_mhz),
            "pcie_rx_bytes_s": float(round(self.pcie_bytes_s * (0.97 + 0.06 * jitter()))),
            "pcie_tx_bytes_s": float(round(self.pcie_bytes_s * 0.08 * (0.9 + 0.2 * jitter()))),
            "pstate": 0,
            "pcie_gen": wrong.pcie_gen or sku.pcie_gen,
            "pcie_gen_max": sku.pcie_gen,
            "pcie_width": wrong.pcie_width or sku.pcie_width,
            "pcie_width_max": sku.pcie_width,
            "processes": processes,
            "state": 0,
            "remap_pending": int(wrong.remap_pending),
            "remap_failed": 0,
            "throttle_reasons": self.mask,
            "energy_j": round(self.energy_j, 3),
            "throttle_sw_power_s": round(self.throttled_s[POWER_CAP], 3),
            "throttle_sw_thermal_s": round(self.throttled_s[SW_THERMAL], 3),
            "throttle_hw_thermal_s": round(self.throttled_s[HW_THERMAL], 3),
            "throttle_hw_power_brake_s": round(self.throttled_s[BRAKE], 3),
            "throttle_sync_boost_s": 0.0,
            "pcie_replays_total": int(self.replays),
            "ecc_corrected_total": int(self.corrected),
            "ecc_uncorrected_total": wrong.uncorrected,
            "remapped_rows_total": 0,
            "xid_total": 0,
        }
        if sku.mem_temp_limit_c is not None:
            fields["mem_temp_c"] = float(round(self.memory_c))
            fields["mem_temp_limit_c"] = float(sku.mem_temp_limit_c)
        return fields
