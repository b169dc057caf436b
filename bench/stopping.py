"""Ctrl-C in the midst of a bench: one line says so, what was measured until then is told, and the exit code is 130."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

CODE = 128 + signal.SIGINT
NOTHING = "stopped: nothing is measured yet"


@dataclass(slots=True)
class Stop:
    """Whether Ctrl-C has come."""

    came: bool = False

    def code(self, otherwise: int) -> int:
        """The exit code: 130 once it has come."""
        return CODE if self.came else otherwise


@contextmanager
def until_stopped(measured: Callable[[], object]) -> Iterator[Stop]:
    """Ctrl-C ends the block, and nothing else; `measured` is true where there is something to tell of it."""
    stop = Stop()
    try:
        yield stop
    except KeyboardInterrupt:
        stop.came = True
        print("stopped: what follows was measured until then" if measured() else NOTHING, file=sys.stderr, flush=True)


def while_imports_run() -> None:
    """Until `as_usual`, Ctrl-C ends the process at once: libraries that are being imported are no place for an exception."""

    def end(_number: int, _frame: FrameType | None) -> None:
        os.write(2, NOTHING.encode() + b"\n")
        os._exit(CODE)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def as_usual() -> None:
    """Ctrl-C raises KeyboardInterrupt again, and so does SIGTERM: servers that a bench has started must not outlive it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
