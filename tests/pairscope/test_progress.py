"""The bar of a long copy: its numbers are whole on a narrow terminal, and there is none where nobody looks."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from pairscope import progress


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize(
    ("what", "word"),
    [("recording sqlite:///var/lib/pairscope/store.db", "samples"), ("正在录制 sqlite:///var/s.db", "个样本")],
)
def test_the_numbers_stay_whole_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, what: str, word: str
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=drawn, force_terminal=True, width=width))
    with progress.shown(what, 200.0, word) as advance:
        advance(66.0, 3_300_000)
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.getvalue()).strip().splitlines()[-1]
    assert f"33% 3,300,000 {word} " in line and re.search(r"/s (\d+:\d\d:\d\d|-:--:--)$", line.strip())
    assert (what in line) is (width == 160)


def test_there_is_no_bar_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=drawn))
    with progress.shown("recording", 200.0, "samples") as advance:
        advance(66.0, 3_300_000)
    assert drawn.getvalue() == ""
