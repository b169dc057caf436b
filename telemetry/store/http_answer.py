"""The answer of a store's server, read within a size and a whole time: one without end, in its head or body, holds nobody for ever."""

from __future__ import annotations

import contextlib
import io
import socket
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from http.client import HTTPResponse as PlainResponse
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

READ_S = 20.0
"""The longest silence within an answer."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """`most_bytes` counts the body as it is decoded. `within_s` is from the first connection to the last byte."""

    most_bytes: int
    within_s: float


WRITES = Bounds(1 << 20, 30.0)
"""A store that took a write says nothing, or what is wrong in a line."""
QUERIES = Bounds(256 << 20, 60.0)


class TooLarge(HTTPError):
    """The answer is larger than it may be."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"an answer of more than {most_bytes} bytes")
        self.most_bytes = most_bytes


class TooLong(HTTPError):
    """The answer was not whole in time."""

    def __init__(self, within_s: float) -> None:
        super().__init__(f"an answer that took more than {within_s:g} s")
        self.within_s = within_s


@dataclass(frozen=True, slots=True)
class _Limit:
    bounds: Bounds
    until_s: float  # of time.monotonic


_limit: ContextVar[_Limit] = ContextVar("limit of an answer")


@contextlib.contextmanager
def bounded(bounds: Bounds) -> Iterator[None]:
    """The request that is made within, by a pool of `bound`, raises TooLarge or TooLong, and its connection is then closed."""
    until_s = time.monotonic() + bounds.within_s
    token = _limit.set(_Limit(bounds, until_s))
    try:
        yield
    except HTTPError as error:
        if time.monotonic() >= until_s:
            raise TooLong(bounds.within_s) from error
        raise
    finally:
        _limit.reset(token)


def bound(pools: urllib3.PoolManager) -> urllib3.PoolManager:
    """Each request of these pools has to be made within `bounded`."""
    pools.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pools


class _Timed(io.RawIOBase):
    """What comes from a socket until a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._raw: Any = connected.makefile("rb", buffering=0)
        self._until_s = _limit.get().until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time of the whole answer is up")
        self._socket.settimeout(min(READ_S, left_s))
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(PlainResponse):
    """The library's own limits are of a line and of a single read."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _TlsConnection(HTTPSConnection):
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection

    def urlopen(self, *arguments: Any, **named: Any) -> urllib3.BaseHTTPResponse:
        return _whole(super().urlopen(*arguments, **{**named, "preload_content": False}))


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection

    def urlopen(self, *arguments: Any, **named: Any) -> urllib3.BaseHTTPResponse:
        return _whole(super().urlopen(*arguments, **{**named, "preload_content": False}))


def _whole(answer: urllib3.BaseHTTPResponse) -> urllib3.HTTPResponse:
    """The same with its body read and decoded, so that whoever looks at it next reads nothing more from the server."""
    bounds = _limit.get().bounds
    body = bytearray()
    at_once = b""
    try:
        if answer.length_remaining is not None and "Content-Encoding" not in answer.headers:
            if answer.length_remaining > bounds.most_bytes:
                raise TooLarge(bounds.most_bytes)
            at_once = answer.read()  # half the time that pieces take
        for piece in answer.stream(_PIECE):
            body += piece
            if len(body) > bounds.most_bytes:
                raise TooLarge(bounds.most_bytes)
    except BaseException:
        answer.close()
        raise
    answer.release_conn()
    return urllib3.HTTPResponse(
        at_once or bytes(body) or io.BytesIO(),
        answer.headers,
        answer.status,
        answer.version,
        reason=answer.reason,
        decode_content=False,
        enforce_content_length=False,
        retries=answer.retries,
    )
