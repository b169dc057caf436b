"""An outage of the store or of the network: silence that is nobody's own, and is told of no node until the backlog had time to come."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from rules.thresholds import Bar
from rules.verdict import Diagnosis, Line, Status, Step
from rules.window import SECOND, Window

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""Agents try a store again within 10 s and send the newest first; the rest is for a fleet that all comes at once. Own choice."""

TOGETHER_S = 10.0
"""Nodes whose newest samples lie no further apart fell silent at one instant; agents tick every second. Own choice."""

_SILENCE = frozenset(f"rules.summary.{name}" for name in ("silent", "gpu_silent", "engine_silent"))


class Outage:
    """Knows what the service could not read, and for how long silence is therefore no verdict. Seconds are monotonic."""

    def __init__(self) -> None:
        self._unread_since_s: float | None = None
        self._until_s = float("-inf")
        self._all_silent = False

    def unread(self, now_s: float) -> None:
        """The store could not be read."""
        if self._unread_since_s is None:
            self._unread_since_s = now_s

    def holds(self, window: Window, at_ns: int, now_s: float) -> bool:
        """Whether silence may be the store's or the network's doing. Call it after each turn that has read; tells the log once."""
        if self._unread_since_s is not None:
            self._until_s = now_s + GRACE_S
            log.warning(
                "the store answers again after %.0f s; silent nodes are not judged for %.0f s, until what the agents kept has come",
                now_s - self._unread_since_s,
                GRACE_S,
            )
            self._unread_since_s = None
        all_silent = fell_silent_together(window, at_ns)
        if all_silent is not self._all_silent:
            self._all_silent = all_silent
            if all_silent and now_s >= self._until_s:
                log.warning(
                    "all nodes fell silent together, as when the store or the network fails; they are not judged for %.0f s",
                    GRACE_S,
                )
            self._until_s = max(self._until_s, now_s + GRACE_S)
        return now_s < self._until_s


def fell_silent_together(window: Window, at_ns: int) -> bool:
    """Whether no node speaks any more and the last to speak, two or more, ended at one instant. A lone node's silence is its own."""
    newest = [
        max((device.last_ns for device in window.all_devices(node)), default=0) for node in window.nodes()
    ]  # of each node
    last_ns = max(newest, default=0)
    if not Bar().reached("telemetry.stale_s", (at_ns - last_ns) / SECOND):
        return False
    return sum(1 for time_ns in newest if last_ns - time_ns <= TOGETHER_S * SECOND) > 1


def without_silence(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """The diagnoses with silence told as a gap and not as a verdict: a gap neither fires nor ends an alert."""
    return [_without_silence(diagnosis) for diagnosis in diagnoses]


def _without_silence(diagnosis: Diagnosis) -> Diagnosis:
    silence = [verdict for verdict in diagnosis.verdicts if verdict.summary.key in _SILENCE]
    if not silence:
        return diagnosis
    others = tuple(verdict for verdict in diagnosis.verdicts if verdict not in silence)
    age_s = (diagnosis.at_ns - (silence[0].since_ns or diagnosis.at_ns)) / SECOND
    steps = tuple(
        replace(step, status=Status.NO_DATA) if step.step is Step.VALIDITY and step.status is Status.CONFIRMED else step
        for step in diagnosis.steps
    )
    gap = Line("rules.summary.gap", {"age_s": min(age_s, 1e6)})
    return replace(diagnosis, verdicts=others, steps=steps, headline=others[0].summary if others else gap)
