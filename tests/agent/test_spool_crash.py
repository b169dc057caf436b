"""What was acknowledged survives kill -9 at any instant, a power cut at any instant, and both in the middle of tidying up."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from agent.spool.disk import Disk
from agent.spool.segment import encode, scan, to_samples, unpack
from telemetry.sample import Sample
from telemetry.store import open_store

S = 10**9
T0 = 1_795_960_800 * S
ROOT = Path(__file__).parents[2]


def numbered(number: int) -> Sample:
    """Every tenth is an event, so that both lanes are at work."""
    if number % 10 == 0:
        return Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"code": number}, T0 + number)
    return Sample("host", {"node": f"n{number % 97}"}, {"load1": number / 7}, T0 + number)


def number_of(sample: Sample) -> int:
    return sample.time_ns - T0


def drain(spool: Spool) -> set[int]:
    found: set[int] = set()
    for _ in range(100_000):
        if not spool.waiting_blocks:
            return found
        blocks = spool.live(10**9) or spool.backlog(5000)
        for block in blocks:
            for sample in block.samples():
                assert sample == numbered(number_of(sample))
                found.add(number_of(sample))
        spool.delivered(blocks)
    raise AssertionError(f"{spool.waiting_blocks} blocks wait for ever")


# --- kill -9


def _writer(folder: str, pipe: Connection, first: int, seed: int) -> None:
    """Appends numbered samples until it is killed; tells of each that is acknowledged, and of each that is delivered before."""
    rng = random.Random(seed)
    descriptor = pipe.fileno()
    spool = Spool(folder, commit_every_s=0.002, min_free_bytes=0, segment_bytes=20_000)
    number = first
    while True:
        count = rng.choice([1, 9, 400])
        ticket = spool.append([numbered(n) for n in range(number, number + count)])
        number += count
        if spool.wait_durable(ticket, 10):
            os.write(descriptor, struct.pack("<cqq", b"a", number - count, number - 1))
        if rng.random() < 0.3:
            for block in spool.live(300) or spool.backlog(300):
                for sample in block.samples():
                    os.write(descriptor, struct.pack("<cqq", b"d", number_of(sample), number_of(sample)))
                spool.delivered([block])


@pytest.mark.parametrize("trials", [50, pytest.param(500, marks=pytest.mark.long)])
def test_kill_at_a_random_instant_loses_nothing_that_was_acknowledged(tmp_path: Path, trials: int) -> None:
    rng = random.Random(trials)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agent.spool"])
    folder = tmp_path / "spool"
    acknowledged: set[int] = set()
    gone: set[int] = set()
    torn = 0
    first = 1
    enough_torn = trials * 30 // 500  # with fewer torn tails the run proves nothing, so it goes on
    for trial in itertools.count():
        if trial >= trials and torn >= enough_torn:
            break
        assert trial < 10 * trials
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_writer, args=(str(folder), writer, first, trial), daemon=True)
        process.start()
        writer.close()
        assert reader.poll(120)
        time.sleep(rng.random() * 0.04)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with os.fdopen(os.dup(reader.fileno()), "rb") as told:
            data = told.read()
        reader.close()
        for kind, low, high in struct.iter_unpack("<cqq", data[: len(data) // 17 * 17]):
            (acknowledged if kind == b"a" else gone).update(range(low, high + 1))
        torn += _tear_what_nobody_acknowledged(folder, acknowledged, rng)
        first = max(acknowledged, default=0) + 100_000
        if trial % 3 == 0:
            spool = Spool(folder, commit_every_s=None, min_free_bytes=0)
            gone |= drain(spool)
            spool.close()
            assert acknowledged <= gone, trial
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0)
    gone |= drain(spool)
    spool.close()
    assert acknowledged <= gone
    assert len(acknowledged) >= trials


def _tear_what_nobody_acknowledged(folder: Path, acknowledged: set[int], rng: random.Random) -> int:
    """Cut the last record of each lane at a random byte if none of its samples was acknowledged, as a lost page would."""
    torn = 0
    for lane in ("keep", "data"):
        paths = sorted(folder.glob(f"{lane}-*.seg"))
        if not paths:
            continue
        data = paths[-1].read_bytes()
        found = scan(data)
        assert found.damaged_bytes == 0
        torn += found.torn_bytes > 0
        if found.records and not found.torn_bytes:
            last = found.records[-1]
            base = next((unpack(r.payload) for r in found.records if r.sequence == last.base), b"")
            if not {number_of(sample) for sample in to_samples(unpack(last.payload, base))} & acknowledged:
                length = len(encode(last))
                os.truncate(paths[-1], len(data) - rng.randrange(1, length))
                torn += 1
    return torn


# --- crashes and power cuts between any two system calls


class Crash(BaseException):
    pass


class ForgetfulDisk(Disk):
    """Works on real files and knows what of them a power cut would leave: bytes that were synced, names whose folder was synced.

    With `crash_at`, the call of that number does not happen and raises Crash; a write then happens in part.
    """

    def __init__(self, folder: Path, crash_at: int, rng: random.Random) -> None:
        self.calls = 0
        self._crash_at = crash_at
        self._rng = rng
        self._folder = folder
        self._ids = itertools.count()
        self._open: dict[int, tuple[int, Path]] = {}  # descriptor -> file, where it was made
        self._content: dict[int, bytearray] = {}
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_file():
                self._names[path.name] = number = next(self._ids)
                self._content[number] = bytearray(path.read_bytes())
                self._synced[number] = bytes(self._content[number])
        self._durable = dict(self._names)

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self._crash_at:
            raise Crash

    def create(self, path: Path) -> int:
        self._step()
        descriptor = super().create(path)
        number = next(self._ids)
        self._open[descriptor] = (number, path)
        self._content[number], self._synced[number] = bytearray(), b""
        self._names[path.name] = number
        return descriptor

    def write(self, descriptor: int, data: bytes) -> int:
        number = self._open[descriptor][0]
        if self.calls + 1 == self._crash_at:
            part = data[: self._rng.randrange(len(data))]
            self._content[number] += part
            super().write(descriptor, part)
        self._step()
        done = super().write(descriptor, data)
        self._content[number] += data[:done]
        return done

    def sync(self, descriptor: int) -> None:
        self._step()
        number = self._open[descriptor][0]
        self._synced[number] = bytes(self._content[number])

    def truncate(self, descriptor: int, size: int) -> None:
        self._step()
        super().truncate(descriptor, size)
        del self._content[self._open[descriptor][0]][size:]

    def replace(self, old: Path, new: Path) -> None:
        self._step()
        super().replace(old, new)
        if new.parent == self._folder:
            self._names[new.name] = self._names.pop(old.name)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        self._names.pop(path.name, None)

    def sync_folder(self, folder: Path) -> None:
        self._step()
        if folder == self._folder:
            self._durable = dict(self._names)

    def cut_power(self) -> None:
        """Leave in the folder what a power cut at this moment may leave; each unsynced thing is there, or not, or in part."""
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        for name in {*self._names, *self._durable}:
            number = self._rng.choice([self._names.get(name), self._durable.get(name)])
            if number is None:
                continue
            safe, whole = self._synced[number], bytes(self._content[number])
            tail = whole[len(safe) :] if whole.startswith(safe) else b""
            keep = self._rng.randrange(len(tail) + 1)
            lost = bytes(len(tail) - keep) if self._rng.random() < 0.3 else b""
            (self._folder / name).write_bytes(safe + tail[:keep] + lost)


def _live_through(folder: Path, disk: Disk, state: tuple[set[int], set[int]], first: int, seed: int) -> None:
    """A small life of a spool: commits, deliveries, rotation, tidying, closing. `state` is (acknowledged, delivered)."""
    acknowledged, gone = state
    rng = random.Random(seed)
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0, segment_bytes=4096, disk=disk)
    try:
        for step in range(7):
            batch = range(first + step * 100, first + step * 100 + rng.choice([1, 25, 80]))
            spool.append([numbered(number) for number in batch])
            if spool.commit():
                acknowledged.update(batch)
            for block in (spool.live(10**6) + spool.backlog(60))[:: rng.choice([1, 2, 3])]:
                gone.update(number_of(sample) for sample in block.samples())
                spool.delivered([block])
        spool.close()
    except Crash:
        os.close(spool._lock_file)  # what the end of a process does
        raise


def _crash_points(folder: Path) -> int:
    disk = ForgetfulDisk(folder, 0, random.Random(0))
    _live_through(folder, disk, (set(), set()), 1, 0)
    return disk.calls


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
def test_a_crash_between_any_two_system_calls_loses_nothing_that_was_acknowledged(tmp_path: Path, power: bool) -> None:
    points = _crash_points(tmp_path / "measure")
    assert points > 60
    for crash_at in range(1, points + 1):
        _crash_once(tmp_path / f"spool{crash_at}", crash_at, seed=crash_at, power=power)


@pytest.mark.parametrize("cuts", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_power_cuts_one_after_another_lose_nothing_that_was_acknowledged(tmp_path: Path, cuts: int) -> None:
    rng = random.Random(cuts)
    folder = tmp_path / "spool"
    state: tuple[set[int], set[int]] = (set(), set())
    for cut in range(cuts):
        disk = ForgetfulDisk(folder, rng.randrange(1, 120), rng)
        try:
            _live_through(folder, disk, state, 1 + cut * 1000, cut)
        except Crash:
            disk.cut_power()
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0)
    state[1].update(drain(spool))
    spool.close()
    assert len(state[0]) > cuts * 20
    assert state[0] <= state[1]


def _crash_once(folder: Path, crash_at: int, *, seed: int, power: bool) -> None:
    state: tuple[set[int], set[int]] = (set(), set())
    disk = ForgetfulDisk(folder, crash_at, random.Random(seed))
    with pytest.raises(Crash):
        _live_through(folder, disk, state, 1, 0)
    if power:
        disk.cut_power()
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0)
    spool.append([numbered(5001)])
    assert spool.commit()
    found = drain(spool)
    spool.close()
    assert 5001 in found
    assert state[0] <= state[1] | found, f"crash at call {crash_at}"
    again = Spool(folder, commit_every_s=None, min_free_bytes=0)
    assert again.waiting_blocks == 0 and list(folder.glob("*.seg")) == []
    again.close()


# --- a power cut on a real file system: the image under a loop mount is copied while the writer is stopped

LOOP_WRITER = """
    import sys
    from agent.delivery import Delivery
    from agent.spool import Spool
    from telemetry.sample import Sample
    from telemetry.store import open_store
    spool = Spool(sys.argv[1], commit_every_s=None, min_free_bytes=0, segment_bytes=4096)
    Delivery(spool, lambda: open_store(f"sqlite://{sys.argv[2]}")).start()
    number = 1
    while True:
        spool.append([Sample("host", {"node": "n"}, {"load1": 1.0}, 10**18 + number)])
        if spool.commit():
            print(number, flush=True)
        number += 1
