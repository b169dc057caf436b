"""`pairscope record`: samples out of any store into a line-protocol file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pairscope.progress import Advance
from pairscope.selection import Selection, as_it_comes, in_time_order
from pairscope.whole_file import Lines, opened
from telemetry import lineprotocol
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown


@dataclass(slots=True)
class Recorded:
    """What was written. `left_out` counts samples of the store that line protocol can't carry."""

    path: Path
    samples: int = 0
    left_out: int = 0
    bytes: int = 0
    first_ns: int | None = None
    last_ns: int | None = None


class Nothing(Exception):
    """The store has no sample of the selection; no file was made."""


def record(
    store: Store, selection: Selection, path: Path, *, force: bool = False, language: str = "en", advance: Advance
) -> Recorded:
    """Write the selection to `path` (`.gz` packs it, `-` is stdout), whole or not at all. Nothing if there is none.

    CannotCopy for a place that can't be written, StoreError for a store that can't be read.
    """
    done = Recorded(path)
    with opened(path, growing=False, force=force, language=language) as lines:
        for reached_ns, samples in in_time_order(store, selection):
            _write(samples, lines, done)
            advance(reached_ns - selection.start_ns, done.samples)
        if not done.samples:
            raise Nothing
    done.bytes = lines.bytes
    return done


def follow(
    store: Store,
    selection: Selection,
    path: Path,
    *,
    force: bool = False,
    language: str = "en",
    advance: Advance,
    wait: Callable[[float], bool],
    down: Callable[[StoreDown], None],
) -> Recorded:
    """Write the selection, then go on as samples arrive, until its end or until `wait(seconds)` says to stop.

    The file grows by whole lines (whole gzip members), so that it is a good recording at any moment.
    """
    done = Recorded(path)
    with opened(path, growing=True, force=force, language=language) as lines:
        for reached_ns, samples in as_it_comes(store, selection, time.time_ns, wait, down):
            _write(samples, lines, done)
            if reached_ns >= time.time_ns() - 60 * 10**9:
                lines.flush()
            advance(reached_ns - selection.start_ns, done.samples)
    done.bytes = lines.bytes
    return done


def _write(samples: list[Sample], lines: Lines, done: Recorded) -> None:
    for sample in samples:
        try:
            lines.put(lineprotocol.encode(sample))
        except ValueError:
            done.left_out += 1
            continue
        done.samples += 1
        done.first_ns = sample.time_ns if done.first_ns is None else done.first_ns
        done.last_ns = sample.time_ns
