"""The page of the signals names every key, and only keys that exist; its example is judged as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rules.signals.judging import judge_signals
from rules.signals.keys import KEYS
from rules.signals.reading import parse

PAGE = (Path(__file__).parents[3] / "docs" / "signals.md").read_text("utf-8")


def test_the_page_names_every_key_and_no_other() -> None:
    first_cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(KEYS)


def test_the_example_of_the_page_is_what_it_says() -> None:
    (example,) = re.findall(r"echo '(.*)' >", PAGE)
    (verdict,) = judge_signals(parse(json.loads(example))).verdicts
    assert str(verdict.cause) == "thermal"
