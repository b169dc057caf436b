"""Retention: once an hour, what is old enough leaves the embedded store. A store server keeps to its own retention policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from apscheduler.schedulers.background import BackgroundScheduler

from telemetry.store import Store, StoreError

log = logging.getLogger(__name__)

DAY_NS = 86_400 * 10**9
RARE_DAYS = 90.0
RARE = ("event", "alert", "verdict", "pair")
"""Few and small, and what a person asks for weeks later; kept at least this long."""

FIRST_AFTER_S = 90.0
EVERY_S = 3600.0


class Retention:
    """A wall-clock chore: it may run late or be skipped, never twice at once, and never on the sampling thread."""

    def __init__(
        self, opener: Callable[[], Store], keep_days: float, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._opener = opener
        self.keep_days = keep_days
        self._wall_ns = wall_ns
        self._scheduler = BackgroundScheduler(timezone=UTC)

    def start(self) -> None:
        self._scheduler.add_job(
            self.prune,
            "interval",
            seconds=EVERY_S,
            next_run_time=datetime.now(UTC) + timedelta(seconds=FIRST_AFTER_S),
            coalesce=True,
            misfire_grace_time=600,
            max_instances=1,
        )
        self._scheduler.start()

    def stop(self) -> None:
        """At once: a prune that is under way is left to end with the process; each of its slices is a transaction."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def prune(self) -> int:
        """Delete what is older than kept; how many samples went. A store that can't do it now is tried again in an hour."""
        now_ns = self._wall_ns()
        raw_ns = now_ns - int(self.keep_days * DAY_NS)
        rare_ns = now_ns - int(max(self.keep_days, RARE_DAYS) * DAY_NS)
        try:
            store = self._opener()
            try:
                return store.prune({"*": raw_ns, **dict.fromkeys(RARE, rare_ns)})
            finally:
                store.close()
        except StoreError as error:
            log.warning("retention: %s", error)
            return 0


def keeps_itself(url: str) -> bool:
    """Whether the store at `url` is a server with a retention policy of its own."""
    return not url.startswith("sqlite:")
