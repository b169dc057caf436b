"""Dialect: the form in which a kind of engine says under which names it exports what the `engine` measurement holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from agent.exposition import Exposition, Labels

Join = Literal["sum", "mean", "max"]
Series = dict[tuple[str, Labels], float]

RATIO_CEILING = 1.5
"""A ratio above this is taken for a percentage: some engines have sent 0..100 under a name that others use for 0..1."""


@dataclass(frozen=True, slots=True)
class Family:
    """Where one value is found: a family, the label values its series must have (`where`, any of) or must not have (`unless`),
    and how its series (ranks, models) are joined. `is_ratio`: 0..1 that becomes percent; engines that send 0..100 are tolerated.

    `plus` families are added where they are there; `minus` is taken off and must be there. `none_yet`: a counter whose series
    appear with their first event, so that 0 is known where the family is there and none of its series fits.
    """

    name: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    join: Join = "sum"
    is_ratio: bool = False
    plus: tuple[Family, ...] = ()
    minus: Family | None = None
    none_yet: bool = False

    def series(self, exposition: Exposition) -> Series:
        """The series that count, those of `plus` included; empty where the family itself has none."""
        found = self._own(exposition)
        if found:
            for more in self.plus:
                found |= more._own(exposition)
        return found

    def value(self, exposition: Exposition) -> float | None:
        """The joined value in our unit; None where the family is absent."""
        values = list(self.series(exposition).values())
        if not values:
            return 0.0 if self.none_yet and exposition.series.get(self.name) else None
        joined = max(values) if self.join == "max" else sum(values)
        if self.join == "mean":
            joined /= len(values)
        if self.minus is not None:
            taken = self.minus.value(exposition)
            if taken is None:
                return None
            joined -= taken
        return joined * 100 if self.is_ratio and joined <= RATIO_CEILING else joined

    def names(self) -> frozenset[str]:
        parts = (*self.plus, *((self.minus,) if self.minus else ()))
        return frozenset({self.name}).union(*(part.names() for part in parts))

    def _own(self, exposition: Exposition) -> Series:
        found = exposition.series.get(self.name, {})
        return {(self.name, labels): value for labels, value in found.items() if self._fits(labels)}

    def _fits(self, labels: Labels) -> bool:
        if not self.where and not self.unless:
            return True
        own = dict(labels)
        return all(own.get(name) in values for name, values in self.where.items()) and not any(
            own.get(name) in values for name, values in self.unless.items()
        )


Alternatives = tuple[Family, ...]
"""The first family that is present is the one; they are never added, since an engine may export old and new names at once."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """What an engine tells of its KV cache: pages, tokens a page, free pages, and tokens held, as far as it tells them."""

    blocks: float | None = None
    block_tokens: float | None = None
    free: float | None = None
    held_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What other routes than the metrics tell. `config` holds what is the same at every start of one configuration, and no
    secret. `ranks` is how many data-parallel ranks there should be.
    """

    version: str = ""
    model: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None


Get = Callable[[str], object]
"""The JSON body at a path of the engine; None where there is no usable answer."""


def _as_it_is(exposition: Exposition) -> Exposition:
    return exposition


