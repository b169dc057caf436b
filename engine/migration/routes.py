"""The HTTP side of migration, `/kv/...`: what runs here, take in, go on, send away, and a link to measure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine.answers import encode, error_body
from engine.migration.access import Forbidden, refuse_strangers, refuse_target
from engine.migration.incoming import Arrivals, Continuation, Unfit
from engine.migration.outgoing import Departures, Migrated, MigrationFailed
from engine.migration.parcel import ParcelError
from engine.service import EngineService, NotServing

ORDER_LIMIT_BYTES = 1 << 16

Handler = Callable[[Request], Awaitable[Response]]


def _json(code: int, body: Mapping[str, object]) -> Response:
    return Response(encode(body), code, media_type="application/json")


def _error(code: int, message: str) -> Response:
    return _json(code, error_body(code, message))


class MigrationRoutes:
    """One instance a server."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._arrivals = Arrivals(service)
        self._departures = Departures(service)
        self._under_way: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/kv/requests", self._guarded(self._requests), methods=["GET"]),
            Route("/kv/requests", self._guarded(self._take_in), methods=["POST"]),
            Route("/kv/requests/{id}/continue", self._guarded(self._go_on), methods=["POST"]),
            Route("/kv/link", self._guarded(self._link), methods=["POST"]),
            Route("/kv/target", self._guarded(self._target), methods=["POST"]),
            Route("/kv/migrate", self._guarded(self._migrate), methods=["POST"]),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                refuse_strangers(request, self._service.settings.migrate_token)
                self._service.refuse_if_not_serving(0)
                if self._service.settings.tensor_parallel > 1:
                    return _error(
                        409, "with tensor_parallel a cache lies in parts in several processes, and is not moved"
                    )
                return await handler(request)
            except (Forbidden, NotServing, Unfit) as error:
                return _error(error.code, str(error))
            except ParcelError as error:
                return _error(400, str(error))
            except ClientDisconnect:
                return Response(status_code=499)
            except TimeoutError:
                return _error(408, "the body did not arrive in time")

        return guarded

    async def _requests(self, _request: Request) -> Response:
        engine, assembled = self._service.engine, self._service.assembled

        def told() -> list[dict[str, object]]:
            return [
                {
                    "id": request.id,
                    "state": request.state.value,
                    "prompt": request.prompt,
                    "output": request.num_output,
                    "cached": request.num_computed,
                    "cache_bytes": request.num_computed * assembled.cache.bytes_per_token,
                }
                for request in engine.requests
                if self._service.ticket(request.id) is not None
            ]

        requests = await self._service.call(told)
        per_token = assembled.cache.bytes_per_token
        return _json(200, {"identity": dict(assembled.identity), "bytes_per_token": per_token, "requests": requests})

    async def _take_in(self, request: Request) -> Response:
        began_s = time.monotonic()
        self._arrivals.refuse_when_full()
        raw = bytearray()
        async for piece in self._body(request, self._arrivals.most_bytes()):
            raw += piece
        return _json(200, {"id": await self._arrivals.take_in(raw, began_s)})

    async def _go_on(self, request: Request) -> Response:
        ticket = await self._arrivals.go_on(request.path_params["id"])
        if ticket is None:
            return _error(404, "no such request waits here for its source's word")
        return Continuation(ticket)

    async def _link(self, request: Request) -> Response:
        taken = 0
        async for piece in self._body(request, self._arrivals.most_bytes()):
            taken += len(piece)
        return _json(200, {"bytes": taken})

    async def _body(self, request: Request, most: int) -> AsyncIterator[bytes]:
        taken = 0
        async with asyncio.timeout(self._service.settings.migrate_timeout_s):
            async for piece in request.stream():
                taken += len(piece)
                if taken > most:
                    raise Unfit(413, f"more than {most} bytes don't fit into the KV cache here")
                yield piece

    async def _target(self, request: Request) -> Response:
        """Whether requests could go on at a target; nothing is moved."""
        try:
            target = json.loads(b"".join([piece async for piece in self._body(request, ORDER_LIMIT_BYTES)]))["target"]
        except (ValueError, KeyError, TypeError, RecursionError):
            target = None
        if not isinstance(target, str):
            return _error(400, 'the body must be {"target": URL}')
        found = await self._departures.obstacle(refuse_target(target, self._service.settings.migrate_token))
        return _json(200, {"obstacle": None if found is None else {"kind": found.kind, "reason": found.reason}})

    async def _migrate(self, request: Request) -> Response:
        """Lines of JSON: how many bytes have gone, then what came of it."""
        try:
            order = json.loads(b"".join([piece async for piece in self._body(request, ORDER_LIMIT_BYTES)]))
            target, id, link = order["target"], order["request"], order.get("link", False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return _error(400, 'the body must be {"target": URL, "request": ID}')
        if not isinstance(target, str) or not isinstance(id, str) or not isinstance(link, bool):
            return _error(400, "target and request must be texts, link true or false")
        target = refuse_target(target, self._service.settings.migrate_token)
        told: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        # a task of its own: whoever watches may go away, the request is not left halfway
        task = asyncio.ensure_future(self._carry_out(id, target, link, told))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        async def lines() -> AsyncIterator[bytes]:
            while True:
                line = await told.get()
                yield encode(line) + b"\n"
                if "sent_bytes" not in line:
                    return

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _carry_out(self, id: str, target: str, link: bool, told: asyncio.Queue[dict[str, object]]) -> None:
        try:
            done = await self._departures.migrate(id, target, told.put)
            line: dict[str, object] = {"migrated": _told(done)}
            if link and done.nbytes:
                line |= await self._link_told(target, done.nbytes)
        except MigrationFailed as error:
            line = {"error": str(error), "resumed": error.resumed}
        except KeyError:
            line = {"error": f"no request {id[:64]!r} waits or runs here", "resumed": None}
        except Exception as error:  # whoever watches must not wait for ever
            line = {"error": f"{type(error).__name__}: {error}", "resumed": None}
        await told.put(line)

    async def _link_told(self, target: str, nbytes: int) -> dict[str, object]:
        try:
            return {"link_s": await self._departures.link_s(target, nbytes)}
        except MigrationFailed as error:  # the request has moved; only the measure is missing
            return {"link_error": str(error)}


def _told(done: Migrated) -> dict[str, object]:
    return {
        "request": done.request,
        "tokens": done.tokens,
        "bytes": done.nbytes,
        "seconds": done.seconds,
        "sending_s": done.sending_s,
    }
