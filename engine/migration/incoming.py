"""The target's side: take a parcel in, hold the request, and let it go on when its source says so."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.blocks import OutOfBlocks
from engine.detokenizer import TextStream
from engine.migration.obstacle import differing
from engine.migration.parcel import Parcel, ParcelError, open_parcel
from engine.request import Request
from engine.sending import while_there
from engine.service import EngineService, NotServing, Ticket

PARKED_S = 15.0
"""A request whose source says nothing for so long after it was taken in is given up: its source does as much then."""
PARKED_AT_ONCE = 4


class Unfit(Exception):
    """The parcel is sound, but this engine can't go on with it. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Parked:
    ticket: Ticket
    nbytes: int
    began_s: float
    expiry: asyncio.TimerHandle


class Arrivals:
    """Requests that have come and wait for their source's word."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._parked: dict[str, Parked] = {}
        self._arriving = 0
        self._numbers = itertools.count(1)

    def most_bytes(self) -> int:
        """The longest parcel that can make sense here: the whole pool's cache, and its tokens."""
        engine, cache = self._service.engine, self._service.assembled.cache
        return engine.scheduler.pool.num_slots * cache.bytes_per_token + 4 * engine.context + (1 << 20)

    def refuse_when_full(self) -> None:
        """NotServing when no further request can come in now."""
        self._service.refuse_if_not_serving()
        if self._arriving + len(self._parked) >= PARKED_AT_ONCE:
            raise NotServing(429, f"{PARKED_AT_ONCE} requests are on their way here already; try again later")

    async def take_in(self, raw: bytearray, began_s: float) -> str:
        """Hold the request of a parcel; its id here. ParcelError, Unfit or NotServing, and then nothing of it is left here."""
        self.refuse_when_full()
        self._arriving += 1
        try:
            parcel = await asyncio.to_thread(open_parcel, raw)
            self._refuse_unfit(parcel)
            request = await asyncio.to_thread(self._request, parcel)
            await self._service.call(lambda: self._park(request, parcel))
        finally:
            self._arriving -= 1
        expiry = asyncio.get_running_loop().call_later(PARKED_S, self._expire, request.id)
        self._parked[request.id] = Parked(self._service.adopt(request), parcel.nbytes, began_s, expiry)
        return request.id

    async def go_on(self, id: str) -> Ticket | None:
        """Let a parked request run; its ticket, to be closed. None when there is none of this id any more."""
        parked = self._parked.pop(id, None)
        if parked is None:
            return None
        parked.expiry.cancel()
        try:
            resumed = await self._service.call(lambda: self._resume(id, parked))
        except BaseException:
            parked.ticket.close()
            raise
        if not resumed:
            parked.ticket.close()
        return parked.ticket if resumed else None

    def _refuse_unfit(self, parcel: Parcel) -> None:
        assembled, engine = self._service.assembled, self._service.engine
        if difference := differing(parcel.identity, assembled.identity):
            raise Unfit(409, difference)
        if max(parcel.tokens) >= assembled.config.vocab:
            raise ParcelError("the parcel holds a token that this model doesn't have")
        longest = parcel.prompt + parcel.sampling.max_tokens
        if longest > engine.context:
            raise Unfit(409, f"the request may grow to {longest} tokens: the context here ends at {engine.context}")

    def _request(self, parcel: Parcel) -> Request:
        """The request as it was, its text decoded as far as it was."""
        prompt = parcel.tokens[: parcel.prompt]
        text = TextStream(self._service.tokenizer.inner, prompt, parcel.sampling.stop)
        for token in parcel.tokens[parcel.prompt :]:
            text.push(token)
        now = time.monotonic()
        due = None if parcel.deadline_in_s is None else now + parcel.deadline_in_s
        id = f"m{next(self._numbers)}"
        request = Request(id, prompt, parcel.sampling, now, text, True, parcel.priority, due)
        request.tokens = list(parcel.tokens)
        request.num_delivered = request.num_output  # by its source
        return request

    def _park(self, request: Request, parcel: Parcel) -> None:
        """In the engine's thread."""
        engine = self._service.engine
        scheduler = engine.scheduler
        if len(scheduler.running) + len(scheduler.held) >= scheduler.max_seqs:
            raise Unfit(429, f"{scheduler.max_seqs} sequences run here already (max_seqs)")
        try:
            engine.park(request, parcel.computed)
        except OutOfBlocks as error:
            raise Unfit(503, f"there is no room in the KV cache: {error}") from None
        try:
            self._service.assembled.cache.fill(request.blocks, parcel.computed, parcel.cache)
        except Exception as error:
            engine.depart(request.id)
            if isinstance(error, ValueError):
                raise ParcelError(str(error)) from None
            raise
        engine.beat()

    def _resume(self, id: str, parked: Parked) -> bool:
        """In the engine's thread."""
        engine = self._service.engine
        if not engine.resume(id):
            return False
        with engine.stats.lock:
            counters = engine.stats.counters
            counters.requests_migrated_in_total += 1
            counters.migrated_in_bytes_total += parked.nbytes
            counters.migrated_in_s += time.monotonic() - parked.began_s
        return True

    def _expire(self, id: str) -> None:
        parked = self._parked.pop(id, None)
        if parked is not None:
            parked.ticket.close()


class Continuation(Response):
    """A migrated request's further tokens, one JSON object a line. When its reader goes away, the request is aborted."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(self._tell(send), receive)
        finally:
            self._ticket.close()

    async def _tell(self, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})  # heads leave with a body only
        request = self._ticket.request
        told = request.num_delivered
        ended = False
        while not ended:
            output = await self._ticket.next()
            ended = output.finish is not None
            line = {
                "tokens": request.output[told : told + output.tokens],
                "text": output.text,
                "finish": output.finish.value if output.finish is not None else None,
                "error": output.error,
            }
            told += output.tokens
            await send(
                {"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": not ended}
            )
            self._ticket.delivered(output.tokens)
