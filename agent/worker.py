"""A worker: one thread that does one job at a time and never queues, so that a job that hangs holds up nobody but itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from agent.collectors.interface import Tick

Answer = TypeVar("Answer")


class Late(Exception):
    """The job of this tick did not come back in time, or an earlier one is still running."""


class Worker(Generic[Answer]):
    """Does `job(tick)` on its own daemon thread. An answer that comes after its tick's deadline is dropped."""

    def __init__(self, name: str, job: Callable[[Tick], Answer]) -> None:
        self.name = name
        self._job = job
        self._turn = threading.Condition()
        self._asked: Tick | None = None
        self._busy = False
        self._closed = False
        self._outcome: tuple[int, Answer | None, Exception | None] | None = None
        self._late: tuple[int, Answer | None, Exception | None] | None = None  # came just before the next job began
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._busy

    def start(self, tick: Tick) -> bool:
        """Begin this tick's job; False when an earlier one is still running (nothing is queued). RuntimeError for want of a thread."""
        with self._turn:
            if self._busy or self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                thread.start()
                self._thread = thread
            self._late, self._outcome = self._outcome or self._late, None
            self._busy = True
            self._asked = tick
            self._turn.notify_all()
            return True

    def take(self, tick: Tick, timeout_s: float) -> Answer:
        """This tick's answer. Raises Late after `timeout_s`, or whatever the job raised."""
        with self._turn:
            if not self._turn.wait_for(lambda: self._answered(tick), max(0.0, timeout_s)):
                raise Late(f"{self.name}: no answer in time")
            assert self._outcome is not None
            _, answer, error = self._outcome
            self._outcome = None
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]  # it is the job's own answer when there is no error

    def missed(self) -> Answer | None:
        """What an earlier tick's job brought after its time, once; None where there is nothing or it failed."""
        with self._turn:
            outcome = self._late or self._outcome
            if self._late is None:
                self._outcome = None
            self._late = None
        return outcome[1] if outcome is not None else None

    def close(self, timeout_s: float = 0.0) -> None:
        """Let the thread end after its present job; wait for it at most `timeout_s`."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        if self._thread is not None and timeout_s > 0:
            self._thread.join(timeout_s)

    def _answered(self, tick: Tick) -> bool:
        return self._outcome is not None and self._outcome[0] == tick.number

    def _loop(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._asked is not None or self._closed)
                tick, self._asked = self._asked, None
            if tick is None:
                return
            answer, error = None, None
            try:
                answer = self._job(tick)
            except Exception as raised:
                error = raised
            with self._turn:
                self._outcome = (tick.number, answer, error)
                self._busy = False
                self._turn.notify_all()
