"""The embedded store: many processes on one file, and files that are damaged, foreign, unwritable, removed or out of room."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, StoreError, open_store
from telemetry.store.rollup import LEVELS_NS
from telemetry.store.sqlite import SqliteStore

S = 10**9
T0 = 1_795_960_800 * S
ROOT = Path(__file__).parents[2]


def host(second: int, load: float = 1.0, node: str = "n1") -> Sample:
    return Sample("host", {"node": node}, {"load1": load, "cpu_pct": load}, T0 + second * S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def stored(path: Path) -> list[int]:
    store = open_store(f"sqlite://{path}")
    try:
        return [(sample.time_ns - T0) // S for sample in store.samples("host", start_ns=0, end_ns=T0 + 10**6 * S)]
    finally:
        store.close()


# --- what a user may get wrong


def test_each_mistake_is_one_line_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes, by no means a database\n")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE contacts (name TEXT)")
    other.commit()
    other.close()
    newer = open_store(f"sqlite://{tmp_path}/newer.db")
    newer.close()
    connection = sqlite3.connect(tmp_path / "newer.db")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    (tmp_path / "logged.db-wal").mkdir()
    cases = {
        "sqlite://": "names no file",
        "sqlite:///": "names no file",
        f"sqlite://{tmp_path}/a\0.db": "names no file",
        f"sqlite://{tmp_path}/\udcff.db": "names no file",
        f"sqlite://{tmp_path}/x.db?mode=ro": "sqlite takes no options",
        "sqlite://~/x.db": f"sqlite://{Path.home()}/store.db",
        "sqlite:///~root/x.db": "~ stands for no folder",
        "sqlite://localhost/var/x.db": "three slashes, sqlite:///var/x.db",
        f"sqlite://{tmp_path}/logged.db": "logged.db-wal is a folder",
        f"sqlite://{tmp_path}": "is a folder",
        f"sqlite://{tmp_path}/notes.txt": "is not a PairScope store",
        f"sqlite://{tmp_path}/other.db": "another program's database",
        f"sqlite://{tmp_path}/newer.db": "update PairScope",
        f"sqlite://{tmp_path}/notes.txt/store.db": "notes.txt",
        "postgres://db/x": "unknown kind 'postgres'",
        "store.db": "unknown kind",
    }
    for url, named in cases.items():
        with pytest.raises(StoreError, match=named) as caught:
            open_store(url)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "notes.txt").read_text() == "my notes, by no means a database\n"
    assert sorted(p.name for p in tmp_path.iterdir() if "damaged" in p.name) == []


def as_nobody(path: Path) -> list[str]:
    """What a user without rights sees of the store: numbers of samples and of latest ones, then what a write says."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            store = open_store(f"sqlite://{path}")
            seen = store.samples("host", start_ns=0, end_ns=2**62)
            said.append(f"{len(seen)} {len(store.latest('host', since_ns=0))} {means(store)[:1]}")
            store.write([host(99)])
            said.append("written")
        except BaseException as error:
            said.append(f"{type(error).__name__} {error}")
        os.write(write_end, "\n".join(said).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        lines = file.read().splitlines()
    os.waitpid(child, 0)
    return lines


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter and only this one may write."""
    folder = Path("/var/tmp") / f"pairscope-test-{os.getpid()}-{random.randrange(10**9)}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def test_another_user_reads_while_a_writer_runs_and_when_none_does(open_folder: Path) -> None:
    path = open_folder / "store.db"
    store = open_store(f"sqlite://{path}")
    store.write([host(0), host(1)])
    running = as_nobody(path)
    assert running[0] == "2 1 [1.0]"
    assert running[1].startswith("StoreError") and "can only be read by this user" in running[1]
    store.close()
    assert not (open_folder / "store.db-wal").exists()
    assert as_nobody(path)[0] == "2 1 [1.0]"
    again = open_store(f"sqlite://{path}")
    again.write([host(2)])
    assert as_nobody(path)[0] == "3 1 [1.0]"
    again.close()


def test_an_unwritable_folder_is_named_with_a_remedy(open_folder: Path) -> None:
    said = as_nobody(open_folder / "store.db")[0]
    assert said.startswith("StoreError") and "can't be written" in said and "65534" in said
    said = as_nobody(open_folder / "deeper" / "store.db")[0]
    assert said.startswith("StoreError") and "permission" in said


# --- damage


def test_a_damaged_file_is_set_aside_with_a_warning_and_writing_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(second, node=f"n{second % 50}") for second in range(5000)])
    store.close()
    data = bytearray(path.read_bytes())
    data[16384:] = os.urandom(len(data) - 16384)  # the header is well, all else is noise
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        store = open_store(f"sqlite://{path}")
        store.write([host(1)])
    assert store.samples("host", start_ns=0, end_ns=T0 + 99 * S) == [host(1)]
    store.close()
    aside = [p for p in path.parent.iterdir() if ".damaged-" in p.name]
    assert [p.read_bytes() for p in aside if not p.name.endswith(("-wal", "-shm"))] == [bytes(data)]
    assert any(str(p) in caplog.text for p in aside)


def test_a_file_whose_first_page_was_lost_is_set_aside_too(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(0)])
    store.close()
    data = bytearray(path.read_bytes())
    data[:8192] = bytes(8192)
    path.write_bytes(data)
    store = open_store(f"sqlite://{path}")
    store.write([host(1)])
    store.close()
    assert stored(path) == [1]


@pytest.mark.parametrize("trials", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_random_damage_never_blocks_a_start_nor_what_comes_after(path: Path, trials: int) -> None:
    rng = random.Random(trials)
    store = open_store(f"sqlite://{path}")
    store.write([host(second, node=f"n{second % 7}") for second in range(700)])
    store.close()
    whole = path.read_bytes()
    for _ in range(trials):
        data = bytearray(whole)
        kind = rng.randrange(3)
        place = rng.randrange(len(data))
        if kind == 0:
            for _ in range(rng.randrange(1, 40)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        else:
            data[place : place + 4096] = bytes(len(data[place : place + 4096]))
        if data[:16] != whole[:16] and data[:16].strip(b"\0"):
            data[:16] = whole[:16]  # a file that does not look like a database is refused, by another test
        if not data:
            continue
        path.write_bytes(data)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        try:
            store = open_store(f"sqlite://{path}")
        except StoreError as error:
            # the number of the layout or the owner's mark was hit: named, not guessed
            assert "layout" in str(error) or "another program" in str(error)
            continue
        new = host(9999, node="new")
        for _ in range(2):  # damage that only shows when its page is read takes what was written beside it along
            store.write([new])
            store.samples("host", start_ns=T0, end_ns=T0 + 10000 * S)
            if new in store.latest("host", since_ns=T0 + 9999 * S):
                break
        else:
            pytest.fail("the file stays damaged")
        store.close()


def test_a_file_that_is_removed_or_replaced_under_us_is_followed(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    reader = open_store(f"sqlite://{path}")
    store.write([host(0)])
    assert len(reader.latest("host", since_ns=0)) == 1
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    assert reader.latest("host", since_ns=0) == []
    store.write([host(1)])
    assert [s.time_ns for s in reader.samples("host", start_ns=0, end_ns=T0 + 9 * S)] == [T0 + S]
    assert stored(path) == [1]
    store.close()
    reader.close()


def test_two_processes_that_find_damage_end_up_on_one_file(path: Path) -> None:
    one, two = open_store(f"sqlite://{path}"), open_store(f"sqlite://{path}")
    one.write([host(0)])
    assert isinstance(one, SqliteStore)
    one._file.set_aside("for the test")
    two.write([host(1)])
    one.write([host(2)])
    assert stored(path) == [1, 2]
    one.close()
    two.close()


# --- room


def test_a_full_disk_is_down_and_passes(path: Path, small_disk: Callable[[int], Path]) -> None:
    small = small_disk(2**20)
    store = open_store(f"sqlite://{small}/store.db")
    store.write([host(0)])
    ballast = small / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(StoreDown, match=r"full|disk"):
        for second in range(1, 400):
            store.write([host(second, node=f"n{i}") for i in range(50)])
    held = len(store.samples("host", start_ns=0, end_ns=T0 + 10**6 * S))
    assert (held - 1) % 50 == 0  # whole batches only
    ballast.unlink()
    store.write([host(5000)])
    assert len(store.samples("host", start_ns=0, end_ns=T0 + 10**6 * S)) == held + 1
    store.close()


LIMITED = """
    import resource, sys
    from telemetry.sample import Sample
    from telemetry.store import open_store, StoreDown
    store = open_store("sqlite://" + sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    done = 0
    try:
        while True:
            store.write([Sample("host", {"node": f"n{i}"}, {"load1": 1.0}, done + 1) for i in range(100)])
            done += 1
    except StoreDown as error:
        print("down", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.write([Sample("host", {"node": "n"}, {"load1": 1.0}, 10**9)])
    print(done * 100 + 1 == len(store.samples("host", start_ns=0, end_ns=2**62)))
"""


def test_a_limit_on_file_size_is_down_and_passes(path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.stdout.splitlines()[-1:] == ["True"], result.stderr
    assert result.stdout.startswith("down store ")


# --- many processes


def _write_many(path: str, node: str, count: int) -> None:
    store = open_store(f"sqlite://{path}")
    for second in range(count):
        store.write([host(second, load=float(second), node=f"{node}-{i}") for i in range(20)])
    store.close()


def test_processes_write_and_read_one_file_at_once(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(str(path), f"w{i}", 40)) for i in range(2)]
    for writer in writers:
        writer.start()
    store = open_store(f"sqlite://{path}")
    reads = 0
    while any(writer.is_alive() for writer in writers):
        for sample in store.latest("host", since_ns=0):
            assert sample.fields["load1"] == sample.fields["cpu_pct"]
        rows = store.samples("host", start_ns=T0, end_ns=T0 + 100 * S)
        for name in ("w0", "w1"):
            # a batch of 20 is there as a whole or not at all
            assert len([s for s in rows if s.tags["node"].startswith(name)]) % 20 == 0
        reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert reads > 3
    assert len(store.samples("host", start_ns=T0, end_ns=T0 + 100 * S)) == 2 * 40 * 20
    store.close()


def _open_and_write(path: str, start: Barrier, number: int) -> None:
    start.wait(120)
    store = open_store(f"sqlite://{path}")
    store.write([host(number)])
    store.close()


def test_processes_that_start_together_make_one_file(path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["telemetry.store"])
    for attempt in range(3):
        start = context.Barrier(4)
        place = path.with_name(f"store{attempt}.db")
        processes = [context.Process(target=_open_and_write, args=(str(place), start, n)) for n in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        assert [process.exitcode for process in processes] == [0] * 4
        assert stored(place) == [0, 1, 2, 3]
    assert [p for p in path.parent.iterdir() if "damaged" in p.name] == []


COUNT_AND_CLOSE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM raw_host").fetchone()[0])
connection.close()
"""


def test_a_second_store_of_one_process_costs_the_first_neither_its_locks_nor_its_log(path: Path) -> None:
    """As retention opens it beside the delivery, while another process reads the file and closes it."""

    def seen_elsewhere() -> int:
        asked = [sys.executable, "-c", COUNT_AND_CLOSE, str(path)]
        return int(subprocess.run(asked, check=True, capture_output=True, timeout=180).stdout)

    with contextlib.closing(open_store(f"sqlite://{path}")) as first:
        first.write([host(1)])
        open_store(f"sqlite://{path}").close()
        assert seen_elsewhere() == 1
        first.write([host(2)])
        assert seen_elsewhere() == 2


def test_a_reader_opens_while_a_writer_holds_the_file(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(0)])
    assert isinstance(store, SqliteStore)
    with store._file.writing() as connection:
        connection.execute("CREATE TABLE busy (x)")
        assert stored(path) == [0]  # opens, reads and closes inside the other's transaction
    store.close()


WRITER = """
    import sys
    from telemetry.sample import Sample
    from telemetry.store import open_store
    store = open_store("sqlite://" + sys.argv[1])
    second = int(sys.argv[2])
    while True:
        store.write([Sample("host", {"node": f"n{i}"}, {"load1": 1.0}, 1_795_960_800 * 10**9 + second) for i in range(10)])
        print(second, flush=True)
        second += 1
"""


def test_a_killed_writer_loses_nothing_that_it_was_told_is_stored(path: Path) -> None:
    rng = random.Random(3)
    told = -1
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(told + 1)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split()
        process.wait()
        told = max([told, *(int(line) for line in lines)])
    store = open_store(f"sqlite://{path}")
    rows = store.samples("host", start_ns=T0, end_ns=T0 + S)
    times = [sample.time_ns - T0 for sample in rows]
    assert set(range(told + 1)) <= set(times)
    assert len(times) % 10 == 0
    store.close()


# --- shape


def test_a_field_that_the_catalogue_gains_becomes_a_column(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(0)])
    old_reader = open_store(f"sqlite://{path}")
    field = catalogue.Field("mood_pct", Kind.GAUGE, float, "mood", "心情")
    grown = replace(catalogue.HOST, fields={**catalogue.HOST.fields, "mood_pct": field})
    monkeypatch.setitem(catalogue.MEASUREMENTS, "host", grown)  # type: ignore[arg-type]
    for opened in (store, open_store(f"sqlite://{path}"), old_reader):
        opened.write([Sample("host", {"node": "n1"}, {"mood_pct": 3.0}, T0 + S)])
        assert opened.latest("host", since_ns=0)[0].fields == {"mood_pct": 3.0}
        found = opened.range("host", ["mood_pct", "load1"], start_ns=T0, end_ns=T0 + 2 * S, step_ns=S)
        assert [(c.field, c.values) for c in found] == [("mood_pct", [None, 3.0]), ("load1", [1.0, None])]
        opened.close()


def test_a_store_from_before_a_field_is_read_without_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(0)])
    field = catalogue.Field("mood_pct", Kind.GAUGE, float, "mood", "心情")
    grown = replace(catalogue.HOST, fields={**catalogue.HOST.fields, "mood_pct": field})
    monkeypatch.setitem(catalogue.MEASUREMENTS, "host", grown)  # type: ignore[arg-type]
    found = store.range("host", ["mood_pct", "load1"], start_ns=T0, end_ns=T0 + S, step_ns=S)
    assert [column.field for column in found] == ["load1"]
    store.close()


