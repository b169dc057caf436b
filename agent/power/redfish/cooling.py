"""Cooling: air, fans, coolant and leaks, from the documents of either schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.power.redfish.document import Json, is_measuring, is_present, number, reading, rows, table, text

_INLET = re.compile(r"inlet|intake|ambient", re.IGNORECASE)
_EXHAUST = re.compile(r"exhaust|outlet", re.IGNORECASE)
_COOLANT = re.compile(r"coolant|liquid", re.IGNORECASE)
_OF_A_PART = re.compile(
    r"psu|ps\d|power ?supply|cpu|gpu|accelerator|dimm|memory|pci|nic\b|network|ocp|vr\b|regulator|storage|drive|ssd|hdd",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Cooling:
    """What the documents of a chassis tell, gathered one after the other."""

    inlet_c: list[float] = field(default_factory=list)
    exhaust_c: list[float] = field(default_factory=list)
    coolant_c: list[float] = field(default_factory=list)
    fan_rpm: list[float] = field(default_factory=list)
    fan_pct: list[float] = field(default_factory=list)
    leak: bool | None = None

    @property
    def has_fans(self) -> bool:
        return bool(self.fan_rpm or self.fan_pct)

    def thermal(self, document: Json) -> None:
        """Thermal (old)."""
        if not (self.inlet_c and self.exhaust_c):
            for entry in rows(document.get("Temperatures")):
                if is_measuring(entry):
                    celsius = number(entry.get("ReadingCelsius"))
                    self._temperature(entry.get("PhysicalContext"), entry.get("Name"), celsius)
        if not self.has_fans:
            for entry in rows(document.get("Fans")):
                self._old_fan(entry)

    def thermal_metrics(self, document: Json) -> None:
        """ThermalMetrics (new)."""
        summary = table(document.get("TemperatureSummaryCelsius"))
        self._add(self.inlet_c, reading(summary.get("Intake")))
        if not self.inlet_c:
            self._add(self.inlet_c, reading(summary.get("Ambient")))
        self._add(self.exhaust_c, reading(summary.get("Exhaust")))
        summed_up = (bool(self.inlet_c), bool(self.exhaust_c))
        for entry in rows(document.get("TemperatureReadingsCelsius")):
            name = entry.get("DeviceName") or text(entry.get("DataSourceUri")).rpartition("/")[2]
            self._temperature(entry.get("PhysicalContext"), name, reading(entry), skip=summed_up)

    def fan(self, document: Json) -> None:
        """Fan (new): a member of ThermalSubsystem's Fans."""
        if is_measuring(document):
            speed = document.get("SpeedPercent")
            self._add(self.fan_pct, reading(speed))
            self._add(self.fan_rpm, number(table(speed).get("SpeedRPM")))

    def leak_detector(self, document: Json) -> None:
        """LeakDetector (new)."""
        word = text(document.get("DetectorState"))
        if is_present(document) and is_measuring(document) and word in ("OK", "Warning", "Critical"):
            self.leak = bool(self.leak) or word != "OK"

    def leak_detection(self, document: Json) -> None:
        """LeakDetection (new), where it holds its detectors' excerpts itself."""
        for group in rows(document.get("LeakDetectorGroups")):
            for entry in rows(group.get("Detectors")):
                self.leak_detector(entry)

    def coolant_connector(self, document: Json) -> None:
        """CoolantConnector (new)."""
        if is_measuring(document):
            self._add(self.coolant_c, reading(document.get("SupplyTemperatureCelsius")))

    def _old_fan(self, entry: Json) -> None:
        if not is_measuring(entry):
            return
        told = number(entry.get("Reading"))
        units = text(entry.get("ReadingUnits")) or text(entry.get("Units"))  # the latter, and CurrentReading: iLO 4
        told = number(entry.get("CurrentReading")) if told is None else told
        if units.upper() == "RPM":
            self._add(self.fan_rpm, told)
        elif units.lower().startswith("percent"):
            self._add(self.fan_pct, told)

    def _temperature(
        self, context: object, name: object, celsius: float | None, skip: tuple[bool, bool] = (False, False)
    ) -> None:
        place, called = text(context), text(name)
        # a name decides only for the node itself: inlets of supplies and cards have the word in theirs
        by_name = not _OF_A_PART.search(place) and not _OF_A_PART.search(called)
        if place == "LiquidInlet" or (by_name and _COOLANT.search(called) and not _EXHAUST.search(called)):
            self._add(self.coolant_c, celsius)
        elif place == "Intake" or (place != "Exhaust" and by_name and _INLET.search(called)):
            if not skip[0]:
                self._add(self.inlet_c, celsius)
        elif (place == "Exhaust" or (by_name and _EXHAUST.search(called))) and not skip[1]:
            self._add(self.exhaust_c, celsius)

    @staticmethod
    def _add(to: list[float], value: float | None) -> None:
        if value is not None:
            to.append(value)


def warmest(celsius: Sequence[float]) -> float | None:
    return max(celsius, default=None)


def slowest(rpm: Sequence[float]) -> float | None:
    return min(rpm, default=None)


def mean(pct: Sequence[float]) -> float | None:
    return sum(pct) / len(pct) if pct else None
