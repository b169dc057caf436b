"""Distributions: means and quantiles of what an engine's histograms saw lately."""

from __future__ import annotations

import math

from agent.collectors.dialects.dialect import Dialect
from agent.collectors.engine_progress import MEAN_WINDOW_S
from agent.exposition import Exposition
from agent.histograms import Histogram, Parts, Quantile, Window, gather, joined
from telemetry.sample import Value

WINDOW_S = 60.0
LONG_WINDOW_S = 300.0
"""Quantiles are of the last minute, or, where that saw too few requests for them, of the last five."""

LONG_WINDOW_EVERY_S = 10.0

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
    "ttft_mean_s": ("ttft", WINDOW_S),
    "itl_mean_s": ("itl", MEAN_WINDOW_S),
    "tpot_mean_s": ("tpot", WINDOW_S),
    "e2e_mean_s": ("e2e", WINDOW_S),
    "queue_mean_s": ("queue", WINDOW_S),
    "step_mean_s": ("step", MEAN_WINDOW_S),
    "prompt_len_mean": ("prompt_len", WINDOW_S),
    "output_len_mean": ("output_len", WINDOW_S),
}


class Distributions:
    """The histograms of one engine, by role."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        roles = (*dialect.histograms, *dialect.means, "step_tokens")
        self._windows = {role: Window(WINDOW_S) for role in roles}
        self._long = {role: Window(LONG_WINDOW_S, LONG_WINDOW_EVERY_S) for role in roles}
        self._latest: dict[str, Parts] = {}

    def forget(self) -> None:
        for window in (*self._windows.values(), *self._long.values()):
            window.forget()

    def read(self, exposition: Exposition, monotonic_s: float) -> dict[str, Value]:
        """Means and quantiles by field. `quantile_bounds` names the quantiles that are only a bound, each with its sign."""
        self._latest = self._parts(exposition)
        for role, window in self._windows.items():
            for each in (window, self._long[role]):
                if self._latest.get(role):
                    each.add(self._latest[role], monotonic_s)
                else:
                    each.forget()
        fields: dict[str, Value] = {}
        for name, (role, span_s) in _MEANS.items():
            recent = self.recent(role, span_s)
            if recent is not None and recent.mean is not None:
                fields[name] = recent.mean
        bounds = []
        for name, (role, share) in _QUANTILES.items():
            quantile = self._quantile(role, share)
            if quantile is not None:
                fields[name] = quantile.value
                if quantile.bound:
                    bounds.append(name + quantile.bound)
        if bounds:
            fields["quantile_bounds"] = " ".join(bounds)
        return fields

    def recent(self, role: str, span_s: float) -> Histogram | None:
        window = self._windows.get(role)
        return window.recent(span_s) if window else None

    def steps(self) -> Parts:
        """The histogram with one observation a step, since the engine's start."""
        return self._latest.get("step_tokens", {})

    def at_most_s(self, role: str, share: float) -> float | None:
        """The bucket's end under which this share of a role's times lies, lately or, without any, since the engine's start."""
        window = self._long.get(role)
        recent = window.recent() if window else None
        found = recent.at_most(share) if recent is not None else None
        whole = joined(self._latest.get(role, {}).values())
        return found if found is not None else whole.at_most(share) if whole is not None else None

    def _quantile(self, role: str, share: float) -> Quantile | None:
        windows = (self._windows.get(role), self._long.get(role))
        recent = (window.recent() for window in windows if window)
        found = (histogram.quantile(share) for histogram in recent if histogram is not None)
        return next((quantile for quantile in found if quantile is not None), None)

    def _parts(self, exposition: Exposition) -> dict[str, Parts]:
        dialect = self._dialect
        named = {**dialect.histograms, "step_tokens": dialect.step_tokens}
        parts: dict[str, Parts] = {}
        for role, names in named.items():
            parts[role] = next((found for name in names if (found := gather(exposition, name))), {})
        for role, (total, count) in dialect.means.items():
            seconds, events = total.value(exposition), count.value(exposition)
            if seconds is not None and events is not None:
                parts[role] = {(): Histogram((math.inf,), (events,), seconds)}
        return parts
