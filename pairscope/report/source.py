"""Where a report's samples come from: a recording, or the store with enough of the past to know what was usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pairscope.judge import JUDGED, announce_live, is_judged, read_recording, refuse_unheard, working
from pairscope.moment import iso
from pairscope.selection import open_for_reading
from rules.clocks import offsets_of, set_right
from rules.verdict import from_sample
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import Store, StoreError, public_url

HEALTH_NS = 1800 * 10**9
"""So much before the beginning is walked, so that what is usual is known by then."""

SHORTEST_NS = 600 * 10**9
LONGEST_NS = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class Source:
    """Samples in the order of time. The report is about `from_ns` to `end_ns`; what lies before teaches what is usual."""

    name: str
    samples: tuple[Sample, ...]
    from_ns: int
    end_ns: int
    bad_lines: int = 0
    file: str = ""  # what was read, for a command that reads it again; either of the two
    store: str = ""  # without secrets
    clocks: Mapping[str, int] | None = (
        None  # nanoseconds by which clocks were off, set right already; None: not looked for
    )


def of_recording(
    path: Path,
    since_ns: int | None,
    at_ns: int | None,
    nodes: Sequence[str],
    language: str,
    *,
    last_ns: int | None = None,
) -> Source:
    """Since `since_ns`, or the last `last_ns` before the end.

    StoreError, in one line, for a file that can't be read or holds nothing that was asked for.
    """
    whole, bad_lines = read_recording(path, language, nodes)
    clocks = offsets_of(whole)
    right = set_right(whole, clocks)
    samples = sorted((s for s in right if at_ns is None or s.time_ns <= at_ns), key=lambda sample: sample.time_ns)
    if not samples:
        first_ns = min(sample.time_ns for sample in whole)
        raise StoreError(say("pairscope.judge.before", language, path=path, first=iso(first_ns)))
    end_ns = samples[-1].time_ns if at_ns is None else at_ns
    if last_ns is not None:
        since_ns = max(end_ns - last_ns, samples[0].time_ns)
    from_ns = since_ns or samples[0].time_ns
    return Source(path.name, tuple(samples), from_ns, end_ns, bad_lines, file=str(path), clocks=clocks)


def of_store(url: str, since_ns: int | None, end_ns: int, nodes: Sequence[str], language: str) -> Source:
    """Without a beginning: since the oldest of the causes that the newest verdicts name, and an hour at least. Raises as the store does."""
    with (
        closing(open_for_reading(url, language)) as store,
        working(say("report.told.reading", language, where=public_url(url))),
    ):
        from_ns = since_ns or _beginning(store, end_ns, nodes)
        from_ns = max(min(from_ns, end_ns - SHORTEST_NS if since_ns is None else end_ns - 1), end_ns - LONGEST_NS)
        announce_live(url, from_ns - HEALTH_NS, nodes, language)
        where = {"node": list(nodes)} if nodes else None
        samples: list[Sample] = []
        for measurement in JUDGED:
            samples += store.samples(measurement, start_ns=from_ns - HEALTH_NS, end_ns=end_ns + 1, where=where)
        if not any(is_judged(sample) for sample in samples):
            refuse_unheard(store, url, nodes, from_ns - HEALTH_NS, language)
    samples.sort(key=lambda sample: sample.time_ns)
    return Source(public_url(url), tuple(samples), from_ns, end_ns, store=public_url(url))


def _beginning(store: Store, end_ns: int, nodes: Sequence[str]) -> int:
    """A quarter of an hour before the oldest beginning that triage has written down; an hour before the end without any."""
    where = {"node": list(nodes)} if nodes else None
    found = []
    for sample in store.samples("verdict", start_ns=end_ns - 120 * 10**9, end_ns=end_ns + 1, where=where):
        try:
            found += [verdict.since_ns for verdict in from_sample(sample).verdicts if verdict.since_ns]
        except ValueError:  # of another version: it only tells us where to begin
            continue
    return min([end_ns - 3600 * 10**9, *(since - 900 * 10**9 for since in found)])
