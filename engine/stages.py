"""Where an engine's time goes: seconds by stage, taken at marks between one stage and the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol


class Stage(IntEnum):
    """The way of a token, in order. What a stage holds is everything since the mark before it."""

    TOKENISE = 0  # text to tokens, in the server's worker threads, beside the steps
    SCHEDULE = 1  # who computes what in the step, its blocks, swaps and tensors
    EMBED = 2  # rows of the embedding, rotations
    ATTENTION = 3  # norm, Q, K and V, rotating and keeping them, attention, the product after it
    MLP = 4
    SAMPLE = 5  # the last norm, the head, the choice; on a device that works beside the host, the wait for it too
    DETOKENISE = 6  # tokens to text, stop strings

    @property
    def label(self) -> str:
        return self.name.lower()


Seconds = Sequence[float]
"""One entry for each Stage, in its order."""


def nothing() -> list[float]:
    """No seconds for each stage yet."""
    return [0.0] * len(Stage)


class StageClock(Protocol):
    """One step's stopwatch."""

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins."""

    def mark(self, stage: Stage) -> None:
        """What has gone by since the last mark, or the beginning, belongs to `stage`."""

    def move(self, source: Stage, to: Stage, seconds: float) -> None:
        """So many seconds that are marked as `source` belong to another stage. Only the host's clock has such marks."""

    def in_one_piece(self) -> None:
        """The step is replayed, with no marks between its stages: they share its time as in the last one of its size that had some.
        Only a device's clock knows that.
        """

    def take(self, seconds: float) -> Seconds | None:
        """The step has ended and has taken so long. None when it isn't known where they went."""


class Untimed:
    """Takes no time and tells none."""

    def begin(self, tokens: int) -> None:
        pass

    def mark(self, stage: Stage) -> None:
        pass

    def move(self, source: Stage, to: Stage, seconds: float) -> None:
        pass

    def in_one_piece(self) -> None:
        pass

    def take(self, seconds: float) -> Seconds | None:
        return None


class HostClock:
    """Where the host computes: the time between marks is the time of the stage."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = nothing()
        self._last = 0.0

    def begin(self, tokens: int) -> None:
        self._seconds = nothing()
        self._last = self._now()

    def mark(self, stage: Stage) -> None:
        now = self._now()
        self._seconds[stage] += now - self._last
        self._last = now

    def move(self, source: Stage, to: Stage, seconds: float) -> None:
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[to] += seconds

    def in_one_piece(self) -> None:
        pass

    def take(self, seconds: float) -> Seconds | None:
        return self._seconds


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


TIMED_EVERY = 16
"""One step in so many is timed on a device: sixty events cost a small model's step several percent of its time."""


class DeviceClock:
    """Where a device computes beside the host: events in its queue of work, never a wait for them.

    Of the steps of one size (in powers of two of tokens) one in TIMED_EVERY is timed, the first ones too; the seconds of the
    others are shared out as in the last one that was. A timed step whose end nobody has waited for is read when it has come.
    """

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self._events: list[Event] = []
        self._stages: list[Stage] = []  # of the step that is timed: what came before each event but the first
        self._timing: int | None = None  # the size of that step, until its events are read
        self._marking = False
        self._size = 0
        self._seen: dict[int, int] = {}
        self._shares: dict[int, Seconds] = {}

    def begin(self, tokens: int) -> None:
        self._size = tokens.bit_length()
        seen = self._seen[self._size] = self._seen.get(self._size, 0) + 1
        # the first step of a size makes its kernels: what it says stands only until the second
        self._marking = self._timing is None and (seen <= 2 or seen % TIMED_EVERY == 0)
        if self._marking:
            self._timing = self._size
            self._stages.clear()
            self._record(0)

    def mark(self, stage: Stage) -> None:
        if self._marking:
            self._stages.append(stage)
            self._record(len(self._stages))

    def move(self, source: Stage, to: Stage, seconds: float) -> None:
        pass

    def in_one_piece(self) -> None:
        if self._marking:
            self._marking, self._timing = False, None

    def take(self, seconds: float) -> Seconds | None:
        self._marking = False
        self._read()
        shares = self._shares.get(self._size)
        return None if shares is None else [share * seconds for share in shares]

    def _record(self, number: int) -> None:
        if number == len(self._events):
            self._events.append(self._event())
        self._events[number].record()

    def _read(self) -> None:
        if self._timing is None or not self._events[len(self._stages)].query():
            return
        spent = nothing()
        for number, stage in enumerate(self._stages):
            spent[stage] += self._events[number].elapsed_time(self._events[number + 1])
        if (whole := sum(spent)) > 0:
            self._shares[self._timing] = [part / whole for part in spent]
        self._timing = None
