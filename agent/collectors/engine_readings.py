"""Engine readings: successive expositions of one engine become the fields of the `engine` measurement."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from agent.collectors.dialects.dialect import Dialect, KvPool, by_rank, config_hash, first
from agent.collectors.engine_distributions import Distributions
from agent.collectors.engine_incarnation import Incarnation, Turn, start_time_s
from agent.collectors.engine_progress import (
    MEAN_WINDOW_S,
    PREFILL_BUDGET_LIMIT_S,
    REPORTED_S,
    STALL_REQUESTS,
    STALL_S,
    STALL_STEPS,
    BusySteps,
    Pulse,
    Rank,
    Stall,
)
from agent.counters import Rate
from agent.exposition import Exposition
from telemetry.catalogue import ENGINE
from telemetry.sample import Value

FINISH_RATE_WINDOW_S = 60.0
"""Counters that move when a request finishes tell no rate over less than about a minute, nor less than two requests' time."""

INT_LIMIT = 2**63

_RATES = {"tokens_per_s": "generation_tokens_total", "prompt_tokens_per_s": "prompt_tokens_total"}
_ITERATION_GAUGES = ("requests_running", "requests_waiting", "kv_used_pct", "kv_blocks_free")


class EngineReadings:
    """What is remembered of one engine between scrapes."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.reported_age_s = 0.0  # how old the engine itself said its numbers were, at the last scrape
        self.families = dialect.families()
        self.restarts = 0  # seen without a scrape that failed between
        self._incarnation = Incarnation()
        self._shares_address = False  # several processes take turns in answering
        window_s = FINISH_RATE_WINDOW_S if dialect.counter_style == "finish" else 0.0
        self._rates = {name: Rate(window_s, dialect.significant_digits) for name in _RATES}
        self._distributions = Distributions(dialect)
        self._busy = BusySteps()
        self._stall = Stall()
        self._iteration = Pulse()
        self._reported = Pulse()
        self._step_s: float | None = None

    def forget(self) -> None:
        """The engine went away: what it says next is a first reading, so no rate spans the gap."""
        for rate in self._rates.values():
            rate.forget()
        for memory in (self._distributions, self._busy, self._stall, self._iteration, self._reported):
            memory.forget()
        self._step_s = None

    def read(
        self, exposition: Exposition, monotonic_s: float, wall_s: float, token: str = "", ranks: int | None = None
    ) -> dict[str, Value]:
        """The fields of this scrape, of an exposition as `Dialect.plain` leaves it.

        `monotonic_s` is when the body had arrived; rates are over the time between bodies. `token` is the restart token that
        came with it, `ranks` how many data-parallel ranks there should be.
        """
        counters = self._counters(exposition)
        self._notice_restart(exposition, monotonic_s, token, counters)
        self.reported_age_s = max(0.0, exposition.value(self.dialect.age) or 0.0)
        fields: dict[str, Value] = {"counter_style": self.dialect.counter_style}
        fields |= self._gauges(exposition)
        start = start_time_s(exposition)
        if start is not None and "uptime_s" not in fields and wall_s >= start:
            fields["uptime_s"] = wall_s - start
        fields |= {name: ENGINE.fields[name].type(total) for name, total in counters.items()}
        fields |= self._distributions.read(exposition, monotonic_s)
        if isinstance(step_s := fields.get("step_mean_s"), float):
            self._step_s = step_s
        fields |= self._rates_of(exposition, monotonic_s)
        fields |= self._steps(exposition, monotonic_s)
        fields |= self._kv(self.dialect.kv_pool(exposition), fields)
        fields |= self._stalled(exposition, monotonic_s)
        self._disbelieve(exposition, fields, monotonic_s)
        partial = self._partial(exposition, ranks)
        if partial is not None:
            fields["partial"] = int(partial)
        return fields

    def _notice_restart(
        self, exposition: Exposition, monotonic_s: float, token: str, counters: Mapping[str, float]
    ) -> None:
        turn = self._incarnation.turn(exposition, monotonic_s, token, counters)
        if turn is Turn.SAME:
            return
        self.forget()
        self._shares_address = turn is Turn.OTHER
        if turn is Turn.NEW:
            self.restarts += 1

    def _gauges(self, exposition: Exposition) -> dict[str, Value]:
        fields: dict[str, Value] = {}
        for name, alternatives in self.dialect.gauges.items():
            family = first(alternatives, exposition)
            value = family.value(exposition) if family else None
            if value is not None and (value or name not in self.dialect.zero_is_unknown):
                fields[name] = float(value)
        if "kv_used_pct" in fields and self.dialect.kv_used_kind:
            fields["kv_used_kind"] = self.dialect.kv_used_kind
        return fields

    def _counters(self, exposition: Exposition) -> dict[str, float]:
        counters: dict[str, float] = {}
        for name, alternatives in self.dialect.counters.items():
            told = [value for family in alternatives if (value := family.value(exposition)) is not None]
            if told:
                total = max(told) if name in self.dialect.largest else told[0]
                if 0 <= total < INT_LIMIT and (total or name not in self.dialect.zero_is_unknown):
                    counters[name] = total
        return counters

    def _rates_of(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        window_s = None
        if self.dialect.counter_style == "finish":
            window_s = max(FINISH_RATE_WINDOW_S, 2 * (self._distributions.at_most_s("e2e", 0.95) or 0.0))
        fields: dict[str, Value] = {}
        for name, counter in _RATES.items():
            family = first(self.dialect.counters.get(counter, ()), exposition)
            series: dict[Hashable, float] = dict(family.series(exposition).items()) if family else {}
            rate = self._rates[name].per_second(series, monotonic_s, window_s)
            if rate is not None:
                fields[name] = rate
        return fields

    def _steps(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        """Steps, tokens a step, and the mean time of a step while busy where the engine does not time its steps itself."""
        fields: dict[str, Value] = {}
        parts = self._distributions.steps()
        if parts:
            fields["steps_total"] = int(sum(part.count for part in parts.values()))
        recent = self._distributions.recent("step_tokens", MEAN_WINDOW_S)
        if recent is not None and recent.mean is not None:
            fields["tokens_per_step"] = recent.mean
        steps = self._by_rank("steps_total", exposition)
        if steps and "step" not in self.dialect.histograms:
            step_s = self._busy.mean_step_s(steps, self._by_rank("requests_running", exposition), monotonic_s)
            if step_s is not None:
                fields["step_mean_s"] = self._step_s = step_s
        return fields

    def _by_rank(self, name: str, exposition: Exposition) -> dict[Rank, float]:
        """A counter or gauge by our name, for each engine behind the target."""
        parts = self._distributions.steps() if name == "steps_total" else {}
        if parts:
            return by_rank({("", labels): part.count for labels, part in parts.items()}, self.dialect.rank_labels)
        family = first(self.dialect.counters.get(name) or self.dialect.gauges.get(name, ()), exposition)
        return by_rank(family.series(exposition), self.dialect.rank_labels) if family else {}

    def _kv(self, pool: KvPool, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Blocks, and the context that a running request holds. Under data parallelism all ranks together."""
        made: dict[str, Value] = {}
        used_pct, running = fields.get("kv_used_pct"), fields.get("requests_running")
        held = pool.held_tokens
        if pool.blocks is not None and "kv_blocks_count" not in fields:
            made["kv_blocks_count"] = pool.blocks
            if pool.free is not None:
                made["kv_blocks_free"] = pool.free
            elif isinstance(used_pct, float) and used_pct <= 100:
                made["kv_blocks_free"] = pool.blocks * (1 - used_pct / 100)
            if (
                held is None
                and pool.block_tokens
                and isinstance(used_pct, float)
                and self.dialect.kv_used_kind == "live"
            ):
                held = pool.blocks * pool.block_tokens * used_pct / 100
        if held is not None and isinstance(running, float) and running > 0:
            # too small where requests share a cached prefix
            made["context_mean"] = held / running
        return made

    def _stalled(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        """Requests run and nothing moves, for longer than a healthy engine is ever silent.

        Where only finished requests count, that is three times what nearly all of them take; else ten seconds, twenty steps, or
        as long as nearly all prompts take to be computed (they are counted at their end).
        """
        names = ("generation_tokens_total", "prompt_tokens_total", "steps_total", "requests_finished_total")
        counted = [found for name in names if (found := self._by_rank(name, exposition))]
        running = self._by_rank("requests_running", exposition)
        if not counted or not running:
            return {}
        if self.dialect.iteration and not self._iteration_moves(exposition, monotonic_s):
            return {}  # whether anything runs is not known
        by_rank_too = [found for found in counted if found.keys() <= running.keys()]
        if by_rank_too:
            counted = by_rank_too  # what is counted for all ranks together says nothing about one of them
        else:
            counted = [{(): sum(found.values())} for found in counted]
            running = {(): sum(running.values())}
        progress = {rank: tuple(found.get(rank, 0.0) for found in counted) for rank in running}
        steps = self.dialect.counter_style == "step" or bool(self._by_rank("steps_total", exposition))
        stalled = self._stall.judge(
            running, progress, monotonic_s, self._step_patience_s() if steps else self._patience_s()
        )
        return {} if stalled is None else {"stalled": int(stalled)}

    def _step_patience_s(self) -> float:
        prefill_s = min(PREFILL_BUDGET_LIMIT_S, self._distributions.at_most_s("prefill", 0.99) or 0.0)
        refresh_s = self.dialect.refresh_s + STALL_S if self.dialect.refresh_s else 0.0
        return max(STALL_S, STALL_STEPS * (self._step_s or 0.0), prefill_s, refresh_s)

    def _patience_s(self) -> float | None:
        e2e_s = self._distributions.at_most_s("e2e", 0.99)
        return max(STALL_S, STALL_REQUESTS * e2e_s) if e2e_s is not None else None

    def _iteration_moves(self, exposition: Exposition, monotonic_s: float) -> bool:
        values = (family.value(exposition) for family in self.dialect.iteration)
        return self._iteration.beats(tuple(value for value in values if value is not None), monotonic_s)

    def _disbelieve(self, exposition: Exposition, fields: dict[str, Value], monotonic_s: float) -> None:
        """Leave out gauges that may only be what was last, long ago: of an iteration that is over, or of an idle engine."""
        if self.dialect.iteration and not self._iteration_moves(exposition, monotonic_s):
            for name in (*_ITERATION_GAUGES, "context_mean"):
                if fields.get(name):
                    del fields[name]
        if "kv_used_pct" not in fields:
            fields.pop("kv_used_kind", None)
        reported = fields.pop("reported_tokens_per_s", None)
        if not isinstance(reported, float):
            return
        moves = self._reported.beats(
            (reported, *(float(value) for value in (fields.get("generation_tokens_total"),) if isinstance(value, int))),
            monotonic_s,
            REPORTED_S if self.dialect.counter_style == "finish" else STALL_S,
        )
        if moves and self._reported.has_moved and fields.get("requests_running"):
            fields["reported_tokens_per_s"] = reported

    def _partial(self, exposition: Exposition, ranks: int | None) -> bool | None:
        """Whether what is told is only a part: fewer ranks than there are, or one of several processes. None where unknown."""
        if self._shares_address:
            return True
        seen = len(self._by_rank("requests_running", exposition))
        return seen < ranks if ranks is not None and seen else None


def configuration(dialect: Dialect, exposition: Exposition) -> str | None:
    """The engine's own configuration hash, or one over the labels that tell its configuration; None where neither is there."""
    labels = dialect.info_labels(exposition)
    if dialect.config_label:
        return labels.get(dialect.config_label)
    return config_hash({name: value for name, value in labels.items() if name not in dialect.info_ignored})


def version(dialect: Dialect, exposition: Exposition) -> str | None:
    """The version as far as the metrics tell it."""
    return dialect.info_labels(exposition).get(dialect.version_label) if dialect.version_label else None
