"""Process table: what /proc tells of the processes of this machine. Every process may be gone by the time it is asked about."""
# ruff: noqa: PTH115, PTH116, PTH123, PTH208 - thousands of small files are read at a time; a Path costs as much as the read

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Known = TypeVar("Known")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, linux/include/linux/proc_ns.h
_CONTAINER = re.compile(r"(?:^|[/\-:.])([0-9a-f]{64})(?:\.scope)?(?=$|[/\n])", re.MULTILINE)
_READ_LIMIT_BYTES = 1 << 20
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Process:
    """One process or thread at one moment. (`pid`, `started`) is one process for ever; a pid alone is used again."""

    pid: int
    parent: int
    session: int
    started: int  # clock ticks since boot
    cpu_s: float  # user and system, its own
    rss_bytes: float
    is_zombie: bool

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started


class ProcessTable:
    """Reads the /proc at `proc`. What can't be read (gone, or not permitted) is None or empty, never an error."""

    def __init__(self, proc: str = "/proc", *, shows_host_pids: bool | None = None) -> None:
        """`shows_host_pids`: whether the pids here are the host's, as a GPU's driver names them; by default it is found out."""
        self.proc = proc
        self.shows_host_pids = self._is_initial() if shows_host_pids is None else shows_host_pids
        self._arguments: dict[tuple[int, int], tuple[str, ...]] = {}
        self._environments: dict[tuple[int, int], Mapping[str, str]] = {}

    def pids(self) -> list[int]:
        return _numbers(self.proc)

    def process(self, pid: int) -> Process | None:
        return _parsed(_stat(f"{self.proc}/{pid}/stat"))

    def all(self) -> dict[int, Process]:
        found = (self.process(pid) for pid in self.pids())
        return {process.pid: process for process in found if process is not None}

    def threads(self, pid: int) -> list[Process]:
        folder = f"{self.proc}/{pid}/task"
        found = (_parsed(_stat(f"{folder}/{tid}/stat")) for tid in _numbers(folder))
        return [thread for thread in found if thread is not None]

    def arguments(self, process: Process) -> tuple[str, ...]:
        """Its command line; read once for each process, so that a title that it gives itself later doesn't count."""
        known = self._arguments.get(process.key)
        if known is None:
            text = self._read(f"{self.proc}/{process.pid}/cmdline").decode("utf-8", "replace")
            known = tuple(part for part in text.split("\0") if part)
            if known:
                _remember(self._arguments, process.key, known)
        return known

    def environment(self, process: Process) -> Mapping[str, str]:
        """What it was started with; empty where it may not be read, or was overwritten by a title."""
        known = self._environments.get(process.key)
        if known is None:
            text = self._read(f"{self.proc}/{process.pid}/environ").decode("utf-8", "replace")
            known = dict(part.split("=", 1) for part in text.split("\0") if "=" in part)
            _remember(self._environments, process.key, known)
        return known

    def container(self, pid: int | str) -> str:
        """The id of its container, as the host sees it; empty for none, or where only the host could tell."""
        found = _CONTAINER.findall(self._read(f"{self.proc}/{pid}/cgroup").decode("utf-8", "replace"))
        return found[-1] if found else ""

    def namespace(self, pid: int | str, kind: str) -> int | None:
        """The number of its namespace of this kind (pid, net); None where it may not be read."""
        try:
            return os.stat(f"{self.proc}/{pid}/ns/{kind}").st_ino
        except OSError:
            return None

    def inner_pid(self, pid: int) -> int | None:
        """Its pid in the innermost pid namespace (NSpid)."""
        for line in self._read(f"{self.proc}/{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                numbers = line.split()[1:]
                return int(numbers[-1]) if numbers and numbers[-1].isdigit() else None
        return None

    def sockets(self, pid: int) -> set[int]:
        """The inodes of its open sockets."""
        folder = f"{self.proc}/{pid}/fd"
        found = set()
        try:
            for name in os.listdir(folder):
                link = _link(f"{folder}/{name}")
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
        except OSError:
            return found
        return found

    def text(self, *parts: object) -> str:
        """A file below /proc as text; empty where it can't be read."""
        return self._read("/".join((self.proc, *map(str, parts)))).decode("utf-8", "replace")

    def _is_initial(self) -> bool:
        return self.namespace("self", "pid") == _INITIAL_PID_NAMESPACE

    def _read(self, path: str) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                pieces = []
                left = _READ_LIMIT_BYTES
                while left > 0 and (piece := file.read(min(left, 65536))):
                    pieces.append(piece)
                    left -= len(piece)
                return b"".join(pieces)
        except OSError:  # ENOENT and ESRCH: it ended between the list and the read
            return b""


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> dict[int, Process]:
    """The roots and all that they started, and those started, by pid."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, Process] = {}
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = processes[pid]
            waiting += children.get(pid, ())
    return found


def ancestors(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """Its parent, its parent's parent and so on."""
    found: list[int] = []
    while (process := processes.get(pid)) is not None and process.parent > 0 and process.parent not in found:
        pid = process.parent
        found.append(pid)
    return found


def _stat(path: str) -> bytes:
    """One call for each of what may be thousands of files: a stat comes in one piece."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:
        return b""
    finally:
        os.close(file)


def _parsed(stat: bytes) -> Process | None:
    """proc(5), /proc/PID/stat: the name stands in brackets and may hold anything, brackets and spaces too."""
    start, end = stat.find(b"("), stat.rfind(b")")
    rest = stat[end + 2 :].split()
    if start < 0 or end < 0 or len(rest) < 22:
        return None
    try:
        return Process(
            pid=int(stat[:start]),
            parent=int(rest[1]),
            session=int(rest[3]),
            started=int(rest[19]),
            cpu_s=(int(rest[11]) + int(rest[12])) / _TICKS_PER_S,
            rss_bytes=float(int(rest[21]) * _PAGE_BYTES),
            is_zombie=rest[0] in (b"Z", b"X"),
        )
    except ValueError:
        return None


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _remember(memory: dict[tuple[int, int], Known], key: tuple[int, int], known: Known) -> None:
    if len(memory) >= _REMEMBERED:
        memory.clear()
    memory[key] = known
