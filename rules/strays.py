"""Strays of a recording: the few samples of a clock that was wrong for a moment, hours after everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rules.window import SECOND
from telemetry.sample import Sample

APART_S = 3600.0
"""So far behind the last of the others. Own choice: what goes on after an hour of silence goes on for longer than `SPAN_S`."""

SPAN_S = 10.0
SHARE = 0.01
"""A stray is no tick of a whole fleet that speaks again: with all that lies so late it is at most this share of the recording."""


def without_strays(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """(the recording, its strays), both in their order. A recording would end with its stray, and every node be silent by then."""
    times = sorted(sample.time_ns for sample in samples)
    end, most = len(times), max(1, int(SHARE * len(times)))
    place = end - 1
    while place > 0 and end - place <= most:
        if times[place] - times[place - 1] > APART_S * SECOND:
            if times[end - 1] - times[place] > SPAN_S * SECOND:
                break
            end = place
        place -= 1
    if end == len(times):
        return list(samples), []
    last_ns = times[end - 1]
    return [s for s in samples if s.time_ns <= last_ns], [s for s in samples if s.time_ns > last_ns]


HELD = 64
LEAST = 100
"""Samples before the end of a recording, without which what comes late may be all that it is about."""


def passed_by(numbered: Iterable[tuple[Sample, int]], strays: list[Sample]) -> Iterator[tuple[Sample, int]]:
    """As they come, each with its line, without those that lie an hour and more ahead of all before and from which the next goes back,
    or which end a recording that had no such gap: they are added to `strays`. One such moment is held back until it is sure."""
    newest_ns: int | None = None
    held: list[tuple[Sample, int]] = []
    count = gaps = 0
    for sample, line in numbered:
        count += 1
        if newest_ns is not None and sample.time_ns - newest_ns > APART_S * SECOND:
            held.append((sample, line))
            if len(held) <= HELD and abs(sample.time_ns - held[0][0].time_ns) <= SPAN_S * SECOND:
                continue
            gaps += 1
            newest_ns = max(each.time_ns for each, _ in held)
            yield from held
            held.clear()
            continue
        strays += [each for each, _ in held]
        held.clear()
        newest_ns = sample.time_ns if newest_ns is None else max(newest_ns, sample.time_ns)
        yield sample, line
    if gaps or count < LEAST:
        yield from held
    else:
        strays += [each for each, _ in held]
