"""Progress: the mean time of a step, whether requests run while nothing comes out, and which gauges are not of now."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

Rank = tuple[str, ...]

MEAN_WINDOW_S = 10.0
"""Exact means need few observations, so they follow a slowdown within seconds."""

STALL_S = 10.0
STALL_STEPS = 20
STALL_REQUESTS = 3
PREFILL_BUDGET_LIMIT_S = 120.0
FROZEN_S = 10.0
REPORTED_S = 30.0


class BusySteps:
    """Mean time of a step over the last seconds, for engines that count steps but don't time them: wall time during which
    requests were running, over the steps made in it. Ranks make their steps side by side, so each is judged by itself.
    """

    def __init__(self) -> None:
        self._history: deque[tuple[float, dict[Rank, float], frozenset[Rank]]] = (
            deque()
        )  # monotonic s, steps, busy ranks

    def forget(self) -> None:
        self._history.clear()

    def mean_step_s(
        self, steps: Mapping[Rank, float], running: Mapping[Rank, float], monotonic_s: float
    ) -> float | None:
        """Over the ranks that had requests running at every scrape of the last MEAN_WINDOW_S and made steps; None without any."""
        history = self._history
        if history and any(value < history[-1][1].get(rank, value) for rank, value in steps.items()):
            history.clear()
        history.append((monotonic_s, dict(steps), frozenset(rank for rank, count in running.items() if count > 0)))
        while len(history) > 2 and monotonic_s - history[1][0] >= MEAN_WINDOW_S:
            history.popleft()
        then_s, before, _ = history[0]
        always_busy = frozenset.intersection(*(busy for _, _, busy in history))
        made = {rank: steps[rank] - before[rank] for rank in always_busy & steps.keys() & before.keys()}
        working = [count for count in made.values() if count > 0]
        if len(history) < 2 or not working:
            return None
        return (monotonic_s - then_s) * len(working) / sum(working)


@dataclass(slots=True)
class _Still:
    progress: tuple[float, ...]
    is_busy: bool
    since_s: float


class Stall:
    """Whether requests run while none of the engine's counters of work moves, on any rank."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, _Still] = {}

    def forget(self) -> None:
        self._ranks.clear()

    def judge(
        self,
        running: Mapping[Rank, float],
        progress: Mapping[Rank, tuple[float, ...]],
        monotonic_s: float,
        patience_s: float | None,
    ) -> bool | None:
        """None before there is anything to compare with, and without a `patience_s`: how long a healthy engine may be silent."""
        known = False
        stalled = False
        for rank in running.keys() & progress.keys():
            still = self._ranks.get(rank)
            known = known or still is not None
            is_busy = running[rank] > 0
            if still is None or still.progress != progress[rank] or not is_busy or not still.is_busy:
                self._ranks[rank] = _Still(progress[rank], is_busy, monotonic_s)
            elif patience_s is not None and monotonic_s - still.since_s >= patience_s:
                stalled = True
        if stalled:
            return True
        busy = any(running[rank] > 0 for rank in running)
        return False if known and (patience_s is not None or not busy) else None


class Pulse:
    """Whether values that change with every iteration still do."""

    def __init__(self) -> None:
        self.has_moved = False  # seen to change at least once
        self._last: tuple[float, ...] = ()
        self._moved_s = 0.0

    def forget(self) -> None:
        self.has_moved = False
        self._last = ()

    def beats(self, values: tuple[float, ...], monotonic_s: float, within_s: float = FROZEN_S) -> bool:
        """True at first, and as long as they changed within `within_s`."""
        if values != self._last or not values:
            self.has_moved = bool(self._last)
            self._last = values
            self._moved_s = monotonic_s
        return monotonic_s - self._moved_s <= within_s
