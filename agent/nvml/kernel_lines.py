"""What the NVIDIA driver writes into the kernel's log: XID errors, and GPUs that have fallen off the bus."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent import pci

WORD = "NVRM:"
"""Every line of the driver has it."""

FALLEN = 79
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-f:.]{5,24})[^)]{0,64}\): ([0-9]{1,5})(?![0-9.])", re.IGNORECASE | re.ASCII
)
_GPU = re.compile(r"(?<![0-9a-f])([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-9a-f])?)(?![0-9a-f])", re.IGNORECASE)
_FALLEN = re.compile(r"fallen off the bus", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Told:
    """`pci` is normalised. `code` is the XID; None for a line that only says that the GPU has fallen off the bus."""

    pci: str
    code: int | None


def parse(text: str) -> Told | None:
    """What a line tells of a GPU; None for anything else: other lines, no address, no number, the number 0."""
    found = _XID.search(text)
    if found is not None:
        address, code = pci.normalised(found.group(1)), int(found.group(2))
        return Told(address, code) if address and code else None
    if "Xid" not in text and _FALLEN.search(text):
        place = _GPU.search(text)
        return Told(pci.normalised(place.group(1)), None) if place else None
    return None


def is_unclear(text: str) -> bool:
    """Whether a line speaks of an XID and can't be understood."""
    return "NVRM: Xid" in text and parse(text) is None
