"""PCI addresses, as driver libraries, the kernel's log and /proc each write them, made one: domain, bus and device, without a function."""

from __future__ import annotations

import re

_ADDRESS = re.compile(
    r"(?:PCI:)?([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f])?", re.IGNORECASE | re.ASCII
)


def normalised(text: str) -> str:
    """`0008:01:00` of "PCI:0008:01:00", "00000008:01:00.0" or "0008:01:00.0"; empty when the text is no such address.

    The domain is kept: two GPUs of one host may have the same bus in different domains.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None:
        return ""
    domain, bus, device = (int(part, 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}"
