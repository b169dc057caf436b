"""Upkeep rolls up by itself, outlives a store that is away, and leaves a store without rollups alone."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, open_store
from telemetry.store.upkeep import Upkeep

S = 10**9
T0 = 1_795_960_800 * S


def until(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_what_ended_is_rolled_up_once_the_store_is_there(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    store = open_store(url)
    store.write([Sample("host", {"node": "n1"}, {"load1": 2.0}, T0)])
    tries: list[int] = []

    def opener() -> Store:
        tries.append(1)
        if len(tries) < 3:
            raise StoreDown("away")
        return open_store(url)

    def rolled() -> bool:
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as connection:
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'min15_host'").fetchone()
            return tables == (1,)

    upkeep = Upkeep(opener, every_s=0.02, wall_ns=lambda: T0 + 3600 * S)
    upkeep.start()
    assert until(rolled)
    upkeep.stop(10)
    assert len(tries) == 3
    store.close()
