"""A real snmpd on loopback that answers for a PDU: its vendor's tables come from a file that the test writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

TABLE = Path(__file__).with_name("table.py")
COMMUNITY = "rack-secret-2"

Rows = Mapping[str, int | str]


class SnmpAgent:
    """`rows` maps OIDs to values. v2c with COMMUNITY, and v3 with the user `watch`."""

    def __init__(self, folder: Path, port: int, object_id: str, rows: Rows) -> None:
        self.port = port
        self._folder = folder
        self._object_id = object_id
        folder.mkdir(parents=True, exist_ok=True)
        self.serve(rows)

    def serve(self, rows: Rows) -> None:
        """From now on answer with these rows."""
        text = "".join(
            f"{oid} {'string' if isinstance(value, str) else 'integer'} {value}\n" for oid, value in rows.items()
        )
        new = self._folder / "rows.new"
        new.write_text(text, "utf-8")
        new.replace(self._folder / "rows.txt")

    def __enter__(self) -> SnmpAgent:
        config, table = self._folder / "snmpd.conf", self._folder / "table.py"
        shutil.copy(TABLE, table)  # snmpd cuts its commands at spaces, and the repository may lie in a folder with one
        python = self._folder / "python"
        python.symlink_to(sys.executable)
        config.write_text(
            f"rocommunity {COMMUNITY}\n"
            f"sysobjectid .{self._object_id}\n"
            f'createUser watch SHA "authentic-9" AES "private-99"\n'
            f'createUser newer SHA-256 "authentic-9" AES "private-99"\n'
            "rouser watch authpriv\nrouser newer authpriv\n"
            f"pass_persist .1.3.6.1.4.1.318 {python} {table} {self._folder / 'rows.txt'}\n"
            f"pass_persist .1.3.6.1.4.1.1718 {python} {table} {self._folder / 'rows.txt'}\n"
            f"pass_persist .1.3.6.1.4.1.13742 {python} {table} {self._folder / 'rows.txt'}\n"
        )
        self._process = subprocess.Popen(
            [
                "snmpd",
                "-f",
                "-Lf",
                str(self._folder / "log"),
                "-C",
                "-c",
                str(config),
                "-I",
                "-smux",
                f"udp:127.0.0.1:{self.port}",
            ],
            env={
                **os.environ,
                "SNMP_PERSISTENT_DIR": str(self._folder / "state"),
                "MIBS": "",
                "PATH": f"{os.environ['PATH']}:/usr/sbin",
            },
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(signal.SIGCONT)
        self._process.kill()
        self._process.wait(30)
        if self._process.poll() is not None:
            self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGSTOP) -> None:
        """SIGSTOP: it hangs. SIGCONT: it goes on."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
