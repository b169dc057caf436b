"""GPU models as data: envelope, power, thermal path and speed of each board that can be simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Sku:
    """One board. Figures are the public envelope; the power and thermal constants are fitted (see `H100_SXM`)."""

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float  # peak of the device memory
    peak_flops: float  # dense 16-bit
    power_limit_w: float
    clock_idle_mhz: float
    clock_max_mhz: float
    mem_clock_mhz: float
    temp_limit_c: float  # software slowdown pins here; hardware slowdown is 2 K above
    mem_temp_limit_c: float | None  # None: the board reports no memory temperature
    leak_w: float  # static power at 45 C
    bandwidth_w: float  # added when the memory is busy all the time
    dynamic_w: float  # added by the SMs at full activity, clock and voltage
    voltage_floor: float
    voltage_knee_mhz: float  # below it the voltage stays at its floor
    voltage_top: float
    die_to_sink_k_w: float
    die_j_k: float
    sink_to_air_k_w: float  # at the node's reference airflow
    sink_j_k: float
    pcie_gen: int
    pcie_width: int

    def dynamic_scale(self, clock_mhz: float) -> float:
        """Dynamic power at a clock as a share of that at the highest clock: (f/f0) (V/V0)^2."""
        rise = max(0.0, clock_mhz - self.voltage_knee_mhz) / (self.clock_max_mhz - self.voltage_knee_mhz)
        volt = self.voltage_floor + (self.voltage_top - self.voltage_floor) * rise
        return clock_mhz / self.clock_max_mhz * (volt / self.voltage_top) ** 2

    def power(self, clock_mhz: float, mem_share: float, activity: float, temp_c: float) -> float:
        """Board power in W. P = leak exp(.008 (T - 45)) + bandwidth + dynamic (f/f0) (V/V0)^2."""
        return (
            self.leak_w * math.exp(0.008 * (temp_c - 45))
            + self.bandwidth_w * mem_share
            + self.dynamic_w * activity * self.dynamic_scale(clock_mhz)
        )


# Fitted to public measurements of 8B decode (ML.ENERGY v3: 486/610/691 W at batch 8/64/256) and to the equilibria of a hot
# board (498 W at 1500 MHz, 377 W at 1200 MHz). With the activity of `roofline.activity` that needs a voltage floor of 0.80 V.
H100_SXM = Sku(
    name="H100 SXM",
    memory_bytes=80 * GIB,
    bandwidth_bytes_s=3.35e12,
    peak_flops=989e12,
    power_limit_w=700,
    clock_idle_mhz=345,
    clock_max_mhz=1980,
    mem_clock_mhz=2619,
    temp_limit_c=87,
    mem_temp_limit_c=95,
    leak_w=70,
    bandwidth_w=150,
    dynamic_w=650,
    voltage_floor=0.80,
    voltage_knee_mhz=1200,
    voltage_top=1.02,
    die_to_sink_k_w=0.022,
    die_j_k=60,
    sink_to_air_k_w=0.040,
    sink_j_k=700,
    pcie_gen=5,
    pcie_width=16,
)

SKUS: dict[str, Sku] = {
    "h100-sxm": H100_SXM,
    # cold plates: 47 C at 700 W on 30 C coolant, settles in seconds
    "h100-sxm-liquid": replace(
        H100_SXM, name="H100 SXM liquid", die_to_sink_k_w=0.018, sink_to_air_k_w=0.007, sink_j_k=500
    ),
    "a100-sxm": replace(
        H100_SXM,
        name="A100 SXM",
        bandwidth_bytes_s=2.039e12,
        peak_flops=312e12,
        power_limit_w=400,
        clock_idle_mhz=210,
        clock_max_mhz=1410,
        mem_clock_mhz=1593,
        leak_w=55,
        bandwidth_w=85,
        dynamic_w=360,
        voltage_knee_mhz=900,
        die_to_sink_k_w=0.035,
        sink_to_air_k_w=0.065,
        pcie_gen=4,
    ),
    "b200": replace(
        H100_SXM,
        name="B200",
        memory_bytes=180 * GIB,
        bandwidth_bytes_s=8.0e12,
        peak_flops=2250e12,
        power_limit_w=1000,
        clock_max_mhz=2100,
        mem_clock_mhz=3996,
        leak_w=110,
        bandwidth_w=220,
        dynamic_w=900,
        voltage_knee_mhz=1300,
        die_to_sink_k_w=0.016,
        sink_to_air_k_w=0.028,
        sink_j_k=1000,
    ),
    "l40s": replace(
        H100_SXM,
        name="L40S",
        memory_bytes=48 * GIB,
        bandwidth_bytes_s=0.864e12,
        peak_flops=362e12,
        power_limit_w=350,
        clock_idle_mhz=210,
        clock_max_mhz=2520,
        mem_clock_mhz=9001,
        mem_temp_limit_c=None,
        leak_w=45,
        bandwidth_w=55,
        dynamic_w=330,
        voltage_knee_mhz=1500,
        die_to_sink_k_w=0.040,
        sink_to_air_k_w=0.080,
        sink_j_k=450,
        pcie_gen=4,
    ),
}
