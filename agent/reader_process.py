"""The agent's end of the reader: starts it, talks to it without ever waiting for it, kills it. At most one exists."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agent.frames import Message, Unpacker, pack
from telemetry.process import childs_environment

SOURCE_ROOT = Path(__file__).parents[1]
PIECE_BYTES = 65536


class ReaderProcess:
    """One child process and its two pipes. Every method returns at once or within the limit that it is given."""

    def __init__(self, arguments: Sequence[str], proc: Path = Path("/proc")) -> None:
        self._arguments = tuple(arguments)
        self._proc = proc
        self._child: subprocess.Popen[bytes] | None = None
        self.killed = False  # the child that exists has had its SIGKILL
        self._unpacker = Unpacker()

    @property
    def pid(self) -> int | None:
        """Of the child that exists, living or stuck; None when there is none."""
        return self._child.pid if self._child is not None else None

    def start(self) -> bool:
        """Start a child; False when the last one isn't gone yet: one stuck in the kernel is never joined by another.

        Raises OSError when the machine can't start a process. Call it from a thread that lives as long as the child may.
        """
        if self._child is not None:
            return False
        self._unpacker = Unpacker()
        self.killed = False
        path = os.pathsep.join(part for part in (str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")) if part)
        self._child = subprocess.Popen(
            (sys.executable, "-m", "agent.reader", *self._arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**childs_environment(os.environ), "PYTHONPATH": path},
        )
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return True

    def send(self, message: Message) -> bool:
        """Whether the child's pipe took the message; a full or closed pipe doesn't."""
        if self._child is None or self._child.stdin is None or self._child.stdin.closed:
            return False
        frame = pack(message)
        assert len(frame) <= select.PIPE_BUF, "only a frame that a pipe takes whole or not at all"
        try:
            os.write(self._child.stdin.fileno(), frame)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> list[Message]:
        """What has arrived, waiting at most `timeout_s` for something to. Raises BadFrame, and EOFError when the child is gone."""
        if self._child is None or self._child.stdout is None or self._child.stdout.closed:
            raise EOFError
        descriptor = self._child.stdout.fileno()
        give_up_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, give_up_s - time.monotonic())
            ready, _, _ = select.select([descriptor], [], [], left_s)
            if not ready:
                return []
            with contextlib.suppress(BlockingIOError):
                piece = os.read(descriptor, PIECE_BYTES)
                if not piece:
                    raise EOFError
                messages = self._unpacker.feed(piece)
                if messages:
                    return messages

    def is_in_kernel(self) -> bool:
        """Whether a thread of the child is in uninterruptible sleep: it can't be killed before the driver lets it go."""
        if self._child is None:
            return False
        for stat in (self._proc / str(self._child.pid) / "task").glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                if stat.read_text("ascii", "replace").rpartition(")")[2].split()[0] == "D":
                    return True
        return False

    def reap(self) -> bool:
        """Whether no child is left. Closes what a dead one leaves behind."""
        if self._child is not None and self._child.poll() is not None:
            self._close_pipes(self._child)
            self._child = None
        return self._child is None

    def kill(self, timeout_s: float = 0.0) -> None:
        """SIGKILL, and at most `timeout_s` for it to work, which `reap` tells. What the child still had to say is lost."""
        if self._child is not None:
            self._close_pipes(self._child)
            self._child.kill()
            self.killed = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)

    def close(self, timeout_s: float = 0.5) -> None:
        """Kill the child and wait a little for its end; one that is stuck in the kernel is left to it."""
        self.kill(timeout_s)
        self.reap()

    @staticmethod
    def _close_pipes(child: subprocess.Popen[bytes]) -> None:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
