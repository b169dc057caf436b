"""Can the agent keep its state: the folder, who may read it, and how much room its disk has."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from agent.collectors.interface import Finding
from telemetry.messages import say

GIB = 1 << 30


def findings(folder: Path, language: str) -> Sequence[Finding]:
    exists = folder.exists()
    place = folder if exists else _nearest(folder)
    if not place.is_dir():
        return [_unusable(folder, os.strerror(20), language)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [_unusable(folder, os.strerror(30 if _is_read_only(place) else 13), language)]
    found = [Finding("state", "ok", say(f"doctor.state.{'usable' if exists else 'to_be_made'}", language, path=folder))]
    if exists and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        text = say("doctor.state.open", language, path=folder, mode=f"{stat.S_IMODE(folder.stat().st_mode):04o}")
        found.append(Finding("state", "warning", text, f"chmod 700 {folder}"))
    return [*found, _room(place, language)]


def _room(place: Path, language: str) -> Finding:
    """Below a tenth of the disk, or 1 GiB, whichever is less, the spool lets its oldest samples go."""
    usage = shutil.disk_usage(place)
    values = {"path": place, "free_gib": usage.free / GIB, "pct": 100 * usage.free / max(1, usage.total)}
    if usage.free < min(GIB, usage.total // 10):
        return Finding(
            "state", "warning", say("doctor.state.full", language, **values), say("doctor.state.full_remedy", language)
        )
    return Finding("state", "ok", say("doctor.state.room", language, **values))


def _unusable(folder: Path, reason: str, language: str) -> Finding:
    text = say("doctor.state.unusable", language, path=folder, reason=reason, uid=os.geteuid())
    return Finding("state", "error", text, say("doctor.state.unusable_remedy", language))


def _nearest(folder: Path) -> Path:
    """The closest thing above that exists; it is there that the folder would be made."""
    return next((parent for parent in folder.parents if parent.exists()), Path("/"))


def _is_read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
