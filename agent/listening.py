"""Listening: which process answers at an address of this machine, also from inside a container."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from urllib.parse import urlsplit

import psutil

from agent.process_table import Process, ProcessTable
from telemetry.lineprotocol import printable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

CONNECT_TIMEOUT_S = 0.5
_LISTEN = "0A"  # TCP_LISTEN, linux/include/net/tcp_states.h


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening socket."""

    address: Address
    port: int
    inode: int


class Listening:
    """Finds processes by the sockets that they listen on. It reads many files: not for every tick."""

    def __init__(
        self,
        table: ProcessTable,
        *,
        resolve: Callable[[str], list[Address]] | None = None,
        own_addresses: Callable[[], set[Address]] | None = None,
    ) -> None:
        self._table = table
        self._resolve = resolve or resolved
        self._own_addresses = own_addresses or addresses_of_this_machine

    def holder(self, url: str, processes: dict[int, Process], likely: Iterable[int] = ()) -> int | None:
        """The pid that listens at `url`: the topmost one where a parent shares the socket with its children. None where nobody
        does, it is another machine's address, or its socket may not be seen.

        `likely` are looked at first. Docker's proxy is seen through to the container's own process.
        """
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        addresses = self._resolve(parts.hostname or "")
        own = self._own_addresses()
        for address in addresses:
            if address.is_loopback or address.is_unspecified or address in own:
                pid = self._holder_here(address, port, processes, likely)
            else:
                pid = self._holder_elsewhere(address, port, processes)
            if pid is not None:
                return pid
        return None

    def _holder_here(
        self, address: Address, port: int, processes: dict[int, Process], likely: Iterable[int]
    ) -> int | None:
        inodes = _best(address, port, self._listeners("self"))
        pid = self._topmost(inodes, processes, likely)
        if pid is None:
            return None
        behind = _proxied(self._table.arguments(processes[pid]))
        return pid if behind is None else self._holder_elsewhere(*behind, processes)

    def _holder_elsewhere(self, address: Address, port: int, processes: dict[int, Process]) -> int | None:
        """In the network namespaces of other processes. Where two of them have this address, nobody can say which is meant."""
        seen = {self._table.namespace("self", "net"), None}
        found: set[int] = set()
        members: dict[int, list[int]] = {}
        for pid in processes:
            namespace = self._table.namespace(pid, "net")
            if namespace is not None and namespace not in seen:
                members.setdefault(namespace, []).append(pid)
        for pids in members.values():
            listeners = [listener for listener in self._listeners(pids[0]) if listener.port == port]
            if listeners and address in self._addresses(pids[0]):
                inodes = _best(address, port, listeners)
                holder = self._topmost(inodes, {pid: processes[pid] for pid in pids}, ())
                if holder is not None:
                    found.add(holder)
        return found.pop() if len(found) == 1 else None

    def _topmost(self, inodes: set[int], processes: dict[int, Process], likely: Iterable[int]) -> int | None:
        if not inodes:
            return None
        newest = sorted(processes, key=lambda pid: -processes[pid].started)
        for pid in dict.fromkeys((*likely, *newest)):
            if pid in processes and inodes & self._table.sockets(pid):
                parent = processes[pid].parent
                while parent in processes and parent > 1 and inodes & self._table.sockets(parent):
                    pid, parent = parent, processes[parent].parent
                return pid
        return None

    def _listeners(self, pid: int | str) -> list[Listener]:
        return [
            listener
            for name in ("tcp", "tcp6")
            for line in self._table.text(pid, "net", name).splitlines()[1:]
            if (listener := _listener(line)) is not None
        ]

    def _addresses(self, pid: int) -> set[Address]:
        """The addresses that are local in a process's network namespace."""
        found: set[Address] = set()
        last = ""
        for line in self._table.text(pid, "net", "fib_trie").splitlines():
            words = line.split()
            if words[:1] == ["|--"] and len(words) > 1:
                last = words[1]
            elif words == ["/32", "host", "LOCAL"]:
                found.update(_address(last))
        for line in self._table.text(pid, "net", "if_inet6").splitlines():
            digits = line.split(" ", 1)[0]
            if len(digits) == 32:
                found.update(_address(":".join(digits[i : i + 4] for i in range(0, 32, 4))))
        return found


def who_listens(url: str) -> str | None:
    """Who answers at an engine's address although the engine does not run: "program, pid 7", empty where that can't be seen; None
    for nobody. Started all the same, the engine would end at once, and the other's health be taken for its own.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError):
        return None
    table = ProcessTable()
    processes = table.all()
    pid = Listening(table).holder(url, processes)
    if pid is None:
        return ""
    program = PurePath((table.arguments(processes[pid]) or ("?",))[0]).name
    return f"{printable(program)[:64]}, pid {pid}"


def resolved(host: str) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(address for entry in found for address in _address(str(entry[4][0]))))


def addresses_of_this_machine() -> set[Address]:
    try:
        interfaces = psutil.net_if_addrs().values()
    except OSError:
        return set()
    return {address for entries in interfaces for entry in entries for address in _address(entry.address)}


def _address(text: str) -> Iterator[Address]:
    try:
        yield ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return


def _listener(line: str) -> Listener | None:
    """One line of /proc/net/tcp or tcp6: addresses are 32-bit words in the machine's own byte order."""
    words = line.split()
    if len(words) < 10 or words[3] != _LISTEN:
        return None
    digits, _, port = words[1].partition(":")
    try:
        raw = bytes.fromhex(digits)
        if sys.byteorder == "little":
            raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
        address: Address = ipaddress.ip_address(raw)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return Listener(address, int(port, 16), int(words[9]))
    except ValueError:
        return None


def _best(address: Address, port: int, listeners: Iterable[Listener]) -> set[int]:
    """The sockets that get a connection to `address`: those of that very address before those of any address."""
    mine = [listener for listener in listeners if listener.port == port]
    exact = {listener.inode for listener in mine if listener.address == address}
    same = {entry.inode for entry in mine if entry.address.is_unspecified and entry.address.version == address.version}
    both = {entry.inode for entry in mine if entry.address == ipaddress.IPv6Address(0)}  # IPv6 any takes IPv4, too
    return exact or same or (both if address.version == 4 else set())


def _proxied(arguments: tuple[str, ...]) -> tuple[Address, int] | None:
    """The container's address behind Docker's userland proxy; None for any other program."""
    if not arguments or PurePath(arguments[0]).name != "docker-proxy":
        return None
    said = dict(pairwise(arguments))
    port = said.get("-container-port", "")
    for address in _address(said.get("-container-ip", "")):
        if port.isdigit():
            return address, int(port)
    return None
