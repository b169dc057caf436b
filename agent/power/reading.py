"""What one visit to a BMC brings, whatever protocol it speaks. None is what it did not tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supply:
    """One power supply that is present. `capacity_w` is output power at the line voltage as measured; `efficiency` is 0..1.

    `ok`: enabled, healthy and with line power. None where the BMC does not say.
    """

    name: str
    ok: bool | None = None
    input_w: float | None = None
    output_w: float | None = None
    capacity_w: float | None = None
    voltage_v: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True, slots=True)
class BmcReading:
    """`spares` is how many supplies may fail by the BMC's own redundancy group; `redundancy` its word on that group's health (as in
    `telemetry.catalogue.REDUNDANCY_STATES`). `supplies` is None where they can't be read at all, and empty where the node has none
    of its own. `problems` are sentences for a person: what could not be read, and why; no password is ever part of one.
    """

    supplies: tuple[Supply, ...] | None = None
    spares: int | None = None
    redundancy: int | None = None
    node_w: float | None = None
    cap_w: float | None = None
    inlet_c: float | None = None
    exhaust_c: float | None = None
    fan_min_rpm: float | None = None
    fan_pct: float | None = None
    coolant_c: float | None = None
    leak: bool | None = None
    problems: tuple[str, ...] = ()
