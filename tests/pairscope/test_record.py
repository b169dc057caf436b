"""Record: any store into the same file, whole or not at all, in little memory."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from pairscope import selection as reading
from pairscope.record import Nothing, follow, record
from pairscope.selection import Selection, in_time_order
from pairscope.whole_file import CannotCopy, WholeFile
from telemetry.lineprotocol import read
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, Where, open_store
from tests.pairscope.command_line import pairscope
from tests.pairscope.recordings import T0, S, everything, recorded, replayed, samples, sqlite_store, unseen
from tests.store_servers import Influxd

ROOT = Path(__file__).parents[2]


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Store]:
    with closing(sqlite_store(tmp_path, "filled")) as store:
        assert store.write(samples()) == []
        yield store


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pairscope", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PAIRSCOPE_LANG": "en"}


def test_a_recording_holds_every_sample_in_time_order(filled: Store, tmp_path: Path) -> None:
    done = recorded(filled, tmp_path / "a.lp")
    assert list(read(tmp_path / "a.lp")) == samples()
    assert (done.samples, done.left_out, done.first_ns, done.last_ns) == (241, 0, T0 + 123_456_789, T0 + 39_123_456_789)
    assert done.bytes == (tmp_path / "a.lp").stat().st_size


def test_recorded_replayed_and_recorded_again_is_the_same_file(filled: Store, tmp_path: Path) -> None:
    for suffix in ("lp", "lp.gz"):
        once, twice = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        recorded(filled, once)
        with closing(sqlite_store(tmp_path, f"empty-{suffix}")) as empty:
            assert replayed(once, empty).samples == 241
            assert replayed(once, empty).samples == 241
            recorded(empty, twice)
        assert once.read_bytes() == twice.read_bytes()


@pytest.mark.server
def test_influxdb_and_sqlite_make_the_same_recording(filled: Store, influxd: Influxd, tmp_path: Path) -> None:
    recorded(filled, tmp_path / "sqlite.lp")
    with closing(open_store(influxd.new_url())) as other:
        replayed(tmp_path / "sqlite.lp", other)
        recorded(other, tmp_path / "influxdb.lp")
    assert (tmp_path / "influxdb.lp").read_bytes() == (tmp_path / "sqlite.lp").read_bytes()


def test_a_selection_is_of_its_nodes_measurements_and_half_open_span(filled: Store, tmp_path: Path) -> None:
    start, end = T0 + 5_123_456_789, T0 + 9_123_456_789
    recorded(filled, tmp_path / "a.lp", Selection(start, end, ("n2",), ("event", "gpu")))
    wanted = [s for s in samples() if start <= s.time_ns < end and s.tags["node"] == "n2" and s.measurement != "engine"]
    assert list(read(tmp_path / "a.lp")) == wanted and len(wanted) == 9


def test_no_samples_make_no_file(filled: Store, tmp_path: Path) -> None:
    with pytest.raises(Nothing):
        recorded(filled, tmp_path / "a.lp", everything(T0 - 900 * S, T0))
    assert not list(tmp_path.glob("*.lp*")) and not list(tmp_path.glob(".*"))


class Dense:
    """A store that is empty for a day and then holds 700 samples a second; it notes how many it ever handed out at once."""

    url = "dense://"

    def __init__(self) -> None:
        self.most = 0
        self.unlimited = 0

    def series(self, measurement: str, *, since_ns: int = 0) -> list[dict[str, str]]:
        return [{"node": "n"}] if measurement == "gpu" else []

    def samples(
        self, measurement: str, *, start_ns: int, end_ns: int, where: Where | None = None, limit: int | None = None
    ) -> list[Sample]:
        step = S // 700
        first = max(start_ns, T0 + 86_400 * S)
        times = range(-(-first // step) * step, end_ns, step)
        self.unlimited += limit is None
        times = times if limit is None else times[max(0, len(times) - limit) :]
        self.most = max(self.most, len(times))
        return [Sample("gpu", {"node": "n"}, {"util_pct": 1.0}, time_ns) for time_ns in times]


def test_a_burst_after_a_long_silence_is_read_in_short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST", 500)
    store = Dense()
    chosen = Selection(T0, T0 + 86_460 * S)
    times = [s.time_ns for _, part in in_time_order(store, chosen) for s in part]  # type: ignore[arg-type]
    assert times == sorted(set(times)) and len(times) == pytest.approx(42_000, abs=2)
    assert store.most <= 501 and store.unlimited == 0


def test_more_samples_at_one_instant_than_are_held_at_once_are_all_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "MOST", 10)
    crowd = [Sample("host", {"node": f"n{n:03}"}, {"cpu_pct": float(n)}, T0) for n in range(50)]
    with closing(sqlite_store(tmp_path, "crowd")) as store:
        store.write(crowd)
        recorded(store, tmp_path / "a.lp")
    assert list(read(tmp_path / "a.lp")) == crowd


def test_nothing_is_overwritten_without_force_and_only_files_are(filled: Store, tmp_path: Path) -> None:
    there = tmp_path / "a.lp"
    there.write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    for place, said in (
        (there, "--force"),
        (tmp_path / "pipe", "regular"),
        (tmp_path, "folder"),
        (tmp_path / "x/a", "x"),
    ):
        with pytest.raises(CannotCopy, match=said):
            recorded(filled, place)
    assert there.read_text() == "precious"
    with pytest.raises(CannotCopy, match="regular"):
        record(filled, everything(), Path("/dev/full"), force=True, advance=unseen)


def test_a_store_that_breaks_off_leaves_what_was_there(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "a.lp"
    there.write_text("precious")

    def gone(*_: object, **__: object) -> Sequence[Sample]:
        raise StoreDown("gone")

    monkeypatch.setattr(filled, "samples", gone)
    with pytest.raises(StoreDown):
        reading_into(there, filled)
    assert there.read_text() == "precious" and not list(tmp_path.glob(".*"))


def reading_into(place: Path, store: Store) -> None:
    from_start = in_time_order(store, everything())
    with WholeFile(place, force=True, language="en") as file:
        file.write(b"half")
        for _ in from_start:
            file.write(b"more")


def big_store(tmp_path: Path) -> Store:
    store = sqlite_store(tmp_path, "big")
    store.write(samples(4000))
    return store


def test_a_full_disk_is_one_line_and_no_half_file(tmp_path: Path) -> None:
    with closing(big_store(tmp_path)) as store:

        def small() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        span = ("--from", "1795960000", "--to", "1795970000")
        done = subprocess.run(
            command("record", str(tmp_path / "a.lp"), *span, "--store", store.url),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            preexec_fn=small,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "a.lp does not fit" in done.stderr
    assert not list(tmp_path.glob("*.lp")) and not list(tmp_path.glob(".*"))


def test_the_disk_that_is_full_only_at_the_end_leaves_no_half_file(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotCopy, match="does not fit"):
        recorded(filled, tmp_path / "a.lp")
    assert not list(tmp_path.glob("*.lp")) and not list(tmp_path.glob(".*"))


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_recording_that_is_ended_leaves_no_file_and_the_next_one_is_whole(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out, part = tmp_path / "a.lp", tmp_path / ".a.lp.part"
    span = ("--from", "1795960000", "--to", "1795970000")
    with closing(big_store(tmp_path)) as store:
        words = command("record", str(out), *span, "--store", store.url)
        for _ in range(10):
            with subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True) as process:
                while not size_of(part) and process.poll() is None:
                    time.sleep(0.001)
                process.send_signal(number)
                assert process.stderr is not None
                said = process.stderr.read()
            if process.returncode:
                break
            out.unlink()  # on a busy machine it may be whole before it is seen to have begun
        assert (process.returncode, out.exists()) == (code, False), said
        assert part.exists() is (number is signal.SIGKILL)
        assert said.count("\n") == (0 if number is signal.SIGKILL else 1)
        recorded(store, out, everything(T0, T0 + 10_000 * S))
    assert sum(1 for _ in read(out)) == 24_001 and not part.exists()


def test_two_recordings_into_one_file_do_not_mix(filled: Store, tmp_path: Path) -> None:
    with WholeFile(tmp_path / "a.lp", force=False, language="en") as first:
        first.write(b"first")
        with pytest.raises(CannotCopy, match="another process"):
            recorded(filled, tmp_path / "a.lp")
    assert (tmp_path / "a.lp").read_bytes() == b"first"


def test_following_goes_on_through_an_outage_and_is_a_good_file_at_any_moment(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "live.lp.gz"
    now = [T0 + 20 * S]
    monkeypatch.setattr("pairscope.record.time.time_ns", lambda: now[0])
    real, down = filled.samples, [0]

    def sometimes(*args: object, **options: object) -> list[Sample]:
        if 25 * S < now[0] - T0 < 30 * S:
            down[0] += 1
            raise StoreDown("gone")
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(filled, "samples", sometimes)
    seen: list[int] = []

    def wait(seconds: float) -> bool:
        if seconds:
            seen.append(gzip.decompress(out.read_bytes()).count(b"\n"))  # raises for half a member
            now[0] += S
        return now[0] >= T0 + 60 * S

    told: list[StoreDown] = []
    follow(filled, Selection(T0, 2**62), out, advance=unseen, wait=wait, down=told.append)
    assert list(read(out)) == samples()
    assert seen == sorted(seen) and len(set(seen)) > 20
    assert len(told) == down[0] > 0


def test_the_command_says_what_it_wrote_in_json_and_pipes_to_stdout(filled: Store, tmp_path: Path) -> None:
    span = ("--from", "2026-11-29T14:00", "--last", "1h")
    refused = pairscope("record", str(tmp_path / "a.lp"), *span, "--store", filled.url)
    assert refused.exit_code == 2 and "--last" in refused.stderr
    done = pairscope("record", "-", "--from", str(T0), "--to", str(T0 + 3 * S), "--store", filled.url, "--json")
    assert done.exit_code == 0
    told = json.loads(done.stderr)
    assert (told["samples"], told["first"]) == (
        18,
        f"2026-11-29T{time.strftime('%H:%M:%S', time.gmtime(T0 // S))}.123456789Z",
    )
    assert done.stdout.count("\n") == 18
    assert pairscope("record", str(tmp_path / "b.lp"), "--store", f"sqlite://{tmp_path}/none.db").exit_code == 2
    assert not (tmp_path / "none.db").exists()
    nothing = pairscope("record", str(tmp_path / "b.lp"), "--last", "5m", "--to", "1795000000", "--store", filled.url)
    assert nothing.exit_code == 1 and "no such samples" in nothing.stderr and not (tmp_path / "b.lp").exists()
