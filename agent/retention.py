"""Retention: the embedded store's chores. What ended is rolled up several times a minute, what is old enough leaves once an hour.

A store server keeps to its own retention policy.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.background import BackgroundScheduler

from telemetry.store import Store, StoreError
from telemetry.store.interface import RARE_DAYS
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS

log = logging.getLogger(__name__)

DAY_NS = 86_400 * 10**9
RARE = ("event", "alert", "verdict", "pair")
"""Kept at least RARE_DAYS."""

FIRST_AFTER_S = 90.0
EVERY_S = 3600.0
ROLLUP_EVERY_S = 20.0
ROLLUP_BUDGET_S = 0.4
"""After days without rollups the rest waits for the next time, so that catching up takes no more than 2 % of a core."""
LOG_EVERY_S = 600.0


@dataclass(frozen=True, slots=True)
class Keep:
    """Days that raw samples, cells of a minute and cells of a quarter of an hour stay."""

    raw: float = 7.0
    minutes: float = 90.0
    quarters: float = 730.0


class Retention:
    """Wall-clock chores: they may run late or be skipped, never twice at once, and never on the sampling thread."""

    def __init__(
        self,
        opener: Callable[[], Store],
        keep: Keep,
        wall_ns: Callable[[], int] = time.time_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._opener = opener
        self.keep = keep
        self._wall_ns = wall_ns
        self._jitter = jitter
        self._scheduler = BackgroundScheduler(timezone=UTC)
        self._store: Store | None = None  # opening one looks the whole file over, which is not for every few seconds
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._logged_s = float("-inf")

    def start(self) -> None:
        """Rollups begin within the first interval, each agent's at its own time: a fleet that was started at once has one server."""
        for chore, every_s, after_s in (
            (self.prune, EVERY_S, FIRST_AFTER_S),
            (self.rollup, ROLLUP_EVERY_S, ROLLUP_EVERY_S * self._jitter()),
        ):
            self._scheduler.add_job(
                chore,
                "interval",
                seconds=every_s,
                next_run_time=datetime.now(UTC) + timedelta(seconds=after_s),
                coalesce=True,
                misfire_grace_time=600,
                max_instances=1,
            )
        self._scheduler.start()

    def stop(self) -> None:
        """At once: a chore that is under way is left to end with the process; each of its slices is a transaction."""
        self._stopped.set()
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)
        if self._lock.acquire(blocking=False):
            self._forget()
            self._lock.release()

    def rollup(self) -> None:
        """Draw together what has ended since the last time. A store that can't do it now is tried again."""
        self._with_store(lambda store: store.rollup(self._wall_ns(), ROLLUP_BUDGET_S))

    def prune(self) -> int:
        """Delete what is older than kept; how many samples went. A store that can't do it now is tried again in an hour."""
        now_ns = self._wall_ns()

        def before(days: float) -> int:
            return now_ns - int(days * DAY_NS)

        rare = dict.fromkeys(RARE, before(max(self.keep.raw, RARE_DAYS)))

        def remove(store: Store) -> int:
            removed = store.prune({"*": before(self.keep.raw), **rare})
            store.prune({"*": before(max(self.keep.raw, self.keep.minutes))}, MINUTE_NS)
            store.prune({"*": before(max(self.keep.raw, self.keep.minutes, self.keep.quarters))}, QUARTER_NS)
            return removed

        return self._with_store(remove)

    def _with_store(self, chore: Callable[[Store], int]) -> int:
        with self._lock:
            if self._stopped.is_set():
                return 0
            try:
                if self._store is None:
                    self._store = self._opener()
                return chore(self._store)
            except StoreError as error:
                self._forget()
                if time.monotonic() - self._logged_s >= LOG_EVERY_S:
                    self._logged_s = time.monotonic()
                    log.warning("retention: %s", error)
                return 0
            finally:
                if self._stopped.is_set():
                    self._forget()

    def _forget(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def keeps_itself(url: str) -> bool:
    """Whether the store at `url` is a server with a retention policy of its own."""
    return not url.startswith("sqlite:")
