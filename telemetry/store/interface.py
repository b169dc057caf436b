"""What every store can do, and the types it answers with. The backends are siblings of this file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol, Self

from telemetry.messages import say
from telemetry.sample import Sample

LONGEST_PAUSE_S = 600.0
"""Whoever asks for more is asked again after so long: a mistaken header must not silence a host for a day."""

RARE_DAYS = 90.0
"""Events, alerts and verdicts are few and small, and what a person asks for weeks later: kept at least this long."""

Where = Mapping[str, str | Sequence[str]]
"""Tag conditions, all of which must hold: a value, or any of several values."""


class StoreError(Exception):
    """The store can't do what was asked. The message is one line: the target, what is wrong, and the remedy."""

    key = ""
    values: Mapping[str, object] = {}

    @classmethod
    def of(cls, key: str, /, **values: object) -> Self:
        """One whose sentence is in the catalogue of messages."""
        made = cls(say(key, "en", **values))
        made.key, made.values = key, values
        return made

    def told(self, language: str) -> str:
        """The message in `language` where there is one, else in English."""
        return say(self.key, language, **self.values) if self.key else str(self)


class StoreDown(StoreError):
    """The store can't be reached or is busy for now; the same call may succeed later. Nothing was half-written."""

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        """`retry_after` is the header of that name, if there was one."""
        super().__init__(message)
        self.retry_after_s = _seconds(retry_after)
        """How long the store asks to be left alone, at most LONGEST_PAUSE_S; None where it doesn't say."""

    def until(self, retry_after: str | None) -> Self:
        """With that header."""
        self.retry_after_s = _seconds(retry_after)
        return self


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header (RFC 9110 section 10.2.3): seconds, or a date."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), LONGEST_PAUSE_S)
    try:
        wait_s = parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(0.0, wait_s), LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample the store refused for good; the others of its batch are stored."""

    sample: Sample
    reason: str


@dataclass(frozen=True, slots=True)
class Column:
    """One field of one series over uniform time buckets.

    `values[i]` belongs to the bucket [start_ns + i*step_ns, start_ns + (i+1)*step_ns); None where nothing was recorded.
    """

    tags: Mapping[str, str]
    field: str
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class Spread:
    """One gauge of all series together over uniform time buckets: the mean of all their values, the least and the greatest."""

    field: str
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


@dataclass(frozen=True, slots=True)
class Survey:
    """What a store says of itself, None or empty where it doesn't."""

    server: str  # its kind and version
    write_problem: str = ""  # why nothing can be written, in one line
    size_bytes: int | None = None
    free_bytes: int | None = None
    oldest_ns: int | None = None
    newest_ns: int | None = None
    retention_s: float | None = None  # after which the server itself drops raw samples; 0 for never
    rollup_days: tuple[float, float] | None = (
        None  # how long the server keeps minutes and quarters, where it has such levels
    )
    policy: str = ""  # the retention policy that raw samples are in, as a statement of the server names it
    advice: tuple[str, ...] = ()  # names of what its operator should set: `pairscope.store.advice` has the words


class Store(Protocol):
    """The interface. Times are wall nanoseconds. All methods raise StoreError on failure.

    A sample holds the fields of one time, never an older field beside a newer one. One that is being written while it is read is not
    there yet, or there with all of its fields; a server may show them one after the other, and its store then gives them a moment.
    """

    url: str

    @property
    def durable_after_s(self) -> float:
        """For how long after `write` has returned a power cut, or a kill of the store, may still take what was written.

        Whoever keeps samples until the store has them keeps them so much longer. After StoreDown the same object goes on best: it
        knows what it wrote.
        """

    @property
    def rolls_up(self) -> bool:
        """Whether `rollup` does anything, so that what is older than the raw samples can be asked for."""

    def write(self, samples: Sequence[Sample]) -> list[Rejected]:
        """Store all samples or raise; same measurement, tags and time overwrite and merge fields (replay is harmless)."""

    def latest(
        self, measurement: str, *, since_ns: int, where: Where | None = None, fields: Sequence[str] | None = None
    ) -> list[Sample]:
        """The newest sample of each series not older than `since_ns`, with the time it was taken.

        With `fields`, no others are in it, and a series is left out whose newest sample has none of them: an older value is
        never taken for a new one. ValueError for a field that the measurement doesn't have.
        """

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        """Raw samples with start_ns <= time < end_ns, oldest first; with `limit`, the newest `limit` of them."""

    def range(
        self,
        measurement: str,
        fields: Sequence[str],
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        aggregate: str = "auto",
        where: Where | None = None,
    ) -> list[Column]:
        """Downsampled columns, one per series and field, over buckets aligned to multiples of `step_ns`.

        `aggregate`: auto (by the catalogue's kind: gauge mean, counter last, state max, mask or), mean, min, max, last,
        rate (per second, of a counter, resets count from zero), or (bits). Text fields can't be ranged: ValueError.
        The first bucket is the one that holds `start_ns`; the last one ends at or after `end_ns`.

        A step of whole minutes is answered from rollups where a field has them for `aggregate` (gauge: mean, min, max;
        counter: last, rate; state: max; mask: or), with the same values as from raw samples; others reach back as far as raw.
        """

    def spread(
        self,
        measurement: str,
        fields: Sequence[str],
        *,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        where: Where | None = None,
    ) -> list[Spread]:
        """Gauges of all series that meet `where` drawn together, buckets as in `range`; ValueError for what is no gauge.

        Fields without a value in the whole time are left out.
        """

    def series(self, measurement: str, *, since_ns: int = 0) -> list[Mapping[str, str]]:
        """The tag sets that have a sample at or after `since_ns`."""

    def rollup(self, now_ns: int, budget_s: float = 1.0) -> bool:
        """Draw together what has ended by now and is not yet, for about `budget_s`; whether more of it is left.

        Safe at any time, from any number of processes, and to be cut off anywhere.
        """

    def prune(self, before_ns: Mapping[str, int], level_ns: int = 0) -> int:
        """Delete what is older than the given time per measurement ("*" for the rest); how many samples went.

        `level_ns` is 0 for raw samples, which are rolled up before they go, or the length of a rollup's cells
        (`rollup.MINUTE_NS`, `rollup.QUARTER_NS`).
        """

    def exists(self) -> bool:
        """Whether the file or database that the URL names is there, so that an empty answer means that it is empty."""

    def prepare(self, keep_s: float = 0.0) -> None:
        """Make the file or database, as the first write would. Safe to repeat.

        `keep_s` is for how long it is to keep samples, 0 for ever: only for what is made, where the server has it by bucket.
        """

    def survey(self) -> Survey:
        """How the store is. Nothing is made or written."""

    def close(self) -> None: ...
