"""Engine readings: successive expositions of one engine become the fields of the `engine` measurement."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterable

from agent.collectors.dialects.dialect import START_FAMILIES, UPTIME_FAMILY, Dialect, first
from agent.counters import Rate
from agent.exposition import Exposition
from agent.histograms import Histogram, Window, gather
from telemetry.sample import Value

WINDOW_S = 60.0
MEAN_WINDOW_S = 10.0
"""Exact means need few observations, so they follow a slowdown within seconds."""

FINISH_RATE_WINDOW_S = 60.0
"""Counters that move when a request finishes tell no rate over less than about a minute."""

SAME_START_S = 1.0
"""Start times closer than this are one start, told twice with rounding."""

UPTIME_MARGIN_S = 3.0

INT_LIMIT = 2**63

_RATES = {"tokens_per_s": "generation_tokens_total", "prompt_tokens_per_s": "prompt_tokens_total"}
_QUANTILES = {
    "ttft_p50_s": ("ttft", 0.5),
    "ttft_p95_s": ("ttft", 0.95),
    "ttft_p99_s": ("ttft", 0.99),
    "itl_p50_s": ("itl", 0.5),
    "itl_p99_s": ("itl", 0.99),
    "e2e_p99_s": ("e2e", 0.99),
    "queue_p99_s": ("queue", 0.99),
    "prompt_len_p50": ("prompt_len", 0.5),
    "prompt_len_p95": ("prompt_len", 0.95),
    "output_len_p95": ("output_len", 0.95),
}
_MEANS = {
    "itl_mean_s": ("itl", MEAN_WINDOW_S),
    "step_mean_s": ("step", MEAN_WINDOW_S),
    "prompt_len_mean": ("prompt_len", WINDOW_S),
    "output_len_mean": ("output_len", WINDOW_S),
}


class EngineReadings:
    """What is remembered of one engine between scrapes."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.reported_age_s = 0.0  # how old the engine itself said its numbers were, at the last scrape
        self.restarts = 0  # seen by a new start time, without a scrape that failed between
        self._incarnation = Incarnation()
        window_s = FINISH_RATE_WINDOW_S if dialect.counter_style == "finish" else 0.0
        self._rates = {name: Rate(window_s) for name in _RATES}
        self._windows = {role: Window(WINDOW_S) for role in (*dialect.histograms, "step_tokens")}
        self._busy = BusySteps()

    def forget(self) -> None:
        """The engine went away: what it says next is a first reading, so no rate spans the gap."""
        for rate in self._rates.values():
            rate.forget()
        for window in self._windows.values():
            window.forget()
        self._busy.forget()

    def read(self, exposition: Exposition, monotonic_s: float, wall_s: float) -> dict[str, Value]:
        """The fields of this scrape. `monotonic_s` is when the body had arrived; rates are over the time between bodies."""
        start = start_time_s(exposition)
        if self._incarnation.changed(exposition, monotonic_s):
            self.restarts += 1
            self.forget()
        self.reported_age_s = max(0.0, exposition.value(self.dialect.age) or 0.0)
        fields: dict[str, Value] = {"counter_style": self.dialect.counter_style}
        fields |= self._gauges(exposition)
        if start is not None and "uptime_s" not in fields and wall_s >= start:
            fields["uptime_s"] = wall_s - start
        fields |= self._counters(exposition, monotonic_s)
        fields |= self._distributions(exposition, monotonic_s)
        fields |= self._steps(exposition, monotonic_s, fields.get("requests_running"))
        fields |= self._kv(exposition, fields)
        return fields

    def _gauges(self, exposition: Exposition) -> dict[str, Value]:
        fields: dict[str, Value] = {}
        for name, alternatives in self.dialect.gauges.items():
            family = first(alternatives, exposition)
            value = family.value(exposition) if family else None
            if value is not None:
                fields[name] = float(value)
        return fields

    def _counters(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        fields: dict[str, Value] = {}
        for name, alternatives in self.dialect.counters.items():
            family = first(alternatives, exposition)
            total = family.value(exposition) if family else None
            if total is not None and 0 <= total < INT_LIMIT:
                fields[name] = int(total)
        for rate_name, counter in _RATES.items():
            family = first(self.dialect.counters.get(counter, ()), exposition)
            series: dict[Hashable, float] = (
                {(family.name, labels): value for labels, value in family.series(exposition).items()} if family else {}
            )
            rate = self._rates[rate_name].per_second(series, monotonic_s)
            if rate is not None:
                fields[rate_name] = rate
        return fields

    def _distributions(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        for role, names in self.dialect.histograms.items():
            self._add(role, names, exposition, monotonic_s)
        self._add("step_tokens", self.dialect.step_tokens, exposition, monotonic_s)
        fields: dict[str, Value] = {}
        recent = {role: window.recent() for role, window in self._windows.items()}
        for name, (role, share) in _QUANTILES.items():
            histogram = recent.get(role)
            value = histogram.quantile(share) if histogram else None
            if value is not None:
                fields[name] = value
        for name, (role, span_s) in _MEANS.items():
            histogram = self._recent(role, span_s)
            if histogram is not None and histogram.mean is not None:
                fields[name] = histogram.mean
        return fields

    def _add(self, role: str, names: Iterable[str], exposition: Exposition, monotonic_s: float) -> None:
        found = next((found for name in names if (found := gather(exposition, name)) is not None), None)
        if found is None:
            self._windows[role].forget()
        else:
            self._windows[role].add(*found, monotonic_s)

    def _recent(self, role: str, span_s: float) -> Histogram | None:
        window = self._windows.get(role)
        return window.recent(span_s) if window else None

    def _steps(self, exposition: Exposition, monotonic_s: float, running: Value | None) -> dict[str, Value]:
        """From a histogram with one observation a step: steps, tokens a step, and the mean time of a step while busy."""
        found = next((g for name in self.dialect.step_tokens if (g := gather(exposition, name)) is not None), None)
        if found is None:
            return {}
        histogram = found[1]
        fields: dict[str, Value] = {"steps_total": int(histogram.count)}
        recent = self._recent("step_tokens", MEAN_WINDOW_S)
        if recent is not None and recent.mean is not None:
            fields["tokens_per_step"] = recent.mean
        step_s = self._busy.mean_step_s(histogram.count, running if isinstance(running, float) else None, monotonic_s)
        if step_s is not None:
            fields["step_mean_s"] = step_s
        return fields

    def _kv(self, exposition: Exposition, fields: dict[str, Value]) -> dict[str, Value]:
        """Blocks from the info labels. Under data parallelism each rank repeats the sum over all ranks, so it is never added."""
        info = self.dialect.info_labels(exposition)
        blocks = _positive(info.get(self.dialect.kv_blocks_label, ""))
        used_pct = fields.get("kv_used_pct")
        if blocks is None:
            return {}
        made: dict[str, Value] = {"kv_blocks_count": blocks}
        if isinstance(used_pct, float):
            made["kv_blocks_free"] = max(0.0, blocks * (1 - used_pct / 100))
            tokens = _positive(info.get(self.dialect.kv_block_tokens_label, ""))
            running = fields.get("requests_running")
            if tokens is not None and isinstance(running, float) and running > 0:
                # tokens held a running request: too small where requests share a cached prefix
                made["context_mean"] = blocks * tokens * used_pct / 100 / running
        return made


class Incarnation:
    """Notices that another process answers at the same address, though no scrape failed between."""

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._uptime: tuple[float, float] | None = None  # uptime as told, monotonic s at which it was told

    def forget(self) -> None:
        self._start_s = self._uptime = None

    def changed(self, exposition: Exposition, monotonic_s: float) -> bool:
        """Whether this exposition comes from another process than the last one, as far as start time and uptime tell."""
        start_s, last_start_s = start_time_s(exposition), self._start_s
        self._start_s = start_s
        moved = start_s is not None and last_start_s is not None and abs(start_s - last_start_s) > SAME_START_S
        uptime_s = exposition.value(UPTIME_FAMILY)
        last, self._uptime = self._uptime, None if uptime_s is None else (uptime_s, monotonic_s)
        if uptime_s is None or last is None:
            return moved
        # an answer may be late by the deadline, hence the margin where uptime grew, but by too little
        return moved or uptime_s < last[0] or uptime_s - last[0] < monotonic_s - last[1] - UPTIME_MARGIN_S


class BusySteps:
    """Mean time of a step over the last seconds, for engines that count steps but don't time them: wall time during which
    requests were running, over the steps made in it.
    """

    def __init__(self) -> None:
        self._history: deque[tuple[float, float, bool]] = deque()  # monotonic s, steps, busy

    def forget(self) -> None:
        self._history.clear()

    def mean_step_s(self, steps: float, running: float | None, monotonic_s: float) -> float | None:
        """None unless requests were running at every scrape of the last MEAN_WINDOW_S and steps were made."""
        history = self._history
        if history and steps < history[-1][1]:
            history.clear()
        history.append((monotonic_s, steps, bool(running)))
        while len(history) > 2 and monotonic_s - history[1][0] >= MEAN_WINDOW_S:
            history.popleft()
        made = steps - history[0][1]
        if len(history) < 2 or made <= 0 or not all(busy for _, _, busy in history):
            return None
        return (monotonic_s - history[0][0]) / made


def start_time_s(exposition: Exposition) -> float | None:
    """When the engine's process started (wall time), from its start time or from the oldest `_created` of its families."""
    for name in START_FAMILIES:
        value = exposition.value(name)
        if value is not None:
            return value
    created = [
        min(family.values())
        for name, family in exposition.series.items()
        if name.endswith("_created") and not name.startswith(("python_", "http_")) and family
    ]
    return min(created, default=None)


def config_hash(dialect: Dialect, exposition: Exposition) -> str | None:
    """The engine's own configuration hash, or one over the labels that tell its configuration; None where neither is there."""
    labels = dialect.info_labels(exposition)
    if dialect.config_label:
        return labels.get(dialect.config_label)
    kept = sorted((name, value) for name, value in labels.items() if name not in dialect.info_ignored)
    return hashlib.sha256(repr(kept).encode()).hexdigest()[:12] if kept else None


def version(dialect: Dialect, exposition: Exposition) -> str | None:
    """The version as far as the metrics tell it."""
    return dialect.info_labels(exposition).get(dialect.version_label) if dialect.version_label else None


def _positive(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and 0 < len(text) < 16 and int(text) > 0 else None
