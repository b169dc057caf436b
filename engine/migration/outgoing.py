"""The source's side: hold a request, send its parcel, let the target go on, and bring its client what the target generates.

The order makes sure that one side only goes on. The target parks what it was sent; nothing is generated there before the
source says so, and from that word on the source never resumes: where the answer to it is lost, the request ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from engine.core import Output
from engine.migration.incoming import PARKED_S
from engine.migration.obstacle import Obstacle, obstacle
from engine.migration.parcel import PIECE_BYTES, Parcel
from engine.request import Finish, Request
from engine.service import EngineService, Ticket

CONNECT_S = 5.0
SILENCE_S = 120.0
"""A target that generates nothing for so long is taken for lost."""
LINE_LIMIT = 1 << 20

Tell = Callable[[dict[str, object]], Awaitable[None]]
"""Hears how far a migration is."""


class MigrationFailed(Exception):
    """It came to nothing, in one line. `resumed`: the request goes on here; else it has ended with an error."""

    def __init__(self, message: str, resumed: bool) -> None:
        super().__init__(message)
        self.resumed = resumed


@dataclass(frozen=True, slots=True)
class Migrated:
    """`seconds` is how long the request stood still; `sending_s` how much of it its bytes travelled."""

    request: str
    tokens: int
    nbytes: int
    seconds: float
    sending_s: float


class Departures:
    """Moves requests of one engine to others."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._closing: set[asyncio.Task[None]] = set()

    def _client(self, target: str) -> httpx.AsyncClient:
        token = self._service.settings.migrate_token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(self._service.settings.migrate_timeout_s, connect=CONNECT_S)
        verify = target.startswith("https:")  # reading the certificates takes longer than a small cache travels
        return httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False, verify=verify)

    async def link_s(self, target: str, nbytes: int) -> float:
        """Seconds in which so many bytes reach the target, which throws them away. MigrationFailed where it doesn't answer."""
        zeros = bytes(PIECE_BYTES)

        async def raw() -> AsyncIterator[bytes]:
            for at in range(0, nbytes, PIECE_BYTES):
                yield zeros[: nbytes - at]

        async with self._client(target) as client:
            try:
                began = time.perf_counter()
                answer = await client.post(f"{target}/kv/link", content=raw())
                seconds = time.perf_counter() - began
            except httpx.HTTPError as error:
                raise MigrationFailed(_reason(error), resumed=True) from None
        if answer.status_code != 200:
            raise MigrationFailed(_refusal(answer), resumed=True)
        return seconds

    async def obstacle(self, target: str) -> Obstacle | None:
        """What stands in the way of moving requests to this target; None when nothing does now."""
        async with self._client(target) as client:
            return await obstacle(client, target, self._service.assembled.identity)

    async def migrate(self, id: str, target: str, tell: Tell) -> Migrated:
        """Move a request. MigrationFailed says whether it goes on here; KeyError when no request of this id waits or runs."""
        ticket = self._service.ticket(id)
        if ticket is None:
            raise KeyError(id)
        client = self._client(target)
        began = time.monotonic()
        try:
            parcel = await self._service.call(lambda: self._pack(id))
            try:
                async with asyncio.timeout(self._service.settings.migrate_timeout_s):
                    sent_at = time.monotonic()
                    there = await self._send(client, target, parcel, tell)
                    sending_s = time.monotonic() - sent_at
            except (httpx.HTTPError, TimeoutError, _Refused) as error:
                raise await self._resumed(id, _reason(error)) from None
            stream = await self._let_go_on(client, target, there, id, ticket)
        except BaseException:
            await client.aclose()
            raise
        seconds = time.monotonic() - began
        await self._service.call(lambda: self._depart(id, parcel, seconds))
        self._begin_relay(client, stream, ticket, target)
        return Migrated(id, len(parcel.tokens), parcel.nbytes, seconds, sending_s)

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def _pack(self, id: str) -> Parcel:
        engine, assembled = self._service.engine, self._service.assembled
        request = engine.hold(id)
        now = time.monotonic()
        # blocks that the model's window has left behind may be others' by now: then the tokens travel and are computed there
        computed = 0 if request.gone else request.num_computed
        try:
            return Parcel(
                identity=assembled.identity,
                tokens=tuple(request.tokens),
                prompt=request.prompt,
                computed=computed,
                sampling=request.sampling,
                priority=request.priority,
                deadline_in_s=None if request.deadline_s is None else request.deadline_s - now,
                cache=assembled.cache.read(request.blocks, computed),
            )
        except BaseException:
            engine.resume(id)
            raise

    def _depart(self, id: str, parcel: Parcel, seconds: float) -> None:
        engine = self._service.engine
        engine.depart(id)
        with engine.stats.lock:
            counters = engine.stats.counters
            counters.requests_migrated_out_total += 1
            counters.migrated_out_bytes_total += parcel.nbytes
            counters.migrated_out_s += seconds

    def _fail(self, id: str, resume: bool) -> None:
        engine = self._service.engine
        if resume:
            engine.resume(id)
        else:
            engine.depart(id)
        with engine.stats.lock:
            engine.stats.counters.migrations_failed_total += 1
            if not resume:
                engine.stats.counters.requests_failed_total += 1

    # -- in the event loop --------------------------------------------------------------------------------------------

    def _begin_relay(self, client: httpx.AsyncClient, stream: httpx.Response, ticket: Ticket, target: str) -> None:
        async def close() -> None:
            await stream.aclose()  # the target sees it, and aborts what still runs
            await client.aclose()

        def end(_task: object) -> None:
            closing = asyncio.ensure_future(close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

        if self._service.ticket(ticket.request.id) is None:  # its client has gone meanwhile
            end(None)
            return
        ticket.relay = asyncio.ensure_future(self._relay(stream, ticket, target))
        ticket.relay.add_done_callback(end)

    async def _resumed(self, id: str, reason: str) -> MigrationFailed:
        await self._service.call(lambda: self._fail(id, resume=True))
        return MigrationFailed(f"{reason}; the request goes on here", resumed=True)

    async def _lost(self, id: str, ticket: Ticket, reason: str) -> MigrationFailed:
        await self._service.call(lambda: self._fail(id, resume=False))
        ticket.put(Output(ticket.request, "", 0, Finish.ERROR, f"lost while it moved to another engine: {reason}"))
        return MigrationFailed(f"{reason}; the request has ended, as the target may have begun to go on with it", False)

    async def _send(self, client: httpx.AsyncClient, target: str, parcel: Parcel, tell: Tell) -> str:
        """Send a parcel; the request's id there."""

        async def content() -> AsyncIterator[bytes]:
            sent = 0
            for piece in parcel.pieces():
                yield piece
                sent += len(piece)
                await tell({"sent_bytes": min(sent, parcel.nbytes), "of_bytes": parcel.nbytes})

        headers = {"Content-Type": "application/octet-stream"}
        answer = await client.post(f"{target}/kv/requests", content=content(), headers=headers)
        if answer.status_code != 200:
            raise _Refused(_refusal(answer))
        try:
            return str(answer.json()["id"])
        except (ValueError, KeyError, TypeError):
            raise _Refused("the target answers what no engine of this kind does") from None

    async def _let_go_on(
        self, client: httpx.AsyncClient, target: str, there: str, id: str, ticket: Ticket
    ) -> httpx.Response:
        """The stream of what the target generates. From here on the request is the target's, unless it says no."""
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        asked = client.build_request("POST", f"{target}/kv/requests/{there}/continue", timeout=timeout)
        try:
            async with asyncio.timeout(PARKED_S):
                stream = await client.send(asked, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # it has heard nothing
            raise await self._resumed(id, _reason(error)) from None
        except (httpx.HTTPError, TimeoutError) as error:
            raise await self._lost(id, ticket, _reason(error)) from None
        if stream.status_code != 200:
            await stream.aread()
            raise await self._resumed(id, _refusal(stream))
        return stream

    async def _relay(self, stream: httpx.Response, ticket: Ticket, target: str) -> None:
        """Bring what the target generates to the client that waits here, no faster than it takes it."""
        request = ticket.request
        try:
            async for line in _lines(stream):
                output = _output(request, line)
                request.tokens += line["tokens"]
                ticket.put(output)
                if output.finish is not None:
                    return
                while request.num_undelivered >= self._service.settings.stream_buffer:
                    await asyncio.sleep(0.02)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = _reason(error)
        else:
            reason = "its answer broke off"
        message = f"lost at {target}, where it went on: {reason}"
        ticket.put(Output(request, "", 0, Finish.ERROR, message))


class _Refused(Exception):
    """The target doesn't take the request."""


async def _lines(stream: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    buffered = b""
    async for piece in stream.aiter_bytes():
        buffered += piece
        *whole, buffered = buffered.split(b"\n")
        for line in whole:
            if line:
                yield json.loads(line)
        if len(buffered) > LINE_LIMIT:
            raise ValueError("a line without end")


def _output(request: Request, line: dict[str, Any]) -> Output:
    tokens, text, finish, error = (line[name] for name in ("tokens", "text", "finish", "error"))
    if not isinstance(text, str) or not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        raise ValueError("the target answers what no engine of this kind does")
    return Output(request, text, len(tokens), None if finish is None else Finish(finish), error and str(error)[:500])


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return "the target did not answer in time"
    if isinstance(error, httpx.HTTPError):
        return f"the target can't be reached ({type(error).__name__})"
    return str(error)


def _refusal(answer: httpx.Response) -> str:
    try:
        return f"the target says {answer.status_code}: {str(answer.json()['error']['message'])[:500]}"
    except (ValueError, KeyError, TypeError, httpx.ResponseNotRead):
        return f"the target says {answer.status_code}"