def as_first_layout(path: Path) -> None:
    """Turn a store that was never rolled up into one of layout 1: the raw tables alone."""
    connection = sqlite3.connect(path)
    for table in ("pending", "unmarked", "pruned"):
        connection.execute(f"DROP TABLE {table}")
    connection.execute("PRAGMA user_version=1")
    connection.commit()
    connection.close()


def means(store: Store, step_s: int = 60) -> list[float | None]:
    found = store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 7200 * S, step_ns=step_s * S)
    return found[0].values if found else []


def test_a_file_of_the_first_layout_is_taken_over_as_it_is_and_rolled_up_piece_by_piece(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(second, load=float(second), node="n1") for second in range(0, 7200, 2)])
    store.write([host(100, load=0.5, node="n2")])
    before = means(store)
    store.close()
    as_first_layout(path)
    store = open_store(f"sqlite://{path}")
    assert means(store) == before
    store.write([host(7100, load=1e6, node="n1")])  # marked, in a time that is not
    changed = means(store)
    assert changed[:118] == before[:118] and changed[118] != before[118]
    pieces = 0
    while store.rollup(T0 + 9000 * S, 0.0):
        assert means(store) == pytest.approx(changed)
        pieces += 1
    assert pieces > 8
    assert means(store) == pytest.approx(changed)
    store.prune({"*": T0 + 7200 * S})
    assert means(store) == pytest.approx(changed)
    store.close()


