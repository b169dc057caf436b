"""Does systemd keep the agent running: the unit, and how it is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from agent.collectors.interface import Finding
from telemetry.messages import say

UNIT = "pairscope-agent.service"
DEADLINE_S = 5.0


def findings(language: str, booted: Path = Path("/run/systemd/system")) -> Sequence[Finding]:
    """`booted` exists where systemd is the init (sd_booted(3))."""
    program = shutil.which("systemctl")
    if program is None or not booted.is_dir():
        return [Finding("service", "absent", say("doctor.service.no_systemd", language))]
    try:
        command = [program, "show", UNIT, "--property=LoadState,ActiveState,UnitFileState,NRestarts"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("service", "warning", say("doctor.service.silent", language, reason=type(error).__name__))]
    return [judged(dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line), language)]


def judged(told: dict[str, str], language: str) -> Finding:
    """`told`: the properties that `systemctl show` names."""
    values = {"unit": UNIT, "restarts": told.get("NRestarts", "0")}
    active = told.get("ActiveState", "")
    if told.get("LoadState") != "loaded":
        remedy = say("doctor.service.install_remedy", language)
        return Finding("service", "absent", say("doctor.service.not_installed", language, **values), remedy)
    if active in ("active", "reloading"):
        if told.get("UnitFileState") not in ("enabled", "enabled-runtime", "static", "generated"):
            remedy = f"systemctl enable {UNIT}"
            return Finding("service", "warning", say("doctor.service.not_enabled", language, **values), remedy)
        return Finding("service", "ok", say("doctor.service.active", language, **values))
    if active == "failed":
        remedy = f"journalctl -u {UNIT} -n 50"
        return Finding("service", "error", say("doctor.service.failed", language, **values), remedy)
    remedy = f"systemctl enable --now {UNIT}"
    return Finding("service", "warning", say("doctor.service.inactive", language, **values, state=active), remedy)
