"""One look at the store for one viewer: the fleet, the chosen pair, its history and its judgement, or why they can't be shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dashboard.fleet import Fleet, PairNow, read_fleet
from dashboard.heard import Heard
from dashboard.history import History
from dashboard.history_reader import HistoryReader
from dashboard.selection import PairKey, Selection, Window
from dashboard.settings import DashboardSettings
from rules.verdict import Diagnosis, from_sample
from rules.verdict_record import text_of
from telemetry.sample import Sample
from telemetry.store import Store, StoreError

KEPT_TEXTS = 64
"""Pairs that somebody looks at; one that is forgotten is read again."""

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class View:
    """`problem` is the store's own sentence when it can't be read; `fleet` and `history` are then the last that were."""

    now_ns: int
    selection: Selection
    window: Window
    fleet: Fleet | None = None
    pair: PairNow | None = None
    history: History | None = None
    diagnosis: Diagnosis | None = None
    unreadable: bool = False
    problem: str = ""


class Fresh(Generic[Key, Made]):
    """A value for each key that is at most `ttl_s` old, made by one caller at a time while the others wait for it."""

    def __init__(self, ttl_s: float, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[Key, tuple[float, Made]] = {}
        self._making: dict[Key, threading.Lock] = {}

    def get(self, key: Key, make: Callable[[], Made]) -> Made:
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                kept = self._made.get(key)
            if kept is not None and self._clock() - kept[0] < self._ttl_s:
                return kept[1]
            made = make()
            with self._lock:
                self._made.pop(key, None)
                self._made[key] = (self._clock(), made)
                while len(self._made) > self._limit:
                    oldest = next(iter(self._made))
                    del self._made[oldest]
                    self._making.pop(oldest, None)
            return made


class Viewer:
    """Looks for all viewers together: whoever looks within one refresh gets what was already read."""

    def __init__(
        self,
        store: Store,
        settings: DashboardSettings,
        now_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._settings = settings
        self._now_ns = now_ns
        self._reader = HistoryReader(store, clock)
        ttl_s = 0.8 * settings.refresh_s  # a viewer that looks each refresh_s finds something new each time
        self._fleets: Fresh[None, tuple[Fleet | None, StoreError | None]] = Fresh(ttl_s, 1, clock)
        self._histories: Fresh[Hashable, tuple[History | None, StoreError | None]] = Fresh(ttl_s, 32, clock)
        self._heard = Heard(store)
        self._texts: dict[PairKey, tuple[int, Sample | None]] = {}  # time of the verdict that it is the text of
        self._last_fleet: Fleet | None = None

    def look(self, selection: Selection) -> View:
        """Never raises for the store's sake; a selection without a pair gets the worst one."""
        fleet, problem = self._fleets.get(None, self._read_fleet)
        now_ns = self._now_ns()
        window = selection.window(now_ns)
        if fleet is None:
            return View(now_ns, selection, window, problem=_told(problem, selection))
        pair = named_pair(fleet, selection.pair) if selection.pair else first_pair(fleet)
        if pair is None:
            return View(now_ns, selection, window, fleet, problem=_told(problem, selection))
        chosen = pair
        span = (selection.start_ms, selection.end_ms) if selection.zoomed else selection.range
        history, trouble = self._histories.get(
            (pair.key, pair.gpus, span), lambda: self._read_history(chosen, selection.window(self._now_ns()))
        )
        told, unwell = self._text(pair)
        diagnosis, unreadable = _diagnosis(told)
        return View(
            now_ns,
            selection,
            history.window if history else window,
            fleet,
            pair,
            history,
            diagnosis,
            unreadable,
            _told(problem or trouble or unwell, selection),
        )

    def trouble(self) -> str:
        """Why the store can't be read now; empty while it can."""
        problem = self._fleets.get(None, self._read_fleet)[1]
        return str(problem) if problem is not None else ""

    def _read_fleet(self) -> tuple[Fleet | None, StoreError | None]:
        settings = self._settings
        try:
            self._last_fleet = read_fleet(
                self._store, self._now_ns(), forget_s=settings.forget_s, stale_s=settings.stale_s, heard=self._heard
            )
        except StoreError as error:
            return self._last_fleet, error
        return self._last_fleet, None

    def _read_history(self, pair: PairNow, window: Window) -> tuple[History | None, StoreError | None]:
        try:
            return self._reader.read(pair, window), None
        except StoreError as error:
            return self._reader.kept(pair, window), error

    def _text(self, pair: PairNow) -> tuple[Sample | None, StoreError | None]:
        """The newest verdict with words in it, asked for when there is a new verdict; while the store is away, the last known."""
        if pair.judged is None:
            return None, None
        at_ns, told = self._texts.get(pair.key, (0, None))
        if at_ns == pair.judged.time_ns:
            return told, None
        try:
            told = text_of(self._store, pair.judged)
        except StoreError as error:
            return told, error
        self._texts.pop(pair.key, None)
        self._texts[pair.key] = pair.judged.time_ns, told
        while len(self._texts) > KEPT_TEXTS:
            self._texts.pop(next(iter(self._texts)), None)
        return told, None


def first_pair(fleet: Fleet) -> PairNow | None:
    """Whom to show a viewer who names nobody: the worst real pair, else the worst; a silent one last."""
    alive = [pair for pair in fleet.worst_first() if pair.age_s(fleet.at_ns) < 60]
    for pairs in (alive, fleet.worst_first()):
        real = [pair for pair in pairs if not pair.simulated]
        named = [pair for pair in pairs if pair.cause not in ("", "none")]
        for choice in ([p for p in named if not p.simulated], named, [p for p in real if p.key.engine], pairs):
            if choice:
                return choice[0]
    return None


def named_pair(fleet: Fleet, key: PairKey) -> PairNow | None:
    """The pair an address names. One that names only a node, as an alert's link does, gets the worst pair of that node."""
    pair = fleet.pairs.get(key)
    if pair is not None or key.engine:
        return pair
    return next((pair for pair in fleet.worst_first() if pair.key.node == key.node), None)


def _told(problem: StoreError | None, selection: Selection) -> str:
    return problem.told(selection.language) if problem is not None else ""


def _diagnosis(told: Sample | None) -> tuple[Diagnosis | None, bool]:
    """What a verdict's text says, and whether it can't be read."""
    if told is None:
        return None, False
    try:
        return from_sample(told), False
    except ValueError:
        return None, True
