"""Headroom: what a node's power supplies can still give, now and with the spare ones lost, as the samples that say so.

A supply's capacity is a rating of its output, so it is held against the load on the output side, never against wall power.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.power.reading import BmcReading, Supply
from telemetry.catalogue import REDUNDANCY_STATES
from telemetry.sample import Sample, Value

ASSUMED_EFFICIENCY = 0.94
"""Output over input of a server supply at the load it is built for, where nothing says better (80 PLUS Platinum at 50 %: 94 %)."""

LOST, DEGRADED, FULL = (REDUNDANCY_STATES.index(name) for name in ("lost", "degraded", "full"))


@dataclass(frozen=True, slots=True)
class Design:
    """How many supplies may fail. `spares` None is unknown; `feed_b` names those on the second of two feeds (then spares is None)."""

    spares: int | None = None
    feed_b: tuple[str, ...] = ()

    @classmethod
    def of(cls, redundancy: str, feed_b: tuple[str, ...], reading: BmcReading) -> Design:
        """By the setting (see `agent.settings.REDUNDANCIES`); "auto" is what the BMC says."""
        if redundancy == "A/B":
            return cls(feed_b=feed_b)
        return cls({"none": 0, "N+1": 1, "N+2": 2}.get(redundancy, reading.spares))


def samples(
    reading: BmcReading, redundancy: str, feed_b: tuple[str, ...], tags: Mapping[str, str], time_ns: int
) -> list[Sample]:
    """`psu`, `power` and `thermal` of one reading; a measurement of which nothing is known has no sample."""
    made = [
        Sample("psu", {**tags, "psu": supply.name}, fields, time_ns)
        for supply in reading.supplies or ()
        if (fields := psu_fields(supply))
    ]
    for measurement, fields in (
        ("power", power_fields(reading, redundancy, feed_b)),
        ("thermal", thermal_fields(reading)),
    ):
        if fields:
            made.append(Sample(measurement, tags, fields, time_ns))
    return made


def psu_fields(supply: Supply) -> dict[str, Value]:
    fields = _known(
        input_w=supply.input_w, output_w=supply.output_w, capacity_w=supply.capacity_w, voltage_v=supply.voltage_v
    )
    if supply.ok is not None:
        fields["ok"] = int(supply.ok)
    return fields


def thermal_fields(reading: BmcReading) -> dict[str, Value]:
    fields = _known(
        inlet_c=reading.inlet_c,
        exhaust_c=reading.exhaust_c,
        fan_min_rpm=reading.fan_min_rpm,
        fan_pct=reading.fan_pct,
        coolant_c=reading.coolant_c,
    )
    if reading.leak is not None:
        fields["leak"] = int(reading.leak)
    return fields


def power_fields(reading: BmcReading, redundancy: str, feed_b: tuple[str, ...]) -> dict[str, Value]:
    supplies = reading.supplies or ()
    design = Design.of(redundancy, feed_b, reading)
    load_w = output_load_w(supplies, reading.node_w)
    capacity_w = capacity(supplies)
    fields = _known(
        node_w=reading.node_w if reading.node_w is not None else wall_power_w(supplies),
        capacity_w=capacity_w,
        headroom_pct=_headroom_pct(load_w, capacity_w),
        headroom_redundant_pct=_headroom_pct(load_w, surviving_capacity_w(supplies, design)),
        cap_w=reading.cap_w,
    )
    told = reading.redundancy if redundancy == "auto" else None
    # the BMC's word stands but where a supply has failed and it has not noticed yet; what the load means is the headroom's to say
    state = redundancy_state(supplies, design, load_w if told is None else None)
    if told is not None:
        state = told if state is None else min(told, state)
    if state is not None and design.spares != 0:
        fields["redundancy"] = state
    return fields


def carries(supply: Supply) -> bool | None:
    """Whether a supply takes its part of the load; where the BMC does not say, line power or output speaks for it. None: unknown."""
    if supply.ok is not None:
        return supply.ok
    if any(supply_value for supply_value in (supply.output_w, supply.input_w, supply.voltage_v)):
        return True
    return None


def capacity(supplies: Sequence[Supply]) -> float | None:
    """W of output that the supplies which are in order can give together. None where one of them does not tell, or there is none."""
    rated = _rated(supplies)
    return sum(rated) if rated else None


def output_load_w(supplies: Sequence[Supply], node_w: float | None) -> float | None:
    """W on the output side: what the supplies give; else what they take x their efficiency; else the node's wall power x 0.94."""
    outputs = [_output_w(supply) for supply in supplies if supply.output_w is not None or carries(supply) is not False]
    known = [output for output in outputs if output is not None]
    if (
        known and len(known) == len(outputs) and sum(known) > 0
    ):  # a node that runs draws something: all zero is no reading
        return sum(known)
    return node_w * ASSUMED_EFFICIENCY if node_w else None


