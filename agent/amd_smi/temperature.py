"""Temperatures, their limits and the margin to them.

temp_c is the edge sensor where the card has one, else the hotspot (junction), as on MI300, which has no edge sensor; temp_limit_c is
the critical temperature of the same sensor, at which the firmware slows the card down.
"""

from __future__ import annotations

from agent.amd_smi.calls import Calls, within
from agent.driver import Number

EDGE, HOTSPOT, MEMORY = "EDGE", "HOTSPOT", "VRAM"
SENSORS = (EDGE, HOTSPOT, MEMORY)


class Temperature:
    """One GPU's temperatures; remembers the limits, and an edge sensor that has spoken once."""

    def __init__(self) -> None:
        self._has_edge = False
        self._limits_c: dict[str, float] = {}

    def read(self, calls: Calls) -> dict[str, Number]:
        """temp_c, mem_temp_c and temp_margin_c, the least distance of any sensor to its own limit."""
        now_c = {sensor: told for sensor in SENSORS if (told := _celsius(calls, sensor, "CURRENT")) is not None}
        fields: dict[str, Number] = {}
        self._has_edge = self._has_edge or EDGE in now_c
        core = now_c.get(EDGE if self._has_edge else HOTSPOT)
        if core is not None:
            fields["temp_c"] = core
        if MEMORY in now_c:
            fields["mem_temp_c"] = now_c[MEMORY]
        gaps = [self._limits_c[sensor] - told for sensor, told in now_c.items() if sensor in self._limits_c]
        if gaps:
            fields["temp_margin_c"] = min(gaps)
        return fields

    def read_limits(self, calls: Calls) -> dict[str, Number]:
        """temp_limit_c and mem_temp_limit_c."""
        found = ((sensor, _celsius(calls, sensor, "CRITICAL")) for sensor in SENSORS)
        self._limits_c = {sensor: told for sensor, told in found if told is not None}
        fields: dict[str, Number] = {}
        self._has_edge = self._has_edge or _celsius(calls, EDGE, "CURRENT") is not None
        core = self._limits_c.get(EDGE if self._has_edge else HOTSPOT)
        if core is not None:
            fields["temp_limit_c"] = core
        if MEMORY in self._limits_c:
            fields["mem_temp_limit_c"] = self._limits_c[MEMORY]
        return fields


def _celsius(calls: Calls, sensor: str, metric: str) -> float | None:
    """Degrees; older libraries hand on the kernel's thousandths. 0 and 65535 are what a card says of a sensor that it lacks."""
    told = calls.ask(
        "amdsmi_get_temp_metric", calls.smi.AmdSmiTemperatureType[sensor], calls.smi.AmdSmiTemperatureMetric[metric]
    )
    found = within(told, -40_000, 199_000) if told != 2**16 - 1 else None
    if found is not None and abs(found) >= 1000:
        found /= 1000
    return found if found and -40 < found < 200 else None
