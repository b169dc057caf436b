"""Which tokens are computed in the next step. Knows requests and blocks, never a tensor.

There are no phases. Each request has `num_tokens` tokens, of which `num_computed` are in the KV cache; a step lets them catch
up within a token budget. Decoding requests come first, so a long prompt never holds up the others for more than one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from engine.blocks import BlockPool
from engine.draft import NO_DRAFT, Draft
from engine.prefix import extend
from engine.queue import Queue
from engine.request import Request, State


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start` to `start + count` of a request, to be computed in this step. The last of them may be guessed: they are
    computed as if they stood there, and the step says which of them are right.
    """

    request: Request
    start: int
    count: int
    draft: Draft = NO_DRAFT

    @property
    def context(self) -> int:
        """Tokens that the last one of this row attends to."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that a next one can be chosen."""
        return self.known_end == self.request.num_tokens

    @property
    def known_end(self) -> int:
        """Where the tokens end that are no guess."""
        return self.context - len(self.draft.tokens)

    @property
    def num_samples(self) -> int:
        """Of how many tokens the successor is wanted: the last known one and all guessed ones."""
        return 1 + len(self.draft.tokens) if self.samples else 0

    @property
    def decodes(self) -> bool:
        """Whether it is the one token that was chosen last, with or without guesses; else it is part of a prompt, or is computed
        again.
        """
        return self.known_end - self.start == 1 and self.known_end > self.request.prompt

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens[self.start : self.known_end], *self.draft.tokens]


class Blocked(Enum):
    """What keeps the next waiting request out of a step."""

    BLOCKS = "blocks"  # too few free KV blocks
    SEQS = "seqs"  # as many sequences run as may, or a static batch is under way
    TOKENS = "tokens"  # the step's token budget is spent


class Batching(Enum):
    CONTINUOUS = "continuous"  # whoever ends makes room at once
    STATIC = "static"  # nobody comes in before the whole batch has ended: the way before, to compare with


