"""Who a GPU is: its uuid, or its PCI address where the driver's uuid is none; its name, and the driver's version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pynvml

from agent import pci
from telemetry.lineprotocol import printable

_UUID = re.compile(r"(GPU|MIG)-(?=[0-9A-Za-z/-]*[1-9A-Za-z])[0-9A-Za-z/-]{4,90}", re.ASCII)
"""Not all of its digits are zero: some drivers fill a uuid that they don't know with zeros or with NUL bytes."""
LONGEST = 96


def uuid_of(handle: Any, address: str) -> str:
    """What identifies the GPU for good. Raises NVMLError when not even the driver knows the GPU any more."""
    try:
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError:
        uuid = ""
    if _UUID.fullmatch(uuid):
        return uuid
    return f"PCI-{address}" if address else ""


def address_of(handle: Any) -> str:
    """The normalised PCI address; empty when the driver doesn't tell it."""
    return pci.normalised(text(lambda: _bus_id(handle)))


def _bus_id(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetPciInfo(handle).busId


def text(ask: Callable[[], Any]) -> str:
    """What the driver answers, cleaned and bounded; empty when it doesn't."""
    try:
        answer = ask()
    except (pynvml.NVMLError, UnicodeDecodeError):
        return ""
    said = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
    return printable(said).strip()[:LONGEST]
