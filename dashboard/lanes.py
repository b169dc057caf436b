"""The lanes of one pair that have data, each with its curves over the window: several GPUs drawn as one, short holes bridged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dashboard.fleet import PairNow
from dashboard.history import History, Values
from dashboard.selection import SECOND_NS
from telemetry import catalogue
from telemetry.messages import say
from telemetry.pairs import LANES, THROTTLE_REASONS, Lane, Trace

MISSED_INTERVALS = 3
"""A reading stands for so many of its intervals; after that the line ends."""
FASTEST_S = 1.0
INLET_SHARE = 0.05
"""Air and boards are 50 °C apart: on one axis neither would be seen to move, so the inlet gets a lane of its own."""

_COMBINE: Mapping[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    # several GPUs as one curve: the one that tells most, and the word for which one it is
    "temp_c": ("hottest", max),
    "temp_limit_c": ("", min),
    "sm_clock_mhz": ("slowest", min),
    "sm_clock_max_mhz": ("", min),
    "power_w": ("mean", statistics.fmean),
    "power_limit_w": ("", min),
    "util_pct": ("mean", statistics.fmean),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One line to draw. `which` says which of several GPUs it shows ("hottest of 2"), else empty."""

    measurement: str
    field: str
    role: str
    title: str
    which: str
    unit: str
    values: Values

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(frozen=True, slots=True)
class DrawnLane:
    name: str
    share: float
    curves: tuple[Curve, ...]


def drawn_lanes(pair: PairNow, history: History, language: str) -> list[DrawnLane]:
    """The lanes that have something to show, in order. The lane of throttle reasons has no curves of its own."""
    found: list[DrawnLane] = []
    for lane in LANES:
        if lane.needs_gpu and not pair.gpus:
            continue
        if lane.name == "reasons":
            if history.columns.get(("gpu", "throttle_reasons")) or history.shares:
                found.append(DrawnLane(lane.name, lane.share, ()))
            continue
        curves = _curves(lane, pair, history, language)
        inlet = tuple(curve for curve in curves if curve.role == "inlet")
        board = tuple(curve for curve in curves if curve.role != "inlet")
        if any(curve.role != "limit" for curve in board):
            found.append(DrawnLane(lane.name, lane.share - INLET_SHARE if inlet else lane.share, board))
        if inlet:
            found.append(DrawnLane("inlet", INLET_SHARE, inlet))
    return found


def _curves(lane: Lane, pair: PairNow, history: History, language: str) -> tuple[Curve, ...]:
    made = (_curve(trace, pair, history, language) for trace in lane.traces)
    return tuple(curve for curve in made if curve is not None)


def _curve(trace: Trace, pair: PairNow, history: History, language: str) -> Curve | None:
    series = history.columns.get((trace.measurement, trace.field), ())
    measurement, name = trace.measurement, trace.field
    titled = (measurement, name)
    if titled == ("pair", "util_pct"):
        titled = ("gpu", "util_pct") if pair.effort == "gpu" else ("host", "cpu_pct")
        if not series:  # triage has not written it yet: read it at its source
            measurement, name = titled
            series = history.columns.get(titled, ())
    if not series:
        return None
    word, combine = _COMBINE.get(name, ("", _first)) if measurement == "gpu" and len(series) > 1 else ("", _first)
    which = say(f"dashboard.chart.{word}", language, count=len(series)) if word and len(series) > 1 else ""
    # a card's limits are read once an hour and stand until read again
    carry = carry_on if trace.role == "limit" and measurement == "gpu" else hold
    held = [carry(one.values, history.window.step_ns) for one in series]
    return Curve(
        trace.measurement,
        trace.field,
        trace.role,
        catalogue.title(*titled, language),
        which,
        catalogue.unit_of(trace.field),
        combined(held, combine),
    )


def _first(values: Sequence[float]) -> float:
    return values[0]


def combined(columns: Sequence[Values], combine: Callable[[Sequence[float]], float]) -> Values:
    """Bucket by bucket, `combine` over the columns that have a value there; None where none has."""
    made: Values = []
    for bucket in zip(*columns, strict=True):
        known = [value for value in bucket if value is not None]
        made.append(combine(known) if known else None)
    return made


def hold(values: Values, step_ns: int) -> Values:
    """Carry each reading over the buckets in which none was due: at most `MISSED_INTERVALS` of the source's own intervals.

    The interval is the usual distance between readings (its 90th percentile, so that jitter does not shorten it); a source
    that fills every bucket is trusted for three of the fastest. A longer hole stays a hole.
    """
    places = [place for place, value in enumerate(values) if value is not None]
    if len(places) < 2:
        return list(values)
    distances = sorted(after - before for before, after in pairwise(places))
    usual = distances[int(0.9 * (len(distances) - 1))]
    fastest = int(MISSED_INTERVALS * FASTEST_S * SECOND_NS / step_ns)
    bridge = MISSED_INTERVALS * usual - 1 if usual > 1 else fastest
    held: Values = []
    carried, age = None, 0
    for value in values:
        if value is not None:
            carried, age = value, 0
        else:
            age += 1
        held.append(carried if age <= bridge else None)
    return held


def carry_on(values: Values, _step_ns: int) -> Values:
    """Each reading stands until the next one, and the first one before it, too."""
    carried = next((value for value in values if value is not None), None)
    held: Values = []
    for value in values:
        carried = carried if value is None else value
        held.append(carried)
    return held


SEEN = 0.15
"""Drawn for a reason that the mask showed and whose seconds the counter rounds to nothing."""


def throttle(history: History) -> dict[str, Values]:
    """Throttle reason -> its share of each bucket, 0..1, averaged over the GPUs; None where no GPU reported.

    From the counters of seconds where a card has them, else from the mask, which says only that it happened.
    """
    masks = history.columns.get(("gpu", "throttle_reasons"), ())
    step_ns = history.window.step_ns
    held = [hold(series.values, step_ns) for series in masks]
    found: dict[str, Values] = {}
    from_mask = {name: [_bit(values, bit) for values in held] for bit, name in _reasons()}
    for name, columns in from_mask.items():
        found[name] = combined(columns, statistics.fmean) if columns else [None] * history.window.count
    for name, counted in history.shares.items():
        spent = combined([hold(series.values, step_ns) for series in counted], statistics.fmean)
        found[name] = [
            bit if share is None else max(min(share, 1.0), SEEN * (bit or 0.0))
            for bit, share in zip(found[name], spent, strict=True)
        ]
    return found


def _reasons() -> list[tuple[int, str]]:
    return [(bit, name) for bit, name in THROTTLE_REASONS if name != "gpu_idle"]


def _bit(values: Values, bit: int) -> Values:
    return [None if value is None else float(bool(int(value) & bit)) for value in values]
