"""Choosing the next token: greedy, or drawn at a temperature from the top-k and top-p of the distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.request import Sampling

Tensor = torch.Tensor

NUCLEUS_TRY = 1024
"""Top-p looks among so many likeliest tokens first: sorting a whole vocabulary costs more than the rest of sampling."""


def sample(logits: Tensor, wanted: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token for each row of logits [rows, vocab]. `positions` counts the row's output tokens so far.

    A row's choice depends on its logits, its seed and its position only: not on the batch, nor on how often the request was
    preempted.
    """
    drawn = [row for row, sampling in enumerate(wanted) if not sampling.greedy]
    if not drawn:
        return likeliest(logits)
    tokens = likeliest(logits) if len(drawn) < len(wanted) else [0] * len(wanted)
    for row in drawn:
        tokens[row] = _draw(logits[row], wanted[row], uniform(wanted[row].seed, positions[row]))
    return tokens


def likeliest(logits: Tensor) -> list[int]:
    """The likeliest token of each row."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        return list(
            map(int, logits.numpy().argmax(axis=-1).tolist())
        )  # numpy's is six to fifteen times as fast as torch's
    return list(map(int, logits.argmax(dim=-1).tolist()))


def uniform(seed: int, position: int, purpose: str = "") -> float:
    """A number in [0, 1) that belongs to this seed, position and purpose for ever."""
    return random.Random(f"{seed}:{position}{purpose}").random()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn from: probabilities [vocab] at the temperature, within top-k and top-p, that sum to 1."""
    likeliest, ids = _kept(logits, sampling)
    if ids is not None:
        likeliest = torch.zeros(logits.shape[0], device=logits.device).index_copy_(0, ids, likeliest)
    return likeliest / likeliest.sum()


def _draw(logits: Tensor, sampling: Sampling, u: float) -> int:
    """The token at which the cumulated distribution passes `u`: exact sampling by inversion."""
    likeliest, ids = _kept(logits, sampling)
    at = invert(likeliest, u)
    return at if ids is None else int(ids[at])


def _kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities of the tokens within top-k and top-p, which need not sum to 1, and which tokens they are; None: all."""
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    vocab = probabilities.shape[0]
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return probabilities, None
    looked_at = min(vocab, sampling.top_k or (NUCLEUS_TRY if sampling.top_p < 1.0 else vocab))
    likeliest, ids = probabilities.topk(looked_at)
    if sampling.top_p < 1.0:
        share = likeliest.cumsum(0)
        # top-k comes first, and top-p is then a share of what it kept
        mass = float(share[-1]) if sampling.top_k else 1.0
        if not sampling.top_k and float(share[-1]) < sampling.top_p and looked_at < vocab:
            likeliest, ids = probabilities.sort(descending=True)
            share = likeliest.cumsum(0)
        before = share - likeliest
        kept = max(1, int((before < sampling.top_p * mass).sum()))
        likeliest = likeliest[:kept]
    return likeliest, ids[: likeliest.shape[0]]


def invert(probabilities: Tensor, u: float) -> int:
    """The place at which what is summed up so far passes the share `u` of the whole."""
    cumulated = probabilities.cumsum(0)
    at = int(torch.searchsorted(cumulated, u * float(cumulated[-1]), right=True))
    return min(at, probabilities.shape[0] - 1)
