"""How a copy ends that can't be finished: on a full disk, by a signal at any step, with a source that is none or has no end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pairscope import whole_file
from pairscope.copying import Stopped, stoppable
from pairscope.replay import Plan, Shift, replay
from pairscope.whole_file import CannotCopy
from telemetry.lineprotocol import Recording, encode_many, read
from telemetry.store import Store, sqlite
from tests.pairscope.command_line import pairscope
from tests.pairscope.recordings import S, recorded, replayed, samples, sqlite_store, unseen, written

ROOT = Path(__file__).parents[2]
SPAN = ("--from", "1795960000", "--to", "1795970000")
COPIES = [
    ("record", "a.lp"),
    ("record", "a.lp.gz"),
    ("export", "a.csv", "--measurement", "gpu"),
    ("export", "a.parquet", "--measurement", "gpu"),
    ("export", "folder"),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with closing(sqlite_store(tmp_path_factory.mktemp("ends"), "filled")) as store:
        assert store.write(samples(300)) == []
        yield store


def copied(store: Store, folder: Path, words: tuple[str, ...], *more: str) -> tuple[int, str]:
    kind, name, *options = words
    done = pairscope(kind, str(folder / name), *options, *SPAN, *more, "--store", store.url)
    return done.exit_code, done.stderr


@pytest.mark.parametrize("words", COPIES, ids=lambda words: words[1])
def test_a_disk_that_fills_up_is_one_line_with_the_remedy_and_leaves_what_was_there(
    filled: Store, small_disk: Callable[[int], Path], words: tuple[str, ...]
) -> None:
    small = small_disk(16 * 1024)
    code, said = copied(filled, small, words)
    assert (code, said.count("\n")) == (2, 1), said
    assert f"{small / words[1]}" in said and "does not fit" in said
    assert ("a name that ends in .gz" in said) is (words[1] == "a.lp")
    assert list(small.iterdir()) == []
    there = small / words[1] / "gpu.parquet" if words[1] == "folder" else small / words[1]
    there.parent.mkdir(exist_ok=True)
    there.write_text("precious")
    assert copied(filled, small, words, "--force")[0] == 2
    assert [p for p in small.rglob("*") if p.is_file()] == [there] and there.read_text() == "precious"


def test_of_several_files_none_is_placed_when_the_last_bytes_of_one_do_not_fit(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, [0]

    def full_at_the_second(place: int) -> None:
        synced[0] += 1
        if synced[0] == 2:
            raise OSError(28, "No space left on device")
        real(place)

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    assert copied(filled, tmp_path, ("export", "folder"))[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("words", COPIES, ids=lambda words: words[1])
@pytest.mark.parametrize("step", ["open", "ftruncate", "fsync"])
def test_a_signal_at_any_step_leaves_nothing(
    filled: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    words: tuple[str, ...],
    number: signal.Signals,
) -> None:
    real = getattr(os, step)

    def then_signalled(*args: object, **options: object) -> object:
        result = real(*args, **options)
        if step != "open" or str(args[0]).endswith(".part"):
            monkeypatch.setattr(os, step, real)
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(whole_file.os, step, then_signalled)
    code, said = copied(filled, tmp_path, words)
    assert (code, said) == (128 + number, f"stopped; {tmp_path / words[1]} was not made\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", ["__init__", "write", "close"])
def test_a_replay_that_is_told_to_stop_says_so_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: signal.Signals
) -> None:
    real = getattr(sqlite.SqliteStore, step)

    def then_signalled(*args: object, **options: object) -> object:
        result = real(*args, **options)
        monkeypatch.setattr(sqlite.SqliteStore, step, real)
        signal.raise_signal(number)
        return result

    monkeypatch.setattr(sqlite.SqliteStore, step, then_signalled)
    path, url = written(tmp_path / "a.lp", samples()), f"sqlite://{tmp_path}/s.db"
    done = pairscope("replay", str(path), "--store", url)
    assert done.exit_code == 128 + number and done.stderr.startswith("stopped;") and done.stderr.count("\n") == 1
    assert pairscope("replay", str(path), "--store", url).exit_code == 0


def test_ctrl_c_while_the_command_line_is_loaded_is_quiet() -> None:
    program = (
        "import runpy, signal, sys\n"
        "class Loading:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pairscope.cli': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Loading())\n"
        "runpy.run_module('pairscope', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_pipe_that_is_silent_is_told_of_and_then_read_twice_like_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pairscope.replay.SILENT_MS", 30)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        threading.Thread(target=pipe.write_text, args=(encode_many(samples()),)).start()

    with closing(sqlite_store(tmp_path, "piped")) as store:
        shift = Plan(Shift(by_ns=0, last_at_ns=samples()[-1].time_ns - 60 * S))
        done = replay(pipe, store, shift, advance=unseen, tell=tell)
    assert (done.samples, done.offset_ns) == (241, -60 * S)
    assert len(told) == 1 and str(pipe) in told[0]


def is_open(path: Path) -> bool:
    """Whether this process has it open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if descriptor.readlink() == path:
                return True
    return False


