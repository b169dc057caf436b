"""Real servers for the stores: Debian's influxd and victoria-metrics on free loopback ports, each in a folder of its own."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

CONFIG = """
reporting-disabled = true
bind-address = "127.0.0.1:{rpc}"
[meta]
  dir = "{folder}/meta"
[data]
  dir = "{folder}/data"
  wal-dir = "{folder}/wal"
  index-version = "tsi1"
  query-log-enabled = false
[monitor]
  store-enabled = false
[http]
  bind-address = "127.0.0.1:{port}"
  log-enabled = false
  auth-enabled = {auth}
[continuous_queries]
  enabled = false
"""


class Influxd:
    """One server that can be killed and started again on the same folder and port."""

    def __init__(self, program: str, folder: Path, *, auth: bool = False) -> None:
        self._program = program
        self._folder = folder
        self.port, rpc = free_port(), free_port()
        self._names = itertools.count(1)
        config = CONFIG.format(folder=folder, port=self.port, rpc=rpc, auth=str(auth).lower())
        (folder / "influxdb.conf").write_text(config)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def new_url(self) -> str:
        """The URL of a database that nobody used before."""
        return f"influxdb://{self.address}/test{next(self._names)}"

    def start(self) -> None:
        log = (self._folder / "influxd.log").open("ab")
        self._process = subprocess.Popen(
            [self._program, "run", "-config", str(self._folder / "influxdb.conf")],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
        )
        for _ in range(2000):
            if self._process.poll() is not None:
                pytest.fail(f"influxd ended with {self._process.returncode}: {self.log()}")
            try:
                urllib.request.urlopen(f"http://{self.address}/ping", timeout=1).close()
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        pytest.fail(f"influxd did not answer on {self.address}: {self.log()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        return (self._folder / "influxd.log").read_text("utf-8", "replace")[-2000:]


@pytest.fixture(scope="session")
def influxd(need_program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Influxd]:
    """A running server for the whole session."""
    server = Influxd(need_program("influxd"), tmp_path_factory.mktemp("influxd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_influxd(need_program: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[..., Influxd]]:
    """own_influxd(auth=True) -> a server of this test alone, to be killed and started at will."""
    made: list[Influxd] = []

    def make(*, auth: bool = False) -> Influxd:
        folder = tmp_path / f"influxd{len(made)}"
        folder.mkdir()
        server = Influxd(need_program("influxd"), folder, auth=auth)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.kill()


class Victoria:
    """One VictoriaMetrics server that can be killed and started again on the same folder and port."""

    def __init__(self, program: str, folder: Path, *flags: str) -> None:
        self._program = program
        self._folder = folder
        self._flags = flags
        self.port = free_port()
        self._names = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def new_url(self) -> str:
        """A URL whose samples nobody else sees."""
        return f"victoriametrics://{self.address}?db=test{next(self._names)}"

    def start(self) -> None:
        log = (self._folder / "victoria.log").open("ab")
        self._process = subprocess.Popen(
            [
                self._program,
                f"-httpListenAddr={self.address}",
                f"-storageDataPath={self._folder / 'data'}",
                *self._flags,
            ],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
        )
        for _ in range(2000):
            if self._process.poll() is not None:
                pytest.fail(f"victoria-metrics ended with {self._process.returncode}: {self.log()}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.05)
        pytest.fail(f"victoria-metrics did not answer on {self.address}: {self.log()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        return (self._folder / "victoria.log").read_text("utf-8", "replace")[-2000:]


@pytest.fixture(scope="session")
def victoria(need_program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victoria]:
    """A running server for the whole session, as it comes."""
    server = Victoria(need_program("victoria-metrics"), tmp_path_factory.mktemp("victoria"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def deduplicating_victoria(
    need_program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victoria]:
    """A running server for the whole session, with the flag that lets it draw ranges itself."""
    folder = tmp_path_factory.mktemp("deduplicating_victoria")
    server = Victoria(need_program("victoria-metrics"), folder, "-dedup.minScrapeInterval=1ms")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_victoria(need_program: Callable[[str], str], tmp_path: Path) -> Iterator[Callable[..., Victoria]]:
    """own_victoria("-flag=x") -> a server of this test alone, to be killed and started at will."""
    made: list[Victoria] = []

    def make(*flags: str) -> Victoria:
        folder = tmp_path / f"victoria{len(made)}"
        folder.mkdir()
        server = Victoria(need_program("victoria-metrics"), folder, *flags)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.kill()
