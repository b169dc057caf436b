"""Points of a round: the right cause, the right node, and how few looks it took. A false alarm costs."""

from __future__ import annotations

from dataclasses import dataclass

from pairscope.drill.rounds import Round
from rules.priors import STEP_OF
from rules.verdict import Cause

CAUSE, NODE, QUICK = 60, 20, 20
SAME_STEP = 20
"""For another cause of the right step: the right part of the house was searched."""

EACH_LOOK = 3
FALSE_ALARM = -20
HARMLESS = frozenset((Cause.NONE, Cause.DEMAND))
"""Fewer requests are no fault, so that both words say that nothing needs to be mended."""


@dataclass(frozen=True, slots=True)
class Guess:
    cause: Cause
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """`cause`, `node` and `quick` add up to 100 at most; a false alarm counts below zero."""

    cause: int
    node: int
    quick: int
    right: bool
    false_alarm: bool = False
    missed: bool = False

    @property
    def total(self) -> int:
        return self.cause + self.node + self.quick


def score(played: Round, guess: Guess | None, looks: int) -> Points:
    """None gives up, and earns nothing. With a single node there is none to name, and its points go with the cause."""
    if guess is None:
        return Points(0, 0, 0, right=False)
    truth = played.cause
    quick = max(0, QUICK - EACH_LOOK * max(0, looks - 1))
    if truth in HARMLESS:
        right = guess.cause in HARMLESS
        return (
            Points(CAUSE + NODE, 0, quick, right=True) if right else Points(FALSE_ALARM, 0, 0, False, false_alarm=True)
        )
    if guess.cause in HARMLESS:
        return Points(0, 0, 0, right=False, missed=True)
    there = len(played.nodes) == 1 or guess.node in played.right_nodes
    if guess.cause is truth:
        return Points(CAUSE, NODE if there else 0, quick, right=True)
    near = STEP_OF.get(guess.cause) is STEP_OF[truth]
    return Points(SAME_STEP if near else 0, NODE if there and len(played.nodes) > 1 else 0, 0, right=False)