"""


@pytest.fixture
def loop_image(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(image file, where it is mounted): 64 MB of ext4."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists() or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root, loop devices and mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    yield image, mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.parametrize("cuts", [3, pytest.param(100, marks=pytest.mark.long)])
def test_a_power_cut_on_ext4_loses_nothing_that_was_acknowledged_nor_what_was_delivered_into_a_file_there(
    loop_image: tuple[Path, Path], tmp_path: Path, cuts: int
) -> None:
    image, mount = loop_image
    rng = random.Random(cuts)
    copy, seen_at = tmp_path / "copy", tmp_path / "seen"
    seen_at.mkdir()
    for _ in range(cuts):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LOOP_WRITER), str(mount / "spool"), str(mount / "store.db")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGSTOP)
        shutil.copyfile(image, copy)
        process.send_signal(signal.SIGKILL)
        # what was acknowledged before the stop was printed before it, up to the line that the stop held up
        acknowledged = [int(line) for line in process.stdout.read().split()]
        process.wait()
        last = max(acknowledged, default=1)
        subprocess.run(["mount", "-o", "loop", str(copy), str(seen_at)], check=True)
        try:
            found = _stored_after_restart(seen_at)
        finally:
            subprocess.run(["umount", str(seen_at)], check=True)
        assert set(range(1, last + 1)) <= found
        shutil.rmtree(mount / "spool")
        for path in mount.glob("store.db*"):
            path.unlink()


def _stored_after_restart(folder: Path) -> set[int]:
    """What is in the store once an agent has started again."""
    spool = Spool(folder / "spool", commit_every_s=None, min_free_bytes=0)
    store = open_store(f"sqlite://{folder}/store.db")
    delivery = Delivery(spool, lambda: store)
    while spool.waiting_blocks:
        delivery.carry()
        assert delivery.errors == 0, delivery.last_error
    spool.close()
    found = {sample.time_ns - 10**18 for sample in store.samples("host", start_ns=0, end_ns=2 * 10**18)}
    store.close()
    return found
