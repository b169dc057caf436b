"""What is read out of a store: samples of some measurements and nodes over a span, in time order and in little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from telemetry import catalogue
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, StoreError, Where, open_existing, public_url
from telemetry.store.buckets import order

MOST = 2_000
"""Samples held at once (8 MB of the widest): a stretch with more is read in shorter ones."""

FIRST_NS = 10 * 10**9
LONGEST_NS = 3600 * 10**9
LONGEST_SILENT_NS = 30 * 86_400 * 10**9
"""While nothing is found the stretches grow up to this; what then comes is found by halving, a few scans of what is there."""

SETTLED_NS = 10 * 10**9
"""Live samples reach the store within 5 s; what is younger than this is left for the next look."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Half-open: start_ns <= time < end_ns. No nodes: all of them."""

    start_ns: int
    end_ns: int
    nodes: tuple[str, ...] = ()
    measurements: tuple[str, ...] = tuple(catalogue.MEASUREMENTS)

    @property
    def where(self) -> Where | None:
        return {"node": self.nodes} if self.nodes else None


def open_for_reading(url: str, language: str) -> Store:
    """The store at `url`; one that isn't there is a StoreError, not a new empty one."""
    store = open_existing(url)
    if store is None:
        raise StoreError(say("recording.no_store", language, store=public_url(url)))
    return store


def in_time_order(store: Store, selection: Selection) -> Iterator[tuple[int, list[Sample]]]:
    """(moment up to which all has come, the samples of the stretch before it), stretch by stretch.

    The order is that of time, then measurement, then tags; the fields of a sample are in the catalogue's order. It is the same on
    every backend, so the same samples always make the same file. Raises as the store does.
    """
    spoken = [name for name in selection.measurements if store.series(name, since_ns=selection.start_ns)]
    at_ns, length_ns = selection.start_ns, FIRST_NS
    while spoken and at_ns < selection.end_ns:
        upto_ns = min(at_ns + length_ns, selection.end_ns)
        found = _stretch(store, spoken, at_ns, upto_ns, selection.where)
        if found is None:
            length_ns = max(1, (upto_ns - at_ns) // 2)
            continue
        yield upto_ns, found
        at_ns = upto_ns
        if len(found) < MOST // 4:
            length_ns = min(2 * length_ns, LONGEST_NS if found else LONGEST_SILENT_NS)
    yield selection.end_ns, []


def as_it_comes(
    store: Store,
    selection: Selection,
    now_ns: Callable[[], int],
    wait: Callable[[float], bool],
    down: Callable[[StoreDown], None],
) -> Iterator[tuple[int, list[Sample]]]:
    """As `in_time_order`, and on as samples arrive, until the selection's end or until `wait(seconds)` says to stop.

    A store that is down is told of by `down` and asked again. What reaches the store later than SETTLED_NS is not seen.
    """
    at_ns = selection.start_ns
    while at_ns < selection.end_ns:
        upto_ns = min(selection.end_ns, now_ns() - SETTLED_NS)
        if upto_ns > at_ns:
            part = Selection(at_ns, upto_ns, selection.nodes, selection.measurements)
            try:
                for reached_ns, samples in in_time_order(store, part):
                    at_ns = reached_ns
                    yield reached_ns, samples
                    if wait(0.0):
                        return
            except StoreDown as error:
                down(error)
        if at_ns < selection.end_ns and wait(1.0):
            return


def _stretch(
    store: Store, measurements: Sequence[str], start_ns: int, end_ns: int, where: Where | None
) -> list[Sample] | None:
    """All samples of the stretch; None when they are more than MOST, unless the stretch can't be shorter."""
    found: list[Sample] = []
    room = MOST if end_ns - start_ns > 1 else None
    for name in measurements:
        limit = None if room is None else room - len(found) + 1
        found += store.samples(name, start_ns=start_ns, end_ns=end_ns, where=where, limit=limit)
        if room is not None and len(found) > room:
            return None
    found.sort(key=lambda sample: (sample.time_ns, sample.measurement, order(sample.tags)))
    return [_ordered(sample) for sample in found]


def _ordered(sample: Sample) -> Sample:
    given = tuple(sample.fields)
    wanted = _catalogue_order(sample.measurement, given)
    if wanted == given:
        return sample
    return Sample(sample.measurement, sample.tags, {name: sample.fields[name] for name in wanted}, sample.time_ns)


@lru_cache(maxsize=4096)
def _catalogue_order(measurement: str, names: tuple[str, ...]) -> tuple[str, ...]:
    have = frozenset(names)
    return tuple(name for name in catalogue.MEASUREMENTS[measurement].fields if name in have)
