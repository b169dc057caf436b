"""Drafts: tokens that somebody guesses will come next, for the model to verify several in one step. Knows no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.request import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens. `odds`, where they were drawn, is what each was drawn from, a tensor [tokens, vocab] that sums to 1;
    None where each is simply the guesser's only guess.
    """

    tokens: tuple[int, ...]
    odds: object = None

    def cut(self, most: int) -> Draft:
        """The first `most` tokens of it. The odds of the others are left where they are."""
        return self if len(self.tokens) <= most else Draft(self.tokens[:most], self.odds)


NO_DRAFT = Draft(())


class Proposer(Protocol):
    """Who guesses. One for the whole engine."""

    free: bool
    """Guesses cost next to nothing, so they may be made and judged by what comes, without being computed."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        """For each request that decodes, at most so many tokens that may follow; NO_DRAFT where there is no guess."""

    def forget(self, id: str) -> None:
        """This request has ended."""
