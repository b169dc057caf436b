"""The pool of KV blocks: which are free and which are taken. Numbers only; the tensors live in `kvstore`."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. The pool is unchanged."""


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots each. Slot s of block b is row b * block_size + s of the KV store.

    The lowest-numbered free block is given first: the touched part of the store stays small, and a sequence that grows
    alone gets neighbouring blocks, which attention can read without gathering.
    """

    __slots__ = ("_free", "_taken", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots: {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks, lowest numbers first. OutOfBlocks when fewer are free; then none is taken."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks. ValueError for one that is not taken: a double release would hand one block to two sequences."""
        for block in blocks:
            if not self._taken[block]:
                raise ValueError(f"block {block} is returned but not taken")
            self._taken[block] = 0
            heapq.heappush(self._free, block)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is either free or in exactly one owner's table."""
        owned = [block for table in owners for block in table]
        if len(set(owned)) != len(owned):
            raise AssertionError("a block has two owners")
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a block is free twice")
        if sorted([*owned, *self._free]) != list(range(self.num_blocks)):
            raise AssertionError(f"{self.num_blocks} blocks, but {len(owned)} owned and {len(self._free)} free")
        if any(not self._taken[block] for block in owned) or sum(self._taken) != len(owned):
            raise AssertionError("the ledger of taken blocks disagrees with the owners")
