"""Guesses from the text itself: what followed when the last tokens stood there before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft import NO_DRAFT, Draft
from engine.request import Request

WIDTH = 4  # bytes of a token id in the searched text


class NGram:
    """Finds the longest suffix of prompt and output, `least` to `most` tokens, that has occurred before, the latest place first.

    The text is kept as bytes, because searching bytes backwards is the fastest search that Python has: microseconds in
    thousands of tokens, at four bytes a token and without an index.
    """

    free = True

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._texts: dict[str, bytearray] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        return [self._guess(request, tokens) for request, tokens in wanted]

    def forget(self, id: str) -> None:
        self._texts.pop(id, None)

    def _guess(self, request: Request, tokens: int) -> Draft:
        text = self._texts.setdefault(request.id, bytearray())
        for token in request.tokens[len(text) // WIDTH :]:
            text += token.to_bytes(WIDTH, "little")
        for length in range(min(self.most, request.num_tokens - 1), self.least - 1, -1):
            at = _last_before_end(text, length)
            if at is not None:
                return _continued(request.tokens, at + length, tokens)
        return NO_DRAFT


def _last_before_end(text: bytearray, length: int) -> int | None:
    """The token at which the last `length` tokens of `text` also begin, as late as possible but not at the end itself."""
    suffix = text[-length * WIDTH :]
    end = len(text) - 1  # the suffix itself ends one byte later, and must not be found
    while (at := text.rfind(suffix, 0, end)) >= 0:
        if at % WIDTH == 0:
            return at // WIDTH
        end = at + len(suffix) - 1  # across two tokens: an accident
    return None


def _continued(tokens: Sequence[int], at: int, count: int) -> Draft:
    """`count` tokens from `at` on. Where the text ends it goes on with the guess itself: a period is repeated for ever."""
    guess: list[int] = []
    for place in range(at, at + count):
        guess.append(tokens[place] if place < len(tokens) else guess[place - len(tokens)])
    return Draft(tuple(guess))
