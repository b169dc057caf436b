"""The engine over a runner that only remembers: conservation of blocks, fairness to decoding, preemption, aborts, slow clients."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool
from engine.core import Engine, OutOfMemory, Output
from engine.queue import FirstCome
from engine.request import Finish, Request, Sampling, State
from engine.scheduler import Scheduler
from tests.engine.fakes import FakeClock, MemoryRunner, fake_engine, next_token


def make(
    blocks: int = 100,
    block_size: int = 4,
    max_seqs: int = 8,
    budget: int = 16,
    buffer: int = 256,
    context: int = 10_000,
) -> tuple[Engine, MemoryRunner, FakeClock]:
    clock = FakeClock()
    scheduler = Scheduler(BlockPool(blocks, block_size), FirstCome(), max_seqs, budget, buffer)
    engine, runner = fake_engine(scheduler, clock, context)
    return engine, runner, clock


def ask(id: str, prompt: int, output: int, clock: FakeClock, paced: bool = False) -> Request:
    return Request(id, [5] * prompt, Sampling(max_tokens=output, ignore_eos=True), clock(), None, paced)


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


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are aborted, are preempted because the pool is small, and have slow clients, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.runner, self.clock = make(
            blocks=17, block_size=4, max_seqs=5, budget=11, buffer=6, context=60
        )
        self.requests: list[Request] = []
        self.ended: dict[str, Output] = {}

    def note(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                assert output.request.id not in self.ended
                self.ended[output.request.id] = output

    @rule(prompt=st.integers(1, 50), output=st.integers(1, 30), paced=st.booleans())
    def a_request_comes(self, prompt: int, output: int, paced: bool) -> None:
        request = ask(f"r{len(self.requests)}", prompt, output, self.clock, paced)
        self.requests.append(request)
        self.engine.add(request)

    @rule(steps=st.integers(1, 8))
    def steps_pass(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.now += 0.01
            self.note(self.engine.step())
            self.engine.scheduler.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_client_takes_tokens(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        request.num_delivered = data.draw(st.integers(request.num_delivered, request.num_output))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_is_aborted(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        held, free = len(request.blocks), self.engine.scheduler.pool.num_free
        self.note(self.engine.abort([request.id]))
        assert self.engine.scheduler.pool.num_free == free + held
        assert request.blocks == []

    @invariant()
    def blocks_are_conserved_and_statistics_say_what_is(self) -> None:
        scheduler, occupancy = self.engine.scheduler, self.engine.stats.occupancy
        scheduler.check()
        assert len(scheduler.running) <= 5
        if occupancy.blocks and self.runner.steps and occupancy.running == len(scheduler.running):
            assert 0.0 <= occupancy.kv_fragmentation_pct < 100.0
            assert 0.0 <= occupancy.kv_used_pct <= 100.0

    def teardown(self) -> None:
        for request in self.requests:
            request.paced = False
        self.note(run_out(self.engine))
        assert self.engine.scheduler.pool.num_free == 17
        counters = self.engine.stats.counters
        assert set(self.ended) == {request.id for request in self.requests}
        by_finish = [output.finish for output in self.ended.values()]
        assert counters.requests_finished_total == by_finish.count(Finish.LENGTH)
        assert counters.requests_aborted_total == by_finish.count(Finish.ABORT)
        assert counters.requests_failed_total == by_finish.count(Finish.ERROR) == 0
        assert counters.generation_tokens_total == sum(request.num_output for request in self.requests)
        finished = [r for r in self.requests if r.finish is Finish.LENGTH]
        for request in finished:
            expected = expected_output(request)
            assert request.output == expected[: request.num_output]
            assert request.num_output == min(request.sampling.max_tokens, 60 - request.prompt)
        assert counters.prompt_tokens_total >= sum(request.prompt for request in finished)
        assert counters.prompt_tokens_total <= sum(request.prompt for request in self.requests)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_a_long_prompt_does_not_stop_others_from_decoding() -> None:
    engine, _, clock = make(budget=16)
    short = ask("short", 4, 40, clock)
    engine.add(short)
    engine.step()
    engine.add(ask("long", 200, 1, clock))
    for count in range(2, 12):
        engine.step()
        assert short.num_output == count


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_that_fill_it() -> None:
    engine, _, clock = make(budget=16)
    long = ask("long", 50, 3, clock)
    engine.add(long)
    seen = []
    for _ in range(4):
        engine.step()
        seen.append(long.num_computed)
    assert seen == [16, 32, 48, 50]
    assert long.num_output == 1


def test_the_newest_request_is_preempted_and_comes_back_before_those_that_wait() -> None:
    engine, _, clock = make(blocks=10, block_size=4, budget=64)
    for id in ("a", "b", "c"):
        engine.add(ask(id, 8, 20, clock))
    preempted: list[str] = []
    for _ in range(200):
        before = {r.id for r in engine.scheduler.running}
        engine.step()
        waiting = [r.id for r in engine.scheduler.waiting]
        preempted += [id for id in before if id in waiting]
        if preempted:
            break
    assert preempted == ["c"]
    assert waiting[0] == "c"
    outputs = run_out(engine)
    assert {o.request.id for o in outputs if o.finish is Finish.LENGTH} == {"a", "b", "c"}
    assert all(o.request.output == expected_output(o.request) for o in outputs if o.finish)
    assert engine.stats.counters.recomputed_tokens_total > 0
    assert engine.stats.counters.prompt_tokens_total == 24


def test_a_lone_request_that_outgrows_the_whole_pool_fails_with_the_reason_and_the_engine_goes_on() -> None:
    engine, _, clock = make(blocks=4, block_size=4)
    request = ask("big", 10, 100, clock)
    engine.add(request)
    outputs = run_out(engine)
    assert outputs[-1].finish is Finish.ERROR
    assert "17 tokens need 5 blocks, the pool has 4" in (outputs[-1].error or "")
    assert request.num_output == 7
    engine.add(ask("small", 3, 2, clock))
    assert run_out(engine)[-1].finish is Finish.LENGTH
    assert engine.stats.counters.requests_failed_total == 1


def test_a_prompt_that_can_never_fit_fails_instead_of_blocking_the_queue() -> None:
    engine, _, clock = make(blocks=4, block_size=4)
    engine.add(ask("huge", 30, 1, clock))
    engine.add(ask("small", 3, 1, clock))
    outputs = run_out(engine)
    assert [(o.request.id, o.finish) for o in outputs] == [("huge", Finish.ERROR), ("small", Finish.LENGTH)]


def test_nobody_is_admitted_who_would_be_preempted_at_once() -> None:
    engine, _, clock = make(blocks=10, block_size=4, budget=64)
    engine.add(ask("a", 24, 4, clock))  # 6 blocks, and one to grow into
    engine.step()
    engine.add(ask("b", 13, 4, clock))  # 4 blocks
    plan = engine.scheduler.schedule()
    assert [row.request.id for row in plan.rows] == ["a"]
    assert plan.blocked_on_blocks


def test_a_request_whose_client_is_slow_pauses_and_the_others_go_on() -> None:
    engine, _, clock = make(buffer=5)
    slow, quick = ask("slow", 4, 50, clock, paced=True), ask("quick", 4, 50, clock, paced=True)
    engine.add(slow)
    engine.add(quick)
    for _ in range(20):
        engine.step()
        quick.num_delivered = quick.num_output
    assert slow.num_output == 5
    assert quick.num_output == 20
    slow.num_delivered = 3
    engine.step()
    assert slow.num_output == 6


def test_a_client_that_takes_nothing_is_given_up_after_the_timeout_and_its_blocks_are_free() -> None:
    engine, _, clock = make(buffer=5)
    request = ask("stalled", 4, 50, clock, paced=True)
    engine.add(request)
    outputs: list[Output] = []
    for _ in range(8):
        outputs += engine.step()
    assert engine.is_idle
    assert engine.has_work
    clock.now += 4.9
    outputs += engine.step()
    assert all(output.finish is None for output in outputs)
    clock.now += 0.2
    assert [output.finish for output in engine.step()] == [Finish.ABORT]
    assert engine.scheduler.pool.num_taken == 0
    assert engine.stats.counters.requests_aborted_total == 1


def test_out_of_memory_ends_the_requests_of_that_step_only() -> None:
    engine, runner, clock = make(max_seqs=1)
    first, second = ask("first", 4, 5, clock), ask("second", 4, 5, clock)
    engine.add(first)
    engine.add(second)
    runner.fail_next = OutOfMemory("out of memory in a step of 4 tokens")
    outputs = run_out(engine)
    assert (first.finish, first.error) == (Finish.ERROR, "out of memory in a step of 4 tokens")
    assert second.finish is Finish.LENGTH
    assert engine.stats.counters.oom_total == 1
    assert outputs[0].request is first


def test_a_prompt_that_fills_the_context_is_refused_and_an_output_ends_where_the_context_does() -> None:
    engine, _, clock = make(context=20)
    with pytest.raises(ValueError, match="20 tokens, the context ends at 20"):
        engine.add(ask("full", 20, 1, clock))
    request = ask("nearly", 15, 100, clock)
    engine.add(request)
    run_out(engine)
    assert (request.num_output, request.finish) == (5, Finish.LENGTH)


def test_an_id_in_use_is_refused() -> None:
    engine, _, clock = make()
    engine.add(ask("same", 4, 5, clock))
    with pytest.raises(ValueError, match="same is in use"):
        engine.add(ask("same", 4, 5, clock))


def test_an_end_token_ends_the_output_unless_it_is_to_be_ignored() -> None:
    clock = FakeClock()
    third = expected_output(ask("x", 3, 3, clock))[2]
    for ignore, length in ((False, 3), (True, 9)):
        scheduler = Scheduler(BlockPool(10, 4), FirstCome(), 4, 16, 256)
        engine, _ = fake_engine(scheduler, clock, end_tokens=frozenset({third}))
        request = Request("x", [5] * 3, Sampling(max_tokens=9, ignore_eos=ignore), clock())
        engine.add(request)
        run_out(engine)
        assert request.num_output == length
        assert request.finish is (Finish.LENGTH if ignore else Finish.STOP)
        assert request.state is State.FINISHED


def test_ten_thousand_aborts_leave_no_block_behind() -> None:
    source = random.Random(3)
    engine, _, clock = make(blocks=40, block_size=4, max_seqs=12, budget=32, buffer=8)
    requests: list[Request] = []
    for number in range(10_000):
        requests.append(
            ask(f"r{number}", source.randrange(1, 60), source.randrange(1, 60), clock, source.random() < 0.3)
        )
        engine.add(requests[-1])
        for _ in range(source.randrange(3)):
            engine.step()
            engine.scheduler.check()
        engine.abort([source.choice(requests[-20:]).id, requests[max(0, number - 30)].id])
        engine.scheduler.check()
    engine.abort([request.id for request in requests])
    assert engine.scheduler.pool.num_taken == 0
    assert engine.stats.counters.preemptions_total > 50
