"""The next tokens of a step's rows from its logits: one of each row, or as many as its draft got right, and one more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.draft import Draft
from engine.request import Sampling
from engine.sampler import distribution, invert, sample, uniform
from engine.scheduler import Row

Tensor = torch.Tensor


def choose(logits: Tensor, rows: Sequence[Row]) -> tuple[tuple[Row, int], ...]:
    """`logits` [samples, vocab] hold, row after row, what follows the last known token and each guessed one.

    A guess without odds is judged by the token that would have been chosen in its place anyway, drawn by the request's own
    seed: so it changes neither a greedy output nor a drawn one, only how soon it comes. It is accepted with the probability
    that the model gives it, as in rejection sampling from a proposal that is certain.
    """
    begins: list[int] = []
    own: list[int] = []
    at = 0
    for row in rows:
        begins.append(at)
        if row.draft.odds is None:
            own += range(at, at + row.num_samples)
        at += row.num_samples
    wanted = [row.request.sampling for row in rows for _ in range(row.num_samples) if row.draft.odds is None]
    places = [row.request.num_output + n for row in rows for n in range(row.num_samples) if row.draft.odds is None]
    chosen = dict(zip(own, sample(logits if len(own) == at else logits[own], wanted, places), strict=True))
    found: list[tuple[Row, int]] = []
    for row, begin in zip(rows, begins, strict=True):
        end = begin + row.num_samples
        if row.draft.odds is None:
            tokens = up_to_the_first_miss([chosen[n] for n in range(begin, end)], row.draft.tokens)
        else:
            tokens = by_rejection(logits[begin:end], row.draft, row.request.sampling, row.request.num_output)
        found += [(row, token) for token in tokens]
    return tuple(found)


def up_to_the_first_miss(chosen: Sequence[int], guessed: Sequence[int]) -> Sequence[int]:
    """The chosen tokens that were made of right guesses only: one more than were right."""
    right = next((n for n, token in enumerate(guessed) if token != chosen[n]), len(guessed))
    return chosen[: right + 1]


def by_rejection(logits: Tensor, draft: Draft, sampling: Sampling, position: int) -> list[int]:
    """Tokens that are distributed as if each had been drawn from the model: a guess x drawn from q is accepted with probability
    min(1, p(x) / q(x)); in place of the first that is not, one is drawn from what p has more than q, max(0, p - q), made to
    sum to 1; after all accepted ones, one from p (Leviathan, Kalman, Matias 2023; Chen et al. 2023).

    p and q are what is left of the softmax at the request's temperature, top-k and top-p. `position` counts its output so far.
    """
    assert isinstance(draft.odds, torch.Tensor)
    tokens: list[int] = []
    for n, guess in enumerate(draft.tokens):
        p, q = distribution(logits[n], sampling), draft.odds[n]
        if uniform(sampling.seed, position + n, "accept") * float(q[guess]) < float(p[guess]):
            tokens.append(guess)
            continue
        more = (p - q).clamp_(min=0.0)
        # by rounding alone nothing may be left, where p and q are as good as equal
        tokens.append(invert(more if float(more.sum()) > 0 else p, uniform(sampling.seed, position + n, "instead")))
        return tokens
    return [*tokens, *sample(logits[-1:], [sampling], [position + len(tokens)])]
