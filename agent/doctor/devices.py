"""May this user open the device nodes, is every device's driver loaded, and which group is missing."""

from __future__ import annotations

import grp
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.interface import Finding, Level
from telemetry.messages import say


@dataclass(frozen=True, slots=True)
class Family:
    """Devices of one kind. `nodes`: patterns under /dev; `vendor`: of the PCI devices of `classes` (the class' first byte) that
    they belong to, as the kernel writes both; `driver`: a path that exists while the kernel driver is loaded.
    """

    name: str
    nodes: tuple[str, ...]
    vendor: str = ""
    classes: tuple[str, ...] = ()
    driver: str = ""


FAMILIES = (
    # PCI classes: 03 display, 12 processing accelerator (PCI Code and ID Assignment Specification)
    Family("NVIDIA", ("nvidiactl", "nvidia[0-9]*"), "0x10de", ("0x03",), "proc/driver/nvidia/version"),
    Family("AMD", ("kfd", "dri/renderD*"), "0x1002", ("0x03", "0x12"), "sys/module/amdgpu"),
    Family("Ascend", ("davinci_manager", "davinci[0-9]*"), "0x19e5", ("0x12",), "sys/module/drv_davinci_intf"),
    Family("IPMI", ("ipmi[0-9]*",)),
)


def findings(language: str, root: Path = Path("/")) -> Sequence[Finding]:
    found = [finding for family in FAMILIES if (finding := _family(family, language, root)) is not None]
    return found or [Finding("devices", "absent", say("doctor.devices.none", language))]


def _family(family: Family, language: str, root: Path) -> Finding | None:
    """None where the host has no such device."""
    nodes = sorted(node for pattern in family.nodes for node in (root / "dev").glob(pattern))
    on_bus = _on_bus(family, root)
    values = {"family": family.name, "count": on_bus}
    if nodes and (on_bus or not family.driver or (root / family.driver).exists()):
        return _permissions(family.name, nodes, language)
    if not on_bus:
        return None
    key = "no_nodes" if family.driver and (root / family.driver).exists() else "no_driver"
    remedy = say(f"doctor.devices.{key}_remedy", language, **values)
    return Finding("devices", "error", say(f"doctor.devices.{key}", language, **values), remedy)


def _permissions(family: str, nodes: Sequence[Path], language: str) -> Finding:
    closed = [node for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if not closed:
        names = ", ".join(node.name for node in nodes[:4]) + (" ..." if len(nodes) > 4 else "")
        return Finding("devices", "ok", say("doctor.devices.open", language, family=family, nodes=names))
    group = _group_of(closed[0])
    text = say("doctor.devices.closed", language, node=closed[0], count=len(closed), uid=os.geteuid(), group=group)
    # a host's IPMI device is root's by design, and a BMC can be asked over the network
    level: Level = "absent" if family == "IPMI" else "error"
    return Finding("devices", level, text, say("doctor.devices.closed_remedy", language, group=group, family=family))


def _on_bus(family: Family, root: Path) -> int:
    """How many such devices the PCI bus has, whoever drives them."""
    if not family.vendor:
        return 0
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, class_ = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == family.vendor and class_.startswith(family.classes)
    return count


def _group_of(node: Path) -> str:
    gid = node.stat().st_gid
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
