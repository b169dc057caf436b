"""What a BMC may claim: numbers that no such hardware has are left out, and names are made fit to be written."""

from __future__ import annotations

import math
from dataclasses import replace

from agent.power.reading import BmcReading, Supply
from telemetry.lineprotocol import printable

SUPPLIES_LIMIT = 32
NAME_LIMIT = 64
PROBLEMS_LIMIT = 20
PROBLEM_LIMIT = 300

SUPPLY_W = (0.0, 20_000.0)  # the largest shelves' rectifiers give 12 to 18 kW
NODE_W = (0.0, 200_000.0)  # a rack-scale system reports as one node
LINE_V = (0.0, 1_000.0)  # 480 V AC and 800 V DC included
AIR_C = (-40.0, 125.0)
FAN_RPM = (0.0, 60_000.0)
PCT = (0.0, 100.0)

Bounds = tuple[float, float]


def plausible(reading: BmcReading) -> BmcReading:
    """The reading without what can't be: sentinels, NaN, numbers out of all proportion. Supplies have names of their own."""
    supplies = None
    if reading.supplies is not None:
        supplies = tuple(_supply(supply) for supply in _named_apart(reading.supplies[:SUPPLIES_LIMIT]))
    return replace(
        reading,
        supplies=supplies,
        spares=reading.spares if reading.spares is not None and 0 <= reading.spares < SUPPLIES_LIMIT else None,
        redundancy=reading.redundancy if reading.redundancy in (0, 1, 2) else None,
        node_w=within(reading.node_w, NODE_W),
        cap_w=_above_zero(within(reading.cap_w, NODE_W)),
        inlet_c=within(reading.inlet_c, AIR_C),
        exhaust_c=within(reading.exhaust_c, AIR_C),
        fan_min_rpm=within(reading.fan_min_rpm, FAN_RPM),
        fan_pct=within(reading.fan_pct, PCT),
        coolant_c=within(reading.coolant_c, AIR_C),
        problems=tuple(printable(text)[:PROBLEM_LIMIT] for text in reading.problems[:PROBLEMS_LIMIT]),
    )


def within(value: float | None, bounds: Bounds) -> float | None:
    """`value` where it lies within both ends, else None."""
    return value if value is not None and math.isfinite(value) and bounds[0] <= value <= bounds[1] else None


def _supply(supply: Supply) -> Supply:
    efficiency = within(supply.efficiency, (0.0, 1.0))
    return replace(
        supply,
        input_w=within(supply.input_w, SUPPLY_W),
        output_w=within(supply.output_w, SUPPLY_W),
        capacity_w=_above_zero(within(supply.capacity_w, SUPPLY_W)),
        voltage_v=within(supply.voltage_v, LINE_V),
        efficiency=efficiency if efficiency is not None and efficiency > 0.5 else None,
    )


def _above_zero(value: float | None) -> float | None:
    return value if value else None


def _named_apart(supplies: tuple[Supply, ...]) -> list[Supply]:
    """The supplies, each with a name that can be a tag and that no other has."""
    taken: set[str] = set()
    found = []
    for number, supply in enumerate(supplies, 1):
        name = printable(supply.name).strip()[:NAME_LIMIT] or str(number)
        if name in taken:
            name = f"{name} #{number}"
        taken.add(name)
        found.append(replace(supply, name=name))
    return found
