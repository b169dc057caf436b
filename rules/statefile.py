"""State that survives a crash: written beside, synced, renamed; read back or put aside, never half-written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def write_state(path: Path, state: object) -> None:
    """Replace `path` with the JSON of `state`, atomically and durably. OSError when the place can't be written."""
    write_text(path, json.dumps(state, ensure_ascii=False, separators=(",", ":")))


def write_text(path: Path, text: str) -> None:
    """Replace `path`, atomically and durably. OSError when it can't be written, as on a full disk: then nothing is left beside it."""
    beside = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path) -> object:
    """The JSON in `path`; None when there is none. A file that can't be read is put aside as `.damaged` and logged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        put_aside(path, str(error))
        return None


def put_aside(path: Path, why: str) -> None:
    """Keep a damaged state file for a person to look at, out of the way of the next one."""
    log.warning("%s can't be used (%s): put aside as %s.damaged, starting anew", path, why, path.name)
    try:
        path.replace(path.with_name(path.name + ".damaged"))
    except OSError as error:
        log.warning("%s can't be put aside: %s", path, error)
