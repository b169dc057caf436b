"""Engine log: where a hosted engine's output goes. The engine writes the file itself, so a busy agent never blocks it; the
agent keeps it small and reads its end when the engine has died.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LIMIT_BYTES = 8 << 20
TAIL_BYTES = 16 << 10
TAIL_LINES = 20
TAIL_CHARS = 4000

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_SECRET = re.compile(
    r"(?i)((?:api[-_]?key|token|password|secret|authorization)[\"']?\s*[=:\s]\s*(?:bearer\s+)?)[\"']?[^\s\"',;]{6,}"
)


@dataclass(frozen=True, slots=True)
class EngineLog:
    """One file and its predecessor (`.1`); together at most twice LIMIT_BYTES and what is written between two looks."""

    path: Path
    limit_bytes: int = LIMIT_BYTES

    def open(self) -> IO[bytes]:
        """For the engine to append to; readable by the agent's user only. OSError when the folder is not usable."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags | os.O_NONBLOCK, 0o600)  # opening a pipe would wait for who reads it
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(self.path))
        return os.fdopen(descriptor, "ab", buffering=0)

    def rotate(self) -> None:
        """Once the file is too large, move its content aside. It is emptied in place because the engine holds it open; what is
        written in the very moment between copy and emptying is lost.
        """
        try:
            if self.path.stat().st_size <= self.limit_bytes:
                return
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
            with self.path.open("r+b") as file:
                file.truncate(0)
        except OSError:
            return  # a full disk must not end the supervision; the next look tries again

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def tail(self, since: int = 0) -> str:
        """The last lines written after byte `since`, as plain text without control characters and without secrets."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                start = since if since <= end else 0  # it was emptied since
                file.seek(max(start, end - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [_CONTROL.sub("", line).rstrip() for line in text.replace("\r", "\n").split("\n")]
        kept = "\n".join([line for line in lines if line][-TAIL_LINES:])[-TAIL_CHARS:]
        return _SECRET.sub(r"\1***", kept)
