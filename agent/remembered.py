"""Remembered: a small JSON file of the state folder, read so that nothing that stands in its place holds up the agent or ends it,
and written no sooner than what was told of its content is safe.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path

from agent.quiet import QuietLog
from agent.spool.disk import Disk, replace_file

log = logging.getLogger(__name__)

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


class RememberedFile:
    """What a collector knows from run to run, and compares with what it sees to tell of a change.

    A change that is remembered before its event is on disk is lost by a kill in between. So `put` only says what the file should
    hold once the samples of a tick are safe, and `keep` writes it when they are. Without a `path` nothing is written. Thread-safe.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._put: list[tuple[int, str]] = []  # ascending
        self._quiet = QuietLog(log)

    def put(self, content: object, tick: int) -> None:
        """`content` goes with the samples of the tick of this number."""
        if self.path is None:
            return
        text = json.dumps(content, indent=1, sort_keys=True)
        with self._lock:
            self._put = [entry for entry in self._put if entry[0] < tick] + [(tick, text)]

    def keep(self, tick: int) -> None:
        """The samples of all ticks up to this one are safe. Never raises: what can't be written is tried again the next time."""
        with self._lock:
            due = [entry for entry in self._put if entry[0] <= tick]
        if not due or self.path is None:
            return
        try:
            replace_file(Disk(), self.path, due[-1][1].encode())
        except OSError as error:
            self._quiet.warning("write", "%s can't be written: %s", self.path, error.strerror or error)
            return
        with self._lock:
            self._put = [entry for entry in self._put if entry not in due]
