"""The file of the embedded store: opening, connections for many threads and processes, and what to do when it is damaged.

Source of the rules about WAL, read-only openings and moved files: sqlite.org/wal.html and howtocorrupt.html.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from telemetry.store.interface import StoreDown, StoreError

log = logging.getLogger(__name__)

APPLICATION_ID = 0x50616972  # "Pair", in the file's header: tells our files from others' databases
SCHEMA_VERSION = 2  # 1: raw samples; 2: rollups and their marks beside them
BUSY_S = 5.0
CHECK_S = 0.5
_MAGIC = b"SQLite format 3\0"
_IDLE_CONNECTIONS = 8
RESERVE_BYTES = 16 * 2**20
"""Of the disk, kept in a file of its own: what a deletion writes into the log before it makes room. Less on a small disk."""
_RESERVE_SHARE = 8

_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (
    id INTEGER PRIMARY KEY,
    measurement TEXT NOT NULL,
    tags TEXT NOT NULL,
    UNIQUE (measurement, tags)
)
"""


class Full(StoreDown):
    """The disk has no room for what was to be written."""


class Replaced(StoreDown):
    """The file was deleted or replaced while it was written: what was written may be gone with it, and has to be written again."""


class Parts(NamedTuple):
    """Which files lie at the store's place, each by device and inode."""

    main: tuple[int, int] | None
    wal: tuple[int, int] | None
    shm: tuple[int, int] | None


class Damaged(StoreError):
    """The file's content is broken; `set_aside` makes room for a new one."""


