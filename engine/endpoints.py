"""The HTTP endpoints of one engine: OpenAI's, /health, /metrics and /debug/steps. Which answers are given is decided here, nothing else."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.answers import Answer, encode, error_body
from engine.api import Ask, BadRequest, parse_chat, parse_completion, parse_json
from engine.generation import Generation, max_tokens_of, open_tickets, tokenise
from engine.metrics import CONTENT_TYPE
from engine.migration.routes import MigrationRoutes
from engine.service import EngineService, NotServing
from engine.steplog import LoggedStep

LONG_BODY_BYTES = 64 * 1024
MOST_HEADERS = 64
"""More header lines of one request are refused: nobody's client sends so many, and each is looked through."""


def json_response(code: int, body: Mapping[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), code, headers, "application/json")


class PlainHeads:
    """Refuses requests of more than MOST_HEADERS header lines with 431, and those that tell two lengths of their body, which others
    on the way may read in another way, with 400, before anything of them is read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = [name for name, _ in scope["headers"]]
        if len(names) > MOST_HEADERS:
            code, message = 431, f"the request has {len(names)} header lines; at most {MOST_HEADERS} are taken"
        elif b"transfer-encoding" in names and b"content-length" in names:
            code, message = 400, "the request has both Content-Length and Transfer-Encoding"
        else:
            await self._app(scope, receive, send)
            return
        await json_response(code, error_body(code, message), {"Connection": "close"})(scope, receive, send)


class Endpoints:
    """The routes. One instance a server."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.created = int(time.time())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/debug/steps", self.steps),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                *MigrationRoutes(self.service).routes(),
            ],
            middleware=[Middleware(PlainHeads)],
            exception_handlers={404: _not_found, 405: _wrong_method, Exception: _defect},
        )

    async def health(self, _request: Request) -> Response:
        health = self.service.health()
        return json_response(health.code, health.body)

    async def metrics(self, _request: Request) -> Response:
        return Response(self.service.metrics.text(time.monotonic()), media_type=CONTENT_TYPE)

    async def steps(self, request: Request) -> Response:
        """The last steps, oldest first; to this machine only: they say how much others ask for."""
        if not _from_here(request) or "origin" in request.headers:
            return json_response(403, error_body(403, "/debug/steps answers on this machine only, and no web pages"))
        if not self.service.ready:
            return json_response(503, error_body(503, "the engine is not ready"), {"Retry-After": "1"})
        steps = self.service.engine.steps
        asked = request.query_params.get("last", "100")
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 10):
            return json_response(400, error_body(400, f"last must be a whole number, 0 to {steps.most}", "last"))
        return await asyncio.to_thread(self._steps_body, steps.last(int(asked)))  # thousands take longer than a step

    def _steps_body(self, steps: list[LoggedStep]) -> Response:
        return json_response(200, {"model": self.service.model_name, "steps": [step.body() for step in steps]})

    async def models(self, _request: Request) -> Response:
        return json_response(200, {"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.service.model_name:
            return json_response(404, error_body(404, f"model {name!r} is not served here", "model"))
        return json_response(200, self._model_body())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, chat: bool) -> Response:
        arrived_s = time.monotonic()
        try:
            ask = await self._parse(await self._read(request), chat)
            self._check_model(ask)
            self.service.refuse_if_not_serving(max(1, len(ask.prompts)) * ask.n)
            prompts = await tokenise(self.service, ask)
            vocab = self.service.vocab
            limits = [max_tokens_of(self.service, ask, prompt, vocab) for prompt in prompts]
            self.service.refuse_if_not_serving(len(prompts) * ask.n)
            self.service.refuse_if_too_late(ask.deadline_ms, max(prompts, key=len))
        except BadRequest as error:
            return json_response(error.code, error_body(error.code, str(error), error.field))
        except NotServing as error:
            return json_response(error.code, error_body(error.code, str(error)), {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=499)
        tickets = open_tickets(self.service, ask, prompts, limits, arrived_s)
        return Generation(tickets, sum(map(len, prompts)), Answer(chat, self.service.model_name), ask)

    async def _parse(self, raw: bytes, chat: bool) -> Ask:
        """A long body in a worker thread: half a million token ids take longer than a step."""

        def parse() -> Ask:
            return (parse_chat if chat else parse_completion)(parse_json(raw), self.service.settings)

        if len(raw) <= LONG_BODY_BYTES:
            return parse()
        self.service.refuse_if_not_serving()
        return await asyncio.get_running_loop().run_in_executor(self.service.tokenisers, parse)

    async def _read(self, request: Request) -> bytes:
        most = self.service.settings.max_body_bytes
        too_long = BadRequest(None, f"the body is longer than {most} bytes", 413)
        if int(request.headers.get("content-length") or 0) > most:
            raise too_long
        raw = bytearray()
        try:
            async with asyncio.timeout(self.service.settings.body_timeout_s):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > most:
                        raise too_long
        except TimeoutError:
            raise BadRequest(None, "the body did not arrive in time", 408) from None
        return bytes(raw)

    def _check_model(self, ask: Ask) -> None:
        if ask.model is not None and ask.model != self.service.model_name:
            raise BadRequest(
                "model", f"model {ask.model!r} is not served here; this server has {self.service.model_name!r}", 404
            )

    def _model_body(self) -> dict[str, object]:
        body = {
            "id": self.service.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "pairscope",
        }
        return body | ({"max_model_len": self.service.engine.context} if self.service.ready else {})


def _from_here(request: Request) -> bool:
    """Whether the client is a process of this machine."""
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


async def _not_found(request: Request, _error: Exception) -> Response:
    return json_response(404, error_body(404, f"there is no {request.url.path} here"))


async def _wrong_method(request: Request, _error: Exception) -> Response:
    return json_response(405, error_body(405, f"{request.url.path} does not take {request.method}"))


async def _defect(_request: Request, error: Exception) -> Response:
    return json_response(500, error_body(500, f"a defect of this server: {type(error).__name__}"))
