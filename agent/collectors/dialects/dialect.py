"""Dialect: the form in which a kind of engine says under which names it exports what the `engine` measurement holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agent.exposition import Exposition, Labels

Join = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Family:
    """Where one value is found: a family, the label values its series must have (any of), how its series (ranks, models) are
    joined, and the factor to our unit. `is_ratio`: 0..1 that becomes percent; engines that send 0..100 are tolerated.
    """

    name: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    join: Join = "sum"
    is_ratio: bool = False

    def series(self, exposition: Exposition) -> dict[Labels, float]:
        found = exposition.series.get(self.name, {})
        if not self.where:
            return found
        return {labels: value for labels, value in found.items() if self._fits(labels)}

    def value(self, exposition: Exposition) -> float | None:
        """The joined value in our unit; None where the family is absent."""
        values = list(self.series(exposition).values())
        if not values:
            return None
        joined = max(values) if self.join == "max" else sum(values)
        if self.join == "mean":
            joined /= len(values)
        return joined * 100 if self.is_ratio and joined <= RATIO_CEILING else joined

    def _fits(self, labels: Labels) -> bool:
        own = dict(labels)
        return all(own.get(name) in values for name, values in self.where.items())


RATIO_CEILING = 1.5
"""A ratio above this is taken for a percentage: some engines have sent 0..100 under a name that others use for 0..1."""

Alternatives = tuple[Family, ...]
"""The first family that is present is the one; they are never added, since an engine may export old and new names at once."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of engine speaks.

    `counters` and `gauges` go by our field names, `histograms` by role (ttft, itl, e2e, queue, step, prompt_len, output_len).
    `counter_style` is "step" where token counters grow with each step and "finish" where only a finished request adds to them.
    """

    kind: str
    prefix: str
    counter_style: Literal["step", "finish"]
    counters: Mapping[str, Alternatives]
    gauges: Mapping[str, Alternatives]
    histograms: Mapping[str, tuple[str, ...]]
    step_tokens: tuple[str, ...] = ()  # a histogram with one observation a step: its count is steps, its sum tokens
    info: str = ""  # a family whose labels tell the configuration
    info_ignored: frozenset[str] = frozenset()  # labels that differ from start to start of one configuration
    version_label: str = ""
    config_label: str = ""
    version_path: str = ""
    kv_blocks_label: str = ""
    kv_block_tokens_label: str = ""
    model_label: str = "model_name"
    age: str = ""  # a family that tells how many seconds ago the engine's own loop made its numbers

    def speaks(self, exposition: Exposition) -> bool:
        return any(name.startswith(self.prefix) for name in exposition.series)

    def model(self, exposition: Exposition) -> str | None:
        """The served model's name; the first by name where there are several."""
        known = [family for families in (*self.gauges.values(), *self.counters.values()) for family in families]
        names = {dict(labels).get(self.model_label) for f in known for labels in exposition.series.get(f.name, {})}
        return min((name for name in names if name), default=None)

    def info_labels(self, exposition: Exposition) -> dict[str, str]:
        return dict(next(iter(exposition.series.get(self.info, {})), ()))


def first(alternatives: Alternatives, exposition: Exposition) -> Family | None:
    return next((family for family in alternatives if family.series(exposition)), None)


START_FAMILIES = ("process_start_time_seconds",)
UPTIME_FAMILY = "pairscope_uptime_s"
