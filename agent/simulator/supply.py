"""The power supplies of one simulated node: capacity, efficiency, redundancy, and the power brake when they can't carry the load."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from telemetry.sample import Value

COUNT = 6
REDUNDANT = 2  # this many may fail without a consequence
LINE_V = 230.0
DESIGN_MARGIN = 1.5  # capacity that survives, over the design load
BRAKE_AT = 0.95  # of the capacity that is left
TITANIUM = ((0.0, 0.80), (0.1, 0.90), (0.2, 0.94), (0.5, 0.96), (1.0, 0.91))
"""Efficiency by load share: 80 PLUS Titanium at 230 V."""


def efficiency(share: float) -> float:
    """Output over input at a load `share` of capacity (0..1); flat beyond 1."""
    for (low, at_low), (high, at_high) in pairwise(TITANIUM):
        if share <= high:
            return at_low + (at_high - at_low) * (share - low) / (high - low)
    return TITANIUM[-1][1]


class Supply:
    """`design_w` is the most that the node can draw."""

    def __init__(self, design_w: float, random: Random) -> None:
        self.capacity_w = round(design_w * DESIGN_MARGIN / (COUNT - REDUNDANT), -2)
        self.random = random
        self.lost = 0
        self.load_w = 0.0
        self.input_w = 0.0
        self.braking = False

    @property
    def working(self) -> int:
        return COUNT - self.lost

    def carry(self, load_w: float, lost: int) -> None:
        """Take a new load with `lost` supplies gone. Once asserted, the brake stays until redundancy is back: releasing it would
        bring the overload back."""
        self.lost = min(lost, COUNT - 1)
        self.load_w = load_w
        share = load_w / (self.capacity_w * self.working)
        self.input_w = load_w / efficiency(share)
        if self.lost <= REDUNDANT:
            self.braking = False
        elif share > BRAKE_AT:
            self.braking = True

    def psu_fields(self, index: int) -> dict[str, Value]:
        if index >= self.working:
            return {"input_w": 0.0, "output_w": 0.0, "capacity_w": float(self.capacity_w), "voltage_v": 0.0, "ok": 0}
        uneven = 1 + 0.01 * (self.random.random() - 0.5)
        return {
            "input_w": round(self.input_w / self.working * uneven, 1),
            "output_w": round(self.load_w / self.working * uneven, 1),
            "capacity_w": float(self.capacity_w),
            "voltage_v": round(LINE_V + self.random.gauss(0, 0.4), 1),
            "ok": 1,
        }

    def power_fields(self, cap_w: float | None) -> dict[str, Value]:
        capacity = self.capacity_w * self.working
        after_one = self.capacity_w * max(1, self.working - 1)
        fields: dict[str, Value] = {
            "node_w": round(self.input_w, 1),
            "capacity_w": float(capacity),
            "headroom_pct": round(100 * (1 - self.load_w / capacity), 2),
            "headroom_redundant_pct": round(100 * (1 - self.load_w / after_one), 2),
            "redundancy": 2 if self.lost == 0 else 1 if self.lost <= REDUNDANT else 0,
        }
        if cap_w is not None:
            fields["cap_w"] = float(cap_w)
        return fields
