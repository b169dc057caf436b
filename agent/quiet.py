"""A log that a fault can't flood: of each topic one line a minute, whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0


class QuietLog:
    """Warnings by topic. What was left unsaid in between is counted in the next line of its topic."""

    def __init__(self, log: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._monotonic = monotonic
        self._said_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def warning(self, topic: str, message: str, *values: object, error: BaseException | None = None) -> None:
        """As `Logger.warning`; with `error`, its traceback follows."""
        now_s = self._monotonic()
        if now_s - self._said_s.get(topic, -EVERY_S) < EVERY_S:
            self._unsaid[topic] = self._unsaid.get(topic, 0) + 1
            return
        self._said_s[topic] = now_s
        unsaid = self._unsaid.pop(topic, 0)
        if unsaid:
            message, values = message + " (and %d times since the last line)", (*values, unsaid)
        self._log.warning(message, *values, exc_info=error)
