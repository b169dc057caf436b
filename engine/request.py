"""One request on its way through the engine, and how its tokens are to be chosen."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.detokenizer import TextStream

COLD = 1e-5
"""Temperatures below it are greedy."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Also at temperatures so low that nothing but the likeliest token could be drawn, and logits would leave float32."""
        return self.temperature < COLD


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"  # its cache is kept and nothing is computed: it is on its way to another engine, or has just come from one
    FINISHED = "finished"
    DEPARTED = "departed"  # it goes on at another engine


class Finish(Enum):
    """Why a request ended. The values are what clients see as finish_reason, but for error and abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """A prompt, the tokens generated so far, and how far its KV cache has got.

    `num_computed` counts the tokens whose K and V are written; it catches up with `num_tokens`: that one rule covers
    prefill, chunked prefill, decode and recomputation after preemption. Times are monotonic seconds.
    """

    __slots__ = (
        "arrived_s",
        "block_keys",
        "blocks",
        "deadline_s",
        "error",
        "finish",
        "finished_s",
        "first_scheduled_s",
        "first_token_s",
        "gone",
        "host_blocks",
        "id",
        "last_token_s",
        "num_computed",
        "num_delivered",
        "num_preempted",
        "num_prompt_counted",
        "paced",
        "paused_since_s",
        "priority",
        "prompt",
        "sampling",
        "state",
        "text",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        sampling: Sampling,
        arrived_s: float,
        text: TextStream | None = None,
        paced: bool = False,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        if not prompt:
            raise ValueError(f"request {id}: the prompt has no tokens")
        self.id = id
        self.prompt = len(prompt)
        self.tokens = list(prompt)  # prompt and output; only ever grows
        self.sampling = sampling
        self.text = text
        self.paced = paced  # a streaming client takes the tokens one by one, and may be slower than we are
        self.priority = priority  # lower is served earlier
        self.deadline_s = deadline_s  # by then the whole answer is wanted
        self.state = State.WAITING
        self.finish: Finish | None = None
        self.error: str | None = None
        self.blocks: list[int] = []
        self.gone = 0  # so many of its first blocks it doesn't hold any more: no layer looks back so far
        self.host_blocks: list[int] = []  # where its cache is while it is swapped out
        self.block_keys: list[bytes] = []  # names of its full blocks, as far as somebody has asked for them
        self.num_computed = 0
        self.num_preempted = 0
        self.num_prompt_counted = 0  # prompt tokens that the statistics have counted; never twice
        self.num_delivered = 0  # written by the server as the client takes tokens
        self.arrived_s = arrived_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None
        self.paused_since_s: float | None = None

    @property
    def held_blocks(self) -> list[int]:
        """Those of its blocks that are taken for it."""
        return self.blocks[self.gone :] if self.gone else self.blocks

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def num_undelivered(self) -> int:
        return self.num_output - self.num_delivered if self.paced else 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]
