"""The block pools conserve blocks, whatever happens to them, and find what has been named until it is evicted."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool, OutOfBlocks
from engine.contiguous import ContiguousPool
from engine.prefix import extend

BLOCKS = 23


class PoolMachine(RuleBasedStateMachine):
    """Random use against the simplest model of a pool: a list of tables, and what each block was named while it was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=BLOCKS, block_size=4)
        self.tables: list[list[int]] = []
        self.names: dict[bytes, int] = {}

    def free(self) -> int:
        return BLOCKS - len({block for table in self.tables for block in table})

    @rule(count=st.integers(0, BLOCKS + 3))
    def take(self, count: int) -> None:
        if count > self.free():
            with pytest.raises(OutOfBlocks):
                self.pool.take(count)
            return
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not {block for table in self.tables for block in table} & set(blocks)
        self.names = {key: block for key, block in self.names.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def name(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.name(block, key)
        if block not in self.names.values():
            self.names.setdefault(key, block)

    @rule(keys=st.lists(st.binary(min_size=1, max_size=1), max_size=3, unique=True))
    def share_what_is_found(self, keys: list[bytes]) -> None:
        found = self.pool.find(keys)
        assert found == [self.names[key] for key in itertools.takewhile(self.names.__contains__, keys)]
        self.pool.share(found)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back_a_table(self, data: st.DataObject) -> None:
        self.pool.give_back(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def give_back_part_of_a_table(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        self.pool.give_back([table.pop()])

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.num_cached == 0
        self.names = {key: block for key, block in self.names.items() if self.pool.is_taken(block)}

    @invariant()
    def every_block_is_free_or_held_by_its_tables(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == self.free()
        assert self.pool.num_free + self.pool.num_taken == BLOCKS
        held = {block for table in self.tables for block in table}
        runs = "".join("x" if block in held else " " for block in range(BLOCKS)).split("x")
        assert self.pool.free_run == max(map(len, runs))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("operations", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_after_any_number_of_operations_free_and_taken_are_all_and_counts_are_those_of_the_tables(
    operations: int,
) -> None:
    source = random.Random(operations)
    pool = BlockPool(BLOCKS, 4)
    tables: list[list[int]] = []
    for number in range(operations):
        what = source.random()
        if what < 0.35 and pool.num_free:
            tables.append(pool.take(source.randint(1, min(5, pool.num_free))))
        elif what < 0.5 and tables:
            for block in source.choice(tables)[:1]:
                pool.name(block, number.to_bytes(4, "little"))
        elif what < 0.65:
            keys = [source.randrange(max(0, number - 60), number + 1).to_bytes(4, "little")]
            found = pool.find(keys)
            pool.share(found)
            tables.append(found)
        elif tables:
            pool.give_back(tables.pop(source.randrange(len(tables))))
        pool.check(tables)
    assert pool.num_evicted > operations / 100


def test_a_block_returned_twice_is_refused() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="block 1"):
        pool.give_back([0, 1])


def test_the_check_sees_a_leaked_block_and_one_that_is_shared_without_being_counted() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(3)
    pool.check([blocks])
    with pytest.raises(AssertionError):
        pool.check([blocks[:2]])
    with pytest.raises(AssertionError):
        pool.check([blocks, blocks[:1]])
    pool.share(blocks[:1])
    pool.check([blocks, blocks[:1]])


def test_a_growing_sequence_that_is_alone_gets_neighbouring_blocks_even_after_others_came_and_went() -> None:
    pool = BlockPool(32, 16)
    tables = [pool.take(3) for _ in range(5)]
    for table in (tables[3], tables[0], tables[4], tables[1], tables[2]):
        pool.give_back(table)
    grown = [pool.take(1)[0] for _ in range(9)]
    assert grown == list(range(9))


def test_a_growing_sequence_gets_neighbours_from_what_is_evicted_too() -> None:
    pool = BlockPool(64, 16)
    old = pool.take(64)
    for block in old:
        pool.name(block, block.to_bytes(2, "little"))
    pool.give_back(old)
    grown = [pool.take(1)[0] for _ in range(4)]
    assert grown == [60, 61, 62, 63]  # a sixteenth of the pool at once, the end of the old sequence first


def test_the_longest_unused_prefix_is_evicted_first_and_its_beginning_last() -> None:
    pool = BlockPool(6, 16)
    keys = [bytes([number]) for number in range(6)]
    old, new = pool.take(3), pool.take(3)
    for block, key in zip([*old, *new], keys, strict=True):
        pool.name(block, key)
    pool.give_back(new)
    pool.give_back(old)
    pool.share(pool.find(keys[3:]))  # used once more
    pool.give_back(new)
    pool.take(2)
    assert pool.find(keys[:3]) == old[:1]
    assert pool.find(keys[3:]) == new
    assert (pool.num_evicted, pool.num_cached, pool.num_free) == (2, 4, 4)


def test_a_second_block_with_the_same_tokens_is_blank_when_it_is_returned() -> None:
    pool = BlockPool(4, 16)
    first, second = pool.take(2)
    pool.name(first, b"k")
    pool.name(second, b"k")
    assert pool.find([b"k"]) == [first]
    pool.give_back([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 4)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_names_are_equal_just_as_far_as_the_full_blocks_of_tokens_are(a: list[int], b: list[int], size: int) -> None:
    names: list[list[bytes]] = []
    for tokens in (a, b):
        keys: list[bytes] = []
        for end in range(len(tokens) + 1):  # as a text grows
            extend(keys, tokens[:end], size)
        assert len(keys) == len(tokens) // size
        names.append(keys)
    for number, (mine, theirs) in enumerate(zip(*names, strict=False), 1):
        assert (mine == theirs) == (a[: number * size] == b[: number * size])


def test_a_contiguous_pool_gives_each_sequence_one_piece_for_the_longest_there_can_be() -> None:
    pool = ContiguousPool(11, 4, longest=14)  # extents of 4 blocks; 3 blocks are left over
    assert pool.blocks_for(1) == pool.blocks_for(16) == pool.most == 4
    first, second = pool.take(4), pool.take(1)
    assert (first, second) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert pool.free_run == pool.num_free == 3
    with pytest.raises(OutOfBlocks, match="no extent of 4 blocks"):
        pool.take(1)
    pool.give_back(first)
    pool.check([second])
    assert pool.num_free == 7
    assert pool.free_run == 4  # seven are free, and no piece of five
    assert pool.take(2) == first
    assert pool.take(0) == []
    pool.check([first, second])
