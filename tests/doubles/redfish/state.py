"""What the double's node is like. No two numbers are the same, so that a swap or a shift shows."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PsuState:
    name: str
    output_w: float
    capacity_w: float
    voltage_v: float
    efficiency: float
    low_line_capacity_w: float
    state: str = "Enabled"
    health: str = "OK"
    line: str = "Normal"

    @property
    def input_w(self) -> float:
        return round(self.output_w / self.efficiency, 1)


@dataclass
class NodeState:
    psus: list[PsuState] = field(
        default_factory=lambda: [
            PsuState("PSU1", 1210.0, 3000.0, 229.5, 0.94, 1400.0),
            PsuState("PSU2", 1180.0, 3100.0, 231.25, 0.93, 1450.0),
            PsuState("PSU3", 1195.0, 2900.0, 230.75, 0.95, 1500.0),
        ]
    )
    node_w: float = 3815.0
    cap_w: float | None = 5200.0
    inlet_c: float = 24.5
    exhaust_c: float = 47.25
    coolant_c: float = 33.5
    fans: list[tuple[float, float]] = field(default_factory=lambda: [(9120.0, 61.0), (8870.0, 58.0), (9340.0, 64.0)])
    leak: bool = False
    min_needed: int = 2
    redundancy_health: str = "OK"
