"""The steps as a JSON Lines file: a thread of its own writes, so that a slow disk delays no step."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from engine.steplog import StepLog

WRITE_EVERY_S = 0.5

log = logging.getLogger("pairscope.engine")


class StepFile:
    """Follows a log into `path`. When that holds half of `most_bytes` it becomes `path`.1, and what was there before is gone.

    Steps that left the ring before they could be written are told as {"skipped": count}. The file is its user's alone.
    """

    def __init__(self, steps: StepLog, path: Path, most_bytes: int) -> None:
        self._log = steps
        self._path = path
        self._most_bytes = most_bytes // 2
        self._next = 0
        self._stopping = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._follow, name="step-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Write what is left, for so long at most."""
        self._stopping.set()
        self._thread.join(within_s)

    def _follow(self) -> None:
        while not self._stopping.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        """Append what is new. A fault is logged once, until it is over; what could not be written is tried again."""
        steps = self._log.since(self._next)
        if not steps:
            return
        lines = [step.line() for step in steps]
        if (skipped := steps[0].number - self._next) > 0:
            lines.insert(0, f'{{"skipped":{skipped}}}')
        try:
            self._append("".join(line + "\n" for line in lines).encode())
        except OSError as error:
            if not self._failed:
                log.warning("the step log %s can't be written: %s", self._path, error.strerror or error)
            self._failed = True
            return
        self._failed = False
        self._next = steps[-1].number + 1

    def _append(self, data: bytes) -> None:
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            if size and size + len(data) > self._most_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                os.close(descriptor)
                descriptor = self._open()
                size = 0
            data = data if len(data) <= self._most_bytes else data[data.index(b"\n", -self._most_bytes) + 1 :]
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError:
                os.ftruncate(descriptor, size)  # a disk that is full takes half a line: none is better
                raise
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)
