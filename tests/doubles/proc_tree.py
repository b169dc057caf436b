"""A /proc that a test writes: processes, containers, sockets and network namespaces that this machine has not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class ProcTree:
    """Folders and files as proc(5) describes them. Each number that a test doesn't give is another one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(exist_ok=True)
        self.process(os.getpid(), 1, name="agent")
        self.process(1, 0, name="init")
        (self.root / "self").symlink_to(str(os.getpid()))

    def process(
        self,
        pid: int,
        parent: int,
        *,
        name: str = "python3",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        started: int = 0,
        cpu_ticks: tuple[int, int] = (0, 0),
        pages: int = 1,
        state: str = "S",
        session: int = 0,
        cgroup: str = "0::/",
        inner_pid: int | None = None,
        network: Path | None = None,
    ) -> Path:
        folder = self.root / str(pid)
        for part in ("task", "fd", "ns"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._stat(folder, pid, parent, name, started or 1000 + pid, cpu_ticks, pages, state, session or pid)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in arguments))
        lines = (f"{name}={value}" for name, value in (environment or {}).items())
        (folder / "environ").write_bytes(b"".join(line.encode() + b"\0" for line in lines))
        (folder / "cgroup").write_text(cgroup + "\n")
        inner = "" if inner_pid is None else f"\t{inner_pid}"
        (folder / "status").write_text(f"Name:\t{name}\nPid:\t{pid}\nNSpid:\t{pid}{inner}\n")
        if network is not None:
            for link in (folder / "net", folder / "ns" / "net"):
                link.unlink(missing_ok=True)
                link.symlink_to(network)
        return folder

    def thread(self, pid: int, tid: int, cpu_ticks: tuple[int, int], started: int = 0) -> None:
        folder = self.root / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        self._stat(folder, tid, 1, "a thread", started or 1000 + tid, cpu_ticks, 1, "R", pid)

    def socket(self, pid: int, inode: int) -> None:
        (self.root / str(pid) / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")

    def network(self, name: str, address: str, listeners: Mapping[int, int]) -> Path:
        """A network namespace with one IPv4 address and listening sockets (port -> inode) on any address."""
        folder = self.root.parent / name
        folder.mkdir()
        rows = [
            f"   {n}: 00000000:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 {i} 1"
            for n, (port, i) in enumerate(listeners.items())
        ]
        (folder / "tcp").write_text("\n".join(["  sl  local_address ...", *rows, ""]))
        (folder / "tcp6").write_text("  sl  local_address ...\n")
        (folder / "fib_trie").write_text(f"Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- {address}\n        /32 host LOCAL\n")
        return folder

    @staticmethod
    def _stat(
        folder: Path,
        pid: int,
        parent: int,
        name: str,
        started: int,
        cpu_ticks: tuple[int, int],
        pages: int,
        state: str,
        session: int,
    ) -> None:
        rest = [
            state,
            parent,
            71,
            session,
            72,
            73,
            74,
            75,
            76,
            77,
            78,
            *cpu_ticks,
            81,
            82,
            20,
            0,
            83,
            0,
            started,
            84,
            pages,
            85,
        ]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, rest))}\n")