def test_what_leaves_a_file_of_the_first_layout_is_rolled_up_first(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    store.write([host(second, load=float(second)) for second in range(0, 7200, 5)])
    before = means(store)
    store.close()
    as_first_layout(path)
    store = open_store(f"sqlite://{path}")
    assert store.prune({"host": T0 + 3600 * S}) == 720
    assert means(store) == pytest.approx(before)
    store.close()


def test_a_file_of_the_first_layout_that_may_only_be_read_is_read(open_folder: Path) -> None:
    path = open_folder / "store.db"
    store = open_store(f"sqlite://{path}")
    store.write([host(0), host(1)])
    store.close()
    as_first_layout(path)
    assert as_nobody(path)[0] == "2 1 [1.0]"


KILLED = """
    import sys
    from telemetry.store import open_store
    store = open_store("sqlite://" + sys.argv[1])
    print("ready", flush=True)
    while store.rollup(1_795_960_800 * 10**9 + 9000 * 10**9, 0.0):
        print("piece", flush=True)
"""


def test_a_kill_at_any_instant_of_rolling_up_changes_no_answer(path: Path) -> None:
    rng = random.Random(11)
    store = open_store(f"sqlite://{path}")
    store.write([host(second, load=float(second), node=f"n{i}") for second in range(0, 7200, 20) for i in range(4)])
    before = {step_s: means(store, step_s) for step_s in (60, 900)}
    pieces = 99
    while pieces > 1:  # until nothing is left
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        pieces = process.stdout.read().count(b"piece")
        process.stdout.close()
        process.wait()
        for step_s, values in before.items():
            assert means(store, step_s) == pytest.approx(values)
    store.close()


PRUNER = """
    import sys
    import telemetry.store.sqlite
    from telemetry.store import open_store
    telemetry.store.sqlite._PRUNE_NS = 60 * 10**9
    store = open_store("sqlite://" + sys.argv[1])
    print("ready", flush=True)
    store.prune({"host": 1_795_960_800 * 10**9 + 7200 * 10**9})
    print("done", flush=True)
"""


def test_a_kill_at_any_instant_of_pruning_changes_no_answer_that_rollups_give(path: Path) -> None:
    rng = random.Random(12)
    store = open_store(f"sqlite://{path}")
    store.write([host(second, load=float(second), node=f"n{i}") for second in range(0, 7200, 20) for i in range(4)])
    before = {step_s: means(store, step_s) for step_s in (60, 900)}
    said = b""
    while b"done" not in said:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PRUNER), str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read()
        process.stdout.close()
        process.wait()
        for step_s, values in before.items():
            assert means(store, step_s) == pytest.approx(values)
    assert store.samples("host", start_ns=0, end_ns=2**62) == []
    store.close()


