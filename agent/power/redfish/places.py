"""Places: where on this BMC the numbers of the node stand. Found by following links once, then only read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.power.redfish.document import Json, is_present, link, rows, table, text

ROOT = "/redfish/v1/"
CHASSIS_LIMIT = 32
PAGES_LIMIT = 8
SUPPLIES_LIMIT = 32
FANS_LIMIT = 64
SENSORS_LIMIT = 16
COOLED_CHASSIS_LIMIT = 3

_PARTS = ("Component", "Module", "Card", "Zone", "Cartridge", "IPBasedDrive", "Expansion", "StorageEnclosure")
_BASEBOARD = re.compile(r"HGX_|ERoT|NVSwitch|Retimer|FPGA", re.IGNORECASE)
"""Names of what sits on a GPU baseboard, whose own controller the node's BMC passes on."""

Get = Callable[[str], Json | None]
"""The document at a path, or None where it can't be had."""


@dataclass(frozen=True, slots=True)
class ChassisPlaces:
    """Paths of one chassis. `supplies` are those of the new schema; `has_supplies` counts both."""

    name: str
    vendor: str
    is_whole: bool
    has_supplies: bool
    tells_power: bool
    power_subsystem: str | None = None
    supplies: tuple[str, ...] = ()
    environment: str | None = None
    power: str | None = None
    thermal: str | None = None
    thermal_metrics: str | None = None
    fans: tuple[str, ...] = ()
    coolant: tuple[str, ...] = ()
    leak_detection: str | None = None
    leak_detectors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """`powered`: the chassis whose supplies feed this node, or, where none has any, the node's own. `cooled`: where its air is told."""

    powered: tuple[ChassisPlaces, ...]
    cooled: tuple[ChassisPlaces, ...]

    @property
    def tells_supplies(self) -> bool:
        """Whether anything could be read that would name supplies, if there were any."""
        return any(chassis.tells_power for chassis in self.powered)


def find(get: Get) -> Places | None:
    """Follow the links from the root; None where the BMC shows no chassis."""
    root = get(ROOT)
    if root is None:
        return None
    vendor = f"{text(root.get('Vendor'))} {' '.join(str(key) for key in table(root.get('Oem')))}"
    seen: set[str] = set()
    found = []
    for path in members(get, link(root.get("Chassis")), CHASSIS_LIMIT):
        document = get(path)
        own = link(document) if document is not None else None
        if document is None or (own or path) in seen:
            continue
        seen.add(own or path)
        found.append(_chassis(get, path, document, vendor))
    if not found:
        return None
    supplied = tuple(chassis for chassis in found if chassis.has_supplies)
    whole = tuple(chassis for chassis in found if chassis.is_whole)
    others = whole or tuple(found)
    telling = tuple(chassis for chassis in others if chassis.tells_power or chassis.environment) or others
    powered = supplied or telling[:1]
    cooled = (*powered, *(chassis for chassis in others if chassis not in powered))
    return Places(powered, cooled[:COOLED_CHASSIS_LIMIT])


def members(get: Get, collection: str | None, limit: int) -> list[str]:
    """The paths of a collection's members, each once, over its pages."""
    found: dict[str, None] = {}
    pages: set[str] = set()
    while collection is not None and collection not in pages and len(pages) < PAGES_LIMIT:
        pages.add(collection)
        document = get(collection) or {}
        for path in _links(document.get("Members")):
            found.setdefault(path)
            if len(found) >= limit:
                return list(found)
        collection = link(document.get("Members@odata.nextLink"))
    return list(found)


def _links(entries: object) -> Iterator[str]:
    for entry in rows(entries):
        path = link(entry)
        if path is not None:
            yield path


def _chassis(get: Get, path: str, document: Json, vendor: str) -> ChassisPlaces:
    name = path.rstrip("/").rpartition("/")[2]
    subsystem_path = link(document.get("PowerSubsystem"))
    subsystem = get(subsystem_path) if subsystem_path else None
    supplies = members(get, link((subsystem or {}).get("PowerSupplies")), SUPPLIES_LIMIT)
    power_path = link(document.get("Power"))
    power = get(power_path) if power_path else None
    listed = [entry for entry in rows((power or {}).get("PowerSupplies")) if is_present(entry)]
    thermal_path = link(document.get("ThermalSubsystem"))
    is_whole = text(document.get("ChassisType")) not in _PARTS and not _BASEBOARD.search(name)
    thermal = (get(thermal_path) if thermal_path and is_whole else None) or {}
    leaks_path = link(thermal.get("LeakDetection"))
    leaks = (get(leaks_path) if leaks_path else None) or {}
    return ChassisPlaces(
        name=name,
        vendor=f"{vendor} {text(document.get('Manufacturer'))}".lower(),
        is_whole=is_whole,
        has_supplies=bool(supplies or listed),
        tells_power=subsystem is not None or power is not None,
        power_subsystem=subsystem_path if subsystem is not None else None,
        supplies=tuple(supplies),
        environment=link(document.get("EnvironmentMetrics")),
        power=power_path if power is not None else None,
        thermal=link(document.get("Thermal")),
        thermal_metrics=link(thermal.get("ThermalMetrics")),
        fans=tuple(members(get, link(thermal.get("Fans")), FANS_LIMIT)),
        coolant=tuple(members(get, link(thermal.get("CoolantConnectors")), SENSORS_LIMIT)),
        leak_detection=leaks_path if leaks else None,
        leak_detectors=tuple(members(get, link(leaks.get("LeakDetectors")), SENSORS_LIMIT)),
    )
