"""Clocks that are off: by how much the samples of a node are stamped ahead of or behind everybody else's, and the samples set right.

Each node is then judged by its own newest samples, and one whose clock is off is told so: its times can't be compared with others'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rules.window import KEPT, SECOND
from telemetry.sample import Sample

APART_S = 120.0
"""Recordings: nodes whose first and last samples lie no further from the others' began and ended with them. Own choice."""

ALIKE_S = 60.0
"""A node shifted as a whole has its first and its last sample shifted alike; one that came late or fell silent has not. Own choice."""

LIVE_S = 15.0
"""A node whose newest sample is older is silent (thresholds.toml, telemetry.stale_s), unless it goes on."""

JITTER_S = 5.0
"""By so much an offset differs from look to look, since a look falls anywhere between two deliveries. Own choice."""


def offsets_of(samples: Iterable[Sample]) -> dict[str, int]:
    """By node, the nanoseconds by which all of its samples are ahead of the others', below zero behind; only of nodes that are off.

    Of two nodes that differ the one ahead is called off: samples from the future are the surer sign.
    """
    spans: dict[str, tuple[int, int]] = {}
    for sample in samples:
        node = sample.tags.get("node")
        if node and sample.measurement in KEPT:
            first, last = spans.get(node, (sample.time_ns, sample.time_ns))
            spans[node] = min(first, sample.time_ns), max(last, sample.time_ns)
    if len(spans) < 2:
        return {}
    middle = [statistics.median_low(column) for column in zip(*spans.values(), strict=True)]
    found = {}
    for node, ends in spans.items():
        first, last = ends[0] - middle[0], ends[1] - middle[1]
        if min(abs(first), abs(last)) > APART_S * SECOND and abs(first - last) <= ALIKE_S * SECOND:
            found[node] = last
    return found


def set_right(samples: Iterable[Sample], offsets: Mapping[str, int]) -> Iterator[Sample]:
    """The samples at the times that they would have by the others' clocks."""
    for sample in samples:
        offset = offsets.get(sample.tags.get("node", ""), 0)
        yield replace(sample, time_ns=sample.time_ns - offset) if offset else sample


class Clocks:
    """Knows which of the nodes that send now have a clock that is off. `offsets` are nanoseconds ahead, below zero behind."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # by node: its newest sample, and when it was looked for

    def look(self, newest: Mapping[str, int], at_ns: int) -> None:
        """`newest` is the time of each node's newest sample. A node far behind is off while it goes on, and silent where it stands."""
        for node, time_ns in newest.items():
            before = self._seen.get(node)
            self._seen[node] = time_ns, at_ns
            apart = time_ns - at_ns
            goes_on = apart > 0 if before is None else _goes_on(time_ns - before[0], at_ns - before[1])
            if abs(apart) <= LIVE_S * SECOND or not goes_on:
                self.offsets.pop(node, None)
            elif abs(self.offsets.get(node, 0) - apart) > JITTER_S * SECOND:
                self.offsets[node] = apart


def _goes_on(moved_ns: int, elapsed_ns: int) -> bool:
    """As much came as time has passed: what is kept from an outage comes faster."""
    return elapsed_ns > 0 and 0.5 * elapsed_ns <= moved_ns <= 1.5 * elapsed_ns