def _no_pool(_exposition: Exposition) -> KvPool:
    return KvPool()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of engine speaks.

    `counters` and `gauges` go by our field names, `histograms` by role (ttft, itl, tpot, e2e, queue, prefill, step, prompt_len,
    output_len), `means` by role as a sum and a count. `counter_style` is "step" where token counters grow with each step and
    "finish" where only a finished request adds to them.

    It is the exposition's dialect where a family begins with one of `prefixes` and one with each of `beside`, all of `needs` and
    none of `lacks` are there. `passed_as`: other beginnings of its names -> its own, where somebody else passes them on.
    `tidy` makes the exposition fit for the tables, such as ranks that repeat each other.
    """

    kind: str
    prefixes: tuple[str, ...]
    counter_style: Literal["step", "finish"]
    counters: Mapping[str, Alternatives]
    gauges: Mapping[str, Alternatives]
    histograms: Mapping[str, tuple[str, ...]]
    means: Mapping[str, tuple[Family, Family]] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    passed_as: Mapping[str, str] = field(default_factory=dict)
    tidy: Callable[[Exposition], Exposition] = _as_it_is
    largest: frozenset[str] = (
        frozenset()
    )  # counters of which the largest alternative counts: each sees a part, none twice
    zero_is_unknown: frozenset[str] = frozenset()  # what may stay 0 though what it is named after happens, or can't
    step_tokens: tuple[str, ...] = ()  # a histogram with one observation a step: its count is steps, its sum tokens
    kv_used_kind: str = ""  # live, live_plus_cached or reserved
    kv_pool: Callable[[Exposition], KvPool] = _no_pool
    rank_labels: tuple[str, ...] = ()  # labels that tell the engines apart whose numbers are joined here
    refresh_s: float = 0.0  # how long gauges may keep their last value after the engine fell idle
    iteration: Alternatives = ()  # these change with every iteration; while they don't, no gauge is believed
    significant_digits: int = 0  # counters are printed with so many digits; 0: exactly
    scrape_every_s: float = 0.0  # it must not be asked more often
    listens_when_ready: bool = False  # a bare 503 at /health never means that it loads
    paths: tuple[str, ...] = ()  # where its metrics are, other than /metrics
    info: tuple[str, ...] = ()  # families whose labels tell the configuration
    info_ignored: frozenset[str] = frozenset()  # labels that differ from start to start of one configuration
    version_label: str = ""
    config_label: str = ""
    ask: Callable[[Get], Told] | None = None
    model_labels: tuple[str, ...] = ("model_name",)
    age: str = ""  # a family that tells how many seconds ago the engine's own loop made its numbers

    def speaks(self, exposition: Exposition) -> bool:
        names: Set[str] = exposition.series.keys()
        if not all(any(name.startswith(prefix) for name in names) for prefix in self.beside):
            return False
        if self.passed_as:
            names = {_native(name, self.passed_as) for name in names if name.startswith(tuple(self.passed_as))}
        if not self.needs <= names or self.lacks & names:
            return False
        return not self.prefixes or any(name.startswith(self.prefixes) for name in names)

    def plain(self, exposition: Exposition) -> Exposition:
        """The exposition as the tables expect it."""
        if self.passed_as:
            exposition = _renamed(exposition, self.passed_as)
        return self.tidy(exposition)

    def model(self, exposition: Exposition) -> str | None:
        """The served model's name; the first by name where there are several."""
        known = [family.name for families in (*self.gauges.values(), *self.counters.values()) for family in families]
        labels = [dict(found) for name in known for found in exposition.series.get(name, {})]
        names = {own[label] for own in labels for label in self.model_labels if label in own}
        return min((name for name in names if name and name != "undefined"), default=None)

    def info_labels(self, exposition: Exposition) -> dict[str, str]:
        return {
            name: value
            for family in self.info
            for labels in list(exposition.series.get(family, {}))[:1]
            for name, value in labels
        }

    def families(self) -> frozenset[str]:
        """The families that must not go missing unnoticed: all but those that appear only once something went wrong."""
        rare = ("requests_failed_total", "requests_aborted_total", "oom_total", "preemptions_total")
        counted = [found for name, found in self.counters.items() if name not in rare]
        singles = (family for found in (*counted, *self.gauges.values()) for family in found)
        histograms = (f"{name}_count" for names in (*self.histograms.values(), self.step_tokens) for name in names)
        return frozenset(histograms).union(*(family.names() for family in singles))


def first(alternatives: Alternatives, exposition: Exposition) -> Family | None:
    return next((family for family in alternatives if family.value(exposition) is not None), None)


def by_rank(series: Series, rank_labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    """Added up for each engine or replica behind the target."""
    added: dict[tuple[str, ...], float] = {}
    for (_, labels), value in series.items():
        own = dict(labels)
        rank = tuple(own.get(label, "") for label in rank_labels)
        added[rank] = added.get(rank, 0.0) + value
    return added


def _native(name: str, prefixes: Mapping[str, str]) -> str:
    foreign = next((foreign for foreign in prefixes if name.startswith(foreign)), "")
    return prefixes.get(foreign, "") + name.removeprefix(foreign)


def _renamed(exposition: Exposition, prefixes: Mapping[str, str]) -> Exposition:
    """With other beginnings of the names; where two names fall together, the series of both are there."""
    series: dict[str, dict[Labels, float]] = {}
    for name, own in exposition.series.items():
        series.setdefault(_native(name, prefixes), {}).update(own)
    return replace(exposition, series=series)


def config_hash(config: Mapping[str, str]) -> str | None:
    """A short name for one configuration; None where nothing is told."""
    return hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()[:12] if config else None


def scalars(body: object, names: tuple[str, ...]) -> dict[str, str]:
    """Of a JSON object the named settings that are plain values, as text; long ones are cut."""
    found = body if isinstance(body, dict) else {}
    kept = {name: found.get(name) for name in names}
    return {name: str(value)[:256] for name, value in kept.items() if isinstance(value, str | int | float | bool)}


def text(body: object, *names: str) -> str:
    """Of a JSON object the first of these names that is a text; empty where none is."""
    found = body if isinstance(body, dict) else {}
    return next((value[:128] for name in names if isinstance(value := found.get(name), str) and value), "")


def number(label: str) -> float | None:
    """A label that is a positive whole number; other engines say "None" or nothing."""
    return float(label) if label.isascii() and label.isdigit() and 0 < len(label) < 16 and int(label) > 0 else None


def told_version(get: Get) -> Told:
    """Of engines that tell their version, and nothing else, at /version."""
    return Told(version=text(get("/version"), "version"))


START_FAMILIES = ("process_start_time_seconds",)
UPTIME_FAMILIES = ("pairscope_uptime_s", "dynamo_component_uptime_seconds")
