"""XID errors: what the driver's number means, how bad it is and what it asks for. Meanings after NVIDIA's "XID Errors" catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from telemetry.messages import catalogue, say

Severity = Literal["info", "warning", "application", "critical"]
"""application: the fault of what runs on the GPU, which stays usable. critical: the GPU is out, or is best taken out."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """`action` is a key of the sentences under `gpu.xid_action`."""

    severity: Severity
    action: str


_APPLICATION = Meaning("application", "restart_app")
_RESET = Meaning("critical", "reset_gpu")
_LINK = Meaning("warning", "check_link")

MEANINGS = {
    13: _APPLICATION,
    31: _APPLICATION,
    43: _APPLICATION,
    45: _APPLICATION,
    69: _APPLICATION,
    94: _APPLICATION,  # contained: the application that met it is ended, nothing else suffers
    48: _RESET,
    62: _RESET,
    95: _RESET,
    109: _RESET,
    119: _RESET,
    120: _RESET,
    140: _RESET,
    143: _RESET,
    63: Meaning("info", "none"),
    64: Meaning("critical", "replace"),
    74: _LINK,
    79: Meaning("critical", "reboot"),
    92: Meaning("warning", "watch"),
    154: Meaning("warning", "read_action"),
    162: Meaning("info", "none"),
    163: Meaning("info", "none"),
    **dict.fromkeys(range(144, 151), _LINK),  # of the fifth NVLink generation
}


def is_of_link(code: int) -> bool:
    """Of NVLink, by which GPUs of a group reach each other."""
    return MEANINGS.get(code) is _LINK


def text_of(code: int, language: str = "en") -> str:
    """One line for an event: number, name where known, and what to do about it where that is known."""
    meaning = MEANINGS.get(code)
    key = f"gpu.xid.{74 if meaning is _LINK else code}"
    name = say(key if key in catalogue() else "gpu.xid.unnamed", language)
    if meaning is None:
        return say("gpu.xid.line", language, code=code, name=name)
    action = say(f"gpu.xid_action.{meaning.action}", language)
    return say("gpu.xid.line_and_action", language, code=code, name=name, action=action)
