"""The embedded store on a small disk of its own that is full: what is said, what still works, and how it comes back."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, open_existing, open_store
from telemetry.store.rollup import MINUTE_NS

S = 10**9
T0 = 1_795_960_800 * S
DISK_BYTES = 24 * 2**20
FIELDS = ("load1", "cpu_pct", "mem_used_pct", "iowait_pct")


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    return small_disk(DISK_BYTES)


def batch(minute: int) -> list[Sample]:
    """Of a hundred hosts, every ten seconds."""
    return [
        Sample(
            "host", {"node": f"n{i}"}, dict.fromkeys(FIELDS, float(minute + i)), T0 + minute * MINUTE_NS + second * S
        )
        for i in range(100)
        for second in range(0, 60, 10)
    ]


def fill(disk: Path) -> Path:
    """Take all that is left, as another program does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass
    return ballast


def count(store: Store) -> int:
    return len(store.samples("host", start_ns=0, end_ns=2**62))


def written_until_full(store: Store, minute: int) -> int:
    """The first minute that found no room."""
    while True:
        try:
            store.write(batch(minute))
        except StoreDown as error:
            assert "the disk is full; free some space or shorten what is kept" in str(error)
            assert "store.db" in str(error) and "\n" not in str(error)
            return minute
        minute += 1


def integrity(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def test_a_full_disk_is_said_reading_goes_on_and_writing_too_as_soon_as_there_is_room(disk: Path) -> None:
    store = open_store(f"sqlite://{disk}/store.db")
    for minute in range(5):
        store.write(batch(minute))
    ballast = fill(disk)
    full_at = written_until_full(store, 5)
    for _ in range(3):
        with pytest.raises(StoreDown, match="the disk is full"):
            store.write(batch(full_at))
        with contextlib.suppress(StoreDown):  # whatever of it there was room for
            store.rollup(T0 + 10**6 * S)
        assert count(store) == full_at * 600  # whole batches only, each that was acknowledged
        assert len(store.latest("host", since_ns=0)) == 100
        assert len(store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 300 * S, step_ns=60 * S)) == 100
    with contextlib.closing(open_store(f"sqlite://{disk}/store.db")) as reader:
        assert count(reader) == full_at * 600
    ballast.unlink()
    store.write(batch(full_at))
    assert count(store) == (full_at + 1) * 600
    store.close()
    assert integrity(disk / "store.db") == "ok"


def test_old_samples_can_be_removed_from_a_store_that_filled_the_disk_and_leave_room_to_go_on(disk: Path) -> None:
    store = open_store(f"sqlite://{disk}/store.db")
    for minute in range(40):
        store.write(batch(minute))
    fill(disk)
    full_at = written_until_full(store, 40)
    before = store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 60 * MINUTE_NS, step_ns=MINUTE_NS)
    assert store.prune({"host": T0 + 35 * MINUTE_NS}) == 35 * 600
    for minute in range(full_at, full_at + 10):
        store.write(batch(minute))
    assert count(store) == (full_at + 10 - 35) * 600
    after = store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 60 * MINUTE_NS, step_ns=MINUTE_NS)
    assert [column.values[:full_at] for column in after] == [column.values[:full_at] for column in before]
    store.close()
    assert integrity(disk / "store.db") == "ok"


def test_the_reserve_is_taken_again_when_there_is_room_and_never_from_a_disk_that_has_little(disk: Path) -> None:
    reserve = disk / "store.db-reserve"
    ballast = fill(disk)
    os.truncate(ballast, ballast.stat().st_size - 2**20)
    store = open_store(f"sqlite://{disk}/store.db")
    store.write([Sample("host", {"node": "n1"}, {"load1": 1.0}, T0)])
    assert not reserve.exists()
    ballast.unlink()
    store.prune({"host": T0})
    assert reserve.stat().st_blocks * 512 >= DISK_BYTES // 8
    store.close()


def test_only_who_writes_takes_a_reserve_also_beside_a_copy_that_somebody_reads(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    with closing(open_store(url)):
        pass
    for _ in range(2):
        store = open_existing(url)
        assert store is not None
        with closing(store):
            store.survey()
            store.latest("host", since_ns=0)
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]
    with closing(open_store(url)) as store:
        store.write([Sample("host", {"node": "n1"}, {"load1": 1.0}, T0)])
        assert (tmp_path / "store.db-reserve").stat().st_size > 0
