"""Upkeep of a store: a thread that rolls up what has ended, several times a minute, for whoever serves the whole fleet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from telemetry.store.interface import Store, StoreError

log = logging.getLogger(__name__)

EVERY_S = 20.0
BUDGET_S = 2.0
LOG_EVERY_S = 600.0


class Upkeep:
    """Several at once do each other no harm: what one has done, the other finds done."""

    def __init__(
        self, opener: Callable[[], Store], every_s: float = EVERY_S, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._opener = opener
        self._every_s = every_s
        self._wall_ns = wall_ns
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._logged_s = float("-inf")

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """What is under way is left after `wait_s`; nothing of it needs to be finished."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        store: Store | None = None
        while not self._stopping.wait(self._every_s):
            try:
                store = store or self._opener()
                if not store.rolls_up:
                    break
                store.rollup(self._wall_ns(), BUDGET_S)
            except StoreError as error:
                if time.monotonic() - self._logged_s >= LOG_EVERY_S:
                    self._logged_s = time.monotonic()
                    log.warning("rolling up: %s", error)
        if store is not None:
            store.close()
