"""The queue of waiting requests, in the order in which they will be admitted: one policy a class, none of which starves anybody."""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from engine.request import Request

AGEING_S = 10.0
PRIORITIES = (-10, 10)
"""What a request may ask for. As elsewhere in the field, a lower number is served earlier."""
HALFWAY_TOKENS = 512
"""A request of so many tokens is put back by half of the ageing time where short ones go first."""

LEFT_OVER = 64
"""So many requests that are gone may stay in the heap, beside as many as wait, before it is made anew."""


class Queue(ABC):
    """The lowest rank first; a rank is a time: the request's arrival, put off by its policy and its priority.

    A policy puts a request off by `ageing_s` at most, and one level of priority counts as much. So nobody waits for requests
    that come later than `bound_s` after it, however short, urgent or important they are: the wait is bounded, whatever comes.
    """

    policy: ClassVar[str]

    def __init__(self, ageing_s: float = AGEING_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.ageing_s = ageing_s
        self.clock = clock
        self._returned: deque[Request] = deque()  # preempted ones: they go before those that have not run yet
        self._heap: list[tuple[float, int, Request]] = []
        self._waiting: dict[str, Request] = {}  # what is in the heap and not here has been taken out
        self._serial = itertools.count()

    @abstractmethod
    def put_off_s(self, request: Request) -> float:
        """By how much the policy puts a request off, 0 to `ageing_s`."""

    @property
    def bound_s(self) -> float:
        """Requests that arrive so much later than another never go before it."""
        return self.ageing_s * (1 + PRIORITIES[1] - PRIORITIES[0])

    def rank(self, request: Request) -> float:
        """Seconds of the monotonic clock. The highest rank is preempted first."""
        return request.arrived_s + self.ageing_s * request.priority + self.put_off_s(request)

    def push(self, request: Request) -> None:
        self._waiting[request.id] = request
        heapq.heappush(self._heap, (self.rank(request), next(self._serial), request))

    def put_back(self, request: Request) -> None:
        """Return a preempted request: it goes before those that have not run yet."""
        self._returned.appendleft(request)

    def peek(self) -> Request:
        """The next one. IndexError when nobody waits."""
        if self._returned:
            return self._returned[0]
        while True:
            rank, _, request = self._heap[0]
            if self._waiting.get(request.id) is not request:
                heapq.heappop(self._heap)
            elif self.rank(request) > rank:  # it has become less urgent since it came
                heapq.heapreplace(self._heap, (self.rank(request), next(self._serial), request))
            else:
                return request

    def pop(self) -> Request:
        request = self.peek()
        if self._returned:
            return self._returned.popleft()
        heapq.heappop(self._heap)
        return self._waiting.pop(request.id)

    def remove(self, request: Request) -> None:
        if self._waiting.get(request.id) is not request:
            self._returned.remove(request)
            return
        del self._waiting[request.id]
        if len(self._heap) > 2 * len(self._waiting) + LEFT_OVER:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2].id) is entry[2]]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._waiting.values()


class FirstCome(Queue):
    """First come, first served."""

    policy = "first-come"

    def put_off_s(self, request: Request) -> float:
        return 0.0


class ShortestFirst(Queue):
    """Those with few tokens first, prompt and output that is asked for together."""

    policy = "shortest-first"

    def put_off_s(self, request: Request) -> float:
        tokens = request.prompt + request.sampling.max_tokens
        return self.ageing_s * tokens / (tokens + HALFWAY_TOKENS)


class EarliestDeadline(Queue):
    """The nearest deadline first. No deadline, one that is far, and one that has passed all count as `ageing_s` after arrival:
    what is late already must not make others late.
    """

    policy = "earliest-deadline"

    def put_off_s(self, request: Request) -> float:
        if request.deadline_s is None or self.clock() > request.deadline_s:
            return self.ageing_s
        return min(self.ageing_s, request.deadline_s - request.arrived_s)


POLICIES: Mapping[str, type[Queue]] = {queue.policy: queue for queue in (FirstCome, ShortestFirst, EarliestDeadline)}