def check_layout(connection: sqlite3.Connection, path: Path) -> None:
    """StoreError for a database of another program, and for one that a later version has made."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise _error(path, "another_program")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise _error(path, "newer", version=version, known=SCHEMA_VERSION)


def check_parts(path: Path) -> None:
    """StoreError where a folder lies in the place of the log or its index, of which SQLite says only `disk I/O error`."""
    for suffix in ("-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.is_dir():
            raise _error(path, "part_is_a_folder", place=part)


def _error(path: Path, key: str, kind: type[StoreError] = StoreError, **values: object) -> StoreError:
    return kind.of(f"store.file.{key}", store=path, folder=path.parent, uid=os.getuid(), **values)


class DatabaseFile:
    """One SQLite file in WAL mode. Any number of threads and processes read and write it at once.

    Where this user may only read, it is opened read-only, also when no writer runs. StoreError says why it can't be opened.
    A file that is deleted or replaced while it is open is noticed at the next use, and before a write counts as done.
    """

    def __init__(self, path: Path, lay_out: Callable[[sqlite3.Connection], None]) -> None:
        """`lay_out` makes the tables of this layout in a new file, or beside those of an older one."""
        self.path = path
        self._lay_out = lay_out
        self.writable = True
        self.generation = 0  # grows when the file was replaced or a write undone: whatever was remembered of it is void
        self._write_lock = threading.RLock()
        self._lock = threading.Lock()  # guards the fields below
        self._idle: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._identity: Parts | None = None  # of what the writer has open
        self._folders: dict[Path, os.stat_result] = {}
        self._mode: int | None = None  # of the file, for one that takes its place
        self._said = ""  # of a file that was deleted or replaced, until another one is open
        self._held_s = 0.0  # how long the last write transaction was
        self._closed = False
        self._open()

    # --- opening

    def _open(self) -> None:
        path = self.path
        try:
            if path.is_dir():
                raise self._error("a_folder")
            if path.exists() and not path.is_file():  # SQLite would wait for whoever writes into a pipe
                raise self._error("no_file")
            check_parts(path)
            self._make_folders()
            with self._folder_lock():
                self._open_locked()
        except PermissionError as error:
            raise self._error("no_permission", place=error.filename) from None
        except OSError as error:
            raise self._of_system(error) from None
        if not self.writable:
            with self.reading() as connection:
                self._check_version(connection)
            return
        self._check_writer()

    def _check_writer(self) -> None:
        try:
            with self._translated():
                assert self._writer is not None
                self._check_pages(self._writer)
        except Damaged as error:
            self.set_aside(str(error))

    def _make_folders(self) -> None:
        """Those that are missing. One that was there before gets the mode and, where we may, the owner that it had."""
        for folder in reversed(self.path.parents):
            if folder.exists():
                self._folders[folder] = folder.stat()
                continue
            before = self._folders.get(folder)
            folder.mkdir(exist_ok=True)
            if before is not None:
                with contextlib.suppress(PermissionError):
                    os.chown(folder, before.st_uid, before.st_gid)
                folder.chmod(before.st_mode & 0o7777)

    def _open_locked(self) -> None:
        path = self.path
        kind = self._kind()
        if kind == "foreign":
            raise self._error("foreign")
        folder_writable = os.access(path.parent, os.W_OK | os.X_OK)
        self.writable = folder_writable and (kind == "absent" or os.access(path, os.W_OK))
        if not self.writable:
            if kind == "absent":
                raise self._error("folder_unwritable")
            return
        if kind == "damaged":
            self._replace(f"store {path}: is damaged (its first page is not that of a database)")
        try:
            self._initialise()
        except Damaged as error:
            self._replace(str(error))
            self._initialise()

    def _error(self, key: str, kind: type[StoreError] = StoreError, **values: object) -> StoreError:
        return _error(self.path, key, kind, **values)

    def _of_system(self, error: OSError, kind: type[StoreError] = StoreError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._error("full", Full)
        if error.errno == errno.EROFS:
            return self._error("folder_unwritable")
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            return self._error("no_folder", place=error.filename or self.path.parent)
        return self._error("system", kind, reason=error.strerror or str(error))

    def _kind(self) -> str:
        """absent, ours (perhaps), damaged, or foreign: a file that never was a database must not be moved away."""
        if not self.path.exists():
            return "absent"
        if not self._is_no_database():
            return "ours"
        with self.path.open("rb") as file:
            head = file.read(16)
        if head in (_MAGIC, b""):
            return "ours"
        had_wal = self._part("-wal").exists()
        return "damaged" if had_wal or not head.strip(b"\0") else "foreign"

    def _is_no_database(self) -> bool:
        """As SQLite itself says. Closing a descriptor of our own would drop every lock that this process holds on the file (a rule of
        POSIX, howtocorrupt.html section 2.2); the next process to close it would then delete the WAL that our writer writes.
        """
        try:
            with contextlib.closing(
                sqlite3.connect(f"file:{quote(str(self.path))}?mode=ro", uri=True, timeout=BUSY_S)
            ) as connection:
                connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.Error as error:
            return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB
        return False

    def _initialise(self) -> None:
        """Connect the writer, and lay the file out if it is new. For who holds the folder's lock."""
        with self._translated():
            connection = self._connect("rwc")
            try:
                if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
                    if self._mode is not None:
                        self.path.chmod(self._mode)  # before the WAL is made, which takes it over
                    connection.execute("PRAGMA page_size=8192")
                    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
                connection.execute("PRAGMA journal_mode=WAL")
                self._check_version(connection)
                if connection.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute(_SCHEMA)
                    self._lay_out(connection)
                    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                    connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
            self._take_as_writer(connection)

    def _take_as_writer(self, connection: sqlite3.Connection) -> None:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()  # opens the WAL
        self._identity = self._on_disk()
        self._mode = self.path.stat().st_mode & 0o777
        self._writer = connection

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Raise Damaged if the file is broken as far as CHECK_S let us look: better now than after writing into it.

        Keys that are out of order are looked for too (quick_check does not): a new row would go where no reader looks.
        """
        deadline_s = time.monotonic() + CHECK_S
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 10_000)
        try:
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            found = "ok"
        finally:
            connection.set_progress_handler(None, 0)
            connection.execute("PRAGMA shrink_memory")  # pages that only the check has read
        if found != "ok":
            raise Damaged(f"store {self.path}: is damaged ({' '.join(str(found).split())})")

    def _check_version(self, connection: sqlite3.Connection) -> None:
        check_layout(connection, self.path)

    def _connect(self, mode: str = "rw") -> sqlite3.Connection:
        if not self.writable:
            # without a writer there may be no -shm file, and a reader can't make one: then nothing changes, so read it as it is
            mode = "ro" if self._has_wal() else "ro&immutable=1"
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode={mode}",
            uri=True,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cache_size=-16384")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute(
            "PRAGMA secure_delete=OFF"
        )  # on by default in Debian: each row that leaves would be overwritten too
        return connection

    def _has_wal(self) -> bool:
        wal = self._part("-wal")
        return wal.exists() and wal.stat().st_size > 0

    def _part(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _on_disk(self) -> Parts:
        return Parts(*(_inode(self._part(suffix)) for suffix in ("", "-wal", "-shm")))

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """Two processes must not make or replace the file at once. Where the folder can't be locked, SQLite's own locks remain."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    # --- use

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection inside a read transaction: all queries see one state. Many threads may read at once."""
        self._follow()
        with self._translated():
            with self._lock:
                self._refuse_closed()
                connection = self._idle.pop() if self._idle else None
                generation = self.generation
            connection = connection or self._connect()
            try:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
            with self._lock:
                keep = self.writable and not self._closed and generation == self.generation
                if keep and len(self._idle) < _IDLE_CONNECTIONS:
                    self._idle.append(connection)
                    return
            connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The connection that writes, inside an immediate transaction: committed as a whole or not at all."""
        with self._write_lock:
            self._follow()
            with self._translated():
                self._refuse_closed()
                if not self.writable:
                    raise self._error("only_read")
                if self._writer is None:
                    self._take_as_writer(self._connect())
                connection = self._writer
                assert connection is not None
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    began_s = time.monotonic()
                    yield connection
                    connection.execute("COMMIT")
                    self._held_s = time.monotonic() - began_s
                except BaseException:
                    # after an I/O error SQLite may have rolled back by itself; a new connection knows nothing of it
                    self._writer = None
                    with self._lock:
                        self.generation += 1
                    connection.close()
                    raise
            if self._on_disk() != self._identity:
                raise self._error("replaced", Replaced)

    def keep_reserve(self) -> None:
        """Take the reserve, where it is not there and the disk has plenty of room."""
        with contextlib.suppress(OSError):
            reserve, disk = self._part("-reserve"), os.statvfs(self.path.parent)
            size = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // _RESERVE_SHARE)
            if reserve.exists() or disk.f_bavail * disk.f_frsize < 4 * size:
                return
            handle = os.open(reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode or 0o600)
            try:
                os.posix_fallocate(handle, 0, size)
            except OSError:
                reserve.unlink()
            finally:
                os.close(handle)

    def spend_reserve(self) -> None:
        """Give the disk the room of the reserve, where there is one."""
        with contextlib.suppress(OSError):
            self._part("-reserve").unlink()

    def shrink(self) -> None:
        """Give freed pages and the log's room back to the disk, as far as no reader is in the way and the disk lets us."""
        with self._write_lock, contextlib.suppress(sqlite3.OperationalError):
            if self._writer is None:
                self._take_as_writer(self._connect())
            assert self._writer is not None
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def give_way(self) -> None:
        """Between pieces of a long work: as long a pause as the last piece took, or others would hardly ever find the lock free."""
        time.sleep(min(self._held_s, 0.5))

    def set_aside(self, reason: str) -> None:
        """Rename a damaged file (and its WAL) and start a new one. Nothing happens if another process has done so already."""
        if not self.writable:
            raise Damaged(reason)
        with self._write_lock, self._folder_lock():
            self._replace(reason)
            self._initialise()

    def _replace(self, reason: str) -> None:
        """Move the file away, unless another process has done so. For who holds the folder's lock."""
        seen, self._identity = self._identity, None
        self._drop_connections()
        now = self._on_disk()
        if seen is not None and (seen.main != now.main or now.wal not in (None, seen.wal)):
            return
        suffix = time.strftime(".damaged-%Y%m%dT%H%M%SZ", time.gmtime())
        aside = self.path.with_name(self.path.name + suffix)
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}{suffix}-{number}")
        try:
            for part in ("-shm", "-wal", ""):
                old = self._part(part)
                if old.exists():
                    old.rename(aside.with_name(aside.name + part))
        except OSError as error:
            raise self._error("damaged_stays", reason=error.strerror) from None
        log.warning("%s; it is kept as %s and a new one is begun", reason, aside)

    def _follow(self) -> None:
        """If the file was replaced or removed under us, go on with the one that is there now, or a new one."""
        if self._closed or not self.writable or self._identity is None or self._on_disk() == self._identity:
            return
        with self._write_lock:
            with self._translated():
                self._make_folders()
                with self._folder_lock():
                    replaced = self._reopen()
            if replaced:
                self._check_writer()

    def _reopen(self) -> bool:
        """Leave what we have open for what is there now; whether that is another file. For who holds the folder's lock."""
        was, now = self._identity, self._on_disk()
        if was is None or was == now or self._closed:
            return False
        if was.main == now.main:
            self._leave_log(was, now)
        else:
            if now.main is None:
                self._say("was deleted while in use; what it held is gone, and a new one is begun")
            else:
                self._say("was replaced by another file, which is gone on with")
            self._drop_connections()
            for suffix, before, here in (("-wal", was.wal, now.wal), ("-shm", was.shm, now.shm)):
                if here is not None and here == before:  # of the old file: SQLite would play it into the new one
                    self._part(suffix).unlink(missing_ok=True)
        self._open_locked()
        if not self.writable:
            self.writable = True  # for the next try
            raise self._error("only_read")
        self._said = ""
        return now.main is not None and was.main != now.main

    def _say(self, what: str) -> None:
        """Once, however often it is tried until it works."""
        if what != self._said:
            self._said = what
            log.warning("store %s: %s", self.path, what)

    def _leave_log(self, was: Parts, now: Parts) -> None:
        """The -wal or -shm has gone from beside the file. As long as a connection is open, no SQLite does that."""
        writer = self._writer
        nobody_came = now.wal is None and now.shm in (None, was.shm)
        if writer is not None:
            self._say("its -wal or -shm file was deleted while in use; they are parts of the store")
            if nobody_came:  # we still have the deleted log open: bring what it holds into the file
                with contextlib.suppress(sqlite3.Error):
                    writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._drop_connections()
        if writer is not None and nobody_came:  # the index of a log that is no more
            self._part("-shm").unlink(missing_ok=True)

    def _drop_connections(self) -> None:
        with self._lock:
            self.generation += 1
            connections, self._idle = self._idle, []
            if self._writer is not None:
                connections.append(self._writer)
                self._writer = None
        for connection in connections:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise self._error("closed")

    def close(self) -> None:
        """Close all connections; calls that are under way end first or fail."""
        with self._write_lock:
            with self._lock:
                self._closed = True
            self._drop_connections()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._as_store_error(error) from error
        except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message, and Python can't read that
            raise Damaged(f"store {self.path}: is damaged (its schema is not text)") from error
        except OSError as error:
            raise self._of_system(error, StoreDown) from error

    def _as_store_error(self, error: sqlite3.Error) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        where = f"store {self.path}"
        broken = ("decode to UTF-8", "unsupported file format", "malformed")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or any(words in str(error) for words in broken):
            return Damaged(f"{where}: is damaged ({error})")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._error("busy", StoreDown, seconds=BUSY_S)
        if code == sqlite3.SQLITE_FULL:
            return self._error("full", Full)
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM):
            return self._error("disk", StoreDown, reason=error)
        if code == sqlite3.SQLITE_READONLY:
            return self._error("unwritable")
        if code == sqlite3.SQLITE_CANTOPEN:
            return self._error("unopenable", StoreDown)
        return self._error("other", reason=error)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
