"""One rank of a simulated engine: the time of its own work in each step, and what it waits for the others and for the transfer."""

from __future__ import annotations

from random import Random

from telemetry.sample import Value

NOISE = 0.01  # of the own time of a step, relative


class Rank:
    """Its counters since its engine's start, and what they were when they were last asked for."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._now = self._told = (0.0, 0.0, 0.0)  # steps, seconds of computing, seconds of waiting

    def advance(self, seconds: float, step_s: float, own_s: float) -> None:
        """Move on by `seconds` of steps of `step_s`, of which `own_s` are its own work."""
        steps, compute, wait = self._now
        made = seconds / step_s
        own_s = min(step_s, own_s * (1 + NOISE * (self._random.random() - 0.5)))
        self._now = (steps + made, compute + made * own_s, wait + made * (step_s - own_s))

    def fields(self) -> dict[str, Value]:
        """Its counters, and its mean step since the last call, where it has made one."""
        steps, compute, wait = (now - before for now, before in zip(self._now, self._told, strict=True))
        self._told = self._now
        fields: dict[str, Value] = {
            "steps_total": int(self._now[0]),
            "compute_s": round(self._now[1], 6),
            "wait_s": round(self._now[2], 6),
        }
        if steps > 0:
            fields["step_compute_mean_s"] = round(compute / steps, 6)
            fields["step_wait_mean_s"] = round(wait / steps, 6)
        return fields
