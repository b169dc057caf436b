"""One client's connection to the engine's server: how little it may hold, how long it may take, and how many there may be."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_BUFFER_BYTES = 16 * 1024
"""What the kernel may hold for a connection, and half of it what we may: a token counts as delivered when it has left for
there, so these must be small for the count to mean something."""
HEADERS_WITHIN_S = 10.0
"""A connection that has sent no whole request head for so long after it was made, or after the head's first byte, is closed."""
TAKES_WITHIN_S = 30.0
"""A connection that takes no byte for so long while an answer waits for it is closed: it would keep its place for ever."""


def connection_limit() -> int:
    """Connections at once: half of the descriptors this process may have, 512 at most. Beyond it nobody would be answered."""
    return max(8, min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class Connection(H11Protocol):
    """Buffers little for a client (see SEND_BUFFER_BYTES), waits for it only so long, and for only so many at once.

    Where there are as many as may be, a newcomer takes the place of the one that has gone longest without asking for anything,
    so that idle connections keep nobody out. If all of them are being served, the newcomer is refused.
    """

    _headers_due: asyncio.TimerHandle | None = None
    _takes_due: asyncio.TimerHandle | None = None
    _quiet_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= connection_limit() and not self._make_room():
            transport.abort()
            return
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES // 2)
        super().connection_made(transport)
        self._quiet_since_s = self.loop.time()
        self._headers_due = self.loop.call_later(HEADERS_WITHIN_S, self._give_up_on_headers)

    def _make_room(self) -> bool:
        """Whether there is a place now."""
        there = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(there) < connection_limit():
            return True
        quiet = [one for one in there if one.awaits_headers]
        if not quiet:
            return False
        min(quiet, key=lambda one: one._quiet_since_s).transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.awaits_headers:
            self._quiet_since_s = self.loop.time()
        if self._headers_due is not None and not self.awaits_headers:
            self._headers_due.cancel()
            self._headers_due = None
        elif self._headers_due is None and self.awaits_headers:  # the head of a further request has begun
            self._headers_due = self.loop.call_later(HEADERS_WITHIN_S, self._give_up_on_headers)

    @property
    def awaits_headers(self) -> bool:
        """Whether no request is being read or answered."""
        cycle = getattr(self, "cycle", None)
        return cycle is None or cycle.response_complete

    def _give_up_on_headers(self) -> None:
        if self.awaits_headers and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._takes_due is not None:
            self._takes_due.cancel()

    def _watch_taking(self, held: int) -> None:
        """See later whether the client has taken anything of the `held` bytes that wait for it."""
        self._takes_due = self.loop.call_later(TAKES_WITHIN_S, self._give_up_on_client, held)

    def _give_up_on_client(self, held: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= held:
            # as if it had gone away: what it asked for ends, its place is free, and the kernel keeps nothing for it either
            connection: socket.socket = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self._watch_taking(now)

    def connection_lost(self, exc: Exception | None) -> None:
        for due in (self._headers_due, self._takes_due):
            if due is not None:
                due.cancel()
        if self.flow is not None:  # else it was refused at once
            super().connection_lost(exc)
