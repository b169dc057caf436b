"""Deadline: HTTP in which connecting, TLS, headers and body together end in time, however slowly the other side drips."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpcore
import httpx


class Deadline:
    """The moment by which the present request must be over. One request at a time: `begin` it before each.

    httpx's own timeouts are for each read, so an endpoint that sends a byte now and then would never meet one.
    """

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._until_s = monotonic() + seconds
        self._sockets: set[socket.socket] = set()

    def begin(self, within_s: float | None = None) -> None:
        """A new request, which has `within_s`, or the usual time."""
        self._until_s = self._monotonic() + (self._seconds if within_s is None else within_s)

    def cut(self) -> None:
        """End the present request now, from another thread: its wait fails at once."""
        self._until_s = float("-inf")
        for open_socket in list(self._sockets):
            with contextlib.suppress(OSError):
                # not SSLSocket's own shutdown: after it, what is still being written would go out in clear
                socket.socket.shutdown(open_socket, socket.SHUT_RDWR)

    def left_s(self, usual_s: float | None) -> float:
        """How long the next wait may take: `usual_s` at most. httpcore.ReadTimeout when nothing is left."""
        left_s = self._until_s - self._monotonic()
        if left_s <= 0:
            raise httpcore.ReadTimeout("not over within the deadline")
        return left_s if usual_s is None else min(left_s, usual_s)


def transport(deadline: Deadline, limits: httpx.Limits, context: ssl.SSLContext | None = None) -> httpx.HTTPTransport:
    """A transport for httpx.Client whose every wait ends at the deadline. No proxies. (A host name's resolution is the system's
    and has timeouts of its own.) `context` is for TLS, by default one that trusts the usual authorities.
    """
    context = context or httpx.create_ssl_context(trust_env=False)
    made = httpx.HTTPTransport(verify=context, trust_env=False, limits=limits)
    made._pool = httpcore.ConnectionPool(
        ssl_context=context,
        max_connections=limits.max_connections,
        max_keepalive_connections=limits.max_keepalive_connections,
        keepalive_expiry=limits.keepalive_expiry,
        network_backend=_Backend(deadline),
    )
    return made


class _Backend(httpcore.NetworkBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self._deadline.left_s(timeout)
        return _Stream(self._inner.connect_tcp(host, port, timeout, local_address, socket_options), self._deadline)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline
        self._socket = inner.get_extra_info("socket")
        deadline._sockets.add(self._socket)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left_s(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.left_s(timeout))

    def close(self) -> None:
        self._deadline._sockets.discard(self._socket)
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            secured = self._inner.start_tls(ssl_context, server_hostname, self._deadline.left_s(timeout))
        finally:
            self._deadline._sockets.discard(self._socket)
        return _Stream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
