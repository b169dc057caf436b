"""How many CPU threads a step uses: all of them, or one, whichever is faster at this batch size on this machine just now."""

from __future__ import annotations

import math
import os
from pathlib import Path

SPIN_COUNT = "200"
"""How often an idle OpenMP thread looks for work before it sleeps. libgomp's default spins for milliseconds: beside one busy
neighbour on two cores that made a decode step 90 times as long (1,188 ms instead of 13 ms), and with 200 it costs nothing
measurable when the machine is quiet."""

TRY_EVERY = 48
"""Every so many steps of one size, the other thread count gets a step, so that a choice can be revised."""

USUAL, TRIED = 0.1, 0.3
"""Weight of the newest step time in the running mean, of the thread count in use and of the one that is only tried now and
then: what is seen rarely must count for more, or it stays what it was long ago."""


def calm_openmp() -> None:
    """Keep OpenMP threads from spinning. Call before torch is imported; what the user has set stays."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: by affinity, and by the CPU quota of its control group (a container's limit)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        granted, period = quota.read_text("ascii").split()
        return max(1, min(cores, math.ceil(int(granted) / int(period))))
    except (OSError, ValueError):  # no control group of version 2, or `max`: no quota
        return cores


class ThreadChooser:
    """Remembers mean step times per number of tokens (in powers of two) and thread count; times are seconds per step.

    Means, not best times: beside busy neighbours two threads are fast now and then and slow on the whole.
    """

    def __init__(self, most: int) -> None:
        self.options = (1, most) if most > 1 else (1,)
        self._mean: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._promising: dict[int, int] = {}  # size -> the thread count whose last trial beat the one in use

    def choose(self, tokens: int) -> int:
        """The thread count for a step of so many tokens."""
        size = tokens.bit_length()
        for option in reversed(self.options):
            if self._seen.get((size, option), 0) < 2:
                return option
        if size in self._promising:
            return self._promising[size]
        best = self._best(size)
        steps = sum(self._seen[size, option] for option in self.options)
        if len(self.options) > 1 and steps % TRY_EVERY == 0:
            return next(option for option in self.options if option != best)
        return best

    def learn(self, tokens: int, threads: int, seconds: float) -> None:
        """Take in how long a step took. The first of its kind is forgotten when the second comes: kernels were made in it.
        Later a single outlier hardly counts; a lasting change does after some ten steps: a count that was tried and faster is
        tried again at once, until it is the one in use or was slower.
        """
        key = (tokens.bit_length(), threads)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= 2:
            self._mean[key] = seconds
            return
        best = self._best(key[0])
        self._promising.pop(key[0], None)
        if threads != best and seconds < self._mean[key[0], best]:
            self._promising[key[0]] = threads
        weight = USUAL if threads == best else TRIED
        self._mean[key] += weight * (min(seconds, 4 * self._mean[key]) - self._mean[key])
        if self._best(key[0]) == threads:
            self._promising.pop(key[0], None)

    def _best(self, size: int) -> int:
        return min(self.options, key=lambda option: self._mean.get((size, option), float("inf")))
