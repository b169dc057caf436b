"""The paired table: what the hardware spent beside what it yielded, before the incident and during it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rules.course import Struck
from telemetry import catalogue
from telemetry.pairs import THROTTLE_REASONS
from telemetry.sample import Sample

SECOND = 10**9
BEFORE_NS = 600 * SECOND
SETTLE_NS = 30 * SECOND
"""Left out on both sides of the beginning: what changes there is neither before nor during."""

SPENT, YIELDED = "spent", "yielded"
MASK = {name: bit for bit, name in THROTTLE_REASONS}


@dataclass(frozen=True, slots=True)
class Row:
    """`expected` is what was to be expected now, or the limit of the part (`is_limit`). None: not known."""

    side: str
    lane: str  # measurement.field, or a key of report.row
    unit: str
    before: float | None
    during: float | None
    expected: float | None = None
    is_limit: bool = False

    @property
    def change_pct(self) -> float | None:
        if self.before is None or self.during is None or not self.before:
            return None
        return 100 * (self.during - self.before) / self.before


@dataclass(frozen=True, slots=True)
class Source:
    """The samples of one pair, by measurement, in the order of time."""

    by_measurement: dict[str, list[Sample]]

    def values(self, measurement: str, name: str, start_ns: int, end_ns: int) -> dict[str, list[float]]:
        """Device -> its readings with start <= time <= end."""
        found: dict[str, list[float]] = {}
        for sample in self.by_measurement.get(measurement, ()):
            value = sample.fields.get(name)
            if start_ns <= sample.time_ns <= end_ns and isinstance(value, int | float):
                found.setdefault(sample.tags.get("gpu", ""), []).append(float(value))
        return found


Combine = Callable[[Sequence[float]], float]
MEAN: Combine = statistics.fmean
NODE = ("power", "thermal", "host")
SPENDS: tuple[tuple[str, str, Combine, str], ...] = (
    # measurement, field, over the pair's GPUs, the field that limits it
    ("gpu", "util_pct", MEAN, ""),
    ("gpu", "power_w", sum, "power_limit_w"),
    ("gpu", "sm_clock_mhz", min, "sm_clock_max_mhz"),
    ("gpu", "temp_c", max, "temp_limit_c"),
    ("gpu", "mem_temp_c", max, "mem_temp_limit_c"),
    ("thermal", "inlet_c", max, ""),
    ("power", "node_w", max, "capacity_w"),
    ("host", "cpu_pct", max, ""),
    ("host", "cpu_core_max_pct", max, ""),
)
YIELDS = (
    "prompt_tokens_per_s",
    "ttft_p95_s",
    "itl_mean_s",
    "requests_running",
    "requests_waiting",
    "kv_used_pct",
    "preemptions_total",
)
DUTIES = ("hw_thermal", "sw_thermal", "sw_power_cap", "hw_power_brake", "hw_slowdown")


def samples_of(struck: Struck, samples: Iterable[Sample]) -> Source:
    """What of the samples speaks of this pair: its engine, its GPUs, its node."""
    subject = struck.course.last.subject
    gpus = {gpu.index for gpu in struck.spell.evidence.gpus}
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        tags = sample.tags
        if tags.get("node") != subject.get("node"):
            continue
        mine = (
            (sample.measurement == "gpu" and tags.get("gpu") in gpus)
            or (sample.measurement == "engine" and tags.get("engine") == subject.get("engine"))
            or sample.measurement in NODE
            or sample.measurement == "event"
        )
        if mine:
            found.setdefault(sample.measurement, []).append(sample)
    return Source(found)


def paired(struck: Struck, source: Source, until_ns: int) -> tuple[Row, ...]:
    """The rows in which something is known, what was spent first. Medians of each device over the span."""
    since_ns = struck.spell.since_ns
    before = (since_ns - BEFORE_NS, since_ns - SETTLE_NS)
    during = (min(since_ns + SETTLE_NS, until_ns - SETTLE_NS), until_ns)
    rows = [_spent(source, entry, before, during) for entry in SPENDS]
    rows += [_duty(source, name, before, during) for name in DUTIES]
    rows += _yielded(struck, source, before, during)
    return tuple(row for row in rows if row.before is not None or row.during is not None)


Span = tuple[int, int]


def _spent(source: Source, entry: tuple[str, str, Combine, str], before: Span, during: Span) -> Row:
    measurement, name, combine, limit = entry
    lane = f"{measurement}.{name}"
    of = [_over(source.values(measurement, name, *span), combine) for span in (before, during)]
    most = _over(source.values(measurement, limit, before[0], during[1]), combine) if limit else None
    return Row(SPENT, lane, catalogue.unit_of(name), of[0], of[1], most, is_limit=most is not None)


def _over(devices: dict[str, list[float]], combine: Combine) -> float | None:
    medians = [statistics.median(readings) for readings in devices.values() if readings]
    return combine(medians) if medians else None


def _duty(source: Source, name: str, before: Span, during: Span) -> Row:
    """% of the samples in which the reason was set, of the GPU that had it most. A reason that never was is no row."""

    def share(span: Span) -> float | None:
        devices = source.values("gpu", "throttle_reasons", *span)
        shares = [
            sum(bool(int(mask) & MASK[name]) for mask in masks) / len(masks) for masks in devices.values() if masks
        ]
        return 100 * max(shares) if shares else None

    first, last = share(before), share(during)
    if not first and not last:
        first = last = None
    return Row(SPENT, f"throttle.{name}", "%", first, last)


def _yielded(struck: Struck, source: Source, before: Span, during: Span) -> list[Row]:
    moments = struck.course.moments
    expected = [
        m.expected_tokens_per_s
        for m in moments
        if during[0] <= m.time_ns <= during[1] and m.expected_tokens_per_s is not None
    ]
    tokens = [_over(source.values("engine", "tokens_per_s", *span), MEAN) for span in (before, during)]
    rows = [
        Row(
            YIELDED,
            "engine.tokens_per_s",
            catalogue.unit_of("tokens_per_s"),
            tokens[0],
            tokens[1],
            statistics.median(expected) if expected else None,
        )
    ]
    watts = [_over(source.values("gpu", "power_w", *span), sum) for span in (before, during)]
    each = [t / w if t is not None and w else None for t, w in zip(tokens, watts, strict=True)]
    rows.append(Row(YIELDED, "row.tokens_per_j", "tokens/J", each[0], each[1]))
    for name in YIELDS:
        if name.endswith("_total"):
            rates = [_rate(source, name, span) for span in (before, during)]
            rows.append(Row(YIELDED, "row.preemptions_per_min", "/min", rates[0], rates[1]))
        else:
            of = [_over(source.values("engine", name, *span), MEAN) for span in (before, during)]
            rows.append(Row(YIELDED, f"engine.{name}", catalogue.unit_of(name), of[0], of[1]))
    return rows


def _rate(source: Source, name: str, span: Span) -> float | None:
    """Growth of a counter a minute; None with fewer than two readings, and over a restart."""
    counts = [
        (sample.time_ns, float(value))
        for sample in source.by_measurement.get("engine", ())
        if span[0] <= sample.time_ns <= span[1] and isinstance(value := sample.fields.get(name), int | float)
    ]
    if len(counts) < 2 or counts[-1][1] < counts[0][1] or counts[-1][0] == counts[0][0]:
        return None
    return (counts[-1][1] - counts[0][1]) / ((counts[-1][0] - counts[0][0]) / (60 * SECOND))
