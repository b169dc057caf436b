"""The blocks that are still in memory: the newest, for a quick delivery, and those that the disk did not take."""

from __future__ import annotations

from collections.abc import Iterable

from agent.spool.lane import DATA, Block


class Live:
    """Blocks that are neither delivered nor dropped, oldest first. Not thread-safe."""

    def __init__(self, most_samples: int, most_bytes: int) -> None:
        self._most_samples = most_samples
        self._most_bytes = most_bytes
        self._blocks: dict[tuple[str, int], Block] = {}

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._blocks

    def get(self, lane: str, sequence: int) -> Block | None:
        return self._blocks.get((lane, sequence))

    def add(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._blocks[block.lane, block.sequence] = block

    def remove(self, block: Block) -> None:
        self._blocks.pop((block.lane, block.sequence), None)

    def newest(self, limit: int) -> list[Block]:
        """At least one block, about `limit` samples, oldest first."""
        chosen: list[Block] = []
        count = 0
        for block in reversed(self._blocks.values()):
            if chosen and count + block.count > limit:
                break
            chosen.append(block)
            count += block.count
        return chosen[::-1]

    def trim(self) -> list[Block]:
        """Beyond `most_samples`, forget what is on disk and pack what is not; the oldest data for which `most_bytes` are not enough."""
        count = sum(block.count for block in self._blocks.values())
        for block in list(self._blocks.values()):
            if count <= self._most_samples:
                break
            count -= block.count
            if block.durable:
                self.remove(block)
            else:
                block.spare_memory()
        unsafe = sum(len(block.packed) for block in self._blocks.values() if not block.durable)
        lost: list[Block] = []
        for block in self._blocks.values():
            if unsafe <= self._most_bytes:
                break
            if block.lane == DATA and block.packed and not block.durable:
                unsafe -= len(block.packed)
                lost.append(block)
        return lost

    def renumber(self) -> None:
        """Some have another sequence than before, in their old place."""
        self._blocks = {(block.lane, block.sequence): block for block in self._blocks.values()}

    def only_here(self) -> list[Block]:
        """Those that no disk has."""
        return [block for block in self._blocks.values() if not block.durable]

    def spans_without(self, lane: str, first: int, last: int) -> list[tuple[int, int]]:
        """first..last without the numbers that are here, as closed spans."""
        spans: list[tuple[int, int]] = []
        start = first
        for number in sorted(number for name, number in self._blocks if name == lane and first <= number <= last):
            spans.append((start, number - 1))
            start = number + 1
        spans.append((start, last))
        return [span for span in spans if span[0] <= span[1]]