def test_a_silent_pipe_is_left_by_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("pairscope.replay.SILENT_MS", 30)
    main = threading.main_thread().ident
    assert main is not None

    def ctrl_c() -> None:
        give_up_s = time.monotonic() + 120
        while not is_open(pipe) and time.monotonic() < give_up_s:
            time.sleep(0.02)
        time.sleep(0.2)  # so that it has most often said that it waits; the end is the same if it has not
        signal.pthread_kill(main, signal.SIGINT)

    signalling = threading.Thread(target=ctrl_c)
    signalling.start()
    done = pairscope("replay", str(pipe), "--store", f"sqlite://{tmp_path}/s.db")
    signalling.join()
    assert done.exit_code == 130 and "pipe" in done.stderr and "stopped" in done.stderr


def test_a_signal_that_comes_while_an_object_is_finalised_is_heard_all_the_same() -> None:
    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)  # the handler runs here at the latest, where nobody sees what it raises

    with pytest.raises(Stopped) as stopped, stoppable():
        Finalised()
        assert threading.Event().wait(60), "nobody heard the signal"
    assert stopped.value.code == 130


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(CannotCopy, match=f"{device} is a device"):
        replayed(Path(device), None, Plan(dry_run=True))


class Endless(io.RawIOBase):
    """Reads as one text again and again; a test that asks for too much fails instead of never ending."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, room: object) -> int:
        piece = memoryview(room)  # type: ignore[arg-type]
        count = len(piece) // len(self._text) * len(self._text)
        piece[:count] = self._text * (count // len(self._text))
        self.given += count
        assert self.given < 64 << 20
        return count


@pytest.mark.parametrize("text", [b"\0", b"nonsense\n"])
def test_what_has_no_end_and_is_no_recording_is_given_up(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(Recording, "MAX_SKIPPED_BYTES", 1 << 18)
    recording = read(io.BufferedReader(Endless(text), 1 << 16))
    assert list(recording) == []
    assert recording.is_given_up and recording.bad_lines == (1 if text == b"\0" else Recording.MAX_BAD_FIRST)


def test_a_file_that_is_no_recording_says_so_and_one_with_a_good_line_is_read_to_its_end(
    filled: Store, tmp_path: Path
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\r\n" * 20_000)
    done = pairscope("replay", str(path), "--store", filled.url)
    assert done.exit_code == 1 and "does not look like a recording; nothing after line 10000" in done.stderr
    path.write_bytes(encode_many(samples(1)).encode() + b"\x89PNG\r\n" * 20_000 + encode_many(samples(2)).encode())
    assert replayed(path, filled).bad_lines == 20_000


@pytest.mark.parametrize("text", [b"", b"# written by a later version\n\n"])
def test_a_recording_without_samples_is_told_of_with_and_without_a_shift(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.lp"
    path.write_bytes(text)
    for shift in ((), ("--shift", "now")):
        done = pairscope("replay", str(path), *shift, "--store", f"sqlite://{tmp_path}/s.db")
        assert (done.exit_code, done.stderr) == (1, f"{path} holds no sample that could be replayed\n")


def test_what_a_later_version_wrote_is_kept_as_far_as_it_is_known(tmp_path: Path) -> None:
    at = samples()[0].time_ns
    path = tmp_path / "a.lp"
    path.write_text(f"quantum,node=n1 qubits=3 {at}\ngpu,node=n1,tray=5 util_pct=5,flux_pct=7 {at}\n")
    with closing(sqlite_store(tmp_path, "s")) as store:
        done = replayed(path, store)
        recorded(store, tmp_path / "b.lp")
    assert (done.samples, done.refused) == (1, 2)
    assert [problem.line for problem in done.problems] == [1, 2]
    assert (tmp_path / "b.lp").read_text() == f"gpu,node=n1,tray=5 util_pct=5.0 {at}\n"
