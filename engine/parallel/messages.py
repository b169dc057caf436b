"""What the first rank tells the others over their sockets, and what they say back: plans of steps, and the time that a step took."""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from engine.draft import NO_DRAFT
from engine.request import Request, Sampling
from engine.scheduler import Row, StepPlan

_LENGTH = struct.Struct("<Q")
REPORT = struct.Struct("<dd")
"""Seconds of a step that a rank computed, and waited."""
LONGEST = 1 << 32


def send(to: socket.socket, message: bytes) -> None:
    to.sendall(_LENGTH.pack(len(message)) + message)


def receive(source: socket.socket) -> bytes | None:
    """The next message; None when the other side has closed, or is gone."""
    head = _exactly(source, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    return _exactly(source, length) if length <= LONGEST else None


def _exactly(source: socket.socket, count: int) -> bytes | None:
    read = bytearray()
    while len(read) < count:
        try:
            piece = source.recv(min(1 << 20, count - len(read)))
        except OSError:
            return None
        if not piece:
            return None
        read += piece
    return bytes(read)


def told(table: dict[str, Any]) -> bytes:
    return json.dumps(table).encode()


def packed(plan: StepPlan) -> bytes:
    """A plan as 64-bit numbers: rows with the tokens that they compute and the blocks that they read, then copies of blocks."""
    numbers = array("q", (len(plan.rows), len(plan.swap_out), len(plan.swap_in)))
    for row in plan.rows:
        blocks = row.request.blocks
        numbers.extend((row.start, row.count, row.samples, len(row.draft.tokens), len(blocks)))
        numbers.extend(row.tokens)
        numbers.extend(blocks)
    numbers.extend(chain.from_iterable((*plan.swap_out, *plan.swap_in)))
    return numbers.tobytes()


def unpacked(message: bytes) -> StepPlan:
    """A plan that computes the same. Its requests hold no tokens but those that are computed: nothing else looks at them."""
    numbers = array("q")
    numbers.frombytes(message)
    source = iter(numbers)
    rows, out, back = (next(source) for _ in range(3))
    plan = StepPlan()
    for number in range(rows):
        plan.rows.append(_row(number, source))
    plan.swap_out = [(next(source), next(source)) for _ in range(out)]
    plan.swap_in = [(next(source), next(source)) for _ in range(back)]
    return plan


def _row(number: int, source: Iterator[int]) -> Row:
    start, count, samples, guessed, blocks = (next(source) for _ in range(5))
    tokens = [0] * start + [next(source) for _ in range(count - guessed)]
    draft = replace(NO_DRAFT, tokens=tuple(next(source) for _ in range(guessed)))
    request = Request(str(number), tokens if samples else [*tokens, 0], Sampling(seed=0), 0.0)
    request.blocks = [next(source) for _ in range(blocks)]
    return Row(request, start, count, draft)
