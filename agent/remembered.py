"""Remembered: a small JSON file of the state folder, read so that nothing that stands in its place holds up the agent or ends it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

LIMIT_BYTES = 1 << 20


def remembered(path: Path) -> object:
    """What the file holds. FileNotFoundError where there is none; another OSError, or ValueError, for one that can't be used."""
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )  # opening a pipe would wait for who writes it
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no ordinary file")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(LIMIT_BYTES + 1)
    if len(content) > LIMIT_BYTES:
        raise ValueError(f"it is larger than {LIMIT_BYTES >> 10} KiB")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
