"""Daemon: the agent of one host, put together: collectors, sampler, spool, delivery, hosted engines and the endpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from agent.clock import SystemClock
from agent.collectors.engine import EngineCollector
from agent.collectors.interface import Examined, Tick
from agent.delivery import Delivery
from agent.endpoint import CannotServe, Endpoint
from agent.engine_status import EngineStatus
from agent.hosting import Hosting
from agent.latest import LatestSamples
from agent.retention import Retention, keeps_itself
from agent.sampler import SLOW_FIELDS, SLOW_SOURCES, Sampler, Storage, collectors, slow_measurements
from agent.settings import AgentSettings, EngineTarget
from agent.spool import Spool, SpoolError
from telemetry.messages import say
from telemetry.process import notify, stop_event
from telemetry.sample import Sample
from telemetry.store import StoreDown, StoreError, open_store

__all__ = ["Agent", "AgentSettings", "CannotStart", "EngineTarget", "once", "run"]

ENGINE_GRACE_S = 1.8
DELIVERY_GRACE_S = 0.5
"""Together within the three seconds in which the agent ends."""

STALLED_AFTER_INTERVALS = 3

ONCE_LIMIT_S = 20.0
"""A single sweep waits this long for the first reading of a slow source."""


class CannotStart(Exception):
    """A mistake in what the agent was given, or in this host. One line: what, why and the remedy."""


def run(settings: AgentSettings) -> int:
    """Run until SIGTERM or SIGINT: 0. 2 with one line on stderr when it can't start; then nothing is left behind."""
    stop = stop_event()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every scrape
    try:
        agent = Agent(settings)
    except CannotStart as error:
        print(error, file=sys.stderr)
        return 2
    agent.run(stop)
    return 0


def once(settings: AgentSettings) -> list[Sample]:
    """The samples of one sweep. It takes one interval, since rates need two readings, and longer while a slow source is being read
    for the first time. Nothing is kept, hosted or delivered.
    """
    only_watched = replace(settings, engines=tuple(replace(engine, command=None) for engine in settings.engines))
    sources = collectors(only_watched, None)
    sampler = Sampler(
        sources,
        settings.tags,
        lambda _samples: None,
        interval_s=settings.interval_s,
        language=settings.language,
    )
    try:
        latest = LatestSamples(settings.interval_s, SLOW_FIELDS, slow_measurements(settings), SLOW_SOURCES)
        began_s = time.monotonic()
        latest.publish(sampler.tick(), 0.0)
        events: list[Sample] = []
        while True:
            time.sleep(settings.interval_s)
            samples, passed_s = sampler.tick(), time.monotonic() - began_s
            latest.publish(samples, passed_s)
            events += [sample for sample in samples if sample.measurement == "event"]
            if passed_s >= ONCE_LIMIT_S or not any(isinstance(at, Examined) and at.pending for at in sources):
                return [*events, *latest.fresh(passed_s)]
    finally:
        sampler.close()


