"""The embedded store's files are deleted or replaced while one process writes them and another reads."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from telemetry.sample import Sample
from telemetry.store import Store, StoreError, open_store
from telemetry.store.sqlite import SqliteStore

S = 10**9
T0 = 1_795_960_800 * S
ROOT = Path(__file__).parents[2]

WRITER = """
    import logging, sys, time
    from telemetry.sample import Sample
    from telemetry.store import open_store
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    store = open_store("sqlite://" + sys.argv[1])
    second = 0
    while sys.argv[2] == "freely" or sys.stdin.readline():
        samples = [Sample("host", {"node": f"n{i}"}, {"load1": float(second)}, (1_795_960_800 + second) * 10**9) for i in range(5)]
        began_ns = time.monotonic_ns()
        store.write(samples)
        print(second, began_ns, flush=True)
        second += 1
"""


class Writer:
    """A process that writes five samples of the next second when asked, and acknowledges them with its number."""

    def __init__(self, path: Path, how: str = "asked") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path), how],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def write(self, times: int = 1) -> None:
        assert self.process.stdin is not None
        for _ in range(times):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            assert self.told() is not None

    def told(self) -> tuple[int, int] | None:
        """Of the next acknowledgement: the second, and when its write began; None when there are no more."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            return None
        second, began_ns = line.split()
        return int(second), int(began_ns)

    def end(self) -> str:
        """What it said on its way."""
        self.process.kill()
        return self.process.communicate(timeout=60)[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder / "store.db"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    yield writer
    writer.end()


def seconds(store: Store) -> list[int]:
    found = store.samples("host", start_ns=0, end_ns=T0 + 10**6 * S)
    times = [(sample.time_ns - T0) // S for sample in found]
    assert len(times) == 5 * len(set(times))  # whole batches only
    return sorted(set(times))


def delete(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink()


def integrity(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


@pytest.mark.parametrize("suffixes", [("-wal",), ("-shm",), ("-wal", "-shm")], ids=" ".join)
@pytest.mark.parametrize("first", ["writer", "reader"])
def test_a_deleted_log_costs_nothing(path: Path, writer: Writer, suffixes: tuple[str, ...], first: str) -> None:
    writer.write(5)
    with contextlib.closing(open_store(f"sqlite://{path}")) as reader:
        assert seconds(reader) == [0, 1, 2, 3, 4]
        delete(path, *suffixes)
        if first == "writer":
            writer.write(2)
            assert seconds(reader) == [0, 1, 2, 3, 4, 5, 6]
            writer.write(3)
        else:
            assert seconds(reader) == [0, 1, 2, 3, 4]
            writer.write(5)
        assert seconds(reader) == list(range(10))
    said = writer.end()
    assert said.count("was deleted while in use") == (1 if first == "writer" else said.count("was deleted"))
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        assert seconds(store) == list(range(10))
    assert integrity(path) == "ok"


@pytest.mark.parametrize(
    "suffixes", [("",), ("", "-wal", "-shm"), ("", "-shm")], ids=lambda suffixes: f"{len(suffixes)}"
)
def test_a_deleted_file_is_said_once_and_a_new_one_holds_what_is_acknowledged_from_then_on(
    path: Path, suffixes: tuple[str, ...]
) -> None:
    open_store(f"sqlite://{path}").close()
    path.chmod(0o640)
    writer = Writer(path)
    try:
        writer.write(6)
        with contextlib.closing(open_store(f"sqlite://{path}")) as reader:
            delete(path, *suffixes)
            writer.write(3)
            assert seconds(reader) == [6, 7, 8]
            assert path.stat().st_mode & 0o777 == 0o640
    finally:
        said = writer.end()
    assert said.count(f"store {path}: was deleted while in use; what it held is gone") == 1
    assert integrity(path) == "ok"


def test_a_deleted_folder_is_made_again_as_it_was(path: Path, writer: Writer) -> None:
    writer.write(2)
    with contextlib.closing(open_store(f"sqlite://{path}")) as reader:
        assert seconds(reader) == [0, 1]
        shutil.rmtree(path.parent)
        writer.write(2)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert seconds(reader) == [2, 3]
        path.parent.rename(path.parent.with_name("taken"))
        assert seconds(reader) == []
        writer.write(2)
        assert seconds(reader) == [4, 5]
        assert path.parent.stat().st_mode & 0o777 == 0o700


def backed_up(path: Path) -> Path:
    """As `sqlite3 store.db '.backup copy.db'` makes one."""
    copy = path.with_name("copy.db")
    with contextlib.closing(sqlite3.connect(path)) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def test_a_backup_that_takes_the_files_place_is_gone_on_with_and_the_old_log_is_not_played_into_it(
    path: Path, writer: Writer
) -> None:
    writer.write(3)
    copy = backed_up(path)
    writer.write(3)
    with contextlib.closing(open_store(f"sqlite://{path}")) as reader:
        assert seconds(reader) == [0, 1, 2, 3, 4, 5]
        copy.replace(path)
        writer.write(2)
        assert seconds(reader) == [0, 1, 2, 6, 7]
    assert writer.end().count("was replaced by another file") == 1
    assert integrity(path) == "ok"


def test_another_programs_file_in_the_stores_place_is_left_alone_and_said_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        store.write([host(0)])
        path.with_name("notes").write_text("my notes, by no means a database\n")
        path.with_name("notes").replace(path)
        for _ in range(3):
            with pytest.raises(StoreError, match="is not a PairScope store"):
                store.write([host(1)])
        assert path.read_text() == "my notes, by no means a database\n"
        path.unlink()
        store.write([host(2)])
        assert [sample.time_ns for sample in store.latest("host", since_ns=0)] == [T0 + 2 * S]
    assert caplog.text.count("was replaced by another file") == 1


def host(second: int) -> Sample:
    return Sample("host", {"node": "n1"}, {"load1": 1.0}, T0 + second * S)


def test_a_write_whose_file_is_deleted_before_it_is_acknowledged_is_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        assert isinstance(store, SqliteStore)
        store.write([host(0)])
        unlinked: list[bool] = []
        original: Callable[[], object] = store._file._refuse_closed

        def delete_once() -> None:
            """After the look at the place, before the transaction."""
            if not unlinked:
                unlinked.append(True)
                delete(path, "", "-wal", "-shm")
            original()

        monkeypatch.setattr(store._file, "_refuse_closed", delete_once)
        store.write([host(1)])
        assert [sample.time_ns for sample in store.samples("host", start_ns=0, end_ns=2**62)] == [T0 + S]


def test_a_writer_that_never_pauses_loses_nothing_that_it_began_after_a_deletion(path: Path) -> None:
    """And where only the log was deleted, nothing at all."""
    rng = random.Random(7)
    writer = Writer(path, "freely")
    told: list[tuple[int, int]] = []
    collector = threading.Thread(target=lambda: told.extend(iter(writer.told, None)))
    collector.start()

    def some_more() -> None:
        here = len(told)
        deadline = time.monotonic() + 60
        while len(told) < here + 5 and time.monotonic() < deadline:
            time.sleep(rng.random() * 0.01)

    try:
        some_more()
        deleted_ns = 0
        for suffixes in [("-wal",), ("", "-wal", "-shm"), ("-wal", "-shm"), ("",), ("-shm",), ("-wal",)] * 2:
            for suffix in suffixes:
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            if "" in suffixes:
                deleted_ns = time.monotonic_ns()
            some_more()
    finally:
        writer.process.kill()
        collector.join(60)
        said = writer.end()
    assert "Traceback" not in said
    with contextlib.closing(open_store(f"sqlite://{path}")) as store:
        kept = set(seconds(store))
    assert [second for second, began_ns in told if began_ns > deleted_ns and second not in kept] == []
    assert told[-1][1] > deleted_ns
    assert integrity(path) == "ok"
