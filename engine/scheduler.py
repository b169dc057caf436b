"""Which tokens are computed in the next step. Knows requests and blocks, never a tensor.

There are no phases. Each request has `num_tokens` tokens, of which `num_computed` are in the KV cache; a step lets them catch
up within a token budget. Decoding requests come first, so a long prompt never holds up the others for more than one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.queue import Queue
from engine.request import Request, State


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start` to `start + count` of a request, to be computed in this step."""

    request: Request
    start: int
    count: int

    @property
    def context(self) -> int:
        """Tokens that the last one of this row attends to."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step ends at the request's last token, so that a next one can be chosen."""
        return self.context == self.request.num_tokens


@dataclass(slots=True)
class StepPlan:
    rows: list[Row] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)  # and why: they don't fit, even alone
    blocked_on_blocks: bool = False  # a request waits although a sequence slot is free

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Scheduler:
    """Owns the queue, the running requests in order of admission, and through the pool every block in their tables."""

    def __init__(self, pool: BlockPool, queue: Queue, max_seqs: int, token_budget: int, stream_buffer: int) -> None:
        self.pool = pool
        self.waiting = queue
        self.running: list[Request] = []
        self.max_seqs = max_seqs
        self.token_budget = token_budget
        self.stream_buffer = stream_buffer

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks at once. One that is already out is left alone."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        self._release(request)
        request.state = State.FINISHED

    def schedule(self) -> StepPlan:
        """Plan one step: blocks for all planned tokens are allocated when this returns."""
        plan = StepPlan()
        budget = self.token_budget
        decoding = [r for r in self.running if r.num_tokens - r.num_computed == 1]
        catching_up = [r for r in self.running if r.num_tokens - r.num_computed > 1]
        for request in (*decoding, *catching_up):
            if request.state is not State.RUNNING or self.is_paused(request):
                continue
            budget -= self._plan_row(plan, request, budget)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def is_paused(self, request: Request) -> bool:
        """Whether its client takes tokens so slowly that it need not run now."""
        return request.num_undelivered >= self.stream_buffer

    def _plan_row(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Add a row for `request` within `budget`, preempting others if its blocks need it. Returns the budget it takes."""
        count = min(request.num_tokens - request.num_computed, budget)
        if count <= 0:
            return 0
        given_back = 0
        missing = self.pool.blocks_for(request.num_computed + count) - len(request.blocks)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                self._fail(plan, request)
                return -given_back
            given_back += self._preempt(plan, victim)
            if victim is request:
                return -given_back
        if missing > 0:
            request.blocks += self.pool.take(missing)
        plan.rows.append(Row(request, request.num_computed, count))
        return count - given_back

    def _preempt(self, plan: StepPlan, victim: Request) -> int:
        """Back to the queue; its tokens stay, its cache is computed anew. Returns the budget that its planned row had taken."""
        taken = sum(row.count for row in plan.rows if row.request is victim)
        plan.rows = [row for row in plan.rows if row.request is not victim]
        plan.preempted.append(victim)
        self.running.remove(victim)
        self._release(victim)
        victim.state = State.WAITING
        victim.num_preempted += 1
        self.waiting.put_back(victim)
        return taken

    def _admit(self, plan: StepPlan, budget: int) -> None:
        # What running requests still need for the tokens they have, and one block for each to grow into: without this
        # margin a newcomer would be admitted only to be preempted a few steps later.
        promised = sum(max(0, self.pool.blocks_for(r.num_tokens) - len(r.blocks)) + 1 for r in self.running)
        while budget > 0 and len(self.waiting) and len(self.running) < self.max_seqs:
            request = self.waiting.peek()
            needed = self.pool.blocks_for(request.num_tokens)
            if needed > self.pool.num_blocks:
                self.waiting.pop()
                self._fail(plan, request)
                continue
            if needed > self.pool.num_free - promised:
                plan.blocked_on_blocks = True
                return
            self.waiting.pop()
            request.state = State.RUNNING
            self.running.append(request)
            used = self._plan_row(plan, request, budget)
            budget -= used
            promised += needed - len(request.blocks) + 1

    def _fail(self, plan: StepPlan, request: Request) -> None:
        reason = (
            f"the KV cache is full: {request.num_tokens} tokens need {self.pool.blocks_for(request.num_tokens)} blocks, "
            f"the pool has {self.pool.num_blocks} of {self.pool.block_size} tokens; shorten the request or give the cache more memory"
        )
        if request.state is State.RUNNING:
            self.running.remove(request)
        self._release(request)
        request.state = State.FINISHED
        plan.failed.append((request, reason))

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.num_computed = 0

    def check(self) -> None:
        """Raise AssertionError unless every block is free or in exactly one running request's table. Used by tests."""
        self.pool.check([r.blocks for r in self.running])
        for request in self.running:
            if len(request.blocks) * self.pool.block_size < request.num_computed:
                raise AssertionError(f"request {request.id} has more cached tokens than slots")
        if any(request.blocks for request in self.waiting):
            raise AssertionError("a waiting request holds blocks")
