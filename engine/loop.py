"""The engine's thread: takes commands, makes steps, hands out what they gave. Dies loudly."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.core import Engine, Output
from engine.request import Finish, Request, State

IDLE_BEAT_S = 0.5
"""An idle loop comes round so often, so that fresh statistics of an idle engine can be told from those of a hung one."""


Result = TypeVar("Result")


class LoopEnded(RuntimeError):
    """The engine's thread has stopped or died, and what it was asked for will not be done."""


class EngineLoop(threading.Thread):
    """`deliver` gets the outputs of a step, `on_death` the exception that ended the loop; both are called in this thread."""

    def __init__(
        self, engine: Engine, deliver: Callable[[list[Output]], None], on_death: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self._deliver = deliver
        self._on_death = on_death
        self._wake = threading.Condition()
        self._new: deque[Request] = deque()
        self._unwanted: deque[str] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._ended = False

    def submit(self, request: Request) -> None:
        with self._wake:
            self._new.append(request)
            self._wake.notify()

    def abort(self, id: str) -> None:
        """Give a request up; nothing happens when it has ended by itself."""
        with self._wake:
            self._unwanted.append(id)
            self._wake.notify()

    def nudge(self) -> None:
        """A paused request may go on."""
        with self._wake:
            self._wake.notify()

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Have `work` done in the engine's thread, between two steps. The future holds LoopEnded when that thread ends first."""
        future: Future[Result] = Future()
        with self._wake:
            if self._ended:
                future.set_exception(LoopEnded("the engine has stopped"))
            else:
                self._calls.append((work, future))
                self._wake.notify()
        return future

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        try:
            while not self._stopping:
                outputs = self._take_commands()
                if self.engine.has_work:
                    outputs += self.engine.step()
                if outputs:
                    self._deliver(outputs)
                self._rest()
        except BaseException as error:
            self._on_death(error)
        finally:
            with self._wake:
                self._ended = True
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(LoopEnded("the engine has stopped"))

    def _do_calls(self) -> None:
        with self._wake:
            calls = list(self._calls)
            self._calls.clear()
        for work, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except Exception as error:  # the asker's to judge
                future.set_exception(error)

    def _take_commands(self) -> list[Output]:
        with self._wake:
            new, unwanted = list(self._new), list(self._unwanted)
            self._new.clear()
            self._unwanted.clear()
        outputs = []
        for request in new:
            try:
                self.engine.add(request)
            except ValueError as error:
                request.state = State.FINISHED
                outputs.append(Output(request, "", 0, Finish.ERROR, str(error)))
        outputs += self.engine.abort(unwanted)
        self._do_calls()
        return outputs

    def _rest(self) -> None:
        if not self.engine.is_idle:
            return
        with self._wake:
            if not (self._new or self._unwanted or self._calls or self._stopping):
                self._wake.wait(IDLE_BEAT_S)
        self.engine.beat()
