"""Reads the bundled text with full and with quantised weights: perplexity, and how far next-token distributions part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.batch import build
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.quality import Quality
from engine.request import Request, Sampling
from engine.scheduler import Row, StepPlan

Tensor = torch.Tensor

PASSAGE = 256
"""Tokens of one piece; each is read without what stands before it."""
ROWS = 64
"""Distributions over the vocabulary that are compared at a time: each takes several times 4 bytes a token of it."""


def measure(
    scheme: str, full: Decoder, quantised: Decoder, tokens: Sequence[int], progress: Callable[[float], None]
) -> Quality:
    """Read `tokens` with both models. The layers of the full one are each asked for once: it may read them only then. `progress`
    hears 0..1.
    """
    length = min(PASSAGE, len(full.rotations))
    passages = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    passages = [passage for passage in passages if len(passage) > 1]
    loss = full_loss = kl = 0.0
    equal = count = 0
    states = _hidden_states(full, [passage[:-1] for passage in passages])
    for done, (passage, state) in enumerate(zip(passages, states, strict=True)):
        progress((done + 1) / (len(passages) + 1))
        own = _hidden_states(quantised, [passage[:-1]])[0]
        for at in range(0, len(state), ROWS):
            following = torch.tensor(passage[1:])[at : at + ROWS]
            p = _log_probabilities(full, state[at : at + ROWS])
            q = _log_probabilities(quantised, own[at : at + ROWS])
            full_loss += float(F.nll_loss(p, following, reduction="sum"))
            loss += float(F.nll_loss(q, following, reduction="sum"))
            kl += float(F.kl_div(q, p, reduction="sum", log_target=True))
            equal += int((p.argmax(dim=1) == q.argmax(dim=1)).sum())
            count += len(following)
    progress(1.0)
    return Quality(scheme, count, _exp(full_loss / count), _exp(loss / count), kl / count, equal / count)


def _exp(mean_loss: float) -> float:
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def _hidden_states(decoder: Decoder, passages: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, hidden] of each passage, all read in one step as prompts with a cache of their own."""
    embedding, rows = decoder.embedding, list[Row]()
    size = max(len(passage) for passage in passages)
    for number, passage in enumerate(passages):
        request = Request(f"reading-{number}", list(passage), Sampling(), 0.0)
        request.blocks = [number]
        rows.append(Row(request, 0, len(passage)))
    cache = KVStore(decoder.config, len(passages), size, embedding.dtype, embedding.device)
    batch = build(StepPlan(rows), size, embedding.dtype, embedding.device, window=decoder.config.window)
    parts = torch.split(decoder.forward(batch, cache), [row.count for row in batch.rows])
    found = dict(zip((row.request.id for row in batch.rows), parts, strict=True))  # a batch has an order of its own
    return [found[row.request.id] for row in rows]


def _log_probabilities(decoder: Decoder, states: Tensor) -> Tensor:
    """[tokens, vocab] float32 of the token that follows each."""
    return decoder.logits(states).float().log_softmax(dim=1)
