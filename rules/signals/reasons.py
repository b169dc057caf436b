"""The reasons for a lowered clock, as tools print them: `HW Thermal Slowdown: Active`, `clocks_event_reasons.sw_power_cap`."""

from __future__ import annotations

import re

from rules.signals.keys import FLAG_NAMES

HARMLESS = frozenset(
    (
        "",
        "none",
        "idle",
        "gpu_idle",
        "sync_boost",
        "application_clocks",
        "applications_clocks",
        "application_clocks_setting",
        "applications_clocks_setting",
        "display_clocks",
        "display_clock_setting",
    )
)
"""Reasons that `nvidia-smi -q -d PERFORMANCE` lists beside the judged ones and that are no fault."""

OTHER_NAMES = {"power_brake": "hw_power_brake", "temp_limit": "temp_at_limit"}
PREFIX = re.compile(r"^(nvml_)?(clocks?_)?(throttle|event)_reasons?_")
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def reason_of(text: str) -> str | None:
    """The name in `FLAG_NAMES` that a tool's words mean; empty for one that is harmless or not active, None for words without a meaning."""
    name = PREFIX.sub("", "_".join(WORD.findall(text)).lower())
    if name.endswith("not_active"):
        return ""
    name = name.removesuffix("_active").replace("software_", "sw_").replace("hardware_", "hw_")
    if name != "hw_slowdown":
        name = name.removesuffix("_slowdown")
    name = OTHER_NAMES.get(name, name)
    if name in FLAG_NAMES:
        return name
    return "" if name in HARMLESS else None