class Agent:
    """All parts of the agent. Making one claims the endpoint's port and the spool; CannotStart when either can't be had."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._clock = SystemClock()
        self._open_state_folder()
        self._check_store()
        self._latest = LatestSamples(settings.interval_s, SLOW_FIELDS, slow_measurements(settings), SLOW_SOURCES)
        self._watchdog = _watchdog_is_wanted(os.environ)
        self._said = ""
        try:
            self.endpoint = Endpoint(
                settings.host,
                settings.port,
                self._latest,
                self.health,
                allow_remote=settings.allow_remote,
                language=settings.language,
            )
        except CannotServe as error:
            raise CannotStart(str(error)) from None
        try:
            self._spool = Spool(settings.state_dir / "spool")
        except SpoolError as error:
            self.endpoint.close()
            raise CannotStart(str(error)) from None
        self._delivery = Delivery(
            self._spool, lambda: open_store(settings.store_url), target=_target(settings.store_url)
        )
        self._retention = Retention(lambda: open_store(settings.store_url), settings.keep_days)
        self._hosting = Hosting(
            settings.tags, settings.engines, settings.state_dir / "engines", language=settings.language
        )
        sources = collectors(settings, settings.state_dir)
        self._engines = next((source for source in sources if isinstance(source, EngineCollector)), None)
        if self._engines is not None:
            self._engines.ownership.sources.hosted = self._hosting.pids
        self._sampler = Sampler(
            [*sources, self._hosting],
            settings.tags,
            self._keep,
            interval_s=settings.interval_s,
            clock=self._clock,
            storage=self._storage,
            after_tick=self._after_tick,
            language=settings.language,
        )

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set, then end everything within three seconds."""
        self.endpoint.start()
        self._delivery.start()
        self._hosting.start()
        if not keeps_itself(self.settings.store_url):
            self._retention.start()
        try:
            self._sampler.run(stop)
        finally:
            self.close()

    def close(self) -> None:
        """Stop engines, hand over what they still said, deliver what can be delivered."""
        notify(STOPPING="1")
        self._retention.stop()
        self._hosting.stop(ENGINE_GRACE_S)
        last = self._hosting.collect(Tick(0, self._clock.wall_ns(), self._clock.monotonic_s()))
        with contextlib.suppress(SpoolError):
            self._spool.append(last)
        self._sampler.close()
        self._delivery.stop(DELIVERY_GRACE_S)
        self._spool.close()
        self.endpoint.close()

    def statuses(self) -> list[EngineStatus]:
        """Every engine: a hosted one as its supervision sees it, with what its metrics tell besides; others by their endpoint."""
        watched = self._engines.statuses() if self._engines else []
        hosted = self._hosting.statuses()
        found = []
        for status in watched:
            own = hosted.get(status.name)
            if own is not None and own.state == "ready":
                found.append(replace(own, problem=own.problem or (status.problem if status.state == "ready" else "")))
            else:
                found.append(own or status)
        return found

    def health(self) -> tuple[bool, Mapping[str, object]]:
        """Whether the agent is well (its ticks go on), and what /healthz shows."""
        last = self._sampler.last
        age_s = self._clock.monotonic_s() - last.monotonic_s if last else None
        stalled = age_s is not None and age_s > STALLED_AFTER_INTERVALS * self.settings.interval_s
        if last is None:
            status = "starting"
        elif stalled:
            status = "stalled"
        else:
            status = "ok" if self._delivery.connected else "degraded"
        return status in ("ok", "degraded"), {
            "status": status,
            "node": self.settings.tags["node"],
            "interval_s": self.settings.interval_s,
            "ticks": last.number if last else 0,
            "ticks_missed": self._sampler.missed,
            "tick_age_s": None if age_s is None else round(age_s, 3),
            "spool_bytes": self._spool.size_bytes,
            "dropped_total": self._spool.dropped_total,
            "delivery": {
                "lag_s": round(self._delivery.lag_s, 3),
                "connected": self._delivery.connected,
                "error": self._delivery.last_error,
            },
            "errors": self._sampler.errors(),
            "engine_answers_late": self._engines.late if self._engines else 0,
            "engines": [asdict(status) for status in self.statuses()],
        }

    def _keep(self, samples: Sequence[Sample]) -> None:
        self._latest.publish(samples, self._clock.monotonic_s())
        self._spool.append(samples)

    def _storage(self) -> Storage:
        return Storage(
            lag_s=self._delivery.lag_s,
            spool_bytes=self._spool.size_bytes,
            dropped_total=self._spool.dropped_total + self._spool.refused_total + self._delivery.rejected,
            errors_total=self._delivery.errors + self._spool.disk_errors_total,
        )

    def _after_tick(self, tick: Tick) -> None:
        """Only a completed tick pings the watchdog, so a loop that hangs is ended by whoever watches."""
        text = self._sentence()
        if tick.number == 1:
            notify(READY="1", STATUS=text)
        elif text != self._said:
            notify(STATUS=text)
        self._said = text
        if self._watchdog:
            notify(WATCHDOG="1")

    def _sentence(self) -> str:
        """What the agent does now, in words: its ticking, or the engines that are not ready."""
        language = self.settings.language
        parts = []
        for status in self.statuses():
            if status.state != "ready":
                key = "engine_progress" if status.progress is not None else "engine_stage" if status.stage else "engine"
                state = say(f"agent.state.{status.state}", language)
                values = {"name": status.name, "state": state, "stage": status.stage, "progress": status.progress}
                parts.append(say(f"agent.status.{key}", language, **values))
        return "; ".join(parts) or say("agent.status.ticking", language, interval_s=self.settings.interval_s)

    def _open_state_folder(self) -> None:
        folder = self.settings.state_dir
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotStart(
                say("agent.start.state_unusable", self.settings.language, path=folder, reason=reason)
            ) from None

    def _check_store(self) -> None:
        """A store that is down for now is no reason not to start; one that can never work is."""
        try:
            open_store(self.settings.store_url).close()
        except StoreDown:
            return
        except StoreError as error:
            raise CannotStart(say("agent.start.store_unusable", self.settings.language, reason=error)) from None


def _watchdog_is_wanted(environment: Mapping[str, str]) -> bool:
    """systemd's WATCHDOG_USEC, unless it is meant for another process."""
    return "WATCHDOG_USEC" in environment and environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())


def _target(url: str) -> str:
    """The store as it may stand in a log: without user, password and query."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0]
    return f"{scheme}://{place.rpartition('@')[2]}"
