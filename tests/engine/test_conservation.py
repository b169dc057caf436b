"""No block is ever lost or shared by mistake: requests come, go, are preempted, swapped and find each other's prefixes, at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Engine, Output
from engine.queue import POLICIES, PRIORITIES
from engine.request import Finish, Request, State
from engine.scheduler import Batching
from tests.engine.fakes import FakeClock, Oracle, ask, expected_output, make, run_out, speculate

BLOCKS = 17
CONTEXT = 60


def prompt_of(family: int, common: int, own: int, mark: int) -> list[int]:
    """Tokens that all of a family begin with, then some that only this request has."""
    return [family] * common + [1000 + mark] * own


def freed_by(engine: Engine, request: Request) -> int:
    """Blocks that no other request has in its table."""
    owners = (*engine.scheduler.running, *engine.scheduler.held)
    others = {block for r in owners if r is not request for block in r.held_blocks}
    return len(set(request.held_blocks) - others)


class EngineMachine(RuleBasedStateMachine):
    """A pool that is too small for what comes, under every policy, with and without prefix cache, swap, static batches,
    guessed tokens and a model that looks back only so far.
    """

    @initialize(
        prefix_cache=st.booleans(),
        host_blocks=st.sampled_from([0, 6, 30]),
        static=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        guesses=st.none() | st.integers(1, 9),
        window=st.none() | st.sampled_from([1, 5, 8, 21]),
    )
    def an_engine(
        self,
        prefix_cache: bool,
        host_blocks: int,
        static: bool,
        policy: str,
        guesses: int | None,
        window: int | None,
    ) -> None:
        self.engine, self.runner, self.clock = make(
            blocks=BLOCKS,
            block_size=4,
            max_seqs=5,
            budget=11,
            buffer=6,
            context=CONTEXT,
            prefix_cache=prefix_cache,
            host_blocks=host_blocks,
            batching=Batching.STATIC if static else Batching.CONTINUOUS,
            policy=policy,
            window=window,
        )
        self.requests: list[Request] = []
        self.ended: dict[str, Output] = {}
        self.oracle = Oracle()
        if guesses is not None:
            speculate(self.engine, self.oracle, self.clock, guesses)

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                assert output.request.id not in self.ended
                self.ended[output.request.id] = output

    @rule(
        family=st.integers(1, 2),
        common=st.integers(0, 40),
        own=st.integers(1, 10),
        output=st.integers(1, 30),
        paced=st.booleans(),
        priority=st.integers(*PRIORITIES),
        deadline_s=st.none() | st.floats(0.001, 30.0),
    )
    def a_request_comes(
        self, family: int, common: int, own: int, output: int, paced: bool, priority: int, deadline_s: float | None
    ) -> None:
        number = len(self.requests)
        request = ask(f"r{number}", prompt_of(family, common, own, number), output, self.clock, paced)
        request.priority = priority
        request.deadline_s = None if deadline_s is None else self.clock() + deadline_s
        self.requests.append(request)
        self.engine.add(request)

    @rule(steps=st.integers(1, 8), seconds=st.sampled_from([0.01, 0.01, 2.0]))
    def steps_pass(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.clock.now += seconds
            self.note(self.engine.step())
            self.engine.scheduler.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_client_takes_tokens(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.num_delivered = data.draw(st.integers(request.num_delivered, request.num_output))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_client_goes_away(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        pool, host = self.engine.scheduler.pool, self.engine.scheduler.host
        held, free = freed_by(self.engine, request), pool.num_free
        on_host = len(request.host_blocks)
        kept = host.num_free if host is not None else 0
        self.note(self.engine.abort([request.id]))
        assert pool.num_free == free + held
        assert host is None or host.num_free == kept + on_host
        assert request.blocks == request.host_blocks == []

    @precondition(lambda self: any(r.state in (State.WAITING, State.RUNNING) for r in self.requests))
    @rule(data=st.data())
    def a_request_is_held(self, data: st.DataObject) -> None:
        alive = [r for r in self.requests if r.state in (State.WAITING, State.RUNNING)]
        request = data.draw(st.sampled_from(alive))
        kept = list(request.blocks) if request.state is State.RUNNING else []
        assert self.engine.hold(request.id) is request
        assert request.blocks == kept

    @precondition(lambda self: self.engine.scheduler.held)
    @rule(data=st.data())
    def a_held_request_goes_on(self, data: st.DataObject) -> None:
        scheduler = self.engine.scheduler
        request = data.draw(st.sampled_from(scheduler.held))
        if not request.blocks or len(scheduler.running) < 5:  # one that comes back with its cache needs a place
            assert self.engine.resume(request.id)

    @invariant()
    def blocks_are_conserved_and_statistics_say_what_is(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler, occupancy = self.engine.scheduler, self.engine.stats.occupancy
        scheduler.check()
        assert len(scheduler.running) <= 5
        self.engine.beat()
        occupancy = self.engine.stats.occupancy
        assert 0.0 <= occupancy.kv_fragmentation_pct < 100.0
        owners = (*scheduler.running, *scheduler.held)
        assert occupancy.slots_unused == sum(4 * len(r.blocks) - r.num_computed for r in owners)
        assert occupancy.blocks_taken == len({block for r in owners for block in r.held_blocks})
        assert occupancy.blocks_taken + scheduler.pool.num_free == BLOCKS
        assert occupancy.blocks_cached <= scheduler.pool.num_free
        assert occupancy.free_run <= scheduler.pool.num_free
        if (window := scheduler.window) is not None:
            # the last token but one, and as far as guesses and a chunk of a prompt may be ahead of what was dropped
            assert all(len(r.held_blocks) * 4 <= window + 11 + 2 * 4 for r in owners if r.gone)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in self.requests:
            request.paced = False
            self.engine.resume(request.id)
        self.note(run_out(self.engine))
        scheduler = self.engine.scheduler
        assert scheduler.pool.num_free == BLOCKS
        assert scheduler.host is None or scheduler.host.num_taken == 0
        assert self.oracle.known == set()
        guessed = self.engine.stats.speculation
        assert guessed is None or guessed.accepted_total <= guessed.drafted_total
        counters = self.engine.stats.counters
        assert set(self.ended) == {request.id for request in self.requests}
        by_finish = [output.finish for output in self.ended.values()]
        assert counters.requests_finished_total == by_finish.count(Finish.LENGTH)
        assert counters.requests_aborted_total == by_finish.count(Finish.ABORT)
        assert counters.requests_failed_total == by_finish.count(Finish.ERROR) == 0
        assert counters.generation_tokens_total == sum(request.num_output for request in self.requests)
        finished = [r for r in self.requests if r.finish is Finish.LENGTH]
        for request in finished:
            assert request.output == expected_output(request)[: request.num_output]
            assert request.num_output == min(request.sampling.max_tokens, CONTEXT - request.prompt)
        assert counters.prompt_tokens_total >= sum(request.prompt for request in finished)
        assert counters.prompt_tokens_total <= sum(request.prompt for request in self.requests)
        assert counters.prompt_tokens_computed_total <= counters.prompt_tokens_total
        assert counters.prefix_hits_total <= counters.prefix_queries_total
        assert counters.preemptions_recompute_total + counters.preemptions_swap_total == counters.preemptions_total
        assert counters.swap_in_blocks_total <= counters.swap_out_blocks_total


class LongMachine(EngineMachine):
    pass


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestEngineForLong = pytest.mark.long(LongMachine.TestCase)
TestEngineForLong.settings = settings(max_examples=300, stateful_step_count=200, deadline=None)


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 25])
@pytest.mark.parametrize("count", [1_500, pytest.param(50_000, marks=pytest.mark.long)])
def test_thousands_of_aborts_preemptions_prefix_hits_and_swaps_leave_no_block_behind(
    count: int, host_blocks: int, guesses: bool, window: int | None
) -> None:
    source = random.Random(3)
    engine, _, clock = make(
        blocks=40,
        max_seqs=12,
        budget=32,
        buffer=8,
        prefix_cache=True,
        host_blocks=host_blocks,
        context=130,
        window=window,
    )
    oracle = Oracle()
    if guesses:
        speculate(engine, oracle, clock)
    requests: list[Request] = []
    for number in range(count):
        prompt = prompt_of(source.randrange(1, 6), source.randrange(50), source.randrange(1, 12), number)
        requests.append(ask(f"r{number}", prompt, source.randrange(1, 60), clock, source.random() < 0.3))
        engine.add(requests[-1])
        for _ in range(source.randrange(4)):
            step_and_check(engine, clock)
        engine.abort([source.choice(requests[-20:]).id, requests[max(0, number - 30)].id])
        engine.scheduler.check()
    engine.abort([request.id for request in requests])
    scheduler, counters = engine.scheduler, engine.stats.counters
    assert scheduler.pool.num_taken == 0
    assert scheduler.pool.num_free == 40
    assert oracle.known == set()
    assert engine.stats.speculation is None or engine.stats.speculation.accepted_total > count / 10
    assert scheduler.host is None or scheduler.host.num_taken == 0
    assert counters.requests_aborted_total > count / 2
    # a beginning that was left behind is the first to be evicted, and there are more blocks for everybody
    assert counters.prefix_hits_total > (4 if window is None else 1) * count
    assert counters.prefix_evictions_total > count
    assert counters.preemptions_total > (count / 50 if window is None else 0)
    assert (counters.swap_out_blocks_total > (count / 10 if window is None else 0)) == bool(host_blocks)


def step_and_check(engine: Engine, clock: FakeClock) -> None:
    clock.now += 0.01
    engine.step()
    engine.scheduler.check()
