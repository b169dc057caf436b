"""Guesses from a second, smaller model with a cache of its own: any checkpoint that the loader reads, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.batch import build
from engine.blocks import BlockPool
from engine.checkpoints.find import find_model, open_checkpoint
from engine.draft import NO_DRAFT, Draft
from engine.kvstore import KVStore
from engine.model import Decoder
from engine.progress import Progress
from engine.request import Request
from engine.sampler import distribution, invert, uniform
from engine.scheduler import Row, StepPlan
from engine.scheme import SchemeLoader
from engine.settings import EngineSettings, SettingsError
from engine.tokenizer import Tokenizer

Tensor = torch.Tensor

CATCH_UP = 256
"""Tokens that the draft model computes in one go at most. A longer prompt is read in pieces, one a step of the engine, and
before its end nothing is guessed."""


def load_draft(
    settings: EngineSettings,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    progress: Progress,
    log: Callable[[str], None],
) -> Decoder | None:
    """The small model that the settings name, None when they name none. SettingsError when its tokens are not those of
    `tokenizer`; else what finding and loading a model raise.
    """
    kind, _, name = settings.speculate.partition(":")
    if kind != "draft":
        return None
    if device.type != "cpu" and settings.speculate_quantize != "none":
        raise SettingsError(f"speculate_quantize is {settings.speculate_quantize!r}: weights are quantised on CPU only")
    path = find_model(name)
    checkpoint = open_checkpoint(path)
    ours, theirs = tokenizer.inner.get_vocab(), checkpoint.tokenizer().inner.get_vocab()
    if ours != theirs:
        other = len(set(ours.items()) ^ set(theirs.items()))
        raise SettingsError(
            f"speculate: the draft model {name} has other tokens than the model ({other} differ, of {len(ours)} and {len(theirs)}); "
            "take a smaller one of the same family"
        )
    loader = SchemeLoader(checkpoint, path, dtype, device, context, settings.quantize_group, progress, log)
    return loader.unchecked(settings.speculate_quantize).decoder


class Shadow:
    """What the draft model knows of a request: its tokens, guesses at their end, as a request in a cache of its own."""

    __slots__ = ("known", "odds", "request")

    def __init__(self, request: Request) -> None:
        self.request = Request(request.id, request.tokens, request.sampling, request.arrived_s)
        self.request.prompt = request.prompt
        self.known = request.num_tokens  # beyond lie guesses
        self.odds: list[Tensor] = []  # what each guess was drawn from; empty for greedy requests

    def follow(self, request: Request) -> None:
        """Take in what has come; guesses that were wrong go, and what was computed for them."""
        own, come = self.request, request.tokens
        agreed = self.known
        while agreed < min(own.num_tokens, len(come)) and own.tokens[agreed] == come[agreed]:
            agreed += 1
        del own.tokens[agreed:]
        own.tokens += come[agreed:]
        own.num_computed = min(own.num_computed, agreed, len(come) - 1)
        self.known, self.odds = len(come), []

    @property
    def draft(self) -> Draft:
        tokens = tuple(self.request.tokens[self.known :])
        return Draft(tokens, torch.stack(self.odds) if self.odds else None)


class DraftModel:
    """`vocab` is the large model's. What the small one has beyond it is never guessed; a request with tokens that the small one
    lacks gets no guesses.
    """

    free = False

    def __init__(self, decoder: Decoder, cache: KVStore, pool: BlockPool, vocab: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.pool = pool
        self.vocab = vocab
        self._shadows: dict[str, Shadow] = {}

    @torch.inference_mode()
    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        try:
            return self._propose(wanted)
        except torch.OutOfMemoryError:  # the large model can go on without
            for id in list(self._shadows):
                self.forget(id)
            return [NO_DRAFT] * len(wanted)

    def forget(self, id: str) -> None:
        shadow = self._shadows.pop(id, None)
        if shadow is not None:
            self.pool.give_back(shadow.request.blocks)

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        names = {request.id for request, _ in wanted}
        shadows = {request.id: self._shadow(request, tokens, names) for request, tokens in wanted}
        left = {
            id: (shadow, tokens) for (_, tokens), (id, shadow) in zip(wanted, shadows.items(), strict=True) if shadow
        }
        self._compute(self._missing([shadow.request for shadow, _ in left.values()]))
        while True:
            # those still behind have no guess yet, and get none in this step
            rows = [
                Row(shadow.request, shadow.request.num_computed, 1)
                for shadow, tokens in left.values()
                if 0 < shadow.request.num_tokens - shadow.known < tokens
            ]
            if not rows:
                return [shadow.draft if (shadow := shadows[request.id]) else NO_DRAFT for request, _ in wanted]
            self._compute(rows)

    def _shadow(self, request: Request, tokens: int, names: set[str]) -> Shadow | None:
        """What is known of a request, with blocks for it and so many guesses; None where there is no room, or a foreign token."""
        shadow = self._shadows.get(request.id)
        since = 0 if shadow is None else shadow.known
        if max(request.tokens[since:], default=0) >= self.decoder.config.vocab:
            self.forget(request.id)
            return None
        if shadow is None:
            shadow = self._shadows[request.id] = Shadow(request)
        else:
            shadow.follow(request)
        blocks = shadow.request.blocks
        missing = self.pool.blocks_for(request.num_tokens + tokens) - len(blocks)
        if missing > self.pool.num_free:
            for id in [
                id for id in self._shadows if id not in names
            ]:  # they are not decoding now: preempted, or paused
                self.forget(id)
        if missing > self.pool.num_free:
            self.forget(request.id)
            return None
        blocks += self.pool.take(max(0, missing))
        return shadow

    def _missing(self, requests: Sequence[Request]) -> list[Row]:
        """All that is not computed yet, or as much of it as goes in one step, what is nearly done first."""
        rows, budget = [], CATCH_UP
        for request in sorted(requests, key=lambda r: r.num_tokens - r.num_computed):
            count = min(request.num_tokens - request.num_computed, budget)
            if count > 0:
                rows.append(Row(request, request.num_computed, count))
                budget -= count
        return rows

    def _compute(self, rows: list[Row]) -> None:
        """Compute rows; those that reach their request's end get one more guess."""
        if not rows:
            return
        decoder, device = self.decoder, self.decoder.embedding.device
        plan = StepPlan(rows=rows)
        batch = build(
            plan, self.cache.block_size, decoder.embedding.dtype, device, decoder.head.padded, decoder.config.window
        )
        x = decoder.forward(batch, self.cache)
        ready = batch.sampled_rows
        for row in rows:
            row.request.num_computed += row.count
        if not ready:
            return
        logits = decoder.logits(x if batch.sampled is None else x.index_select(0, batch.sampled))[:, : self.vocab]
        logits = F.pad(logits, (0, self.vocab - logits.shape[1]), value=float("-inf"))
        likeliest = logits.argmax(dim=-1).tolist()
        for row, own, best in zip(ready, logits, likeliest, strict=True):
            shadow, how = self._shadows[row.request.id], row.request.sampling
            if how.greedy:
                row.request.tokens.append(best)
                continue
            odds = distribution(own, how)
            row.request.tokens.append(invert(odds, uniform(how.seed, row.request.num_output, "guess")))
            shadow.odds.append(odds)
