"""A file that appears whole or not at all: written beside its place under another name, made durable, then renamed."""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from telemetry.messages import say

PIECE_BYTES = 1 << 20
PACKED = (".gz", ".parquet", ".csv", ".md", ".svg")
"""Suffixes of files that can't be had smaller: they are packed already, or nothing here writes them packed."""

GZIP_LEVEL = 4
"""About six times smaller at a third of the time that the library's default takes."""


class CannotCopy(Exception):
    """A file can't be read or written as asked: one line that names it and says what to do."""


def refuse_unless_new(path: Path, *, force: bool, language: str) -> None:
    """CannotCopy for a folder, a device or a pipe, for a place in no folder, and for a file that is there, unless `force`."""
    reason = ""
    if path.is_dir():
        reason = "a_folder"
    elif path.exists() and not path.is_file():
        reason = "not_regular"
    elif path.exists() and not force:
        reason = "exists"
    elif not path.parent.is_dir():
        reason = "no_folder"
    if reason:
        raise CannotCopy(say(f"recording.file.{reason}", language, path=path, folder=path.parent))


def unwritable(path: Path, error: OSError, language: str) -> CannotCopy:
    """The one line for what the system says about writing `path`."""
    key = "unwritable"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        key = "full_unpacked" if path.suffix not in PACKED else "full"
    return CannotCopy(say(f"recording.file.{key}", language, path=path, reason=error.strerror or str(error)))


class WholeFile:
    """Bytes for `path`, which is touched only when the block ends without an exception; else nothing is left.

    What a killed process left behind is overwritten by the next one. Two at once for one place: CannotCopy.
    """

    def __init__(self, path: Path, *, force: bool, language: str) -> None:
        refuse_unless_new(path, force=force, language=language)
        self.path = path
        self.part = path.with_name(f".{path.name}.part")
        self._force = force
        self._language = language
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        try:
            return self._begin()
        except BaseException:  # also a signal between two steps
            self._take_back()
            raise

    def _begin(self) -> IO[bytes]:
        with self._explained():
            place = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            self._file = open(place, "w+b", buffering=PIECE_BYTES)  # noqa: PTH123, SIM115 - closed in __exit__ or _take_back
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(place).st_ino != self.part.stat().st_ino:  # the one before has just put it in its place
                raise BlockingIOError
        except OSError:
            raise CannotCopy(say("recording.file.busy", self._language, path=self.path)) from None
        os.ftruncate(place, 0)
        return self._file

    def _take_back(self) -> None:
        """Leave nothing of a beginning, unless what is there is another's who holds it."""
        if self._file is not None:
            self._file.close()
        with suppress(OSError):
            place = os.open(self.part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.part.unlink()
            finally:
                os.close(place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        placed = False
        try:
            if error is None:
                with self._explained():
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    refuse_unless_new(self.path, force=self._force, language=self._language)
                    self.part.replace(self.path)
                    placed = True
        finally:
            if not placed:
                self.part.unlink(missing_ok=True)
            with suppress(OSError):  # what is still buffered may not fit, either
                self._file.close()
        if isinstance(error, OSError) and error.errno is not None:
            raise unwritable(self.path, error, self._language) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self.path, error, self._language) from None


class Binary(Protocol):
    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Lines:
    """Text lines into a binary file, in large pieces that each end with a whole line; packed, each is a gzip member of its own.

    A file that ends after any piece is a good one, also when packed. `flush` lets out what has gathered.
    """

    def __init__(self, file: Binary, *, packed: bool) -> None:
        self._file = file
        self._packed = packed
        self._gathered: list[str] = []
        self._size = 0
        self.bytes = 0

    def put(self, line: str) -> None:
        """`line` is without its newline."""
        self._gathered.append(line)
        self._size += len(line)
        if self._size >= PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            piece = ("\n".join(self._gathered) + "\n").encode("utf-8")
            if self._packed:
                piece = gzip.compress(piece, compresslevel=GZIP_LEVEL, mtime=0)
            self._gathered, self._size = [], 0
            self._file.write(piece)
            self.bytes += len(piece)
        self._file.flush()


@contextmanager
def opened(path: Path, *, growing: bool, force: bool, language: str) -> Iterator[Lines]:
    """Lines for `path`; `-` is stdout. A `growing` file is there from the start, and what is in it is whole lines."""
    packed = path.suffix == ".gz"
    if str(path) == "-":
        lines = Lines(sys.stdout.buffer, packed=False)
        yield lines
        lines.flush()
    elif growing:
        refuse_unless_new(path, force=force, language=language)
        try:
            with path.open("wb", buffering=0) as raw:
                lines = Lines(Unbroken(raw), packed=packed)
                try:
                    yield lines
                finally:
                    lines.flush()
        except OSError as error:
            raise unwritable(path, error, language) from None
    else:
        with WholeFile(path, force=force, language=language) as file:
            lines = Lines(file, packed=packed)
            yield lines
            lines.flush()


class Unbroken:
    """A file in which a piece that did not fit whole is taken back, so that it always ends with a whole one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, data: bytes, /) -> None:
        start = self._raw.tell()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._raw.seek(start)
                self._raw.truncate()
            raise

    def flush(self) -> None:
        self._raw.flush()
