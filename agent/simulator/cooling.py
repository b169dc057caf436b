"""The air of one simulated node: inlet, fans, exhaust."""

from __future__ import annotations

import math

from telemetry.sample import Value

SUPPLY_C = 22.0
AIR_J_M3_K = 1.2 * 1005  # density times heat capacity
FLOW_M3_S = 0.55  # at full fan speed, unblocked
REFERENCE_FLOW = 0.75  # of full speed: the airflow at which the boards' thermal resistance is quoted
FLOW_POWER = 0.7  # resistance goes with flow to the minus this
FAN_RPM = 14_000.0
FAN_W = 900.0  # at full speed; goes with the cube of it
FAN_TAU_S = 5.0
INLET_TAU_S = 25.0


class Cooling:
    """Temperatures in C, fan speed as a share of full."""

    def __init__(self) -> None:
        self.inlet_c = SUPPLY_C + 1
        self.exhaust_c = SUPPLY_C + 12
        self.speed = 0.6
        self.flow = 0.6
        self.standing = 0.0

    def advance(
        self, seconds: float, target_c: float, hottest_c: float, node_w: float, block: float, lost: float
    ) -> None:
        """`target_c` is the air that comes in, `hottest_c` the hottest board, `block` the resistance of the path (1 = clean),
        `lost` the share of fans that stand still."""
        self.standing = lost
        self.inlet_c += (target_c - self.inlet_c) * (1 - math.exp(-seconds / INLET_TAU_S))
        wanted = min(1.0, max(0.35, 0.45 + (hottest_c - 58) * 0.025))
        self.speed += (wanted - self.speed) * (1 - math.exp(-seconds / FAN_TAU_S))
        self.flow = self.speed * (1 - 0.85 * lost) / block
        self.exhaust_c = self.inlet_c + node_w / (AIR_J_M3_K * FLOW_M3_S * max(0.1, self.flow))

    def resistance(self, base_k_w: float) -> float:
        """K/W from sink to air at the present flow, from the one at reference flow."""
        return float(base_k_w * (REFERENCE_FLOW / max(0.05, self.flow)) ** FLOW_POWER)

    @property
    def fan_w(self) -> float:
        return FAN_W * (1 - self.standing) * self.speed**3

    def fields(self) -> dict[str, Value]:
        slowest = 0.0 if self.standing > 0 else FAN_RPM * self.speed
        return {
            "inlet_c": round(self.inlet_c, 1),
            "exhaust_c": round(self.exhaust_c, 1),
            "fan_min_rpm": float(round(slowest, -1)),
            "fan_pct": float(round(100 * self.speed)),
        }
