"""A damaged entry among the alerts on disk is lost alone, in one line, and the others go on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rules.alertfile import load_alerts
from rules.alerts import AlertMachine
from rules.statefile import write_state
from rules.verdict import Cause
from tests.rules.test_alerts import diagnosis

NODES = ("n1", "n2", "n3")


def machine() -> AlertMachine:
    found = AlertMachine()
    for t in range(20):
        found.step([diagnosis(node, Cause.POWER, t=5.0 * t) for node in NODES], int(5e9 * t), 5.0)
    return found


def nodes(loaded: AlertMachine) -> list[str]:
    return sorted(alert.place["node"] for alert in loaded.open())


def test_what_was_written_is_read_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, before = tmp_path / "alerts.json", machine()
    write_state(path, before.state())
    assert load_alerts(path).alerts == before.alerts
    assert load_alerts(tmp_path / "none.json").alerts == {}
    assert caplog.records == [] and sorted(tmp_path.iterdir()) == [path]


def entry(text: str, node: str) -> tuple[int, int]:
    """Where in the text the node's alert stands."""
    start = next(
        i for i in range(len(text)) if text.startswith('{"fingerprint"', i) and f'"node":"{node}"' in text[i : i + 200]
    )
    return start, json.JSONDecoder().raw_decode(text, start)[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text, start, end: text[:start] + text[start:end].replace('"flips":0', '"flips":-3') + text[end:],
        lambda text, start, end: text[:start] + text[start:end].replace('"flips":0', '"flips":\x000') + text[end:],
        lambda text, start, end: text[: start + 80] + text[end:],
        lambda text, start, end: text[:start] + "7" + text[end:],
    ],
    ids=["a value that can't be", "a broken byte", "a part is missing", "no entry at all"],
)
@pytest.mark.parametrize("node", NODES)
def test_one_damaged_entry_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, node: str
) -> None:
    path = tmp_path / "alerts.json"
    write_state(path, machine().state())
    text = path.read_text("utf-8")
    assert callable(damage)
    damaged = damage(text, *entry(text, node))
    assert damaged != text
    path.write_text(damaged, "utf-8")
    with caplog.at_level(logging.WARNING):
        assert nodes(load_alerts(path)) == [other for other in NODES if other != node]
    (record,) = caplog.records
    assert "1 of its alerts can't be read" in record.getMessage() and "2 go on" in record.getMessage()
    assert (tmp_path / "alerts.json.damaged").read_text("utf-8") == damaged
    assert path.exists()


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_file_that_was_cut_keeps_what_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    path = tmp_path / "alerts.json"
    write_state(path, machine().state())
    text = path.read_bytes()
    path.write_bytes(text[: int(share * len(text))])
    kept = nodes(load_alerts(path))
    assert len(kept) == int(3 * share) and len(caplog.records) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version":2,"alerts":[]}', '{"version":1,"alerts":7}', '{"version":1,"al', "[" * 10**5]
)
def test_what_is_no_file_of_alerts_is_put_aside_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alerts.json"
    path.write_text(text, "utf-8")
    assert load_alerts(path).alerts == {}
    assert not path.exists() and (tmp_path / "alerts.json.damaged").read_text("utf-8") == text
