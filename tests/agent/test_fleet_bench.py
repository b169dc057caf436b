"""A small form of the bench of a whole fleet: real processes, a store that is away for a while, agents that are killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "nodes": 3,
    "gpus": 2,
    "seconds": 2,
    "outage": 2,
    "history": 0.1,
    "window": 0,
    "settle": 0,
    "processes": 1,
    "turns": 2,
}


def bench(store: str) -> dict[str, str | int]:
    command = [sys.executable, str(ROOT / "bench" / "fleet.py"), "--json", "--store", store]
    command += [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def nothing_is_lost(rows: dict[str, str | int]) -> None:
    assert rows.pop("lost") == 0
    assert str(rows["triage"]).startswith("3 pairs judged")
    kept = {
        row.removeprefix("acknowledged "): str(text) for row, text in rows.items() if row.startswith("acknowledged ")
    }
    assert {"gpu", "engine", "host", "psu", "power", "thermal", "pair"} <= kept.keys()
    for measurement, text in kept.items():
        found = re.match(r"([\d,]+) samples: 0 lost, 0 more than once, 0 values missing", text)
        assert found, (measurement, text)
        assert int(found[1].replace(",", "")) > 0


def test_a_small_fleet_loses_nothing_while_its_file_is_held_and_agents_are_killed() -> None:
    nothing_is_lost(bench("sqlite"))


@pytest.mark.server
def test_a_small_fleet_loses_nothing_while_its_server_is_killed_and_agents_are_killed(
    need_program: Callable[[str], str],
) -> None:
    need_program("victoria-metrics")
    nothing_is_lost(bench("victoriametrics"))
