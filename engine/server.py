"""The OpenAI-compatible server of one engine. It listens at once and says how far loading is; `run` is the process's entry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.answers import Answer, encode, error_body
from engine.api import Ask, BadRequest, parse_chat, parse_completion, parse_json
from engine.checkpoints.find import ModelNotFound, find_model, name_of
from engine.generation import Generation, max_tokens_of, open_tickets, tokenise
from engine.metrics import CONTENT_TYPE, EngineMetrics
from engine.modelconfig import UnsupportedModel
from engine.service import EngineService, LoadingStopped, NotServing, load_in_thread
from engine.settings import EngineSettings, SettingsError, check
from engine.threads import calm_openmp
from telemetry.messages import say, terminal_language
from telemetry.process import notify

if TYPE_CHECKING:
    from engine.assembly import Assembled

log = logging.getLogger("pairscope.engine")

SEND_BUFFER_BYTES = 16 * 1024
"""What the kernel may hold for a connection, and half of it what we may: a token counts as delivered when it has left for
there, so these must be small for the count to mean something."""
STOP_LOADING_S = 0.5
"""Told to stop while the model loads, the loading thread gets so long to come to its next stop."""
DEATH_LINGER_S = 1.0
"""After the engine's death, /health says so and clients get their errors for so long; then the process ends, to be restarted."""


def installed_version() -> str:
    """Of the distribution that this engine belongs to; `unknown` when it runs from a bare source tree."""
    try:
        return metadata.version("pairscope")
    except metadata.PackageNotFoundError:
        return "unknown"


