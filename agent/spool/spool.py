"""The spool: what was sampled, kept until it is delivered, whatever happens to the process, the disk or the store meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.quiet import QuietLog
from agent.spool import cursor
from agent.spool.disk import Disk
from agent.spool.lane import DATA, KEEP, Block, Lane, Segment, lane_of, segment_files
from agent.spool.live import Live
from agent.spool.rejected import RejectedFile
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.sample import Sample
from telemetry.store.admission import admit

log = logging.getLogger(__name__)

BLOCK_SAMPLES = 2000
LIVE_SAMPLES = 3000
"""So many samples stay in memory for the delivery; older ones are read from disk."""
PENDING_SAMPLES = 100_000
CLOSE_S = 2.0


class SpoolError(Exception):
    """The spool can't be opened. One line: the folder, what is wrong, and the remedy."""


class Spool:
    """Segments of line protocol in `folder`, written and synced together once every `commit_every_s`.

    A sample is *acknowledged* once it is synced: from then on it survives a crash of the process and a power cut, and is delivered
    at least once. Of what is not acknowledged, a crash loses at most `commit_every_s`. When there is no room (`max_bytes`, or less
    free disk than `min_free_bytes`), the oldest samples go first and are counted in `dropped`; events, alerts and verdicts never
    go. On a full disk samples stay in memory, up to `memory_bytes` packed, and are delivered from there.

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
        disk: Disk | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(folder)
        self.dropped: Counter[str] = Counter()  # samples by reason: spool_full, disk_low, disk_full, disk_error, memory
        self.refused_total = 0  # samples and fields that the catalogue or line protocol don't take
        self.disk_errors_total = 0
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._segment_bytes = segment_bytes or max(4096, min(4 << 20, max_bytes // 16))
        self._disk = disk or Disk()
        self._monotonic = monotonic
        # two locks, taken in this order: one for the files, held while the disk works, and one for what is in memory, never held so
        self._committing = threading.RLock()
        self._changed = threading.Condition()
        self._pending: list[Sample] = []
        self._appended = 0  # tickets given out
        self._acknowledged = 0
        self._live = Live(LIVE_SAMPLES, memory_bytes)
        self._unwritten: list[Block] = []  # the commit's own
        self._cursor_dirty = False
        self._woken = False
        self._closed = False
        self._newest_appended_s: float | None = None
        self._newest_delivered_s: float | None = None
        self._started_s = monotonic()
        self._quiet = QuietLog(log, monotonic)
        self._lock_file = self._open_folder()
        self.rejected_file = RejectedFile(self.folder)
        self._lanes = {name: Lane(name, self.folder, self._disk) for name in (KEEP, DATA)}
        self._adopt()
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
            raise SpoolError(
                f"spool {self.folder}: {error.strerror or error}; let uid {os.getuid()} write there, or name another folder"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise SpoolError(
                f"spool {self.folder}: another process uses it; give each agent a folder of its own"
            ) from None
        return descriptor

    def _adopt(self) -> None:
        path = self.folder / "delivered"
        try:
            delivered = cursor.load(self._disk, path)
        except (ValueError, TypeError, AttributeError, OSError) as error:
            log.warning("spool: %s is damaged (%s); what is in the spool is delivered once more", path, error)
            delivered = {}
            with contextlib.suppress(OSError):
                self._disk.replace(path, path.with_name("delivered.damaged"))
        files = segment_files(self.folder)
        for name, lane in self._lanes.items():
            lane.adopt(files[name], delivered.get(name, cursor.Delivered()))
        self._settle_holes()

    # --- for whoever samples

    def append(self, samples: Iterable[Sample]) -> int:
        """Take samples; a ticket that `wait_durable` understands. Never waits for the disk."""
        batch = list(samples)
        with self._changed:
            if self._closed:
                raise SpoolError(f"spool {self.folder}: is closed")
            self._pending += batch
            self._newest_appended_s = self._monotonic()
            self._appended += 1
            if len(self._pending) > PENDING_SAMPLES:  # the disk has been stuck for a long time
                spare = len(self._pending) - PENDING_SAMPLES
                kept: list[Sample] = []
                for sample in self._pending:
                    if spare > 0 and lane_of(sample) == DATA:
                        spare -= 1
                        self.dropped["memory"] += 1
                    else:
                        kept.append(sample)
                self._pending = kept
            return self._appended

    @property
    def acknowledged(self) -> int:
        """The highest ticket up to which all samples are on the medium (or delivered already, or dropped and counted)."""
        with self._changed:
            return self._acknowledged

    def wait_durable(self, ticket: int, timeout_s: float) -> bool:
        """Wait until `ticket` is acknowledged; False when the time is up before."""
        self._hurry.set()
        with self._changed:
            return self._changed.wait_for(lambda: self._acknowledged >= ticket, timeout_s)

    # --- for the delivery

    def wait(self, timeout_s: float) -> bool:
        """Wait until something is to be delivered, `wake` is called, or the time is up; whether something is."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._waiting() > 0, timeout_s)
            self._woken = False
            return self._waiting() > 0

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def live(self, limit: int) -> list[Block]:
        """The newest blocks that are still in memory, up to about `limit` samples, oldest first."""
        with self._changed:
            return self._live.newest(limit)

    def backlog(self, limit: int) -> list[Block]:
        """Blocks that are on disk only, newest first: events and alerts before the rest; about `limit` samples, oldest first."""
        for name in (KEEP, DATA):
            chosen = self._backlog(self._lanes[name], limit)
            if chosen:
                return chosen[::-1]
        return []

    def _backlog(self, lane: Lane, limit: int) -> list[Block]:
        with self._committing:
            segments = list(lane.segments)
        chosen: list[Block] = []
        count = 0
        for segment in reversed(segments):
            with self._committing:
                if segment not in lane.segments or self._is_settled(lane, segment):
                    continue
                records = lane.records(segment)
                self._settle_missing(lane, segment)
            for record in reversed(records):
                with self._changed:
                    known = record.sequence in lane.delivered or (lane.name, record.sequence) in self._live
                if known:
                    continue
                if chosen and count + record.samples > limit:
                    return chosen
                block = Block(lane.name, record.sequence, record.samples, record.newest_ns, None, None)
                try:
                    with self._committing:
                        block.decoded = lane.samples(segment, record)
                except ValueError as error:
                    self._quiet.warning("decode", "spool: a record of %s can't be read: %s", segment.path, error)
                    segment.damaged = True
                    self.delivered([block])
                    continue
                chosen.append(block)
                count += record.samples
        return chosen

    def _is_settled(self, lane: Lane, segment: Segment) -> bool:
        with self._changed:
            return lane.delivered.covers(segment.first, segment.last)

    def delivered(self, blocks: Sequence[Block]) -> None:
        """These need not be kept any longer."""
        with self._changed:
            for block in blocks:
                self._settle(block)
                if block.appended_s is not None:
                    self._newest_delivered_s = max(self._newest_delivered_s or block.appended_s, block.appended_s)

    def _settle(self, block: Block) -> None:
        block.settled = True
        self._lanes[block.lane].delivered.add(block.sequence, block.sequence)
        self._live.remove(block)
        self._cursor_dirty = True

    # --- numbers

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(lane.size for lane in self._lanes.values())

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    @property
    def waiting_blocks(self) -> int:
        """Commits that are not delivered yet; about one a second and lane."""
        with self._changed:
            return self._waiting()

    def _waiting(self) -> int:
        return sum(lane.waiting_blocks for lane in self._lanes.values())

    @property
    def lag_s(self) -> float:
        """Seconds by which the newest delivered sample is behind the newest appended one."""
        with self._changed:
            if self._newest_appended_s is None:
                return 0.0
            since = self._newest_delivered_s if self._newest_delivered_s is not None else self._started_s
            return max(0.0, self._newest_appended_s - since)

    # --- committing

    def _run(self) -> None:
        while not self._stop.is_set():
            self._hurry.wait(self._commit_every_s)
            self._hurry.clear()
            try:
                self.commit()
            except Exception as error:
                self.disk_errors_total += 1
                self._quiet.warning("commit", "spool %s: a commit failed and is tried again", self.folder, error=error)

    def commit(self) -> bool:
        """Write and sync what is pending, remember what was delivered, remove what is not needed; True when all is durable."""
        with self._committing:
            with self._changed:
                batch, self._pending = self._pending, []
                ticket = self._appended
                appended_s = self._newest_appended_s
            blocks = self._blocks(batch, appended_s)
            with self._changed:
                self._live.add(blocks)
                self._unwritten = [block for block in self._unwritten + blocks if not block.settled]
            if self._unwritten:
                self._write_unwritten()
            with self._changed:
                self._drop_from_memory()
                self._unwritten = [block for block in self._unwritten if block.unwritten and not block.settled]
                if not self._unwritten:
                    self._acknowledged = ticket
                self._changed.notify_all()
            self._tidy()
            return not self._unwritten

    def _blocks(self, samples: Sequence[Sample], appended_s: float | None) -> list[Block]:
        admitted, refused = admit([_clean(sample) for sample in samples])
        if refused:
            self.refused_total += len(refused)
            self._quiet.warning(
                "refused", "spool: refused %d samples or fields, such as: %s", len(refused), refused[0].reason
            )
        blocks: list[Block] = []
        for name in (KEEP, DATA):
            lane = self._lanes[name]
            mine = [sample for sample in admitted if lane_of(sample) == name]
            for start in range(0, len(mine), BLOCK_SAMPLES):
                part = mine[start : start + BLOCK_SAMPLES]
                newest_ns = max(sample.time_ns for sample in part)
                with self._changed:
                    sequence, lane.next_sequence = lane.next_sequence, lane.next_sequence + 1
                blocks.append(Block(name, sequence, len(part), newest_ns, appended_s, part))
        return blocks

    def _write_unwritten(self) -> None:
        failed: dict[str, str] = {}  # lane -> why
        room = self._make_free_space()
        for block in sorted(self._unwritten, key=lambda block: (block.lane != KEEP, block.sequence)):
            if block.lane in failed:
                block.reason = failed[block.lane]
                continue
            if block.lane == DATA and not room:
                block.reason = "disk_low"
                continue
            try:
                self._write(block)
                block.unwritten = False
            except OSError as error:
                self._note(block, error)
                failed[block.lane] = block.reason
        for lane in self._lanes.values():
            mine = [block for block in self._unwritten if block.lane == lane.name and not block.unwritten]
            try:
                lane.sync()
            except OSError as error:
                for block in mine:
                    block.unwritten = True
                    self._note(block, error)
            else:
                for block in mine:
                    # written and given up again in one commit: it lives in memory only
                    block.durable = not block.reason

    def _note(self, block: Block, error: OSError) -> None:
        block.reason = "disk_full" if error.errno in _NO_ROOM else "disk_error"
        self.disk_errors_total += 1
        self._quiet.warning("write", "spool %s: %s; samples are kept in memory", self.folder, error.strerror or error)

    def _write(self, block: Block) -> None:
        """Write one block, and make room for it at the cost of the oldest data."""
        lane = self._lanes[block.lane]
        block.reason = ""
        while True:
            try:
                lane.write(block, self._segment_bytes)
                break
            except OSError as error:
                if error.errno == errno.EFBIG and lane.active_size:
                    lane.seal()  # a limit on the size of one file: the next one has room again
                elif error.errno not in _NO_ROOM or not self._drop_oldest("disk_full"):
                    raise
        while self.size_bytes > self._max_bytes and self._drop_oldest("spool_full"):
            pass

    def _make_free_space(self) -> bool:
        """Whether there is room for data, after the oldest data has gone if need be."""
        try:
            while True:
                free, total = self._disk.free(self.folder)
                least = self._min_free_bytes if self._min_free_bytes is not None else min(1 << 30, total // 10)
                if free >= least:
                    return True
                if not self._drop_oldest("disk_low"):
                    self._quiet.warning("free", "spool %s: less than %d MB of disk are free", self.folder, least >> 20)
                    return False
        except OSError:
            return True  # then the write itself will tell

    def _drop_oldest(self, reason: str) -> bool:
        """Give up the oldest segment of data; False when there is none. Samples that are in no other place are counted."""
        lane = self._lanes[DATA]
        if not lane.segments or lane.segments[0].size == 0:
            return False
        segment = lane.segments[0]
        if segment not in lane.sealed:
            lane.seal()
        records = lane.records(segment)
        try:
            lane.remove(segment, keep_damaged=False)
        except OSError:
            return False
        lost = 0
        with self._changed:
            for record in records:
                block = self._live.get(DATA, record.sequence)
                if block is not None:
                    block.durable, block.reason = False, reason  # still in memory, and delivered from there
                elif record.sequence not in lane.delivered:
                    lost += record.samples
            self._settle_span(lane, segment.first, segment.last)
        if lost:
            self.dropped[reason] += lost
            self._quiet.warning(
                reason, "spool %s: no room (%s), the oldest %d samples were dropped", self.folder, reason, lost
            )
        return True

    def _drop_from_memory(self) -> None:
        for block in self._live.trim():
            self.dropped[block.reason or "memory"] += block.count
            self._settle(block)
            self._quiet.warning("memory", "spool %s: memory is full too; the oldest samples are dropped", self.folder)

    def _tidy(self) -> None:
        """Remember what was delivered, then remove the segments that are not needed any longer, in this order."""
        for lane in self._lanes.values():
            if lane.segments and lane.segments[-1].size >= self._segment_bytes:
                lane.seal()
        with self._changed:
            finished = [(lane, segment) for lane in self._lanes.values() for segment in lane.finished()]
            dirty, self._cursor_dirty = self._cursor_dirty, False
            lanes = {name: cursor.Delivered(lane.delivered.runs) for name, lane in self._lanes.items()}
        if dirty:
            try:
                cursor.save(self._disk, self.folder / "delivered", lanes)
            except OSError as error:
                # on a full disk the segments must still go: a segment that is gone needs no cursor
                self._cursor_dirty = True
                self.disk_errors_total += 1
                self._quiet.warning(
                    "cursor", "spool %s: %s while noting what was delivered", self.folder, error.strerror or error
                )
                if error.errno not in _NO_ROOM:
                    return
        for lane, segment in finished:
            with contextlib.suppress(OSError):
                lane.remove(segment)

    def _settle_holes(self) -> None:
        for lane in self._lanes.values():
            if lane.segments:
                self._settle_missing(lane, lane.segments[-1])

    def _settle_missing(self, lane: Lane, segment: Segment) -> None:
        """Numbers that a sealed segment should hold and does not will never come."""
        if segment not in lane.sealed:
            return
        records = lane.records(segment)
        expected = segment.first
        with self._changed:
            highest = max((record.sequence for record in records), default=0)
            if highest >= lane.next_sequence:  # a file that was renamed
                lane.next_sequence, segment.last = highest + 1, highest
            for record in records:
                self._settle_span(lane, expected, record.sequence - 1)
                expected = max(expected, record.sequence + 1)
            self._settle_span(lane, expected, segment.last)

    def _settle_span(self, lane: Lane, first: int, last: int) -> None:
        if first <= last and not lane.delivered.covers(first, last):
            for span in self._live.spans_without(lane.name, first, last):
                lane.delivered.add(*span)
            self._cursor_dirty = True

    def close(self) -> bool:
        """Commit what is pending and let go of the folder; True when everything is durable or delivered. Idempotent."""
        with self._changed:
            if self._closed:
                return True
            self._closed = True
        self._stop.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)
        if not self._committing.acquire(timeout=CLOSE_S):
            log.warning("spool %s: the disk doesn't answer; the last samples may be lost", self.folder)
            return False
        try:
            durable = self.commit()
            for lane in self._lanes.values():
                lane.seal()
            self._tidy()
            os.close(self._lock_file)
            return durable
        finally:
            self._committing.release()


_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def _clean(sample: Sample) -> Sample:
    """Control characters in a text become spaces: an event that quotes a log keeps its words."""
    known = catalogue.MEASUREMENTS.get(sample.measurement)
    if known is None or all(not isinstance(v, str) or printable(v) == v for v in sample.fields.values()):
        return sample
    fields = {k: printable(v) if isinstance(v, str) else v for k, v in sample.fields.items()}
    return Sample(sample.measurement, sample.tags, fields, sample.time_ns)