@dataclass(slots=True)
class StepPlan:
    """Blocks are copied out first, then in, then the rows are computed."""

    rows: list[Row] = field(default_factory=list)
    admitted: list[tuple[Request, int]] = field(default_factory=list)  # and how many of its tokens were cached
    preempted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)  # and why: they don't fit, even alone
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # blocks: from the device's to the host's
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # blocks: from the host's to the device's
    blocked: Blocked | None = None  # why somebody still waits

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Scheduler:
    """Owns the queue, the running requests in order of admission, and through the pool every block in their tables.

    `host` is where preempted requests are swapped to; without it, or when it is full, their cache is computed anew. `window`: no
    layer of the model attends to more than so many tokens; blocks that lie before are given back while their request runs.
    """

    def __init__(
        self,
        pool: BlockPool,
        queue: Queue,
        max_seqs: int,
        token_budget: int,
        stream_buffer: int,
        prefix_cache: bool = False,
        host: BlockPool | None = None,
        batching: Batching = Batching.CONTINUOUS,
        window: int | None = None,
    ) -> None:
        self.pool = pool
        self.window = window
        self.waiting = queue
        self.running: list[Request] = []
        self.held: list[Request] = []
        self.max_seqs = max_seqs
        self.token_budget = token_budget
        self.stream_buffer = stream_buffer
        self.prefix_cache = prefix_cache
        self.host = host
        self.batching = batching
        self._closed = False  # the static batch that runs takes nobody more

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks at once. One that is already out is left alone."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.HELD:
            self.held.remove(request)
        self._release(request)
        request.state = State.FINISHED

    def hold(self, request: Request) -> None:
        """Compute nothing more for a request until `resume`. A running one keeps its cache as long as nobody needs the blocks
        more; one that waits has none left.
        """
        if request.state is State.WAITING:
            self.waiting.remove(request)
            self._release(request)
        else:
            self.running.remove(request)
        request.state = State.HELD
        self.held.append(request)

    def park(self, request: Request, computed: int) -> None:
        """Hold a request that comes with a cache of so many tokens: its blocks are taken, and to be filled. OutOfBlocks changes
        nothing.
        """
        if computed:
            request.blocks = self.pool.take(self.pool.blocks_for(computed))
        request.num_computed = computed
        request.state = State.HELD
        self.held.append(request)

    def resume(self, request: Request) -> None:
        """Let a held request go on: at once where it has its cache, else as one that was preempted."""
        self.held.remove(request)
        if request.blocks:
            request.state = State.RUNNING
            self.running.append(request)
            self._share_full_blocks(request, request.gone * self.pool.block_size)
        else:
            request.state = State.WAITING
            self.waiting.put_back(request)

    @property
    def decoding(self) -> list[Request]:
        """Running requests that will compute one token in the next step, if there is room."""
        return [r for r in self.running if r.num_tokens - r.num_computed == 1 and not self.is_paused(r)]

    def schedule(self, drafts: Mapping[str, Draft] | None = None) -> StepPlan:
        """Plan one step: blocks for all planned tokens are allocated when this returns. `drafts` of decoding requests, by id,
        are computed as far as budget and free blocks go that nobody else wants.
        """
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
        elif len(self.waiting):
            plan.blocked = Blocked.BLOCKS
        if drafts:
            self._add_drafts(plan, drafts)
        return plan

    def computed(self, row: Row) -> None:
        """A step has written K and V of a row's tokens, of which guessed ones don't count before they are accepted."""
        row.request.num_computed = row.known_end
        self._share_full_blocks(row.request, row.start)
        self._leave_behind(row.request)

    def accepted(self, request: Request) -> None:
        """One more of a request's tokens was guessed right: its K and V are there already."""
        request.num_computed += 1
        self._share_full_blocks(request, request.num_computed - 1)

    def _leave_behind(self, request: Request) -> None:
        """Give back the blocks that the next token doesn't look back to. Those with a name can still be found by it."""
        if self.window is None:
            return
        gone = max(0, request.num_computed + 1 - self.window) // self.pool.block_size
        if gone > request.gone:
            self.pool.give_back(request.blocks[request.gone : gone])
            request.gone = gone

    def _share_full_blocks(self, request: Request, start: int) -> None:
        """Name the full blocks from token `start` on."""
        if not self.prefix_cache:
            return
        size = self.pool.block_size
        extend(request.block_keys, request.tokens, size)
        for number in range(start // size, request.num_computed // size):
            self.pool.name(request.blocks[number], request.block_keys[number])

    def drop_guesses(self, request: Request) -> None:
        """Give back the blocks that only guesses needed which turned out wrong."""
        needed = self.pool.blocks_for(request.num_computed)
        if len(request.blocks) > needed:
            self.pool.give_back(request.blocks[needed:])
            del request.blocks[needed:]

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the cache holds just now. May be called from another thread."""
        if not self.prefix_cache:
            return 0
        keys: list[bytes] = []
        extend(keys, prompt, self.pool.block_size)
        return len(self.pool.find(keys)) * self.pool.block_size

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
            if len(self.running) == 1:
                if self._shed():
                    continue
                self._fail(plan, request)
                return -given_back
            victim = self._victim()
            given_back += self._preempt(plan, victim)
            if victim is request:
                return -given_back
        if missing > 0:
            request.blocks += self.pool.take(missing)
        plan.rows.append(Row(request, request.num_computed, count))
        return count - given_back

    def _add_drafts(self, plan: StepPlan, drafts: Mapping[str, Draft]) -> None:
        """Lengthen planned rows by guesses. Last of all, so that no guess takes a token or a block from anybody's real work."""
        budget = self.token_budget - plan.num_tokens
        for at, row in enumerate(plan.rows):
            request, size = row.request, self.pool.block_size
            room = (len(request.blocks) + self.pool.num_free) * size - row.context
            draft = drafts.get(request.id, NO_DRAFT).cut(max(0, min(budget, room))) if row.samples else NO_DRAFT
            if not draft.tokens:
                continue
            plan.rows[at] = replace(row, count=row.count + len(draft.tokens), draft=draft)
            missing = self.pool.blocks_for(plan.rows[at].context) - len(request.blocks)
            if missing > 0:
                request.blocks += self.pool.take(missing)
            budget -= len(draft.tokens)

    def _shed(self) -> bool:
        """Take its blocks from a held request, if one has any: it will be computed anew, should it go on here."""
        holder = next((request for request in self.held if request.blocks), None)
        if holder is None:
            return False
        self._release(holder)
        holder.num_preempted += 1
        return True

    def _victim(self) -> Request:
        """The running request that the policy would serve last; among equals, the one admitted last."""
        return max(enumerate(self.running), key=lambda entry: (self.waiting.rank(entry[1]), entry[0]))[1]

    def _preempt(self, plan: StepPlan, victim: Request) -> int:
        """Back to the queue; its tokens stay. Returns the budget that its planned row had taken."""
        taken = sum(row.count for row in plan.rows if row.request is victim)
        plan.rows = [row for row in plan.rows if row.request is not victim]
        plan.preempted.append(victim)
        self.running.remove(victim)
        written = victim.blocks[victim.gone : -(-victim.num_computed // self.pool.block_size)]
        if self.host is not None and 0 < len(written) <= self.host.num_free:
            victim.host_blocks = self.host.take(len(written))
            plan.swap_out += zip(written, victim.host_blocks, strict=True)
            self.pool.give_back(victim.held_blocks)
            victim.blocks = []
        else:
            self._release(victim)
        victim.state = State.WAITING
        victim.num_preempted += 1
        self.waiting.put_back(victim)
        return taken

    def _admit(self, plan: StepPlan, budget: int) -> None:
        if not self.running:
            self._closed = False
        # What running requests still need for the tokens they have, and one block for each to grow into: without this
        # margin a newcomer would be admitted only to be preempted a few steps later.
        growth = self.pool.growth
        promised = sum(max(0, self.pool.blocks_for(r.num_tokens) - len(r.blocks)) + growth for r in self.running)
        while len(self.waiting):
            request = self.waiting.peek()
            needed = self.pool.blocks_for(request.num_tokens)
            if needed > self.pool.most:
                self.waiting.pop()
                self._fail(plan, request)
                continue
            shared = self._find_prefix(request)
            plan.blocked = self._blocked(needed - sum(map(self.pool.is_taken, shared)), promised, budget)
            if plan.blocked is not None:
                break
            self.waiting.pop()
            self._let_in(plan, request, shared)
            budget -= self._plan_row(plan, request, budget)
            promised += needed - len(request.blocks) + growth
        self._closed = self.batching is Batching.STATIC and plan.blocked is not Blocked.TOKENS

    def _blocked(self, needed: int, promised: int, budget: int) -> Blocked | None:
        """Why a request that needs so many free blocks can't come in; None when it can."""
        if len(self.running) >= self.max_seqs or self._closed:
            return Blocked.SEQS
        if needed > self.pool.num_free - promised:
            return Blocked.BLOCKS
        return Blocked.TOKENS if budget <= 0 else None

    def _find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the request's first tokens already. Its last token is left out: its logits are still wanted."""
        if not self.prefix_cache:
            return []
        size = self.pool.block_size
        extend(request.block_keys, request.tokens, size)
        return self.pool.find(request.block_keys[: (request.num_tokens - 1) // size])

    def _let_in(self, plan: StepPlan, request: Request, shared: list[int]) -> None:
        """Start or resume a request: its cache is what others share with it, then what was swapped out."""
        cached = len(shared) * self.pool.block_size
        shared = shared[request.gone :]
        self.pool.share(shared)
        request.blocks = [0] * request.gone + shared  # nobody reads what is gone
        plan.admitted.append((request, cached))
        if cached < request.num_computed:
            rest = request.host_blocks[len(shared) :]
            taken = self.pool.take(len(rest))
            request.blocks += taken
            plan.swap_in += zip(rest, taken, strict=False)  # an extent may be longer than the rest
        else:
            request.num_computed = cached
        if self.host is not None:
            self.host.give_back(request.host_blocks)
            request.host_blocks = []
        request.state = State.RUNNING
        self.running.append(request)

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
        self.pool.give_back(request.held_blocks)
        request.blocks = []
        request.gone = 0
        if self.host is not None:
            self.host.give_back(request.host_blocks)
            request.host_blocks = []
        request.num_computed = 0

    def check(self) -> None:
        """Raise AssertionError unless each block is free or taken by just the requests that hold it, here and on the host.
        Used by tests.
        """
        self.pool.check([r.held_blocks for r in (*self.running, *self.held)])
        for request in self.running:
            if len(request.blocks) * self.pool.block_size < request.num_computed:
                raise AssertionError(f"request {request.id} has more cached tokens than slots")
            if request.host_blocks:
                raise AssertionError(f"request {request.id} runs and is swapped out")
        if any(request.blocks for request in self.waiting):
            raise AssertionError("a waiting request holds blocks")
        if self.host is not None:
            self.host.check([r.host_blocks for r in self.waiting])
