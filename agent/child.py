"""Child: a program that is run for its answer; bounded in time and in bytes, one at a time, and never left behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LIMIT_BYTES = 1 << 20
REAP_S = 0.5
"""How long a killed child may take to go; one that sits in a driver takes longer, and blocks the next run until it is gone."""

End = Literal["ended", "missing", "late", "flood", "stuck"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run brought. `how`: it ended by itself with exit status `code`; the program is missing; it was killed because it was
    late or wrote more than its limit; or an earlier run is stuck in the kernel and this one was not started.
    """

    how: End
    code: int = -1
    out: str = ""
    err: str = ""

    @property
    def well(self) -> bool:
        return self.how == "ended" and self.code == 0


class Program:
    """Runs one program, never two at a time. Each run has a process group of its own, that is killed as a whole.

    The child gets a bare environment (PATH and LC_ALL=C) and what the caller adds.
    """

    def __init__(self, name: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self.name = name
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def run(self, arguments: Sequence[str], deadline_s: float, environment: Mapping[str, str] | None = None) -> Answer:
        """Start it and wait at most `deadline_s` (and REAP_S, should it have to be killed). Raises nothing."""
        give_up_s = time.monotonic() + deadline_s
        with self._lock:
            if self._stopped or not self._gone(0):
                return Answer("stuck")
            try:
                child = self._child = self._start(arguments, environment or {})
            except OSError:
                return Answer("missing")
        how, out, err = self._read(child, give_up_s)
        with self._lock:
            _kill(child)
            self._gone(REAP_S)
        code = child.returncode if child.returncode is not None else -1
        return Answer(how, code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))

    def stop(self) -> None:
        """Kill what runs and start nothing more. From any thread."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                _kill(self._child)  # who waits for it reaps it

    def _start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        bare = {"PATH": os.environ.get("PATH") or os.defpath, "LC_ALL": "C"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            env={**bare, **environment},
            start_new_session=True,
        )

    def _gone(self, wait_s: float) -> bool:
        """Whether no child is left, reaping the one that has ended."""
        if self._child is None:
            return True
        try:
            self._child.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        self._child = None
        return True

    def _read(self, child: subprocess.Popen[bytes], give_up_s: float) -> tuple[End, bytes, bytes]:
        """All that it writes, until it closes both ends."""
        assert child.stdout is not None
        assert child.stderr is not None
        pages = {child.stdout: bytearray(), child.stderr: bytearray()}
        how: End = "ended"
        with selectors.DefaultSelector() as ready, child.stdout, child.stderr:
            for pipe in pages:
                ready.register(pipe, selectors.EVENT_READ)
            while ready.get_map():
                left_s = give_up_s - time.monotonic()
                events = ready.select(left_s) if left_s > 0 else []
                if not events:
                    how = "late"
                    break
                for key, _ in events:
                    pipe = child.stdout if key.fileobj is child.stdout else child.stderr
                    chunk = os.read(pipe.fileno(), 65536)
                    if not chunk:
                        ready.unregister(pipe)
                    pages[pipe] += chunk
                if sum(len(page) for page in pages.values()) > self._limit_bytes:
                    how = "flood"
                    break
            out, err = bytes(pages[child.stdout]), bytes(pages[child.stderr])
        if how == "ended":
            how = self._wait(child, give_up_s)
        return how, out[: self._limit_bytes], err[: self._limit_bytes]

    @staticmethod
    def _wait(child: subprocess.Popen[bytes], give_up_s: float) -> End:
        """It may close its output and stay; `waitid` looks without reaping, so that its group's number stays its own until the kill."""
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= give_up_s:
                return "late"
            time.sleep(0.005)
        return "ended"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The whole group; its number can't have been given to others, because its leader is not reaped yet."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
