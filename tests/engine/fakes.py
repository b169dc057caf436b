"""A runner without a model: it checks that the cache would hold the right tokens, and continues a text that only it knows."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence

from engine.accounting import ModelCost, Peaks
from engine.blocks import BlockPool
from engine.contiguous import ContiguousPool
from engine.core import Engine, Output, StepResult
from engine.draft import NO_DRAFT, Draft, Proposer
from engine.payoff import Payoff
from engine.queue import POLICIES
from engine.request import Request, Sampling
from engine.scheduler import Batching, Row, Scheduler, StepPlan
from engine.speculation import Speculation
from engine.stats import EngineStats, SpeculationStats

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
    """Keeps for every slot a digest of the tokens up to the one that it holds; a step must find each row's whole context in
    that row's own blocks, whether the row has written it, shares it with another or had it copied to the host and back.

    The next token depends on the request and the position only, so an output is right or wrong whatever happened on the way.
    """

    def __init__(self, block_size: int, token_budget: int, step_s: float = 0.01, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window  # no token of a row looks back further
        self.token_budget = token_budget
        self.step_s = step_s
        self.slots: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.steps = 0
        self.fail_next: Exception | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.copy_blocks(plan.swap_out, self.slots, self.host)
        self.copy_blocks(plan.swap_in, self.host, self.slots)
        if not plan.rows:
            return StepResult((), self.step_s)
        self.steps += 1
        assert plan.num_tokens <= self.token_budget
        assert len({row.request.id for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.start == row.request.num_computed
            for position, digest in enumerate(digests(row)):
                if position >= row.start:
                    self.slots[self._slot(row.request, position)] = digest
        for row in plan.rows:
            first = 0 if self.window is None else max(0, row.start + 1 - self.window)
            assert row.request.gone <= first // self.block_size, "a block is gone that is still read"
            for position, digest in enumerate(digests(row)):
                assert position < first or self.slots[self._slot(row.request, position)] == digest
        chosen = tuple((row, token) for row in plan.rows if row.samples for token in verified(row))
        return StepResult(chosen, self.step_s)

    def _slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def copy_blocks(self, pairs: list[tuple[int, int]], source: dict[int, int], target: dict[int, int]) -> None:
        for begin, end in pairs:
            for offset in range(self.block_size):
                target[end * self.block_size + offset] = source.get(begin * self.block_size + offset, -1)


def digests(row: Row) -> Iterator[int]:
    """For each token of a row's context, a number that says which tokens come up to it."""
    digest = 0
    for token in [*row.request.tokens[: row.start], *row.tokens]:
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        yield digest


def next_token(request: Request, ahead: int = 0) -> int:
    """The token that comes `ahead` places after the next one."""
    return 10 + zlib.crc32(f"{request.id}:{request.num_output + ahead}".encode()) % 200


def verified(row: Row) -> Iterator[int]:
    """What comes after the known tokens of a row, and after its guesses up to the first wrong one."""
    for ahead in range(row.num_samples):
        yield next_token(row.request, ahead)
        if row.draft.tokens[ahead : ahead + 1] != (next_token(row.request, ahead),):
            return


class Oracle:
    """Guesses that are right by chance: of whole drafts, of their beginnings, and at times no guess at all."""

    def __init__(self, seed: int = 0, right: float = 0.7, free: bool = False) -> None:
        self.free = free
        self.right = right
        self.source = random.Random(seed)
        self.known: set[str] = set()

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        self.known |= {request.id for request, _ in wanted}
        return [self._guess(request, tokens) for request, tokens in wanted]

    def _guess(self, request: Request, tokens: int) -> Draft:
        if self.source.random() < 0.1:
            return NO_DRAFT
        return Draft(tuple(self._token(request, ahead) for ahead in range(self.source.randint(1, tokens))))

    def _token(self, request: Request, ahead: int) -> int:
        return next_token(request, ahead) if self.source.random() < self.right else 7

    def forget(self, id: str) -> None:
        self.known.discard(id)


class Always(Payoff):
    """Speculates whatever it costs."""

    def wants_drafts(self) -> bool:
        return True


def speculate(
    engine: Engine, proposer: Proposer, clock: FakeClock, most: int = 5, payoff: Callable[[], Payoff] = Payoff
) -> Speculation:
    """Makes an engine guess."""
    made = Speculation(proposer, most, engine.context, SpeculationStats(), clock, payoff=payoff)
    engine.speculate(made)
    return made


def fake_engine(
    scheduler: Scheduler, clock: FakeClock, context: int = 10_000, end_tokens: frozenset[int] = frozenset()
) -> tuple[Engine, MemoryRunner]:
    runner = MemoryRunner(scheduler.pool.block_size, scheduler.token_budget, window=scheduler.window)
    stats = EngineStats(started_s=clock(), peaks=Peaks(1e6, 1e6))
    return Engine(scheduler, runner, COST, stats, end_tokens, context, stall_timeout_s=5.0, clock=clock), runner


def make(
    blocks: int = 100,
    block_size: int = 4,
    max_seqs: int = 8,
    budget: int = 16,
    buffer: int = 256,
    context: int = 10_000,
    prefix_cache: bool = False,
    host_blocks: int = 0,
    batching: Batching = Batching.CONTINUOUS,
    policy: str = "first-come",
    contiguous: bool = False,
    window: int | None = None,
) -> tuple[Engine, MemoryRunner, FakeClock]:
    """An engine over a runner that remembers, and the clock that both go by."""
    clock = FakeClock()
    scheduler = Scheduler(
        ContiguousPool(blocks, block_size, context) if contiguous else BlockPool(blocks, block_size),
        POLICIES[policy](clock=clock),
        max_seqs,
        budget,
        buffer,
        prefix_cache,
        BlockPool(host_blocks, block_size) if host_blocks else None,
        batching,
        window,
    )
    engine, runner = fake_engine(scheduler, clock, context)
    return engine, runner, clock


def ask(id: str, prompt: int | list[int], output: int, clock: FakeClock, paced: bool = False) -> Request:
    """A request for so many tokens; its prompt is given, or so many equal tokens."""
    tokens = [5] * prompt if isinstance(prompt, int) else prompt
    return Request(id, tokens, Sampling(max_tokens=output, ignore_eos=True), clock(), None, paced)


def expected_output(request: Request) -> list[int]:
    ghost = Request(request.id, request.tokens[: request.prompt], request.sampling, 0.0)
    for _ in range(request.sampling.max_tokens):
        ghost.tokens.append(next_token(ghost))
    return ghost.output


def run_out(engine: Engine, most: int = 10_000) -> list[Output]:
    outputs = []
    for _ in range(most):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.scheduler.check()
    raise AssertionError(f"still not done after {most} steps")
