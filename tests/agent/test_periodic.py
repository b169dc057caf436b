"""A slow source runs beside the ticks: none of them waits, and no job is started while one is under way."""

from __future__ import annotations

import threading
import time

from agent.collectors.interface import Tick
from agent.periodic import Periodic


def at(second: float) -> Tick:
    return Tick(int(second * 10) + 1, int(second * 1e9), second)


def wait_for_end(periodic: Periodic[int], tick: Tick) -> int | None:
    until_s = time.monotonic() + 60
    while periodic.pending and time.monotonic() < until_s:
        answer = periodic.take(tick)
        if answer is not None:
            return answer
        time.sleep(0.005)
    return None


def test_an_answer_is_given_once_and_the_next_job_starts_when_it_is_due() -> None:
    asked: list[float] = []

    def job(tick: Tick) -> int:
        asked.append(tick.monotonic_s)
        return len(asked)

    periodic = Periodic("slow", 30.0, job)
    assert periodic.take(at(0)) is None
    assert wait_for_end(periodic, at(0.1)) == 1
    assert periodic.take(at(29)) is None and not periodic.pending
    periodic.take(at(30))
    assert wait_for_end(periodic, at(30.1)) == 2
    assert asked == [0, 30]
    periodic.close()


def test_a_job_that_hangs_holds_up_no_tick_and_is_not_started_twice() -> None:
    leave = threading.Event()
    started: list[int] = []

    def job(_tick: Tick) -> int:
        started.append(1)
        leave.wait(120)
        return 7

    periodic = Periodic("hangs", 1.0, job)
    began_s = time.monotonic()
    for second in range(20):
        assert periodic.take(at(second)) is None
    assert time.monotonic() - began_s < 60
    assert periodic.running_s(at(19)) == 19
    leave.set()
    assert wait_for_end(periodic, at(19)) == 7
    assert len(started) == 1
    periodic.close()


def test_a_job_that_raises_is_counted_and_the_next_one_runs() -> None:
    def job(tick: Tick) -> int:
        if tick.monotonic_s < 1:
            raise RuntimeError("first")
        return 2

    periodic = Periodic("raises", 1.0, job)
    periodic.take(at(0))
    assert wait_for_end(periodic, at(0.5)) is None
    assert periodic.failures == 1
    periodic.take(at(2))
    assert wait_for_end(periodic, at(2.1)) == 2
    periodic.close()
