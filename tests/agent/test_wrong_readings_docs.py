"""docs/wrong-readings.md names tests that exist, at least one in each row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/wrong-readings.md"
NAMED = re.compile(r"`(test_\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.M)}
    named = set(NAMED.findall(PAGE.read_text("utf-8")))
    assert len(named) > 100
    assert named - there == set()


def test_every_row_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    titles = [row for row in rows if row.endswith("| test |")]
    assert [row for row in rows if row not in titles and not NAMED.search(row.split("|")[-2])] == []
