"""Periodic: a slow source, read on a thread of its own every so often, so that no tick ever waits for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from agent.collectors.interface import Tick
from agent.worker import Late, Worker

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Periodic(Generic[Answer]):
    """Runs `job(tick)` every `every_s`, first at the first tick; one that takes longer than its period is not started twice.

    The job catches what its source may do wrong and answers with it: what it raises all the same is logged and counted.
    """

    def __init__(self, name: str, every_s: float, job: Callable[[Tick], Answer]) -> None:
        self.failures = 0  # jobs that raised
        self._name = name
        self._every_s = every_s
        self._worker = Worker(name, job)
        self._started: Tick | None = None
        self._due_s = -math.inf

    @property
    def pending(self) -> bool:
        """Whether a job is under way."""
        return self._started is not None

    def running_s(self, tick: Tick) -> float:
        """For how long the present job has been under way, seconds; 0 when there is none."""
        return tick.monotonic_s - self._started.monotonic_s if self._started else 0.0

    def take(self, tick: Tick) -> Answer | None:
        """The answer of a job that has ended since the last call, once; starts the next one when it is due. Never waits."""
        answer = self._ended()
        if self._started is None and tick.monotonic_s >= self._due_s and self._worker.start(tick):
            self._started = tick
            self._due_s = tick.monotonic_s + self._every_s
        return answer

    def close(self) -> None:
        self._worker.close()

    def _ended(self) -> Answer | None:
        if self._started is None or self._worker.busy:
            return None
        started, self._started = self._started, None
        try:
            return self._worker.take(started, 0.0)
        except Late:
            return None
        except Exception:
            self.failures += 1
            log.exception("%s failed", self._name)
            return None
