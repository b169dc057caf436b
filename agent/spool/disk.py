"""The system calls that the spool stands on, so that a test can make each of them fail, crash or forget."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


class Disk:
    """Thin over `os`. Every method may raise OSError."""

    def create(self, path: Path) -> int:
        """A new file, opened for appending; its file descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)

    def write(self, descriptor: int, data: bytes) -> int:
        """How many bytes were written; fewer than given when the disk fills up."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Return when the bytes are on the medium."""
        os.fdatasync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, path: Path) -> bytes:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )  # opening a pipe would wait for who writes it
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def replace(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in the folder are on the medium."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def identity(self, path: Path) -> tuple[int, int] | None:
        """What stands there now, as (device, inode); None for nothing."""
        try:
            state = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return state.st_dev, state.st_ino

    def free(self, folder: Path) -> tuple[int, int]:
        """(bytes that this user may still take, bytes in all) of the file system."""
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


def write_whole(disk: Disk, descriptor: int, data: bytes) -> None:
    """Write all of `data` or raise OSError; what was written of it before stays."""
    view = memoryview(data)
    while view:
        view = view[disk.write(descriptor, bytes(view)) :]


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Put `data` in `path` so that after any crash either the old or the new content is there. OSError leaves the old one."""
    fresh = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(fresh)
    descriptor = disk.create(fresh)
    try:
        write_whole(disk, descriptor, data)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.replace(fresh, path)
    disk.sync_folder(path.parent)
