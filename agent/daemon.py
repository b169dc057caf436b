"""Daemon: the agent of one host, put together: collectors, sampler, spool, delivery, hosted engines and the endpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from agent.clock import SystemClock
from agent.collectors.engine import EngineCollector
from agent.collectors.interface import Collector, Pausable, Remembers, Reprobable, Tick
from agent.delivery import Delivery
from agent.endpoint import CannotServe, Endpoint
from agent.engine_status import EngineStatus
from agent.hosting import Hosting
from agent.latest import LatestSamples
from agent.pause import Pause, moment
from agent.reload import (
    ConfigurationRefused,
    Difference,
    Gather,
    describe,
    difference,
    engine_changes,
    has_terminal,
    terminal_is_gone,
    to_make_anew,
    warm,
)
from agent.retention import Keep, Retention, keeps_itself
from agent.sampler import (
    COLLECTORS,
    DEPENDS_ON,
    SLOW_KINDS,
    SLOW_SOURCES,
    Sampler,
    Storage,
    acquaint,
    collectors_by_source,
    misses_many,
    slow_fields,
    slow_measurements,
)
from agent.settings import AgentSettings, EngineTarget
from agent.spool import Spool, SpoolError
from telemetry.messages import say
from telemetry.process import notify, on_signals, stop_event
from telemetry.sample import Sample
from telemetry.store import StoreDown, StoreError, open_store

__all__ = ["Agent", "AgentSettings", "CannotStart", "EngineTarget", "run"]

ENGINE_GRACE_S = 1.8
DELIVERY_GRACE_S = 0.5
"""Together within the three seconds in which the agent ends."""

RELOAD_ENGINE_GRACE_S = 10.0
"""An engine that a reload stops may end what it has begun; the ticks don't wait for it."""

STALLED_AFTER_INTERVALS = 3

UNSAFE_TICKS = 1000
"""So many ticks may wait for the disk; what they tell is told again after a restart."""

log = logging.getLogger(__name__)


class CannotStart(Exception):
    """A mistake in what the agent was given, or in this host. One line: what, why and the remedy."""


def run(settings: AgentSettings, gather: Gather | None = None) -> int:
    """Run until SIGTERM or SIGINT: 0. 2 with one line on stderr when it can't start; then nothing is left behind.

    With `gather`, SIGHUP takes over what it then answers, while the ticks go on.
    """
    stop = stop_event()
    asked = threading.Event()
    if gather is not None:
        _on_hangup(asked, stop)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every scrape
    try:
        agent = Agent(settings)
    except CannotStart as error:
        print(error, file=sys.stderr)
        return 2
    if gather is not None:
        threading.Thread(target=_reload_when_asked, args=(agent, gather, asked), name="reload", daemon=True).start()
    agent.run(stop)
    return 0


def _on_hangup(asked: threading.Event, stop: threading.Event) -> None:
    """SIGHUP asks for a reload; from a terminal that was closed it means the end, as for any program."""
    had_terminal = has_terminal()

    def hung_up() -> None:
        (stop if terminal_is_gone(had_terminal) else asked).set()

    on_signals(hung_up, signal.SIGHUP)


def _reload_when_asked(agent: Agent, gather: Gather, asked: threading.Event) -> None:
    while True:
        asked.wait()
        asked.clear()
        try:
            agent.reload(gather)
        except Exception:
            log.exception("the configuration could not be taken over")


