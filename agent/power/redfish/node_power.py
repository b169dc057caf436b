"""Node power: what the whole node draws, its cap, and how many supplies may fail, from the documents of either schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent.power.headroom import DEGRADED, FULL, LOST
from agent.power.redfish.document import Json, health, number, positive, reading, rows, state, table, text

UNCAPPED_W = 32767
"""iDRAC's word for no cap: the largest signed 16-bit number."""

_WHOLE = re.compile(r"system|server|chassis|total|node", re.IGNORECASE)
_PART = re.compile(r"cpu|processor|memory|dimm|gpu|fan|storage|drive|sub-?system", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Redundancy:
    """As in `agent.power.reading.BmcReading`: how many supplies may fail, and the BMC's word on whether they still may."""

    spares: int | None = None
    state: int | None = None


def of_environment(document: Json) -> tuple[float | None, float | None]:
    """Power and cap in W, from EnvironmentMetrics."""
    limit = table(document.get("PowerLimitWatts"))
    is_on = text(limit.get("ControlMode")) != "Disabled"
    return positive(reading(document.get("PowerWatts"))), _cap(limit.get("SetPoint")) if is_on else None


def of_power(document: Json) -> tuple[float | None, float | None]:
    """Power and cap in W, from Power: its PowerControl for the whole node, else where Fujitsu, Inspur and Huawei have it."""
    control = whole_node(rows(document.get("PowerControl")))
    oem, control_oem = table(document.get("Oem")), table(control.get("Oem"))
    candidates = (
        control.get("PowerConsumedWatts"),
        table(table(oem.get("ts_fujitsu")).get("ChassisPowerConsumption")).get("CurrentPowerConsumptionW"),
        table(oem.get("Public")).get("TotalPower"),
        table(control_oem.get("Public")).get("TotalPower"),
        table(oem.get("Huawei")).get("PowerConsumedWatts"),
        table(control_oem.get("Huawei")).get("PowerConsumedWatts"),
    )
    node_w = next((found for value in candidates if (found := positive(value)) is not None), None)
    return node_w, _cap(table(control.get("PowerLimit")).get("LimitInWatts"))


def whole_node(controls: Sequence[Json]) -> Json:
    """The entry that stands for the node: XCC lists processors and memory besides. By its name, else the first."""
    for control in controls:
        name = text(control.get("Name"))
        if _WHOLE.search(name) and not _PART.search(name):
            return control
    return controls[0] if controls else {}


def redundancy_of(groups: Sequence[Json], present: int) -> Redundancy:
    """From PowerSupplyRedundancy (new) or Redundancy (old); of several groups the worst. `present`: supplies that are there."""
    found = [_of_group(group, present) for group in groups]
    spares = [entry.spares for entry in found if entry.spares is not None]
    states = [entry.state for entry in found if entry.state is not None]
    return Redundancy(min(spares) if spares else None, min(states) if states else None)


def _of_group(group: Json, present: int) -> Redundancy:
    kind = text(group.get("RedundancyType")) or text(group.get("Mode"))
    members = group.get("RedundancyGroup") or group.get("RedundancySet")
    size = len(members) if isinstance(members, list) and members else present
    if kind == "NotRedundant" or state(group) in ("Disabled", "Absent") or not 2 <= size <= 64:
        return Redundancy(0) if kind == "NotRedundant" or state(group) == "Disabled" else Redundancy()
    needed = number(group.get("MinNeededInGroup"))
    needed = number(group.get("MinNumNeeded")) if needed is None else needed
    spares = None if needed is None or not 0 <= needed <= size else size - int(needed)
    if kind == "Failover" and spares in (0, None):
        spares = 1  # iLO says that two of two are needed, of a pair that takes over from each other
    if spares is not None:
        spares = min(spares, size - 1)
    word = {"OK": FULL, "Warning": DEGRADED, "Critical": LOST}.get(health(group))
    return Redundancy(spares, word if spares != 0 else None)


def _cap(value: object) -> float | None:
    cap_w = positive(value)
    return None if cap_w == UNCAPPED_W else cap_w
