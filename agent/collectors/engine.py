"""Engine: reads what every engine of this host yields from its metrics endpoint, each on its own thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.collectors.dialects.dialect import Dialect, Told, config_hash
from agent.collectors.dialects.dynamo import counted_once
from agent.collectors.dialects.registry import KINDS, detect
from agent.collectors.engine_findings import Examination, findings
from agent.collectors.engine_identity import Change, Identities, Vanishing
from agent.collectors.engine_incarnation import Incarnation, Turn
from agent.collectors.engine_probe import EngineProbe
from agent.collectors.engine_readings import EngineReadings, configuration, version
from agent.collectors.engine_route import MetricsRoute, who_serves
from agent.collectors.engine_scrape import DEADLINE_S, Condition, EngineClient, Health, Outcome, Scrape
from agent.collectors.interface import Collector, Finding, ListsGpuProcesses, Tags, Tick
from agent.engine_ownership import EngineOwnership
from agent.engine_ranks import RankReadings
from agent.engine_status import EngineStatus
from agent.exposition import Exposition
from agent.settings import AgentSettings, EngineTarget
from agent.worker import Late, Worker
from telemetry.catalogue import REACH
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 30.0
"""How often a serving engine is asked for its health and identity besides its metrics."""

STALE_AFTER_INTERVALS = 3


@dataclass(frozen=True, slots=True)
class Visit:
    """What one visit to an engine brought: its metrics, and how it is."""

    scrape: Scrape
    health: Health
    dialect: Dialect | None = None
    kind: str = ""
    model: str = ""
    version: str = ""
    told: Told = field(default_factory=Told)


class EngineVisitor:
    """Visits one engine. Everything here runs on that engine's worker thread."""

    def __init__(self, target: EngineTarget, deadline_s: float, monotonic: Callable[[], float]) -> None:
        self._target = target
        self._monotonic = monotonic
        self._client = EngineClient(target.base_url, deadline_s, monotonic, target.api_key)
        self._health = Health(Condition.SILENT)
        self._checked_s: float | None = None
        self._route = MetricsRoute(self._client, target.name, target.kind, monotonic)
        self._incarnation = Incarnation()
        self._kind = ""  # as other routes than the metrics tell it
        self._told = Told()

    def visit(self, tick: Tick) -> Visit:
        scrape = self._route.scrape(tick.time_ns // 1_000_000)
        if scrape.outcome is Outcome.REFUSED:
            self._forget()
            self._route.forget()
            return Visit(scrape, self._health)
        exposition = scrape.exposition
        if exposition is not None:
            turn = self._incarnation.turn(exposition, scrape.received_s, scrape.restart_token)
            if turn is Turn.NEW:
                self._forget()
        dialect = detect(exposition, self._target.kind) if exposition else None
        self._check(dialect)
        if dialect is None or exposition is None:
            return Visit(scrape, self._health, None, self._kind, self._told.model, self._told.version, self._told)
        plain = dialect.plain(exposition)
        return Visit(
            replace(scrape, exposition=plain),
            self._health,
            dialect,
            dialect.kind,
            dialect.model(plain) or self._told.model,
            version(dialect, plain) or self._told.version,
            self._told,
        )

    def _forget(self) -> None:
        """Another process answers from here on, or none."""
        self._health = Health(Condition.SILENT)
        self._checked_s = None
        self._kind = ""
        self._told = Told()

    def _check(self, dialect: Dialect | None) -> None:
        """Ask for health until the engine is ready, then now and then; and for what the metrics don't tell."""
        now_s = self._monotonic()
        was_ready = self._health.condition is Condition.READY
        if was_ready and self._checked_s is not None and now_s - self._checked_s < HEALTH_EVERY_S:
            return
        self._checked_s = now_s
        said = self._client.health()
        if said.is_plain and dialect is not None and dialect.listens_when_ready:
            said = Health(Condition.READY)
        if not (was_ready and said.is_plain):  # that one is busy, not loading
            self._health = said
        if self._health.condition is not Condition.READY:
            return
        if dialect is None:
            kind, told = who_serves(self._get)
            self._kind = self._route.kind or kind or self._kind
            self._route.settle(self._kind)
        else:
            told = dialect.ask(self._get) if dialect.ask else Told()
        self._told = Told(
            told.version or self._told.version,
            told.model or self._told.model,
            told.config or self._told.config,
            told.ranks or self._told.ranks,
        )

    def _get(self, path: str) -> object:
        answer = self._client.get_json(path)
        return answer[1] if answer is not None and answer[0] == 200 else None


class Watched:
    """One engine as the collector remembers it."""

    def __init__(self, target: EngineTarget, deadline_s: float, monotonic: Callable[[], float]) -> None:
        self.target = target
        self.worker = Worker(f"engine-{target.name}", EngineVisitor(target, deadline_s, monotonic).visit)
        self.readings: EngineReadings | None = None
        self.ranks = RankReadings()
        self.kind = "" if target.kind == "auto" else target.kind
        self.model = ""
        self.up: int | None = None
        self.starting = 0  # says that it loads, or is hosted here and not listening yet
        self.read_s: float | None = None  # monotonic time of the last metrics that could be read
        self.answered_s: float | None = None
        self.asked_s = 0.0
        self.late: Visit | None = None  # an earlier visit's answer, taken with this tick
        self.slow_s = 0.0  # how long it took, when longer than a tick waits
        self.rests_until_s = 0.0  # monotonic time before which it must not be asked again
        self.probe = EngineProbe(target, monotonic=monotonic) if target.probe_every_s else None
        self.vanishing = Vanishing()
        self.status = EngineStatus(target.name, target.base_url, "starting")


class EngineCollector:
    """The `engine` measurement of every target, and events for what changed about it.

    A visit that does not come back within `wait_s` brings its numbers with a later tick, the first after they came; `stats_age_s`
    tells how old they are by then, and rates are over the times at which bodies came. Until then `up` keeps its last value, for at
    most three intervals, or three times as long as a slow engine took. No numbers are repeated. A slow engine is given as much
    time between two visits as a visit takes.
    """

    name = "engine"

    def __init__(
        self,
        tags: Tags,
        targets: Sequence[EngineTarget],
        *,
        interval_s: float = 1.0,
        wait_s: float | None = None,
        deadline_s: float = DEADLINE_S,
        identities: Path | None = None,
        language: str = "en",
        ownership: EngineOwnership | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.errors = 0
        self.late = 0
        self.ownership = ownership or EngineOwnership(targets, monotonic=monotonic)
        self._tags = dict(tags)
        self._interval_s = interval_s
        self._wait_s = 0.8 * min(1.0, interval_s) if wait_s is None else wait_s
        self._language = language
        self._monotonic = monotonic
        self._identities = Identities(identities)
        self._engines = [Watched(target, deadline_s, monotonic) for target in targets]

    @classmethod
    def of(cls, settings: AgentSettings, tags: Tags, memory: Path | None) -> EngineCollector:
        """For the engines of this host; versions are remembered in the folder `memory`, if any."""
        return cls(
            tags,
            settings.engines,
            interval_s=settings.interval_s,
            identities=memory / "engines.json" if memory else None,
            language=settings.language,
        )

    def beside(self, others: Sequence[Collector]) -> None:
        """Which processes use which GPUs is what the collectors of GPUs know."""
        self.ownership.sources.gpus = [source for source in others if isinstance(source, ListsGpuProcesses)]

    def collect(self, tick: Tick) -> Sequence[Sample]:
        self.ownership.begin(tick)
        asked = [(engine, self._ask(engine, tick)) for engine in self._engines]
        give_up_s = time.monotonic() + self._wait_s
        visits: list[tuple[Watched, bool | None, Visit | None]] = []
        for engine, started in asked:
            try:
                # a visit still under way from an earlier tick is not waited for again
                visit = engine.worker.take(tick, give_up_s - time.monotonic()) if started else None
            except Late:
                visit = None
            except Exception:
                self.errors += 1
                log.exception("engine %s: the visit failed", engine.target.name)
                visit = None
            visits.append((engine, started, visit or engine.late))
        self.ownership.settle(tick, give_up_s - time.monotonic())
        samples: list[Sample] = []
        for engine, started, visit in visits:
            if visit is not None:
                samples += self._with_answer(engine, visit, tick)
            elif started is None:
                samples += self._samples(engine, {}, tick)
            else:
                samples += self._without_answer(engine, tick)
        return counted_once(samples)

    @property
    def pending(self) -> bool:
        """Whether an engine, its processes or its first probe are still waited for."""
        return self.ownership.pending or any(
            engine.up is None or (engine.probe is not None and engine.probe.pending and engine.probe.last is None)
            for engine in self._engines
        )

    def findings(self, language: str) -> Sequence[Finding]:
        if not self._engines:
            none, remedy = say("agent.examined.none", language), say("agent.examined.none_remedy", language)
            return [Finding(self.name, "absent", none, remedy)]
        return [finding for engine in self._engines for finding in findings(self._examined(engine), language)]

    def _examined(self, engine: Watched) -> Examination:
        name = engine.target.name
        return Examination(
            engine.status,
            engine.kind,
            engine.model,
            gpus=self.ownership.gpus(name),
            driver_says=self.ownership.driver_says(name),
            pid=self.ownership.pid(name),
            has_gpus=self.ownership.has_gpus,
            probed=engine.probe.last if engine.probe is not None else None,
        )

    def statuses(self) -> list[EngineStatus]:
        return [engine.status for engine in self._engines]

    def remember(self, tick: int) -> None:
        self._identities.file.keep(tick)

    def close(self) -> None:
        for engine in self._engines:
            engine.worker.close()
            if engine.probe is not None:
                engine.probe.close()
        self.ownership.close()

    def _ask(self, engine: Watched, tick: Tick) -> bool | None:
        """Start this tick's visit; False while an earlier one is under way, None while the engine must be left alone."""
        engine.late = engine.worker.missed()
        if engine.late is not None:
            engine.slow_s = max(0.0, engine.late.scrape.received_s - engine.asked_s)
            engine.rests_until_s = engine.asked_s + 2 * engine.slow_s
        now_s = self._monotonic()
        if now_s < engine.rests_until_s:
            return None
        started = engine.worker.start(tick)
        if started:
            engine.asked_s = now_s
        return started

    def _with_answer(self, engine: Watched, visit: Visit, tick: Tick) -> list[Sample]:
        engine.kind = visit.kind or engine.kind
        engine.model = visit.model or engine.model
        fields: dict[str, Value] = {}
        events: list[Sample] = []
        exposition = visit.scrape.exposition
        if visit.dialect is not None and exposition is not None:
            if engine.readings is None or engine.readings.dialect is not visit.dialect:
                engine.readings = EngineReadings(visit.dialect)
            restarts = engine.readings.restarts
            fields = engine.readings.read(
                exposition,
                visit.scrape.received_s,
                tick.time_ns / 1e9,
                visit.scrape.restart_token,
                visit.told.ranks,
            )
            engine.read_s = visit.scrape.received_s
            if visit.dialect.scrape_every_s:
                due_s = visit.scrape.received_s + visit.dialect.scrape_every_s - self._interval_s / 2
                engine.rests_until_s = max(engine.rests_until_s, due_s)
            configured = config_hash(visit.told.config) or configuration(visit.dialect, exposition)
            said = {"version": visit.version, "config_hash": configured or ""}
            said = {name: text for name, text in said.items() if text}
            fields |= said
            events = [*self._changes(engine, said, tick), *self._gone(engine, visit, tick)]
            if engine.readings.restarts > restarts:
                self.ownership.look_again()
            if engine.readings.restarts > restarts and engine.target.command is None:
                text = say("agent.event.restarted", self._language, engine=engine.target.name)
                events.append(self._event("restart", engine, text, tick))
        else:
            if engine.readings is not None:
                engine.readings.forget()
            if visit.version:
                fields = {"version": visit.version}
                events = self._changes(engine, {"version": visit.version}, tick)
        self._judge(engine, visit)
        if fields.get("partial") and engine.status.state == "ready":
            engine.status = replace(engine.status, problem=say("agent.engine.partial", self._language))
        self._add_problem(engine, visit)
        return [*self._samples(engine, fields, tick), *self._ranks(engine, exposition, tick), *events]

    def _add_problem(self, engine: Watched, visit: Visit) -> None:
        """What is not as it should be with an engine that is ready all the same."""
        if visit is not engine.late:
            engine.slow_s = 0.0
        problem = ""
        if engine.slow_s:
            problem = say("agent.engine.late", self._language, took_s=engine.slow_s)
        elif engine.probe is not None and engine.probe.last is not None and engine.probe.last.trouble:
            last = engine.probe.last
            problem = say(f"agent.engine.probe_{last.trouble}", self._language, detail=last.detail)
        if problem and engine.status.state == "ready" and not engine.status.problem:
            engine.status = replace(engine.status, problem=problem)

    def _without_answer(self, engine: Watched, tick: Tick) -> list[Sample]:
        self.late += 1
        limit_s = STALE_AFTER_INTERVALS * max(self._interval_s, engine.slow_s)
        if engine.answered_s is None:
            engine.answered_s = tick.monotonic_s  # nothing is known yet: the wait begins
        # one that is asked seldom has not been silent since its last answer, but since it was asked
        if self._monotonic() - max(engine.answered_s, engine.asked_s) > limit_s:
            engine.up = engine.starting = 0
            problem = say("agent.engine.silent", self._language)
            engine.status = replace(engine.status, state="down", stage="", progress=None, problem=problem)
        return self._samples(engine, {}, tick)

    def _judge(self, engine: Watched, visit: Visit) -> None:
        """Up or down, and why, in words."""
        scrape, health = visit.scrape, visit.health
        if scrape.outcome in (Outcome.TIMEOUT, Outcome.BAD):
            self.errors += 1
        engine.answered_s = scrape.received_s
        was_up, engine.up = engine.up, 0
        engine.starting = 0
        status = EngineStatus(engine.target.name, engine.target.base_url, "down")
        if scrape.outcome is Outcome.REFUSED:
            engine.starting = int(engine.target.command is not None)
            problem = "" if engine.target.command else say("agent.engine.refused", self._language)
            engine.status = replace(status, problem=problem)
        elif health.condition is Condition.LOADING:
            engine.starting = 1
            engine.status = replace(status, state="loading", stage=health.stage, progress=health.progress)
        elif health.condition is Condition.UNWELL and scrape.outcome in (Outcome.OK, Outcome.STATUS):
            engine.up = 1 if visit.dialect is not None else 0  # its numbers and their age tell the rest
            engine.status = replace(status, problem=say("agent.engine.unwell", self._language, word=health.word))
        elif visit.dialect is not None:
            engine.up = 1
            engine.status = replace(status, state="ready")
        elif health.condition is Condition.READY and scrape.outcome in (Outcome.OK, Outcome.STATUS):
            engine.up = 1
            engine.status = replace(status, state="ready", problem=self._metrics_off(engine, visit))
        else:
            key = "slow" if scrape.outcome is Outcome.TIMEOUT else "unusable"
            problem = say(f"agent.engine.{key}", self._language, reason=scrape.reason or f"HTTP {scrape.status}")
            engine.status = replace(status, problem=problem)
        if engine.up != was_up:
            self.ownership.look_again()

    def _metrics_off(self, engine: Watched, visit: Visit) -> str:
        """Why an engine that serves tells no numbers, and which of its flags changes that."""
        configured = engine.target.kind
        other = detect(visit.scrape.exposition) if visit.scrape.exposition is not None else None
        if other is not None:
            return say("agent.engine.other_kind", self._language, kind=other.kind, configured=configured)
        kind = visit.kind or configured
        key = f"metrics_off_{kind}" if kind in KINDS else "metrics_off"
        return say(f"agent.engine.{key}", self._language)

    def _samples(self, engine: Watched, fields: dict[str, Value], tick: Tick) -> list[Sample]:
        # every number of an engine counts or measures something: below zero or beyond reason it is not known
        fields = {name: value for name, value in fields.items() if isinstance(value, str) or 0 <= value <= REACH}
        if engine.up is not None:
            fields["up"] = engine.up
            if not engine.up:
                fields["starting"] = engine.starting
        if engine.read_s is not None:
            reported_s = engine.readings.reported_age_s if engine.readings else 0.0
            fields["stats_age_s"] = max(0.0, self._monotonic() - engine.read_s) + reported_s
        fields |= self.ownership.fields(engine.target.name, tick)
        if engine.probe is not None:
            fields |= engine.probe.take(tick, engine.kind, engine.model, is_up=bool(engine.up))
        return [Sample("engine", self._engine_tags(engine), fields, tick.time_ns)] if fields else []

    def _ranks(self, engine: Watched, exposition: Exposition | None, tick: Tick) -> list[Sample]:
        """One sample for each process of a model that is split."""
        tags = self._engine_tags(engine)
        found = engine.ranks.read(exposition)
        return [Sample("rank", {**tags, "rank": rank}, fields, tick.time_ns) for rank, fields in found.items()]

    def _engine_tags(self, engine: Watched) -> dict[str, str]:
        gpus = self.ownership.tag(engine.target.name)
        own = {"engine": engine.target.name, "kind": engine.kind, "model": engine.model, "gpus": gpus}
        return {**self._tags, **{name: printable(value) for name, value in own.items() if value}}

    def _changes(self, engine: Watched, said: dict[str, str], tick: Tick) -> list[Sample]:
        """A new version is a deployment; another configuration of the same version is a change of configuration."""
        changes = {change.field: change for change in self._identities.update(engine.target.name, said, tick.number)}
        if "version" in changes:
            return [self._event("deploy", engine, _arrow(engine.kind, changes["version"]), tick)]
        if "config_hash" in changes:
            change = changes["config_hash"]
            text = say("agent.event.config", self._language, engine=engine.target.name)
            return [self._event("config", engine, text, tick, f"{change.before} -> {change.after}")]
        return []

    def _gone(self, engine: Watched, visit: Visit, tick: Tick) -> list[Sample]:
        """A family that a new version no longer has blanks whatever was built on its name, without a word."""
        assert engine.readings is not None and visit.scrape.exposition is not None
        families = engine.readings.families & visit.scrape.exposition.series.keys()
        gone = engine.vanishing.gone(visit.version, families, visit.scrape.received_s)
        if not gone:
            return []
        names = {"engine": engine.target.name, "version": visit.version, "families": ", ".join(gone)}
        return [self._event("config", engine, say("agent.event.vanished", self._language, **names), tick)]

    def _event(self, kind: str, engine: Watched, text: str, tick: Tick, detail: str = "") -> Sample:
        fields: dict[str, Value] = {"text": text, "code": 0}
        if detail:
            fields["detail"] = detail
        return Sample("event", {**self._tags, "kind": kind, "subject": engine.target.name}, fields, tick.time_ns)


def _arrow(kind: str, change: Change) -> str:
    return f"{kind} {change.before} -> {change.after}".strip()
