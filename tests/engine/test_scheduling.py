"""The engine over a runner that only remembers: fairness to decoding, preemption, batches, slow clients, what ends a request."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from engine.core import OutOfMemory, Output
from engine.queue import FirstCome
from engine.request import Finish, Request, Sampling, State
from engine.scheduler import Batching, Blocked, Scheduler
from tests.engine.fakes import FakeClock, ask, expected_output, fake_engine, make, run_out


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
    assert plan.blocked is Blocked.BLOCKS


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


def test_in_a_static_batch_nobody_comes_in_before_the_last_one_has_ended() -> None:
    engine, _, clock = make(batching=Batching.STATIC, max_seqs=2, budget=8)
    for id, output in (("long", 30), ("short", 2), ("next", 2)):
        engine.add(ask(id, 6, output, clock))
    together = []
    for _ in range(34):
        engine.step()
        together.append({request.id for request in engine.scheduler.running})
    assert {"long", "short"} in together
    assert all(ids <= {"long", "short"} or ids <= {"next"} for ids in together)
    assert not engine.has_work


def test_a_static_batch_goes_on_filling_while_only_the_token_budget_keeps_others_out() -> None:
    engine, _, clock = make(batching=Batching.STATIC, max_seqs=2, budget=6)
    for id in ("first", "second", "third"):
        engine.add(ask(id, 6, 10, clock))
    engine.step()
    assert [request.id for request in engine.scheduler.running] == ["first"]
    engine.step()
    assert [request.id for request in engine.scheduler.running] == ["first", "second"]
    counters = engine.stats.counters
    assert (counters.blocked_on_tokens_total, counters.blocked_on_seqs_total) == (1, 1)


def test_what_keeps_a_request_out_is_counted_by_its_kind() -> None:
    engine, _, clock = make(blocks=10, block_size=4, max_seqs=2, budget=64)
    engine.add(ask("a", 24, 3, clock))
    engine.add(ask("b", 20, 3, clock))  # 5 blocks where 4 are free
    engine.step()
    engine.step()
    counters = engine.stats.counters
    kinds = (counters.blocked_on_blocks_total, counters.blocked_on_seqs_total, counters.blocked_on_tokens_total)
    assert kinds == (2, 0, 0)
    run_out(engine)
    for id in ("c", "d", "e"):
        engine.add(ask(id, 4, 3, clock))
    engine.step()
    assert counters.blocked_on_seqs_total == 1


def test_the_request_that_the_policy_would_serve_last_is_preempted_and_not_the_newest() -> None:
    engine, _, clock = make(blocks=9, block_size=4, budget=64)
    unimportant, important = ask("unimportant", 8, 20, clock), ask("important", 8, 20, clock)
    unimportant.priority = 1
    engine.add(unimportant)
    engine.step()
    engine.add(important)
    while not engine.stats.counters.preemptions_total:
        engine.step()
    assert [request.id for request in engine.scheduler.waiting] == ["unimportant"]


def test_a_deadline_that_has_passed_at_the_end_is_counted_as_missed() -> None:
    engine, _, clock = make()
    for id, seconds in (("kept", 5.0), ("missed", 0.5)):
        request = ask(id, 4, 2, clock)
        request.deadline_s = clock() + seconds
        engine.add(request)
    engine.add(ask("without", 4, 2, clock))
    clock.now += 1.0
    run_out(engine)
    assert engine.stats.counters.deadline_missed_total == 1
