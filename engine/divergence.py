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


def measure(
    scheme: str, full: Decoder, quantised: Decoder, tokens: Sequence[int], progress: Callable[[float], None]
) -> Quality:
    """Read `tokens` with both models. `progress` hears 0..1."""
    length = min(PASSAGE, len(full.rotations))
    passages = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    passages = [passage for passage in passages if len(passage) > 1]
    loss = full_loss = kl = 0.0
    equal = count = 0
    for done, passage in enumerate(passages):
        following = torch.tensor(passage[1:])
        p, q = (_log_probabilities(decoder, passage[:-1]) for decoder in (full, quantised))
        full_loss += float(F.nll_loss(p, following, reduction="sum"))
        loss += float(F.nll_loss(q, following, reduction="sum"))
        kl += float(F.kl_div(q, p, reduction="sum", log_target=True))
        equal += int((p.argmax(dim=1) == q.argmax(dim=1)).sum())
        count += len(following)
        progress((done + 1) / len(passages))
    return Quality(scheme, count, _exp(full_loss / count), _exp(loss / count), kl / count, equal / count)


def _exp(mean_loss: float) -> float:
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def _log_probabilities(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] float32 of the token that follows each of `ids`, read as one prompt with a cache of its own."""
    rows, embedding = len(ids), decoder.embedding
    cache = KVStore(decoder.config, 1, rows, embedding.dtype, embedding.device)
    request = Request("reading", list(ids), Sampling(), 0.0)
    request.blocks = [0]
    plan = StepPlan([Row(request, 0, rows)])
    batch = build(plan, rows, embedding.dtype, embedding.device, window=decoder.config.window)
    return decoder.logits(decoder.forward(batch, cache)).float().log_softmax(dim=1)
