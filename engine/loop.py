"""The engine's thread: takes commands, makes steps, hands out what they gave. Dies loudly."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine.core import Engine, Output
from engine.request import Finish, Request, State

IDLE_BEAT_S = 0.5
"""An idle loop comes round so often, so that fresh statistics of an idle engine can be told from those of a hung one."""


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
        self._stopping = False

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
        return outputs + self.engine.abort(unwanted)

    def _rest(self) -> None:
        if not self.engine.is_idle:
            return
        with self._wake:
            if not (self._new or self._unwanted or self._stopping):
                self._wake.wait(IDLE_BEAT_S)
        self.engine.beat()
