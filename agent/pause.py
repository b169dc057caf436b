"""Pause: the agent lets go of its devices for a bounded time, because a file in its state folder asks for it.

The file is empty: the time of its last change is the moment at which the pause ends, so that looking costs one stat, the agent
need not be allowed to read what another user wrote, and whoever may write into the state folder, and nobody else, may ask.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

FILE = "pause"
LONGEST_S = 86_400.0
"""A pause that was asked for longer ends after a day: a typing error must not blind a host for a year."""


class Pause:
    """Looks at the file. `until_s`: the end of the present pause in seconds since the epoch; None while there is none."""

    def __init__(
        self,
        folder: Path,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.until_s: float | None = None
        self._path = folder / FILE
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._asked: tuple[int, int] | None = None  # the file as it was when this pause began
        self._ends_s = 0.0  # monotonic, so that a step of the clock neither ends nor prolongs it

    def look(self) -> bool:
        """Whether a pause began, changed its end or ended since the last look."""
        before = self.until_s
        found = self._request()
        if found is None:
            self.until_s = None
            self._asked = None
        elif found != self._asked:
            self._asked = found
            left_s = min(LONGEST_S, found[1] / 1e9 - self._wall_s())
            self._ends_s = self._monotonic_s() + left_s
            self.until_s = self._wall_s() + left_s if left_s > 0 else None
        elif self.until_s is not None and self._monotonic_s() >= self._ends_s:
            self.until_s = None
            with contextlib.suppress(OSError):
                self._path.unlink()
        return self.until_s != before

    def _request(self) -> tuple[int, int] | None:
        """(inode, end in ns) of the file; None where there is none, or what is there is not of this user or root."""
        try:
            found = self._path.lstat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
            return None
        return found.st_ino, found.st_mtime_ns


def ask(folder: Path, seconds: float) -> float:
    """Ask the agent of this state folder for a pause of so many seconds; its end since the epoch. OSError when the folder can't be
    written.
    """
    until_s = time.time() + min(seconds, LONGEST_S)
    draft = folder / f".{FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.utime(descriptor, (until_s, until_s))
        draft.replace(folder / FILE)
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
    return until_s


def withdraw(folder: Path) -> bool:
    """End a pause early; False when none was asked for. OSError when the folder can't be written."""
    try:
        (folder / FILE).unlink()
    except FileNotFoundError:
        return False
    return True


def moment(until_s: float) -> str:
    """The end of a pause as people and programs read it: ISO 8601 in this host's time zone."""
    return datetime.fromtimestamp(until_s, UTC).astimezone().isoformat(timespec="seconds")
