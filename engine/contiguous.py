"""The way before paging, to compare with: each sequence gets room for the longest one there can be, in one piece."""

from __future__ import annotations

from engine.blocks import BlockPool, OutOfBlocks


class ContiguousPool(BlockPool):
    """A pool cut into extents of neighbouring blocks, `longest` tokens each. A sequence takes one when it is admitted and holds
    it to its end, so it never waits for a block and is never preempted; what it does not fill is lost to the others.

    Blocks beyond the last whole extent are never given.
    """

    growth = 0

    def __init__(self, num_blocks: int, block_size: int, longest: int) -> None:
        super().__init__(num_blocks, block_size)
        self.extent = -(-longest // block_size)

    @property
    def most(self) -> int:
        return self.extent

    def blocks_for(self, num_tokens: int) -> int:
        return max(self.extent, super().blocks_for(num_tokens))

    def take(self, count: int) -> list[int]:
        """The first free extent. OutOfBlocks when there is none, or when it can't hold `count` blocks."""
        if not count:
            return []
        for first in range(0, self.num_blocks - self.extent + 1, self.extent):
            if not self._taken[first] and count <= self.extent:
                blocks = list(range(first, first + self.extent))
                self._blank = [block for block in self._blank if not first <= block < first + self.extent]
                for block in blocks:
                    self._enter(block)
                return blocks
        raise OutOfBlocks(f"no extent of {self.extent} blocks is free for {count}")
