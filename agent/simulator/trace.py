"""Requests of a public production trace, replayed: when they came, how long they were, and what of them was cached already.

Two forms are read. Azure's LLM inference trace (2023; CC-BY 4.0): CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake's
(FAST'25; Apache-2.0): a JSON object a line with timestamp in ms, input_length, output_length and hash_ids, the prefix blocks.
"""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

from agent.simulator.workload import PREFIX_HIT, Asked, wave


class TraceError(ValueError):
    """A file that is no trace; one line that names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`requests` in the order of their coming, offsets in s from the start; it is taken to repeat after `span_s`."""

    name: str
    requests: tuple[Asked, ...]
    span_s: float

    @property
    def rate(self) -> float:
        """Requests/s, mean."""
        return len(self.requests) / self.span_s

    def shortened(self, longest: int) -> Trace:
        """With prompts of at most `longest` tokens, as a model that takes no more would get them."""
        cut = tuple(Asked(r.offset_s, min(r.prompt, longest), r.output, r.hit) for r in self.requests)
        return Trace(self.name, cut, self.span_s)

    def means(self) -> tuple[float, float, float]:
        """Prompt and output tokens, and the share of all prompt tokens that is cached."""
        prompts = sum(r.prompt for r in self.requests)
        count = len(self.requests)
        return (
            prompts / count,
            sum(r.output for r in self.requests) / count,
            sum(r.prompt * r.hit for r in self.requests) / prompts,
        )


def read_trace(path: Path) -> Trace:
    """The trace in a .csv or .jsonl file. TraceError for anything else, OSError for one that can't be read."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = _azure(csv.DictReader(file)) if path.suffix == ".csv" else _mooncake(map(json.loads, file))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path.name} is no trace of requests: {error}") from error
    if len(found) < 2 or found[-1].offset_s <= found[0].offset_s:
        raise TraceError(f"{path.name} has too few requests")
    first = found[0].offset_s
    moved = tuple(Asked(r.offset_s - first, r.prompt, r.output, r.hit) for r in found)
    return Trace(path.stem, moved, moved[-1].offset_s * len(moved) / (len(moved) - 1))


def _azure(rows: Iterable[Mapping[str, str]]) -> list[Asked]:
    found = []
    for row in rows:
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        found.append(Asked(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), PREFIX_HIT))
    return sorted(found, key=lambda request: request.offset_s)


def _mooncake(rows: Iterable[Mapping[str, object]]) -> list[Asked]:
    """The share of a prompt's blocks that came before, as an infinite cache would find them."""
    found, seen = [], set[object]()
    for row in rows:
        blocks = row["hash_ids"]
        if not isinstance(blocks, list):
            raise TypeError("hash_ids is no list")
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        at_s, prompt, output = (float(str(row[name])) for name in ("timestamp", "input_length", "output_length"))
        found.append(Asked(at_s / 1000, int(prompt), int(output), known / max(1, len(blocks))))
    return sorted(found, key=lambda request: request.offset_s)


class Replay:
    """A trace as the arrivals of one engine, at `rate` requests/s in the mean of the busiest hour.

    A slower engine gets a random part of the requests at their own times; a faster one gets several courses of the trace at once,
    each begun elsewhere. Engines that are given the same `start_s` see the same rush at the same time.
    """

    def __init__(self, trace: Trace, rate: float, start_s: float, random: Random) -> None:
        self.rate = rate
        self._trace = trace
        self._random = random
        self._times: Sequence[float] = [request.offset_s for request in trace.requests]
        self._courses = max(1, math.ceil(rate / trace.rate))
        self._kept = rate / trace.rate / self._courses
        self._starts = [start_s + course * trace.span_s / self._courses for course in range(self._courses)]

    def draw(self, elapsed_s: float, seconds: float, scale: float) -> list[Asked]:
        """Requests with offsets in [0, seconds). `scale` takes effect up to all requests of every course."""
        kept = self._kept * scale * wave(elapsed_s)
        span_s, found = self._trace.span_s, list[Asked]()
        for start_s in self._starts:
            place = (start_s + elapsed_s) % span_s
            for shift in (0.0, span_s):  # the stretch may run over the end of the trace
                i = bisect_left(self._times, place - shift)
                while i < len(self._times) and self._times[i] < place - shift + seconds:
                    if self._random.random() < kept:
                        request = self._trace.requests[i]
                        offset_s = max(0.0, request.offset_s - (place - shift))
                        found.append(Asked(offset_s, request.prompt, request.output, request.hit))
                    i += 1
        return sorted(found, key=lambda request: request.offset_s)
