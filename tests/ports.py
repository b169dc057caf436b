"""Loopback ports that nobody takes between the moment they are picked and the moment a server listens at them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

LOWEST = 12_000
"""Below it are the ports that well-known servers, PairScope's own among them, listen at."""


def _candidates() -> Iterator[int]:
    """Ports below those that the kernel hands out itself, each once, from a place of this process's own."""
    first_of_the_kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(LOWEST, max(first_of_the_kernels, LOWEST + 4000))
    start = random.Random(os.getpid()).randrange(len(ports))  # seeded: a test that seeds `random` changes nothing here
    yield from itertools.chain(ports[start:], ports[:start])


_LEFT = _candidates()


def free_port() -> int:
    """A port, for TCP and UDP, that is free and is neither picked again nor given to a connection by the kernel."""
    for port in _LEFT:
        with contextlib.suppress(OSError), socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is left")
