"""A runner without a model: it checks that the cache would hold the right tokens, and continues a text that only it knows."""

from __future__ import annotations

import zlib

from engine.accounting import ModelCost, Peaks
from engine.core import Engine, OutOfMemory, StepResult
from engine.request import Request
from engine.scheduler import Scheduler, StepPlan
from engine.stats import EngineStats

COST = ModelCost(
    layer_weights=1000,
    head_weights=100,
    layer_bytes=4000,
    head_bytes=400,
    embedding_row_bytes=40,
    kv_bytes_per_token=16,
    attention_width=8,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemoryRunner:
    """Keeps for every slot whose token it holds; a step must find each row's whole context in that row's own blocks.

    The next token depends on the request and the position only, so an output is right or wrong whatever happened on the way.
    """

    def __init__(self, block_size: int, token_budget: int, step_s: float = 0.01) -> None:
        self.block_size = block_size
        self.token_budget = token_budget
        self.step_s = step_s
        self.slots: dict[int, tuple[str, int, int]] = {}
        self.steps = 0
        self.fail_next: Exception | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.steps += 1
        assert plan.num_tokens <= self.token_budget
        assert len({row.request.id for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.start == row.request.num_computed
            for position in range(row.start, row.context):
                self.slots[self._slot(row.request, position)] = self._entry(row.request, position)
        for row in plan.rows:
            for position in range(row.context):
                assert self.slots[self._slot(row.request, position)] == self._entry(row.request, position)
        chosen = tuple((row, next_token(row.request)) for row in plan.rows if row.samples)
        return StepResult(chosen, self.step_s)

    def _slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _entry(self, request: Request, position: int) -> tuple[str, int, int]:
        return request.id, position, request.tokens[position]


def next_token(request: Request) -> int:
    return 10 + zlib.crc32(f"{request.id}:{request.num_output}".encode()) % 200


def fake_engine(
    scheduler: Scheduler, clock: FakeClock, context: int = 10_000, end_tokens: frozenset[int] = frozenset()
) -> tuple[Engine, MemoryRunner]:
    runner = MemoryRunner(scheduler.pool.block_size, scheduler.token_budget)
    stats = EngineStats(started_s=clock(), peaks=Peaks(1e6, 1e6))
    return Engine(scheduler, runner, COST, stats, end_tokens, context, stall_timeout_s=5.0, clock=clock), runner


__all__ = ["COST", "FakeClock", "MemoryRunner", "OutOfMemory", "fake_engine", "next_token"]
