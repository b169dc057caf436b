"""What slow cards cost a fleet whose cards work in groups: a tensor-parallel group runs at its slowest member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rules.course import Course, Incident
from rules.verdict import Cause, Line

CARDS_OWN = frozenset((Cause.THERMAL, Cause.POWER, Cause.GPU_FAULT, Cause.PCIE_LINK))


@dataclass(frozen=True, slots=True)
class Coupling:
    """Counts are cards; losses are shares (0..1) of the output that all cards of the place would have."""

    slow: int
    held_up: int  # the slow ones and all that wait for them
    of: int
    group: int  # cards of the largest group
    lost: float
    lost_alone: float  # if no card waited for another

    @property
    def gain(self) -> float:
        """What mending the slow cards adds to the present output: 1 / (1 - lost) - 1."""
        return 1 / (1 - self.lost) - 1

    @property
    def gain_alone(self) -> float:
        return 1 / (1 - self.lost_alone) - 1

    def line(self) -> Line:
        return Line(
            "rules.loss.coupling",
            {
                "slow": self.slow,
                "held_up": self.held_up,
                "of": self.of,
                "group": self.group,
                "lost_pct": round(100 * self.lost, 1),
                "gain_pct": round(100 * self.gain, 1),
                "lost_alone_pct": round(100 * self.lost_alone, 1),
                "gain_alone_pct": round(100 * self.gain_alone, 1),
            },
        )


def coupling_of(incident: Incident, courses: Sequence[Course]) -> Coupling | None:
    """The arithmetic of an incident that is about some cards of several groups; None for any other.

    Each struck group counts with all of its cards at its own loss, as it was last judged; the place's other groups run as expected.
    """
    if incident.cause not in CARDS_OWN or len(incident.struck) < 2:
        return None
    place = {tag: name for tag, name in incident.subject.items() if tag not in ("engine", "gpu")}
    around = [course for course in courses if place.items() <= dict(course.last.subject).items()]
    total = sum(len(course.seen.gpus) for course in around)
    slow = held_up = group = 0
    lost = lost_alone = 0.0
    for struck in incident.struck:
        verdict, size = struck.spell.verdict, struck.gpus
        own = len(verdict.gpus) or size
        share = min(max(verdict.loss_pct or 0.0, 0.0), 99.0) / 100
        slow, held_up, group = slow + own, held_up + size, max(group, size)
        lost += share * size
        lost_alone += share * own
    if slow >= held_up or not total:
        return None
    return Coupling(slow, held_up, total, group, lost / total, lost_alone / total)
