"""The bench over a corpus: what is right, forbidden or an alarm, and its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.triage import main

HOT = {"tps_ratio": 0.6, "sm_ratio": 0.7, "temp_c": 91, "flags": ["hw_thermal"]}


def report(name: str, signals: object, primary: str, *must_not: str, kind: str = "incident") -> dict[str, object]:
    expected = {"primary": primary, "accept": [primary], "must_not": list(must_not)}
    return {"id": name, "kind": kind, "confidence": "high", "signals": signals, "expected": expected}


@pytest.mark.parametrize(
    ("reports", "code"),
    [
        ([report("a", HOT, "thermal", "power"), report("b", {}, "none", kind="negative-control")], 0),
        ([report("a", HOT, "power")], 1),
        ([report("a", HOT, "thermal", "thermal-alert")], 1),
        ([report("a", HOT, "thermal"), report("b", HOT, "thermal", kind="negative-control")], 1),
        ([report("a", None, "thermal")], 0),
    ],
    ids=["right", "wrong", "forbidden", "alarm", "no signals"],
)
def test_the_exit_code_says_whether_the_bar_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[object], code: int
) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(reports))
    monkeypatch.setattr(sys, "argv", ["triage.py", "--incidents", str(path)])
    assert main() == code


def test_without_a_corpus_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["triage.py"])
    assert main() == 2
