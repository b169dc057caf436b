"""Triage over the bench's fleet, as its service does it: started by `bench/fleet.py` with the store's URL, a folder and a number of turns.

The first turn reads the window and what is usual from the store; the turns after it, one each five seconds, read what is new, judge
every pair and write. Prints one JSON object: wall and CPU seconds of each part, and the resident memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rules.service import Service, TriageSettings
from telemetry.store import open_store

EVERY_S = 5.0


class Clocked:
    """Wall and CPU seconds of the calls of one function."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._work = work

    def __call__(self, *args: Any) -> Any:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            return self._work(*args)
        finally:
            self.wall_s.append(time.perf_counter() - began_s)
            self.cpu_s.append(time.process_time() - cpu_s)


def main() -> None:
    url, folder, turns = sys.argv[1:]
    settings = TriageSettings(store_url=url, state_dir=Path(folder), evaluate_every_s=EVERY_S)
    service = Service(settings, open_store(url))
    parts = {
        "read": Clocked(service._read),
        "judge": Clocked(service.triage.evaluate),
        "write": Clocked(service._write),
    }
    service._read = parts["read"]  # type: ignore[method-assign]
    service.triage.evaluate = parts["judge"]  # type: ignore[method-assign]
    service._write = parts["write"]  # type: ignore[method-assign]
    turn = Clocked(service.turn)
    rss = []
    for _ in range(int(turns)):
        began_s = time.monotonic()
        turn(time.time_ns(), time.monotonic())
        rss.append(psutil.Process().memory_info().rss / 1e6)
        time.sleep(max(0.0, EVERY_S - (time.monotonic() - began_s)))
    json.dump(
        {
            "pairs": len(service.diagnoses),
            "named": sum(bool(diagnosis.verdicts) for diagnosis in service.diagnoses),
            "turn": [turn.wall_s, turn.cpu_s],
            **{name: [part.wall_s, part.cpu_s] for name, part in parts.items()},
            "rss_mb": rss,
        },
        sys.stdout,
    )
    service.stop()


if __name__ == "__main__":
    main()
