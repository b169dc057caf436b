"""A batch sweep measured: batch after batch in a closed loop, doubling until more does not pay, then finely around the knee.

Closed loop: so many requests are in flight, and as one ends the next one begins. What is measured of a batch begins when as many
requests as are in flight have ended, and ends with a fixed number of further ones, while the loop goes on: neither its start nor
its end, at which fewer run, is in it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from pairscope.load_sweep.endpoint import EndpointProblem, Reason, Served, Streamed, prompt_of, stream, words_for
from pairscope.load_sweep.knee import Judged, Limits, Point, elasticity, judge
from pairscope.load_sweep.lengths import Lengths
from pairscope.load_sweep.watching import Metrics, look, watch

A_SLOT, LEAST_REQUESTS = 4, 32
"""Requests measured of a batch where their number is not given: so many for each in flight, and at least so many."""

ERRORS_PCT, LEAST_ERRORS = 10, 3
PAUSE_AFTER_ERROR_S = 0.2
"""Else an endpoint that refuses at once is asked thousands of times a second."""

SETTLE_S = 0.5
"""An engine takes a step or two to notice that the clients of the batch before hung up; it might refuse the next ones."""

Tell = Callable[[int, int, int, Sequence[Point]], None]
"""Called with the batch, how many of its requests have ended, how many there are in all, and the points so far."""


@dataclass(frozen=True, slots=True)
class Plan:
    start: int
    most: int
    requests: int | None
    limits: Limits
    lengths: Lengths

    def requests_of(self, batch: int) -> int:
        return self.requests or max(LEAST_REQUESTS, A_SLOT * batch)


@dataclass(slots=True)
class Swept:
    """`windows` are the wall nanoseconds of each point, by batch. `stopped` from outside; `problem` is what ended it early."""

    points: list[Point] = field(default_factory=list)
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    stopped: bool = False
    problem: EndpointProblem | None = None

    def ordered(self) -> list[Point]:
        return sorted(self.points, key=lambda point: point.batch)


class Stopping(Exception):
    """The sweep was told to stop."""


async def sweep(client: httpx.AsyncClient, served: Served, plan: Plan, stop: asyncio.Event, tell: Tell) -> Swept:
    """All of it, or what was measured until it ended."""
    swept = Swept()
    try:
        batch = plan.start
        while True:
            await _measure_into(swept, client, served, plan, batch, stop, tell)
            if batch == plan.most or enough(swept.points, plan.limits):
                break
            batch = min(2 * batch, plan.most)
        for batch in fine_batches(swept.points, plan):
            await _measure_into(swept, client, served, plan, batch, stop, tell)
    except Stopping:
        swept.stopped = True
    except EndpointProblem as problem:
        swept.problem = problem
    return swept


def enough(points: Sequence[Point], limits: Limits) -> bool:
    """A limit is met, or more does not pay: clearly not over the last doubling, or not enough over the last two together."""
    if len(points) < 2:
        return False
    judged = judge(points, limits)
    if judged.caps or elasticity(points[-2], points[-1]) < limits.elasticity / 2:
        return True
    return judged.knee is not None and len(points) > 2 and judged.knee.above <= points[-3].batch


def fine_batches(points: Sequence[Point], plan: Plan) -> list[int]:
    """Quarters around what the doublings found: for 32, that is 24, 40 and 48. None where they found neither knee nor limit."""
    if len(points) < 2:
        return []
    judged = judge(points, plan.limits)
    around = _around(judged)
    if around is None:
        return []
    wanted = {around * 3 // 4, around * 5 // 4, around * 3 // 2}
    if around == points[0].batch:
        wanted.add(around // 2)
    return sorted(batch for batch in wanted - {point.batch for point in points} if 1 <= batch <= plan.most)


def _around(judged: Judged) -> int | None:
    found = [float(judged.knee.above)] if judged.knee else []
    found += [cap.batch for cap in judged.caps]
    if not found:
        return None
    return max((point.batch for point in judged.points if point.batch <= min(found)), default=judged.points[0].batch)


async def _measure_into(
    swept: Swept,
    client: httpx.AsyncClient,
    served: Served,
    plan: Plan,
    batch: int,
    stop: asyncio.Event,
    tell: Tell,
) -> None:
    loop = _Loop(client, served, plan, batch, lambda done, total: tell(batch, done, total, swept.ordered()))
    began_ns = time.time_ns()
    work = asyncio.create_task(loop.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Stopping
        point = work.result()
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
    swept.points.append(point)
    swept.windows[batch] = (began_ns + int((loop.window_s[0] - loop.began_s) * 1e9), time.time_ns())


class _Loop:
    """One batch."""

    def __init__(
        self, client: httpx.AsyncClient, served: Served, plan: Plan, batch: int, tell: Callable[[int, int], None]
    ) -> None:
        self.began_s = time.monotonic()
        self.window_s = (self.began_s, self.began_s)
        self._client = client
        self._served = served
        self._batch = batch
        self._wanted = plan.requests_of(batch)
        self._tell = tell
        self._numbers = itertools.count()
        self._pairs = plan.lengths.pairs
        self._ended: list[Streamed] = []
        self._running: dict[int, Streamed] = {}
        self._errors: list[Reason] = []
        self._over = asyncio.Event()
        self._warm = asyncio.Event()

    async def run(self) -> Point:
        """EndpointProblem when too many of its requests fail."""
        await asyncio.sleep(SETTLE_S)
        metrics = Metrics()
        workers: list[asyncio.Task[Any]] = [asyncio.create_task(self._work()) for _ in range(self._batch)]
        try:
            warm, over = asyncio.create_task(self._warm.wait()), asyncio.create_task(self._over.wait())
            workers += [warm, over]
            await _first_of(workers, warm, over)
            await look(self._client, self._served.base_url, metrics)
            watching = asyncio.create_task(watch(self._client, self._served.base_url, metrics))
            workers.append(watching)
            await _first_of(workers, over)
            ended_s = time.monotonic()
            if not self._too_many_errors():
                await look(self._client, self._served.base_url, metrics)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if self._too_many_errors():
            told = {"batch": self._batch, "count": len(self._errors), "reason": self._errors[-1]}
            raise EndpointProblem("errors", url=self._served.base_url, **told)
        self.window_s = (self.window_s[0], ended_s)
        return self._point(metrics)

    async def _work(self) -> None:
        while True:
            number = next(self._numbers)
            inputs, outputs = self._pairs[number % len(self._pairs)]
            prompt = prompt_of(words_for(self._served, inputs), random.Random(self._batch * 1_000_003 + number))
            answer = self._running[number] = Streamed(outputs)
            await stream(self._client, self._served, prompt, outputs, answer)
            del self._running[number]
            self._take(answer)
            if answer.problem is not None:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    def _take(self, answer: Streamed) -> None:
        if self._over.is_set():
            return
        if answer.problem is not None:
            self._errors.append(answer.problem)
            if self._too_many_errors():
                self._over.set()
            return
        self._ended.append(answer)
        count = len(self._ended)
        if count == self._batch:
            self.window_s = (time.monotonic(), 0.0)
            self._warm.set()
        if count == self._batch + self._wanted:
            self._over.set()
        self._tell(count, self._batch + self._wanted)

    def _too_many_errors(self) -> bool:
        return len(self._errors) >= max(LEAST_ERRORS, self._wanted * ERRORS_PCT // 100)

    def _point(self, metrics: Metrics) -> Point:
        """Of the requests that ended in the window; tokens of all, those cut at its ends by their pieces in it."""
        start_s, end_s = self.window_s
        measured = self._ended[self._batch :]
        everything = [*self._ended, *self._running.values()]
        inside = sum(start_s < at <= end_s for answer in everything for at in answer.pieces_s)
        firsts = [answer.pieces_s[0] - answer.sent_s for answer in measured]
        gaps = [after - before for answer in measured for before, after in itertools.pairwise(answer.pieces_s)]
        point = Point(
            self._batch,
            max(inside, 1) * self._tokens_a_piece() / max(end_s - start_s, 1e-6),
            ttft_p50_s=percentile(firsts, 50),
            ttft_p95_s=percentile(firsts, 95),
            itl_p50_s=percentile(gaps, 50),
            itl_p95_s=percentile(gaps, 95),
            requests=len(measured),
            errors=len(self._errors),
        )
        return replace(point, kv_used_pct=metrics.highest_kv_pct, preemptions=metrics.preempted)

    def _tokens_a_piece(self) -> float:
        """A piece of text may hold several tokens: as the endpoint counts them over all, one where it counts none."""
        counted = [answer for answer in self._ended if answer.tokens is not None]
        pieces = sum(len(answer.pieces_s) for answer in counted)
        return sum(answer.tokens or 0 for answer in counted) / pieces if pieces else 1.0


async def _first_of(tasks: Sequence[asyncio.Task[Any]], *wanted: asyncio.Task[Any]) -> None:
    """Wait for one of `wanted`; another one that fails meanwhile is a defect, which is raised and does not hang."""
    waiting = set(tasks)
    while not any(task.done() for task in wanted):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def percentile(values: Sequence[float], share: float) -> float | None:
    """Drawn straight between the ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
