"""Ten minutes on a file system that is really full, or that takes no larger file: an agent delivers from memory, bounds what it
holds, says what it drops, keeps every event, and writes again with the first commit that finds room.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from agent.spool.journal import LIVE_SAMPLES
from telemetry.sample import Sample
from telemetry.store import StoreDown
from tests.agent.test_delivery import Ledger
from tests.agent.test_delivery_outage import Device, host_of_8, tick

DISK_BYTES = 2 << 20
MEMORY_BYTES = 40_000
LARGEST_BYTES = 50_000
TOPICS = 6  # that a log line may be about


def full(folder: Path) -> Path:
    """Another program's file that has taken all there was."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with ballast.open("ab", buffering=0) as file, pytest.raises(OSError) as caught:
        while True:
            file.write(b"x")
    assert caught.value.errno == errno.ENOSPC
    return ballast


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """No file may grow larger by what this process writes; EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Agent:
    """The spool and the delivery of an agent whose seconds pass as fast as they can; they write once a second, as in earnest."""

    def __init__(self, folder: Path) -> None:
        self.second = 0
        self.taken = 0
        self.events = 0
        self.store = Ledger()
        self._devices = [*host_of_8(), Device("event", {"node": "n07", "kind": "oom", "subject": "0"}, 5, Random(5))]
        self.spool = Spool(folder, commit_every_s=None, memory_bytes=MEMORY_BYTES, monotonic=self._now_s)
        self.delivery = Delivery(self.spool, self.store.open, monotonic=self._now_s, jitter=lambda: 0.0)

    def _now_s(self) -> float:
        return float(self.second)

    def live_a_second(self) -> bool:
        """Whether all that was taken is on disk by now, or delivered, or dropped and counted."""
        samples = tick(self._devices, self.second)
        self.taken += len(samples)
        self.events += sum(sample.measurement == "event" for sample in samples)
        self.spool.append(samples)
        is_durable = self.spool.commit(tidy=self.second % 5 == 0)
        self.delivery.carry()
        self.second += 1
        return is_durable

    @property
    def stored(self) -> Counter[Key]:
        return Counter(map(key_of, (sample for batch in self.store.batches for sample in batch)))

    @property
    def held_bytes(self) -> int:
        return sum(len(block.packed) for block in self.spool.live(10**9) if block.lane == "data")

    @property
    def held_whole(self) -> int:
        return sum(block.count for block in self.spool.live(10**9) if block.decoded is not None)


def data_bytes(agent: Agent) -> int:
    return sum(path.stat().st_size for path in agent.spool.folder.glob("data-*.seg"))


Key = tuple[str, tuple[tuple[str, str], ...], int]


def key_of(sample: Sample) -> Key:
    return sample.measurement, tuple(sorted(sample.tags.items())), sample.time_ns


def test_ten_minutes_of_a_full_disk_are_delivered_from_memory_and_end_with_the_first_commit_that_finds_room(
    small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_disk(DISK_BYTES)
    agent = Agent(folder / "spool")
    for _ in range(20):
        assert agent.live_a_second()
    ballast = full(folder)
    for _ in range(200):  # its store is well
        agent.live_a_second()
        assert agent.store.times[-1] == agent.second - 1 and agent.spool.waiting_blocks == 0
    agent.store.down = StoreDown("nobody is at home")
    for _ in range(400):  # and now it is not
        agent.live_a_second()
        assert agent.held_bytes <= MEMORY_BYTES and agent.held_whole <= LIVE_SAMPLES
    held = [block.sequence for block in agent.spool.live(10**9) if block.lane == "data"]
    assert held == list(range(agent.second - len(held) + 1, agent.second + 1)), "not the oldest were dropped"
    dropped = agent.spool.dropped_total
    assert dropped > 0 and set(agent.spool.dropped) <= {"disk_full", "disk_low"}
    assert "the oldest samples are dropped" in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= TOPICS * 11, "more than a line a minute"
    ballast.unlink()
    assert agent.live_a_second(), "there is room, and the next commit did not use it"
    assert agent.spool.dropped_total == dropped
    assert_all_but_the_dropped_come_after_a_restart(agent)


def test_what_had_to_leave_a_full_disk_and_is_in_memory_still_is_on_disk_again_once_there_is_room(
    small_disk: Callable[[int], Path],
) -> None:
    folder = small_disk(DISK_BYTES)
    agent = Agent(folder / "spool")
    agent.store.down = StoreDown("nobody is at home")
    for _ in range(20):
        assert agent.live_a_second()
    before = data_bytes(agent)
    ballast = full(folder)
    for _ in range(5):
        agent.live_a_second()
    assert data_bytes(agent) < before / 2
    with ballast.open("r+b") as file:  # room for a second or two, not for all that had to go
        file.truncate(ballast.stat().st_size - DISK_BYTES // 10 - 20_000)
    assert agent.live_a_second()
    ballast.unlink()
    assert agent.live_a_second() and agent.spool.dropped_total == 0
    assert_all_but_the_dropped_come_after_a_restart(agent)


def test_what_no_disk_took_until_the_end_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(tmp_path / "spool")
    agent.store.down = StoreDown("nobody is at home")
    with largest_file(0):
        agent.live_a_second()
        agent.spool.close()
    assert agent.spool.dropped == {"disk_full": agent.taken}
    assert f"ends with {agent.taken} samples that no disk took" in caplog.text


def test_ten_minutes_in_which_no_file_may_grow_are_delivered_from_memory_and_end_with_the_first_commit_that_may_write(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path / "spool")
    agent.store.down = StoreDown("nobody is at home")
    with largest_file(LARGEST_BYTES):  # the next file has room again
        for _ in range(200):
            assert agent.live_a_second()
    sizes = [path.stat().st_size for path in agent.spool.folder.glob("data-*.seg")]
    assert len(sizes) > 2 and LARGEST_BYTES / 2 < max(sizes) <= LARGEST_BYTES
    with largest_file(0):
        for _ in range(400):
            agent.live_a_second()
            assert agent.held_bytes <= MEMORY_BYTES and agent.held_whole <= LIVE_SAMPLES
    dropped = agent.spool.dropped_total
    assert dropped > 0 and set(agent.spool.dropped) == {"disk_full"}
    assert agent.live_a_second(), "files may grow again, and the next commit did not use it"
    assert agent.spool.dropped_total == dropped
    assert_all_but_the_dropped_come_after_a_restart(agent)


def assert_all_but_the_dropped_come_after_a_restart(agent: Agent) -> None:
    agent.spool.close()
    again = Agent(agent.spool.folder)
    while again.spool.waiting_blocks:
        again.delivery.carry()
    stored = agent.stored | again.stored
    assert len(stored) == agent.taken - agent.spool.dropped_total
    assert sum(1 for measurement, _, _ in stored if measurement == "event") == agent.events
    again.spool.close()
