"""When a group of readings is next taken."""

from __future__ import annotations

from dataclasses import dataclass, field

TICK_SLACK_S = 0.25
"""Ticks jitter: a group that is due this soon is read now rather than a whole tick late."""


@dataclass(slots=True)
class Due:
    """When a group of readings is next taken. GPUs take turns within the period, so that slow calls don't fall into one sweep."""

    period_s: float
    share: float  # of the period until the second reading, in (0, 1]
    next_s: float = field(default=0.0)

    def now(self, now: float) -> bool:
        """Whether it is time; if so the next time is set at once, so that a call that hangs is not repeated by another thread."""
        if now < self.next_s - TICK_SLACK_S:
            return False
        self.next_s = now + self.period_s * (1.0 if self.next_s else self.share)
        return True
