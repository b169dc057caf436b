"""The spool: what was sampled, kept until it is delivered, whatever happens to the process, the disk or the store meanwhile."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.quiet import QuietLog
from agent.spool.disk import Disk
from agent.spool.journal import Journal
from agent.spool.lane import DATA, Block, lane_of
from agent.spool.rejected import RejectedFile
from telemetry.messages import say
from telemetry.sample import Sample

log = logging.getLogger(__name__)

PENDING_SAMPLES = 100_000
CLOSE_S = 2.0
TIDY_EVERY_S = 5.0
"""Noting what was delivered replaces and syncs a file; once every few seconds is enough, since it only saves repetition."""


class SpoolError(Exception):
    """The spool can't be opened. One line: the folder, what is wrong, and the remedy."""

    def __init__(self, key: str, folder: Path, **values: object) -> None:
        self.key, self.values = f"agent.spool.{key}", {"folder": folder, **values}
        super().__init__(self.told("en"))

    def told(self, language: str) -> str:
        return say(self.key, language, **self.values)


class Spool:
    """Segments of line protocol in `folder`, written and synced together once every `commit_every_s`.

    A sample is *acknowledged* once it is synced: from then on it survives a crash of the process and a power cut, and is delivered
    at least once. Of what is not acknowledged, a crash loses at most `commit_every_s`. When there is no room (`max_bytes`, or less
    free disk than `min_free_bytes`), the oldest samples go first and are counted in `dropped`; events, alerts and verdicts never
    go. On a full disk samples stay in memory, up to `memory_bytes` packed, and are delivered from there.

    `after_commit` hears of the highest ticket that is acknowledged, on the thread that commits; `on_removed`,
    there too, when somebody has removed the files, with how many samples were nowhere else.

    `append` never waits for the disk. SpoolError if the folder can't be used or another process uses it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int = 1 << 30,
        min_free_bytes: int | None = None,  # None: the smaller of 1 GiB and a tenth of the file system
        segment_bytes: int | None = None,
        memory_bytes: int = 16 << 20,
        commit_every_s: float | None = 1.0,  # None: only when commit() is called
        after_commit: Callable[[int], None] = lambda _acknowledged: None,
        on_removed: Callable[[int], None] = lambda _lost: None,
        disk: Disk | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder)
        self._monotonic = monotonic
        self._after_commit = after_commit
        self._on_removed = on_removed
        self._pending: list[Sample] = []
        self._appended = 0  # tickets given out
        self._acknowledged = 0
        self._woken = False
        self._closed = False
        self._newest_appended_s: float | None = None
        self._newest_delivered_s: float | None = None
        self._started_s = monotonic()
        self._quiet = QuietLog(log, monotonic)
        self._lock_file = self._open_folder()
        self.rejected_file = RejectedFile(self.folder)
        self._journal = Journal(
            self.folder,
            disk or Disk(),
            self._quiet,
            monotonic,
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            segment_bytes=segment_bytes or max(4096, min(4 << 20, max_bytes // 16)),
            memory_bytes=memory_bytes,
        )
        self._memory = self._journal.memory
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        if commit_every_s is not None:
            self._commit_every_s = commit_every_s
            self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
            self._thread.start()

    def _open_folder(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SpoolError("unwritable", self.folder, reason=reason, uid=os.getuid()) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise SpoolError("in_use", self.folder) from None
        return descriptor

    # --- for whoever samples

    def append(self, samples: Iterable[Sample]) -> int:
        """Take samples; a ticket that `wait_durable` understands. Never waits for the disk."""
        batch = list(samples)
        with self._memory:
            if self._closed:
                raise SpoolError("closed", self.folder)
            self._pending += batch
            self._newest_appended_s = self._monotonic()
            self._appended += 1
            if len(self._pending) > PENDING_SAMPLES:  # the disk has been stuck for a long time
                spare = len(self._pending) - PENDING_SAMPLES
                kept: list[Sample] = []
                for sample in self._pending:
                    if spare > 0 and lane_of(sample) == DATA:
                        spare -= 1
                        self._journal.dropped["memory"] += 1
                    else:
                        kept.append(sample)
                self._pending = kept
            return self._appended

    @property
    def acknowledged(self) -> int:
        """The highest ticket up to which all samples are on the medium (or delivered already, or dropped and counted)."""
        with self._memory:
            return self._acknowledged

    def wait_durable(self, ticket: int, timeout_s: float) -> bool:
        """Wait until `ticket` is acknowledged; False when the time is up before."""
        self._hurry.set()
        with self._memory:
            return self._memory.wait_for(lambda: self._acknowledged >= ticket, timeout_s)

    # --- for the delivery

    def wait(self, timeout_s: float) -> bool:
        """Wait until something is to be delivered, `wake` is called, or the time is up; whether something is."""
        with self._memory:
            self._memory.wait_for(lambda: self._woken or self._journal.waiting > 0, timeout_s)
            self._woken = False
            return self._journal.waiting > 0

    def wake(self) -> None:
        with self._memory:
            self._woken = True
            self._memory.notify_all()

    def live(self, limit: int) -> list[Block]:
        """The newest blocks that are still in memory, up to about `limit` samples, oldest first."""
        with self._memory:
            return self._journal.live.newest(limit)

    def backlog(self, limit: int) -> list[Block]:
        """Blocks that are on disk only, newest first: events and alerts before the rest; about `limit` samples, oldest first."""
        return self._journal.backlog(limit)

    def delivered(self, blocks: Sequence[Block], held_s: float = 0.0) -> None:
        """The store has these. For `held_s` it may still lose them: so long they stay on disk, a spool that is opened again gives
        them out again, and so does this one after `give_out_again`.
        """
        with self._memory:
            self._journal.settle(blocks, held_s)
            for block in blocks:
                if block.appended_s is not None:
                    self._newest_delivered_s = max(self._newest_delivered_s or block.appended_s, block.appended_s)

    def give_out_again(self) -> None:
        """The store may have lost what it acknowledged and could still lose."""
        with self._memory:
            self._journal.give_out_again()
            self._memory.notify_all()

    # --- numbers

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._journal.size_bytes

    @property
    def dropped(self) -> Counter[str]:
        """Samples given up, by reason: spool_full, disk_low, disk_full, disk_error, memory, removed."""
        return self._journal.dropped

    @property
    def dropped_total(self) -> int:
        return sum(self._journal.dropped.values())

    @property
    def refused_total(self) -> int:
        """Samples and fields that the catalogue or line protocol don't take."""
        return self._journal.refused_total

    @property
    def disk_errors_total(self) -> int:
        return self._journal.disk_errors_total

    @property
    def waiting_blocks(self) -> int:
        """Commits that are not delivered yet; about one a second and lane."""
        with self._memory:
            return self._journal.waiting

    @property
    def lag_s(self) -> float:
        """Seconds by which the newest delivered sample is behind the newest appended one."""
        with self._memory:
            if self._newest_appended_s is None:
                return 0.0
            since = self._newest_delivered_s if self._newest_delivered_s is not None else self._started_s
            return max(0.0, self._newest_appended_s - since)

    # --- committing

    def _run(self) -> None:
        tidied_s = -math.inf
        while not self._stop.is_set():
            self._hurry.wait(self._commit_every_s)
            self._hurry.clear()
            now_s = time.monotonic()
            is_due = now_s - tidied_s >= TIDY_EVERY_S
            tidied_s = now_s if is_due else tidied_s
            try:
                self.commit(tidy=is_due)
            except Exception as error:
                self._journal.disk_errors_total += 1
                self._quiet.warning("commit", "spool %s: a commit failed and is tried again", self.folder, error=error)

    def commit(self, *, tidy: bool = True) -> bool:
        """Write and sync what is pending; with `tidy`, remember what was delivered and remove what is not needed. True when all is
        durable. What was delivered and is not remembered yet is delivered once more after a crash, which is harmless.
        """
        with self._journal.files:
            self._follow()
            with self._memory:
                batch, self._pending = self._pending, []
                ticket = self._appended
                appended_s = self._newest_appended_s
            durable = self._journal.commit(batch, appended_s)
            with self._memory:
                if durable:
                    self._acknowledged = ticket
                self._memory.notify_all()
            if tidy:
                self._journal.tidy()
        if durable:
            self._after_commit(ticket)
        return durable

    def _follow(self) -> None:
        """Go on where somebody has removed the folder or what is in it."""
        lost = self._journal.follow()
        if lost is None:
            return
        log.warning("spool %s: its files were removed; %d samples were nowhere else", self.folder, lost)
        try:
            lock_file = self._open_folder()
        except SpoolError as error:  # only the lock is in place, or another agent took it
            log.warning("%s", error)
        else:
            os.close(self._lock_file)
            self._lock_file = lock_file
        self._on_removed(lost)

    def close(self) -> bool:
        """Commit what is pending and let go of the folder; True when everything is durable or delivered. Idempotent."""
        with self._memory:
            if self._closed:
                return True
            self._closed = True
        self._stop.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)
        if not self._journal.files.acquire(timeout=CLOSE_S):
            log.warning("spool %s: the disk doesn't answer; the last samples may be lost", self.folder)
            return False
        try:
            durable = self.commit()
            self._journal.seal()
            os.close(self._lock_file)
            return durable
        finally:
            self._journal.files.release()
