"""How many CPU threads a step uses: all of them, or one, whichever is faster at this batch size on this machine just now."""

from __future__ import annotations

import math
import os
from pathlib import Path

SPIN_COUNT = "200"
"""How often an idle OpenMP thread looks for work before it sleeps. libgomp's default spins for milliseconds: beside one busy
neighbour on two cores that made a decode step 90 times as long (1,188 ms instead of 13 ms), and with 200 it costs nothing
measurable when the machine is quiet."""

TRY_EVERY = 64
"""Every so many steps of one size, the other thread count gets a step, so that a choice can be revised."""

SLOWER, FASTER = 0.1, 0.5
"""Weight of the newest step time in the running mean. A faster step counts more: the first step of a size is slow for reasons
that don't come back (kernels are made), and a choice must not suffer from that for hundreds of steps."""


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
    """Remembers step times per number of tokens (in powers of two) and thread count; times are seconds per step."""

    def __init__(self, most: int) -> None:
        self.options = (1, most) if most > 1 else (1,)
        self._mean: dict[tuple[int, int], float] = {}
        self._steps: dict[int, int] = {}

    def choose(self, tokens: int) -> int:
        """The thread count for a step of so many tokens."""
        size = tokens.bit_length()
        for option in reversed(self.options):
            if (size, option) not in self._mean:
                return option
        best = min(self.options, key=lambda option: self._mean[size, option])
        steps = self._steps.get(size, 0)
        if len(self.options) > 1 and steps % TRY_EVERY == TRY_EVERY - 1:
            return next(option for option in self.options if option != best)
        return best

    def learn(self, tokens: int, threads: int, seconds: float) -> None:
        """Take in how long a step took. A single outlier hardly counts; a lasting change does after some ten steps."""
        size = tokens.bit_length()
        self._steps[size] = self._steps.get(size, 0) + 1
        known = self._mean.get((size, threads))
        if known is None:
            self._mean[size, threads] = seconds
        else:
            weight = FASTER if seconds < known else SLOWER
            self._mean[size, threads] = known + weight * (min(seconds, 4 * known) - known)
