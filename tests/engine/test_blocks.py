"""The block pool conserves blocks, whatever happens to it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool, OutOfBlocks


class PoolMachine(RuleBasedStateMachine):
    """Random takes and returns against the simplest model of a pool: a set of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=23, block_size=4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 26))
    def take(self, count: int) -> None:
        free = 23 - sum(map(len, self.tables))
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.take(count)
        else:
            self.tables.append(self.pool.take(count))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back_a_table(self, data: st.DataObject) -> None:
        self.pool.give_back(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def give_back_part_of_a_table(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        self.pool.give_back([table.pop()])

    @invariant()
    def every_block_is_free_or_has_one_owner(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free + self.pool.num_taken == 23
        assert self.pool.num_taken == sum(map(len, self.tables))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_block_returned_twice_is_refused() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="block 0"):
        pool.give_back([0])


def test_the_check_sees_a_leaked_block_and_a_shared_one() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(3)
    pool.check([blocks])
    with pytest.raises(AssertionError):
        pool.check([blocks[:2]])
    with pytest.raises(AssertionError):
        pool.check([blocks, blocks[:1]])


def test_a_growing_sequence_that_is_alone_gets_neighbouring_blocks_even_after_others_came_and_went() -> None:
    pool = BlockPool(32, 16)
    tables = [pool.take(3) for _ in range(5)]
    for table in (tables[3], tables[0], tables[4], tables[1], tables[2]):
        pool.give_back(table)
    grown = [pool.take(1)[0] for _ in range(9)]
    assert grown == list(range(9))