class Agent:
    """All parts of the agent. Making one claims the endpoint's port and the spool; CannotStart when either can't be had."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._clock = SystemClock()
        self._open_state_folder()
        self._check_store()
        self._latest = LatestSamples(
            settings.interval_s, slow_fields(settings), slow_measurements(settings), SLOW_SOURCES, SLOW_KINDS
        )
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
            self._spool = Spool(
                settings.state_dir / "spool", after_commit=self._remember, on_removed=self._tell_of_removal
            )
        except SpoolError as error:
            self.endpoint.close()
            raise CannotStart(error.told(settings.language)) from None
        self._delivery = Delivery(
            self._spool, lambda: open_store(settings.store_url), target=_target(settings.store_url)
        )
        self._retention = Retention(lambda: open_store(settings.store_url), _keep(settings))
        self._hosting = Hosting(
            settings.tags, settings.engines, settings.state_dir / "engines", language=settings.language
        )
        self._unsafe: deque[tuple[int, list[tuple[Collector, int]]]] = deque(maxlen=UNSAFE_TICKS)
        """The ticks that are not on disk yet, oldest first: the ticket, and up to which tick each collector had told all."""
        self._remember_from = 1
        self._pause = Pause(settings.state_dir)
        self._pausing = threading.Lock()
        self._is_pause_new = False  # it changed, and nothing has followed from that yet
        self._paused_until_s: float | None = None  # once the devices are let go
        self._sources = collectors_by_source(settings, settings.state_dir, COLLECTORS)
        self._engines = self._meet(self._sources)
        self._sampler = Sampler(
            [*self._sources.values(), self._hosting],
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
        if self._pause.look():  # before any device is opened
            self._let_go_or_take_back()
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
            self._spool.append([*last, *self._sampler.noted()])
        self._sampler.close()
        self._delivery.stop(DELIVERY_GRACE_S)
        self._spool.close()
        self.endpoint.close()

    def reload(self, gather: Gather) -> None:
        """Take over a new configuration as a whole, or leave all as it is. On a thread of its own: the ticks go on meanwhile."""
        notify(RELOADING="1", MONOTONIC_USEC=str(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000))
        try:
            found = difference(self.settings, gather())
        except ConfigurationRefused as error:
            log.error("%s", say("agent.reload.refused", self.settings.language, reason=error))
        else:
            self._go_on_with(found)
        finally:
            notify(READY="1", STATUS=self._sentence())

    def _go_on_with(self, found: Difference) -> None:
        before, now = self.settings, found.settings
        if found.kept:
            log.warning("%s", say("agent.reload.kept", now.language, names=", ".join(found.kept)))
        anew = to_make_anew(found.changed, DEPENDS_ON, list(COLLECTORS))
        leaving = [self._sources[name] for name in anew & self._sources.keys()]
        for source in self._sources.values():
            if isinstance(source, Reprobable) and source not in leaving:
                source.reprobe()
        made = collectors_by_source(now, now.state_dir, anew)
        events = [event for source in made.values() for event in self._warmed(source)]
        going_on = {name: source for name, source in self._sources.items() if name not in anew} | made
        sources = {name: going_on[name] for name in COLLECTORS if name in going_on}
        engines = self._meet(sources)
        self._latest.keep(now.interval_s, slow_fields(now), slow_measurements(now))
        taken = self._sampler.change([*sources.values(), self._hosting], now.tags, now.interval_s)
        taken.wait(2 * before.interval_s + ENGINE_GRACE_S)
        self._sampler.keep(events)
        if self._sampler.last is not None:
            self._remember_from = (
                self._sampler.last.number + 2
            )  # the events are in the next tick, or in the one after it
        with self._pausing:
            self.settings, self._sources, self._engines = now, sources, engines
            if self._pause.until_s is not None:  # it may have begun meanwhile
                _let_go(made.values())
        self._retention.keep = _keep(now)
        for source in leaving:
            source.close()
        self._tell_of_reload(before, found)
        self._hosting.change(now.engines, now.tags, RELOAD_ENGINE_GRACE_S)

    def _meet(self, sources: Mapping[str, Collector]) -> EngineCollector | None:
        """Tell the collectors of each other, and the one of engines, which is returned, of what is hosted here."""
        acquaint(list(sources.values()))
        engines = next((source for source in sources.values() if isinstance(source, EngineCollector)), None)
        if engines is not None:
            engines.ownership.sources.hosted = self._hosting.pids
        return engines

    def _warmed(self, source: Collector) -> list[Sample]:
        with self._pausing:
            if isinstance(source, Pausable) and self._pause.until_s is not None:
                source.pause()
                return []
        return warm(source)

    def _tell_of_reload(self, before: AgentSettings, found: Difference) -> None:
        if not found.changed:
            log.info("%s", say("agent.reload.same", before.language))
            return
        what = describe(before, found)
        log.warning("%s", say("agent.reload.done", before.language, what=what))
        self._sampler.note("config", "agent", say("agent.reload.done", before.language, what=what))
        for name, how in engine_changes(before.engines, found.settings.engines).items():
            if how == "changed":  # what an engine yields may differ from here on
                self._sampler.note("config", name, say("agent.event.config", before.language, engine=name))

    def _look_for_pause(self) -> None:
        """A stat; what follows from a change is done beside the ticks, since a driver may take its time."""
        self._is_pause_new = self._pause.look() or self._is_pause_new
        if self._is_pause_new:
            with contextlib.suppress(
                RuntimeError
            ):  # this host has no thread left for us now; the next tick tries again
                threading.Thread(target=self._let_go_or_take_back, name="pause", daemon=True).start()
                self._is_pause_new = False

    def _let_go_or_take_back(self) -> None:
        with self._pausing:
            until_s = self._pause.until_s
            if until_s is None:
                _take_back(self._sources.values())
            else:
                _let_go(self._sources.values())
            self._paused_until_s = until_s
        key = "over" if until_s is None else "begins"
        text = say(f"agent.pause.{key}", self.settings.language, until="" if until_s is None else moment(until_s))
        log.warning("%s", text)
        self._sampler.note("pause", "agent", text)

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
            status = "degraded" if self._degraded() else "ok"
        missed, due = self._sampler.missed_of_late()
        until_s = self._paused_until_s
        return status in ("ok", "degraded"), {
            "status": status,
            "degraded": self._degraded(),
            "paused_until": None if until_s is None else moment(until_s),
            "state_dir": str(self.settings.state_dir),
            "node": self.settings.tags["node"],
            "interval_s": self.settings.interval_s,
            "ticks": last.number if last else 0,
            "ticks_missed": self._sampler.missed,
            "ticks_missed_of_late": missed,
            "ticks_due_of_late": due,
            "tick_age_s": None if age_s is None else round(age_s, 3),
            "spool_bytes": self._spool.size_bytes,
            "dropped_total": self._spool.dropped_total,
            "delivery": {
                "lag_s": round(self._delivery.lag_s, 3),
                "connected": self._delivery.connected,
                "error": self._delivery.last_error,
            },
            "errors": self._sampler.errors(),
            "collectors": self._sampler.progress(),
            "engine_answers_late": self._engines.late if self._engines else 0,
            "engines": [asdict(status) for status in self.statuses()],
        }

    def _degraded(self) -> list[str]:
        """What is not as it should be although the ticks go on, a sentence each."""
        missed, due = self._sampler.missed_of_late()
        found = []
        if misses_many(missed, due):
            pct = 100 * missed / due
            found.append(say("agent.health.missed", self.settings.language, missed=missed, due=due, pct=pct))
        if not self._delivery.connected:
            found.append(say("agent.health.unconnected", self.settings.language))
        return found

    def _keep(self, samples: Sequence[Sample]) -> None:
        self._latest.publish(samples, self._clock.monotonic_s())
        ticket = self._spool.append(samples)
        self._unsafe.append((ticket, self._sampler.answered()))

    def _remember(self, acknowledged: int) -> None:
        """On the spool's thread, which may wait for the disk: what is on disk by now may be remembered."""
        safe: list[tuple[Collector, int]] = []
        while self._unsafe and self._unsafe[0][0] <= acknowledged:
            safe = self._unsafe.popleft()[1]
        for source, tick in safe:
            if isinstance(source, Remembers) and tick >= self._remember_from:
                source.remember(tick)

    def _tell_of_removal(self, lost: int) -> None:
        text = say("agent.event.spool_removed", self.settings.language, folder=self._spool.folder, lost=lost)
        self._sampler.note("spool", "agent", text)

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
        self._look_for_pause()

    def _sentence(self) -> str:
        """What the agent does now, in words: its ticking, or the engines that are not ready."""
        language = self.settings.language
        until_s = self._paused_until_s
        parts = [] if until_s is None else [say("agent.pause.begins", language, until=moment(until_s))]
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
        language = self.settings.language
        try:
            open_store(self.settings.store_url).close()
        except StoreDown:
            return
        except StoreError as error:
            raise CannotStart(say("agent.start.store_unusable", language, reason=error.told(language))) from None


def _watchdog_is_wanted(environment: Mapping[str, str]) -> bool:
    """systemd's WATCHDOG_USEC, unless it is meant for another process."""
    return "WATCHDOG_USEC" in environment and environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())


def _keep(settings: AgentSettings) -> Keep:
    return Keep(settings.keep_days, settings.keep_1min_days, settings.keep_15min_days)


def _target(url: str) -> str:
    """The store as it may stand in a log: without user, password and query."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("?")[0]
    return f"{scheme}://{place.rpartition('@')[2]}"


def _let_go(sources: Iterable[Collector]) -> None:
    for source in sources:
        if isinstance(source, Pausable):
            source.pause()


def _take_back(sources: Iterable[Collector]) -> None:
    for source in sources:
        if isinstance(source, Pausable):
            source.resume()
