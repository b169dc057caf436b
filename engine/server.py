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
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console

from engine.checkpoints.find import ModelNotFound, find_model, name_of
from engine.connection import SEND_BUFFER_BYTES, Connection
from engine.core import RankLost
from engine.endpoints import Endpoints
from engine.metrics import EngineMetrics
from engine.modelconfig import UnsupportedModel
from engine.progress import LoadingLine, words
from engine.quality import PoorQuality
from engine.service import EngineService, LoadingStopped, load_in_thread
from engine.settings import EngineSettings, SettingsError, check
from engine.stepfile import StepFile
from engine.threads import calm_openmp
from telemetry.messages import say, terminal_language
from telemetry.process import notify

if TYPE_CHECKING:
    from engine.assembly import Assembled

log = logging.getLogger("pairscope.engine")

STOP_WRITING_S = 1.0
"""The last lines of the step log get so long to reach the disk."""
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
        self._step_file: StepFile | None = None
        config = uvicorn.Config(
            Endpoints(self.service).app(),
            http=Connection,
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
        if self.service.num_open:
            print(say("engine.start.draining", self.language, running=self.service.num_open), flush=True)
        reporter.cancel()
        await self.service.drain()
        if self._step_file is not None:
            await asyncio.to_thread(self._step_file.close, STOP_WRITING_S)
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
        if self.settings.step_log is not None:
            path = Path(self.settings.step_log).expanduser()
            self._step_file = StepFile(assembled.engine.steps, path, self.settings.step_log_mib << 20)
            self._step_file.start()
        host, port = self._listening.getsockname()[:2]
        line = say("engine.start.ready", self.language, model=self.service.model_name, host=host, port=port)
        print(line, flush=True)
        notify(READY="1", STATUS=line)

    def _loading_failed(self, error: BaseException) -> None:
        if isinstance(error, LoadingStopped):
            return
        reason = str(error)
        if isinstance(error, ModelNotFound):
            _complain(say(error.key, self.language, **error.values))
        elif isinstance(error, UnsupportedModel):
            _complain(say("engine.model.unusable", self.language, model=self.settings.model, reason=reason))
        elif isinstance(error, PoorQuality):
            _complain(say("engine.quantize.refused", self.language, **error.quality.figures()))
        elif isinstance(error, RankLost):
            log.critical(say("engine.start.died", self.language, reason=reason))
            self.exit_code = 1
            self._stopping.set()
            return
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
        """To systemd, and to whoever looks at this terminal. Ends when the engine is ready, or is cancelled."""
        service, told, shown = self.service, "", LoadingLine(Console(stderr=True))
        try:
            while not service.ready:
                stage = words(service.stage, self.language)
                done = {"stage": stage, "progress": 100 * service.progress, "detail": service.detail}
                line = say("engine.start.loading", self.language, model=service.model_name, **done).rstrip()
                if line != told:
                    notify(STATUS=line)
                    shown.show(line)
                    told = line
                await asyncio.sleep(0.2)
        finally:
            shown.end()


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
    except (OSError, UnicodeError, OverflowError) as error:  # UnicodeError: no name that a host can have
        reason = getattr(error, "strerror", None) or str(error)
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
