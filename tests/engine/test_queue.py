"""Who comes next under each policy, and that nobody is starved: a later request goes before another only within a bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.queue import HALFWAY_TOKENS, LEFT_OVER, POLICIES, PRIORITIES, EarliestDeadline, FirstCome, ShortestFirst
from engine.request import Request, Sampling
from engine.settings import EngineSettings, check
from tests.engine.fakes import FakeClock, ask, make


def request(
    id: str, at: float, tokens: int = 10, priority: int = 0, deadline_s: float | None = None, prompt: int = 10
) -> Request:
    """It came at `at` and wants `tokens`; `deadline_s` is from then on."""
    due = None if deadline_s is None else at + deadline_s
    return Request(id, [5] * prompt, Sampling(max_tokens=tokens), at, None, False, priority, due)


def order(queue: FirstCome | ShortestFirst | EarliestDeadline, *requests: Request) -> str:
    for one in requests:
        queue.push(one)
    return "".join(queue.pop().id for _ in requests)


def test_the_names_in_the_settings_are_those_of_the_policies() -> None:
    for policy in POLICIES:
        check(EngineSettings(policy=policy))
    assert EngineSettings().policy == FirstCome.policy
    assert EngineSettings().ageing_s == FirstCome().ageing_s


def test_first_come_goes_by_arrival_and_by_order_where_that_is_equal() -> None:
    queue = FirstCome(clock=lambda: 50.0)
    assert order(queue, request("b", 2.0), request("a", 1.0), request("c", 2.0, deadline_s=0.1)) == "abc"


def test_short_requests_go_first_until_a_long_one_has_waited_long_enough() -> None:
    queue = ShortestFirst(10.0, lambda: 50.0)
    long, short, late = request("l", 0.0, 5000), request("s", 5.0, 20), request("x", 9.9, 20)
    assert order(queue, long, short, late) == "slx"
    half = request("h", 0.0, HALFWAY_TOKENS - 10)
    assert queue.put_off_s(half) == 5.0
    assert queue.put_off_s(request("p", 0.0, 10, prompt=HALFWAY_TOKENS - 10)) == 5.0


def test_the_nearest_deadline_goes_first_and_one_that_has_passed_is_like_none() -> None:
    clock = FakeClock()
    queue = EarliestDeadline(10.0, clock)
    far, near, none = request("f", 100.0, deadline_s=8.0), request("n", 101.0, deadline_s=2.0), request("o", 99.0)
    assert order(queue, far, none, near) == "nfo"
    for one in (far, none, near):
        queue.push(one)
    clock.now = 104.0  # the near one is late
    assert [queue.pop().id for _ in range(3)] == ["f", "o", "n"]


def test_a_level_of_priority_counts_as_much_as_the_ageing_time() -> None:
    queue = FirstCome(10.0, lambda: 50.0)
    plain, important, later = request("p", 0.0), request("i", 9.0, priority=-1), request("l", 11.0, priority=-1)
    assert order(queue, plain, important, later) == "ipl"


def test_preempted_requests_go_first_and_every_request_can_leave() -> None:
    queue = ShortestFirst(10.0, lambda: 50.0)
    waiting, gone, returned, too = request("w", 0.0), request("g", 0.0), request("r", 9.0, 900), request("t", 9.5)
    for one in (waiting, gone):
        queue.push(one)
    queue.put_back(returned)
    queue.put_back(too)
    assert [one.id for one in queue] == ["t", "r", "w", "g"]
    queue.remove(gone)
    queue.remove(too)
    assert len(queue) == 2
    assert [queue.pop().id, queue.pop().id] == ["r", "w"]
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.peek()


def test_requests_that_leave_while_one_blocks_the_queue_don_t_pile_up() -> None:
    queue = FirstCome()
    queue.push(request("head", 0.0))
    for number in range(5000):
        leaving = request(f"r{number}", 1.0)
        queue.push(leaving)
        queue.remove(leaving)
    assert len(queue._heap) <= LEFT_OVER + 3
    assert queue.pop().id == "head"


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 1.0, 30.0]),  # seconds since the one before
        st.integers(*PRIORITIES),
        st.integers(1, 10_000),  # tokens
        st.none() | st.floats(0.001, 1000.0),  # deadline
        st.integers(0, 2),  # how many are served afterwards
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), ARRIVALS)
def test_nobody_is_overtaken_by_what_comes_later_than_the_bound(
    policy: str, arrivals: list[tuple[float, int, int, float | None, int]]
) -> None:
    clock = FakeClock()
    queue = POLICIES[policy](2.0, clock)
    served = 0
    for number, (gap, priority, tokens, deadline_s, serve) in enumerate(arrivals):
        clock.now += gap
        queue.push(request(f"r{number}", clock.now, tokens, priority, deadline_s))
        for _ in range(min(serve, len(queue))):
            next_one = queue.pop()
            served += 1
            for waiting in queue:
                assert next_one.arrived_s <= waiting.arrived_s + queue.bound_s
                if next_one.priority == waiting.priority:
                    assert next_one.arrived_s <= waiting.arrived_s + queue.ageing_s
    assert len(queue) == len(arrivals) - served


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_request_without_a_deadline_runs_although_short_urgent_ones_never_stop_coming(policy: str) -> None:
    """Twice as much work comes as can be done, for ever. The long one waits for those of the ageing time, and for no more."""
    engine, _, clock = make(max_seqs=1, policy=policy)
    long = ask("long", 12, 40, clock)
    engine.add(long)
    long.arrived_s = clock()
    for number in range(1000):
        clock.now += 0.1
        short = ask(f"s{number}", 4, 1, clock)
        short.deadline_s = clock() + 0.05
        engine.add(short)
        if number % 2:
            engine.step()
        if long.first_scheduled_s is not None:
            break
    assert long.first_scheduled_s is not None
    waited = long.first_scheduled_s - long.arrived_s
    assert waited <= 2 * engine.scheduler.waiting.ageing_s + 1.0


def ended_in_time(policy: str) -> tuple[int, float]:
    """Bursts of long requests without a deadline, between which short ones want their answer within a second: how many miss
    it, and the longest wait of a long one.
    """
    engine, _, clock = make(blocks=400, max_seqs=2, policy=policy, budget=64)
    requests = []
    for number in range(400):
        hurried = number % 20 > 3
        request = ask(f"r{number}", 8, 4 if hurried else 60, clock)
        request.deadline_s = clock() + 1.0 if hurried else None
        requests.append(request)
        engine.add(request)
        for _ in range(6):
            clock.now += 0.01
            engine.step()
    while engine.has_work:
        clock.now += 0.01
        engine.step()
    waits = [r.first_scheduled_s - r.arrived_s for r in requests if r.deadline_s is None and r.first_scheduled_s]
    return engine.stats.counters.deadline_missed_total, max(waits)


def test_deadlines_that_first_come_misses_are_kept_by_earliest_deadline_and_the_others_still_get_their_turn() -> None:
    missed, _ = ended_in_time("first-come")
    kept, longest_wait = ended_in_time("earliest-deadline")
    assert missed > 100
    assert kept < missed / 10
    assert longest_wait <= 2 * FirstCome().ageing_s
