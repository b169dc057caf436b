"""A real store server of the fleet bench, which can be killed and started again on the same data."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

PROGRAMS = {"influxdb": "influxd", "victoriametrics": "victoria-metrics"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`sqlite` has no server: while it is "killed", somebody else holds the file for writing."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / kind
        self.folder.mkdir()
        self._log = folder / f"{kind}.log"
        self._process: psutil.Popen | None = None
        self._holding: threading.Event | None = None
        self._spent_s = 0.0  # CPU time of those that were killed
        self._port = free_port()
        if kind == "sqlite":
            self.url = f"sqlite://{self.folder}/store.db"
            return
        program = shutil.which(PROGRAMS[kind])
        if program is None:
            raise SystemExit(f"{PROGRAMS[kind]} is not installed")
        address = f"127.0.0.1:{self._port}"
        if kind == "influxdb":
            self.url, self._alive = f"influxdb://{address}/bench", f"http://{address}/ping"
            (self.folder / "conf").write_text(_influxdb_settings(self.folder, address))
            self._command = [program, "run", "-config", f"{self.folder}/conf"]
        else:
            self.url, self._alive = f"victoriametrics://{address}", f"http://{address}/health"
            flags = ("-dedup.minScrapeInterval=1ms", "-retentionPeriod=30d")
            self._command = [program, f"-httpListenAddr={address}", f"-storageDataPath={self.folder}/data", *flags]

    def start(self) -> None:
        if self._holding is not None:
            self._holding.set()
            self._holding = None
        if self.kind == "sqlite":
            return
        with self._log.open("ab") as log:
            self._process = psutil.Popen(self._command, stdout=log, stderr=log)
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            try:
                urllib.request.urlopen(self._alive, timeout=1).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
            else:
                return
        raise SystemExit(f"{self.kind} does not answer; see {self._log}")

    def kill(self) -> None:
        if self.kind == "sqlite":
            self._hold()
        elif self._process is not None:
            self._spent_s = self.cpu_s()
            self._process.kill()
            self._process.wait()
            self._process = None

    def _hold(self) -> None:
        released, held = threading.Event(), threading.Event()

        def hold() -> None:
            connection = sqlite3.connect(f"{self.folder}/store.db", timeout=60, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            held.set()
            released.wait()
            connection.execute("ROLLBACK")
            connection.close()

        threading.Thread(target=hold, daemon=True).start()
        held.wait(60)
        self._holding = released

    def stop(self) -> None:
        if self._holding is not None:
            self._holding.set()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cpu_s(self) -> float:
        """CPU seconds of the server so far; 0 where there is none."""
        if self._process is None:
            return self._spent_s
        times = self._process.cpu_times()
        return self._spent_s + float(times.user + times.system)

    def rss_mb(self) -> float:
        return 0.0 if self._process is None else float(self._process.memory_info().rss) / 1e6

    def disk_mb(self) -> float:
        found = 0
        for path in self.folder.rglob("*"):
            try:
                found += path.stat().st_size if path.is_file() else 0
            except OSError:  # merged into another meanwhile
                continue
        return found / 1e6


def _influxdb_settings(home: Path, address: str) -> str:
    return (
        f'reporting-disabled = true\nbind-address = "127.0.0.1:{free_port()}"\n[meta]\ndir = "{home}/meta"\n'
        f'[data]\ndir = "{home}/data"\nwal-dir = "{home}/wal"\nindex-version = "tsi1"\nquery-log-enabled = false\n'
        f'[monitor]\nstore-enabled = false\n[http]\nbind-address = "{address}"\nlog-enabled = false\n'
    )