def json_response(code: int, body: Mapping[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), code, headers, "application/json")


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
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={404: _not_found, 405: _wrong_method, Exception: _defect},
        )

    async def health(self, _request: Request) -> Response:
        health = self.service.health()
        return json_response(health.code, health.body)

    async def metrics(self, _request: Request) -> Response:
        return Response(self.service.metrics.text(time.monotonic()), media_type=CONTENT_TYPE)

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
            body = parse_json(await self._read(request))
            ask = (parse_chat if chat else parse_completion)(body, self.service.settings)
            self._check_model(ask)
            self.service.refuse_if_not_serving(max(1, len(ask.prompts)) * ask.n)
            prompts = await tokenise(self.service, ask)
            vocab = self.service.vocab
            limits = [max_tokens_of(self.service, ask, prompt, vocab) for prompt in prompts]
            self.service.refuse_if_not_serving(len(prompts) * ask.n)
        except BadRequest as error:
            return json_response(error.code, error_body(error.code, str(error), error.field))
        except NotServing as error:
            return json_response(error.code, error_body(error.code, str(error)), {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=499)
        tickets = open_tickets(self.service, ask, prompts, limits, arrived_s)
        return Generation(tickets, sum(map(len, prompts)), Answer(chat, self.service.model_name), ask)

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


async def _not_found(request: Request, _error: Exception) -> Response:
    return json_response(404, error_body(404, f"there is no {request.url.path} here"))


async def _wrong_method(request: Request, _error: Exception) -> Response:
    return json_response(405, error_body(405, f"{request.url.path} does not take {request.method}"))


async def _defect(_request: Request, error: Exception) -> Response:
    return json_response(500, error_body(500, f"a defect of this server: {type(error).__name__}"))


class _Protocol(H11Protocol):
    """Buffers little for a client: see SEND_BUFFER_BYTES."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES // 2)
        super().connection_made(transport)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are ours


class EngineServer:
    """The process: binds, loads, serves, drains. `exit_code` says how it ended."""

    def __init__(self, settings: EngineSettings, model_name: str, listening: socket.socket) -> None:
        self.settings = settings
        self.language = terminal_language()
        metrics = EngineMetrics(model_name, installed_version(), settings.fingerprint(), time.monotonic())
        self.service = EngineService(settings, model_name, metrics)
        self.exit_code = 0
        self.threads_left = False  # one of our threads is still inside torch although we have stopped
        self._listening = listening
        config = uvicorn.Config(
            Endpoints(self.service).app(),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=30,
        )
        self._server = _Server(config)
        self._stopping = asyncio.Event()

    async def serve(self) -> int:
        """Serve until a signal comes, loading fails or the engine dies."""
        aio = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread: a test
                aio.add_signal_handler(number, self._stopping.set)
        self.service.on_death = self._on_death
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listening]))
        loading = load_in_thread(
            self.service,
            done=lambda assembled: self._from_thread(aio, self._begin, assembled),
            failed=lambda error: self._from_thread(aio, self._loading_failed, error),
        )
        reporter = asyncio.ensure_future(self._report_progress())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        notify(STOPPING="1")
        reporter.cancel()
        await self.service.drain()
        self._server.should_exit = True
        await serving
        await asyncio.to_thread(loading.join, STOP_LOADING_S)
        self.threads_left = loading.is_alive() or self.service.thread_alive
        return self.exit_code

    def stop(self) -> None:
        """As SIGTERM does. From the event loop only."""
        self._stopping.set()

    @staticmethod
    def _from_thread(aio: asyncio.AbstractEventLoop, call: Callable[[Any], None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
            aio.call_soon_threadsafe(call, value)

    def _begin(self, assembled: Assembled) -> None:
        if self._stopping.is_set():
            return
        self.service.begin(assembled)
        host, port = self._listening.getsockname()[:2]
        line = say("engine.start.ready", self.language, model=self.service.model_name, host=host, port=port)
        log.info(line)
        notify(READY="1", STATUS=line)

    def _loading_failed(self, error: BaseException) -> None:
        if isinstance(error, LoadingStopped):
            return
        reason = str(error)
        if isinstance(error, ModelNotFound):
            _complain(say(error.key, self.language, **error.values))
        elif isinstance(error, UnsupportedModel):
            _complain(say("engine.model.unusable", self.language, model=self.settings.model, reason=reason))
        elif isinstance(error, SettingsError):
            _complain(say("engine.start.bad_setting", self.language, reason=reason))
        else:
            log.critical("loading failed", exc_info=error)
            self.exit_code = 1
            self._stopping.set()
            return
        self.exit_code = 2
        self._stopping.set()

    def _on_death(self) -> None:
        self.exit_code = 1
        log.critical(say("engine.start.died", self.language, reason=self.service.death or ""))
        asyncio.get_running_loop().call_later(DEATH_LINGER_S, self._stopping.set)

    async def _report_progress(self) -> None:
        told = ""
        while not self.service.ready:
            line = say(
                "engine.start.loading",
                self.language,
                model=self.service.model_name,
                stage=self.service.stage,
                progress=100 * self.service.progress,
            )
            if line != told:
                notify(STATUS=line)
                told = line
            await asyncio.sleep(0.2)


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. OSError when the address can't be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it each answer takes 40 ms longer.
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        listening.bind(address)
        listening.listen(512)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def run(settings: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT (0), a user's mistake (2) or a crash (1). Tells systemd when it is ready."""
    language = terminal_language()
    calm_openmp()
    try:
        check(settings)
        found: Path = find_model(settings.model)
        listening = bind(settings.host, settings.port)
    except SettingsError as error:
        _complain(say("engine.start.bad_setting", language, reason=str(error)))
        return 2
    except ModelNotFound as error:
        _complain(say(error.key, language, **error.values))
        return 2
    except OSError as error:
        reason = error.strerror or str(error)
        _complain(say("engine.start.port_taken", language, host=settings.host, port=settings.port, reason=reason))
        return 2
    log.info("model %s", found)
    name = settings.model_name or name_of(settings.model)
    server = asyncio.run(_serve(settings, name, listening))
    if server.threads_left:
        # Taking the interpreter down around a thread in torch aborts the process: the exit code would be a lie.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(server.exit_code)
    return server.exit_code


async def _serve(settings: EngineSettings, name: str, listening: socket.socket) -> EngineServer:
    server = EngineServer(settings, name, listening)
    await server.serve()
    return server
