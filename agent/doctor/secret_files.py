"""Are secrets kept to their owner: the files that hold passwords, keys and communities, and the configuration itself."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from agent.collectors.interface import Finding
from telemetry.messages import say


def findings(files: Sequence[Path], language: str) -> Sequence[Finding]:
    open_ = [(path, mode) for path in files if (mode := _mode(path)) is not None and mode & 0o077]
    if open_:
        return [
            Finding(
                "secrets",
                "warning",
                say("doctor.secrets.open", language, path=path, mode=f"{mode:04o}"),
                say("doctor.secrets.open_remedy", language, path=path),
            )
            for path, mode in open_
        ]
    if files:
        return [Finding("secrets", "ok", say("doctor.secrets.kept", language, count=len(files)))]
    return [Finding("secrets", "absent", say("doctor.secrets.none", language))]


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None  # that it can't be read is the configuration's own complaint
