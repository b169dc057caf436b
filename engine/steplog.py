"""The last steps one by one: what each computed, how long it took and in which stages, and what kept others out."""

from __future__ import annotations

import json
import threading
from array import array
from collections import deque
from dataclasses import dataclass

from engine.scheduler import StepPlan
from engine.stages import Seconds, Stage

RING_STEPS = 4096
"""So many steps are kept: about a minute of a fast engine, and some megabyte and a half."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Tokens of a decoding step count as `decode_tokens`, guessed ones among them; those of prompts, and those computed again, as
    `prefill_tokens`.
    """

    number: int  # from 0, since the start
    time_ns: int  # wall clock, at its end
    seconds: float | None  # on the device; None when it ended in nothing (out of memory)
    sequences: int
    prefill_tokens: int
    decode_tokens: int
    waiting: int
    kv_blocks_free: int
    preempted: int
    blocked: str | None  # what kept the next waiting request out
    stages: Seconds | None

    def body(self) -> dict[str, object]:
        """As JSON has it: what isn't known is left out. Times are UNIX seconds and seconds, to the microsecond."""
        body: dict[str, object] = {"step": self.number, "time": round(self.time_ns / 1e9, 6)}
        if self.seconds is None:
            body["out_of_memory"] = True
        else:
            body["seconds"] = round(self.seconds, 6)
        for name in ("sequences", "prefill_tokens", "decode_tokens", "waiting", "kv_blocks_free", "preempted"):
            body[name] = getattr(self, name)
        if self.blocked is not None:
            body["blocked"] = self.blocked
        if self.stages is not None:
            # of one step only what happens in steps: tokenising goes on beside them
            body["stages"] = {
                stage.label: round(self.stages[stage], 6) for stage in Stage if stage is not Stage.TOKENISE
            }
        return body

    def line(self) -> str:
        """One line of a JSON Lines file."""
        return json.dumps(self.body(), separators=(",", ":"))


class StepLog:
    """A ring. The engine's thread adds, anybody reads."""

    def __init__(self, most: int = RING_STEPS) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=most)
        self._lock = threading.Lock()
        self._next = 0

    @property
    def most(self) -> int:
        assert self._steps.maxlen is not None
        return self._steps.maxlen

    def add(
        self, plan: StepPlan, time_ns: int, seconds: float | None, waiting: int, free: int, stages: Seconds | None
    ) -> None:
        """A step of this plan has ended."""
        decode = sum(row.count for row in plan.rows if row.decodes)
        with self._lock:
            self._steps.append(
                LoggedStep(
                    self._next,
                    time_ns,
                    seconds,
                    len(plan.rows),
                    plan.num_tokens - decode,
                    decode,
                    waiting,
                    free,
                    len(plan.preempted),
                    plan.blocked.value if plan.blocked is not None else None,
                    array("f", stages) if stages is not None else None,  # a quarter of a list's memory
                )
            )
            self._next += 1

    def last(self, count: int) -> list[LoggedStep]:
        """The last `count` steps, or as many as are kept, oldest first."""
        with self._lock:
            steps = list(self._steps)
        return steps[max(0, len(steps) - count) :]

    def since(self, number: int) -> list[LoggedStep]:
        """The steps from `number` on that are still kept."""
        with self._lock:
            wanted = min(len(self._steps), max(0, self._next - number))
        return self.last(wanted) if wanted else []