def wall_power_w(supplies: Sequence[Supply]) -> float | None:
    """W that the supplies take together, where each that carries load says so."""
    inputs = [supply.input_w for supply in supplies if supply.input_w is not None or carries(supply) is not False]
    known = [value for value in inputs if value is not None]
    return sum(known) if known and len(known) == len(inputs) and sum(known) > 0 else None


def surviving_capacity_w(supplies: Sequence[Supply], design: Design) -> float | None:
    """W that remain when the supplies that may fail have failed: without the largest M of N+M, or with the smaller feed alone.

    One is taken as lost where neither the setting nor the BMC tells how many may be. None where nothing would remain, by design
    or now, or where a capacity is unknown.
    """
    if design.feed_b:
        feeds = _feeds(supplies, design.feed_b)
        sums = [capacity(feed) for feed in feeds or ()]
        known = [feed_w for feed_w in sums if feed_w is not None]
        return min(known) if known and len(known) == len(sums) else None
    spares = 1 if design.spares is None else design.spares
    rated_all = _rated(supplies)
    if not rated_all or spares == 0 or spares >= len(rated_all):
        return None
    return sum(sorted(rated_all)[:-spares])


def redundancy_state(supplies: Sequence[Supply], design: Design, load_w: float | None) -> int | None:
    """full: all spare supplies are there, and the load is carried without them. degraded: some of them have failed or are needed.
    lost: no spare is left. None: no redundancy by design, or not known. (The words are those of the redundancy sensor in IPMI 2.0,
    table 42-2.)
    """
    if design.feed_b:
        return _state_of_feeds(_feeds(supplies, design.feed_b), load_w)
    carrying = [carries(supply) for supply in supplies]
    if not design.spares or None in carrying or len(supplies) <= design.spares:
        return None
    left = max(0, design.spares - carrying.count(False))
    rated = _rated(supplies)
    if load_w is not None and rated is not None:
        ascending = sorted(rated)
        while left > 0 and sum(ascending[: max(0, len(ascending) - left)]) < load_w:
            left -= 1
    if left == design.spares:
        return FULL
    return DEGRADED if left > 0 else LOST


def _state_of_feeds(feeds: tuple[Sequence[Supply], Sequence[Supply]] | None, load_w: float | None) -> int | None:
    if feeds is None:
        return None
    states = [carries(supply) for feed in feeds for supply in feed]
    if None in states:
        return None
    for feed in feeds:
        rated = _rated(feed)
        if not any(carries(supply) for supply in feed) or (rated and load_w is not None and sum(rated) < load_w):
            return LOST
    return FULL if all(states) else DEGRADED


def _feeds(supplies: Sequence[Supply], feed_b: Sequence[str]) -> tuple[tuple[Supply, ...], tuple[Supply, ...]] | None:
    """The supplies of either feed; None where one of them would have none: then the names are not those of the BMC."""
    second = tuple(supply for supply in supplies if supply.name in feed_b)
    first = tuple(supply for supply in supplies if supply.name not in feed_b)
    return (first, second) if first and second else None


def _rated(supplies: Sequence[Supply]) -> list[float] | None:
    """The capacities of those that carry; None where one is not known."""
    rated = []
    for supply in supplies:
        does = carries(supply)
        if does is None or (does and supply.capacity_w is None):
            return None
        if does and supply.capacity_w is not None:
            rated.append(supply.capacity_w)
    return rated


def _output_w(supply: Supply) -> float | None:
    if supply.output_w is not None:
        return supply.output_w
    return None if supply.input_w is None else supply.input_w * (supply.efficiency or ASSUMED_EFFICIENCY)


def _headroom_pct(load_w: float | None, capacity_w: float | None) -> float | None:
    return None if load_w is None or not capacity_w else 100.0 * (1.0 - load_w / capacity_w)


def _known(**values: float | None) -> dict[str, Value]:
    return {name: float(value) for name, value in values.items() if value is not None}
