"""The bench of the ways before and after compares what it says, small and on a tiny model. Its times are nobody's promise here."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from bench.engine_ab import COMPARISONS, compare, names, table
from tests.engine.checkpoints import write_checkpoint


def test_every_comparison_runs_and_paging_needs_a_fraction_of_the_memory(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_position_embeddings=16_384)
    found = compare(list(COMPARISONS), str(folder), scale=0.25, repeats=1, tell=lambda line: None)
    lines = list(itertools.chain.from_iterable(found))
    assert {line.name for line in lines} == set(COMPARISONS)
    concurrency, waste, *_ = lines
    assert concurrency.other <= 4.0  # the memory is that of four of the longest
    assert concurrency.holds
    assert concurrency.ratio == concurrency.ours / concurrency.other > 2
    assert waste.ours < waste.other / 4
    assert waste.other > 50
    text = table(lines)
    assert all(line.what in text for line in lines)


def test_a_comparison_that_there_is_not_is_refused_by_name() -> None:
    assert names("prefix,paged") == ["prefix", "paged"]
    with pytest.raises(
        argparse.ArgumentTypeError, match="'pages' is none of paged, batching, chunked, prefix, speculation"
    ):
        names("prefix,pages")
