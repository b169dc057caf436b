"""A small form of the bench of a whole fleet: real processes, a store that is away for a while, agents that are killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    "--nodes",
    "3",
    "--gpus",
    "2",
    "--seconds",
    "2",
    "--outage",
    "2",
    "--history",
    "0.1",
    "--window",
    "0",
    "--settle",
    "0",
    "--processes",
    "1",
    "--json",
]


def test_a_small_fleet_loses_nothing_while_its_file_is_held_and_agents_are_killed() -> None:
    command = [sys.executable, str(ROOT / "bench" / "fleet.py"), *SMALL, "--store", "sqlite"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert rows.pop("lost") == 0
    kept = {row.removeprefix("acknowledged "): text for row, text in rows.items() if row.startswith("acknowledged ")}
    assert {"gpu", "engine", "host", "psu", "power", "thermal", "pair"} <= kept.keys()
    for measurement, text in kept.items():
        found = re.match(r"([\d,]+) samples: 0 lost, 0 more than once, 0 values missing", text)
        assert found, (measurement, text)
        assert int(found[1].replace(",", "")) > 0