def test_latest_reads_one_row_a_series_however_long_its_history(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    assert isinstance(store, SqliteStore)
    store.write([host(second, node=f"n{i}") for second in range(100) for i in range(20)])
    with store._file.reading() as connection:
        steps = [0]

        def count() -> int:
            steps[0] += 1
            return 0

        connection.set_progress_handler(count, 10)
        text = _latest_sql(store)
        rows = connection.execute(text).fetchall()
        connection.set_progress_handler(None, 0)
    assert len(rows) == 20
    assert steps[0] * 10 < 20 * 400  # virtual-machine steps; a scan of the history would take 2,000 rows times 20
    store.close()


def _latest_sql(store: SqliteStore) -> str:
    """The statement that `latest` runs, caught on its way."""
    said: list[str] = []
    with store._file.reading() as connection:
        connection.set_trace_callback(said.append)
    store.latest("host", since_ns=0)
    with store._file.reading() as connection:
        connection.set_trace_callback(None)
    return next(text for text in said if "max(time_ns)" in text)


def test_pruning_takes_small_slices_so_that_writers_get_their_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite://{path}")
    assert isinstance(store, SqliteStore)
    hours = 30
    store.write([host(second, node=f"n{i}") for second in range(0, hours * 3600, 60) for i in range(2)])
    counts: list[int] = []
    original: Callable[[], object] = store._file.writing
    monkeypatch.setattr(store._file, "writing", lambda: counts.append(1) or original())
    assert store.prune({"host": T0 + 20 * 3600 * S}) == 20 * 60 * 2
    assert len(counts) >= 20
    store.close()


def test_space_that_pruning_freed_is_given_back_or_used_again(path: Path) -> None:
    store = open_store(f"sqlite://{path}")
    for day in range(3):
        store.write([host(day * 86400 + second * 10, node=f"n{i}") for second in range(2000) for i in range(5)])
        for level_ns in (0, *LEVELS_NS):
            store.prune({"host": T0 + (day * 86400 - 1) * S}, level_ns)
    store.close()
    one_day = 2000 * 5 * 40
    assert path.stat().st_size < 2.5 * one_day


def test_a_pipe_in_the_place_of_the_store_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.db")
    with pytest.raises(StoreError, match="no ordinary file"):
        open_store(f"sqlite://{tmp_path}/store.db")


def test_four_slashes_name_the_same_file_as_three(path: Path) -> None:
    store = open_store(f"sqlite:///{path}")
    store.write([host(0)])
    store.close()
    again = open_store(f"sqlite://{path}")
    assert len(again.latest("host", since_ns=0)) == 1
    again.close()
