"""The queue of waiting requests, in the order in which they will be admitted. A further policy is a sibling of FirstCome."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from engine.request import Request


class Queue(Protocol):
    def push(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """Return a preempted request: it goes before those that have not run yet."""

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstCome:
    """First come, first served."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)
