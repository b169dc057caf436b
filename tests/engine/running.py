"""A server to talk to: in a thread of this process, where a test can reach into it, or as the real process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from engine.server import EngineServer, bind
from engine.service import EngineService
from engine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
WAIT_S = 240.0
"""Far beyond what anything here takes, also on a machine that does much else; only a defect waits for so long."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until it is true. AssertionError names what never came."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


class ThreadServer:
    """Runs an EngineServer on a port of its own. `exit_code` is set when it has ended."""

    def __init__(self, settings: EngineSettings, wait_ready: bool = True) -> None:
        listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.exit_code: int | None = None
        self._aio: asyncio.AbstractEventLoop | None = None
        self._settings, self._listening = settings, listening
        self._server: EngineServer | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self._server is not None, "the server object")
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, verify=False, trust_env=False)
        if wait_ready:
            until(lambda: self.http.get("/health").status_code == 200, "ready")

    @property
    def service(self) -> EngineService:
        assert self._server is not None
        return self._server.service

    def _run(self) -> None:
        async def serve() -> int:
            self._aio = asyncio.get_running_loop()
            self._server = EngineServer(self._settings, "tiny", self._listening)
            return await self._server.serve()

        self.exit_code = asyncio.run(serve())

    def ask_to_stop(self) -> None:
        assert self._aio is not None and self._server is not None
        self._aio.call_soon_threadsafe(self._server.stop)

    def join(self) -> int:
        self._thread.join(WAIT_S)
        assert self.exit_code is not None, "the server did not stop"
        return self.exit_code

    def metric(self, name: str) -> float:
        """The value of pairscope_<name>."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"pairscope_{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric pairscope_{name}")

    def __enter__(self) -> ThreadServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread.is_alive():
            self.ask_to_stop()
            self.join()
        self.http.close()


def start_process(settings: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`engine.server.run` as a process of its own, in English."""
    code = (
        "import logging, sys; logging.basicConfig(level='INFO');"
        "from engine.server import run; from engine.settings import EngineSettings;"
        f"sys.exit(run(EngineSettings(**{dict(settings)!r})))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PAIRSCOPE_LANG": "en"} | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
