"""The pool of KV blocks: free, taken by how many tables, or free and still holding a known prefix. The tensors live in `kvstore`."""

from __future__ import annotations

import heapq
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

EVICTED_SHARE = 16
"""When no blank block is left, a sixteenth of the pool is evicted at once: blocks of one old sequence come back together, and
a sequence that grows gets neighbours again. One at a time would hand them out in falling order, which attention must gather."""

_FREE_RUN = re.compile(rb"\x00+")


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free. The pool is unchanged."""


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots each. Slot s of block b is row b * block_size + s of the KV store.

    A block is blank, taken (by one table or several), or cached: in no table, but named after the tokens that it holds, to be
    shared again or evicted, the longest unused first. Free means blank or cached. The lowest-numbered blank block is given
    first: the touched part of the store stays small, and a sequence that grows alone gets neighbouring blocks, which
    attention can read without gathering.
    """

    growth = 1
    """Blocks to be kept back for each running sequence, so that it can grow."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots: {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0  # cached blocks given up so far
        self._blank = list(range(num_blocks))  # a heap
        self._tables = [0] * num_blocks  # in how many tables each block is
        self._taken = bytearray(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones among them."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that hold a known prefix."""
        return len(self._cached)

    @property
    def num_taken(self) -> int:
        """Blocks in a table, shared ones counted once."""
        return self.num_blocks - self.num_free

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def most(self) -> int:
        """Blocks that one sequence can have."""
        return self.num_blocks

    @property
    def free_run(self) -> int:
        """Blocks of the longest run of free neighbours: what an allocator that needs one piece could still give."""
        return max((run.end() - run.start() for run in _FREE_RUN.finditer(self._taken)), default=0)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks a sequence of `num_tokens` tokens holds."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks, lowest numbers first. OutOfBlocks when fewer are free; then none is taken."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        if count > len(self._blank):
            self._evict(max(count - len(self._blank), self.num_blocks // EVICTED_SHARE))
        blocks = [heapq.heappop(self._blank) for _ in range(count)]
        for block in blocks:
            self._enter(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Take blocks that `find` has given, for one more table."""
        for block in blocks:
            if not self._taken[block]:
                del self._cached[block]
            self._enter(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return a table's blocks. ValueError for one that is not taken: a double release would hand one block to two sequences.

        The last blocks of a sequence are evicted before the first: without its beginning, the rest of a prefix is worth nothing.
        """
        for block in reversed(blocks):
            if not self._taken[block]:
                raise ValueError(f"block {block} is returned but not taken")
            self._tables[block] -= 1
            if self._tables[block]:
                continue
            self._taken[block] = 0
            if block in self._names:
                self._cached[block] = None
            else:
                heapq.heappush(self._blank, block)

    # -- known prefixes -----------------------------------------------------------------------------------------------

    def name(self, block: int, key: bytes) -> None:
        """From now on this taken block can be found by `key`, unless another one can already. A block keeps its first name: full
        blocks don't change while they are taken.
        """
        if block not in self._names and key not in self._named:
            self._names[block] = key
            self._named[key] = block

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks named so, up to the first key that no block has."""
        found: list[int] = []
        for key in keys:
            block = self._named.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_taken(self, block: int) -> bool:
        return bool(self._taken[block])

    def forget(self) -> None:
        """Make every cached block blank."""
        self._evict(len(self._cached))

    def _enter(self, block: int) -> None:
        self._tables[block] += 1
        self._taken[block] = 1

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            del self._named[self._names.pop(block)]
            heapq.heappush(self._blank, block)
            self.num_evicted += 1

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless blank + cached + taken is all, and each block is taken by just the tables that hold it."""
        held = Counter(block for table in owners for block in table)
        if any(self._tables[block] != held[block] for block in range(self.num_blocks)):
            raise AssertionError("the counts of tables disagree with the tables")
        if any(bool(self._taken[block]) != (block in held) for block in range(self.num_blocks)):
            raise AssertionError("the ledger of taken blocks disagrees with the tables")
        if sorted([*held, *self._blank, *self._cached]) != list(range(self.num_blocks)):
            raise AssertionError(
                f"{self.num_blocks} blocks, but {len(held)} taken, {len(self._blank)} blank and {len(self._cached)} cached"
            )
        if {key: block for block, key in self._names.items()} != self._named:
            raise AssertionError("names and named blocks disagree")
        if not self._names.keys() >= self._cached.keys() or self._names.keys() & set(self._blank):
            raise AssertionError("a cached block has no name, or a blank one has")
