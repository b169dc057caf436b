"""The marks that writes to InfluxDB leave for the rollups: what they say, and what is asked for of several of them at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from telemetry.sample import Sample
from telemetry.store.rollup import (
    MINUTE_NS,
    SINGLE,
)

MARKS = "rollup"
HOUR_NS = 3600 * 10**9
_AT_BITS = 20
_MOST_RUNS = 20


@dataclass(frozen=True, slots=True)
class Mark:
    """`kind` is minute, quarter (of `node`), fleet, fleet_quarter or hour (of all). `at` begins with when it was written, in ms."""

    kind: str
    node: str
    start_ns: int
    at: int

    @property
    def written_ns(self) -> int:
        return (self.at >> _AT_BITS) * 10**6

    def opened(self) -> Sample:
        return Sample(MARKS, {"kind": self.kind, "node": self.node}, {"at": self.at, "open": 1}, self.start_ns)

    def settled(self) -> Sample:
        return Sample(MARKS, {"kind": self.kind, "node": self.node}, {"done": self.at, "open": 0}, self.start_ns)


def marks(samples: Iterable[Sample]) -> list[Sample]:
    """What a write of these samples has to carry beside them."""
    at = now_at()
    touched = {
        (sample.tags.get("node", ""), sample.time_ns // MINUTE_NS * MINUTE_NS)
        for sample in samples
        if sample.measurement not in SINGLE
    }
    fleet = {start_ns for _, start_ns in touched}
    hours = {start_ns // HOUR_NS * HOUR_NS for start_ns in fleet}
    return [
        *(Mark("minute", node, start_ns, at).opened() for node, start_ns in sorted(touched)),
        *(Mark("fleet", "", start_ns, at).opened() for start_ns in sorted(fleet)),
        *(Mark("hour", "", start_ns, at).opened() for start_ns in sorted(hours)),
    ]


def now_at(ago_ns: int = 0) -> int:
    """A number of its own for a write of so long ago."""
    return (time.time_ns() - ago_ns) // 10**6 << _AT_BITS | secrets.randbits(_AT_BITS)


def runs(starts: Collection[int], length_ns: int) -> list[tuple[int, int]]:
    """The spans that these minutes or quarters make up; one span over all when they are too scattered to ask for one by one."""
    found: list[tuple[int, int]] = []
    for start_ns in sorted(set(starts)):
        if found and found[-1][1] == start_ns:
            found[-1] = (found[-1][0], start_ns + length_ns)
        else:
            found.append((start_ns, start_ns + length_ns))
    return found if len(found) <= _MOST_RUNS else [(found[0][0], found[-1][1])]


def blocks(marks: Iterable[Mark], length_ns: int, nodes_at_once: int) -> Iterator[list[Mark]]:
    """Marks of one quarter or hour and of so many nodes; the newest first."""
    groups: dict[int, dict[str, list[Mark]]] = {}
    for mark in marks:
        groups.setdefault(mark.start_ns // length_ns, {}).setdefault(mark.node, []).append(mark)
    for block in sorted(groups, reverse=True):
        nodes = sorted(groups[block])
        for first in range(0, len(nodes), nodes_at_once):
            yield [mark for node in nodes[first : first + nodes_at_once] for mark in groups[block][node]]


def span_of(minutes: Sequence[Mark]) -> tuple[int, int]:
    return min(mark.start_ns for mark in minutes), max(mark.start_ns for mark in minutes) + MINUTE_NS
