"""The kernel's log as it is written: /dev/kmsg, read without ever waiting, from the moment of its opening on.

Form of a record: `priority,sequence,microseconds,flags;text`, then lines that begin with a space (Linux,
Documentation/ABI/testing/dev-kmsg). The sequence number is a record's identity: two records of one text are two.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 16 * 1024  # the kernel's own limit is half of it
READS_A_TURN = 512
RETRY_S = 300.0
LONGEST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Record:
    sequence: int
    text: str


class KernelLog:
    """Records that hold `word`, each once. An idle log costs one system call a turn."""

    def __init__(self, word: str, path: Path = KMSG, retry_s: float = RETRY_S) -> None:
        self.problem = ""  # why it can't be read: "missing", "forbidden" or the system's words; empty when it can
        self._word = word.encode()
        self._path = path
        self._retry_s = retry_s
        self._descriptor: int | None = None
        self._open_at_s = 0.0  # monotonic s
        self._rest = b""
        self._last = -1  # sequence number

    @property
    def readable(self) -> bool:
        return self._descriptor is not None

    def read(self, now: float) -> list[Record]:
        """What came since the last turn; nothing where there is no such log, which is tried again. `now` is monotonic seconds."""
        if self._descriptor is None and (now < self._open_at_s or not self._open(now)):
            return []
        found: list[Record] = []
        for _ in range(READS_A_TURN):
            piece = self._piece(now)
            if piece is None:
                break
            found += self._records(piece)
        return found

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = None

    def _open(self, now: float) -> bool:
        self._open_at_s = now + self._retry_s
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error)
            return False
        with contextlib.suppress(OSError):
            os.lseek(descriptor, 0, os.SEEK_END)  # what was before is not news
        self._descriptor, self._rest, self.problem = descriptor, b"", ""
        return True

    def _piece(self, now: float) -> bytes | None:
        """The next bytes; None when there are none for now."""
        assert self._descriptor is not None
        try:
            return os.read(self._descriptor, RECORD_BYTES) or None
        except BlockingIOError:
            return None
        except OSError as error:
            if (
                error.errno == errno.EPIPE
            ):  # records were overwritten before they were read: the next read goes on after them
                return b""
            self.close()
            self._open_at_s = now + self._retry_s
            self._fail(error)
            return None

    def _fail(self, error: OSError) -> None:
        kinds = {errno.ENOENT: "missing", errno.EPERM: "forbidden", errno.EACCES: "forbidden"}
        self.problem = kinds.get(error.errno or 0) or error.strerror or str(error)

    def _records(self, piece: bytes) -> list[Record]:
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest if len(rest) < RECORD_BYTES else b""
        return [record for line in lines if self._word in line and (record := self._record(line)) is not None]

    def _record(self, line: bytes) -> Record | None:
        """None for a line that is none, or one that was read before."""
        head, found, text = line.partition(b";")
        parts = head.split(b",")
        if not found or len(parts) < 4 or not (parts[1].isdigit() and len(parts[1]) < 20):
            return None
        sequence = int(parts[1])
        if sequence <= self._last:
            return None
        self._last = sequence
        return Record(sequence, text[:LONGEST_TEXT].decode("utf-8", "replace"))
