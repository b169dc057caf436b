"""The journal of the spool: which blocks wait, where they are kept, and which go first when there is no room."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.quiet import QuietLog
from agent.spool import cursor
from agent.spool.disk import Disk
from agent.spool.held import Held
from agent.spool.lane import DATA, KEEP, Block, Lane, Segment, lane_of, segment_files
from agent.spool.live import Live
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.sample import Sample
from telemetry.store.admission import admit

log = logging.getLogger(__name__)

BLOCK_SAMPLES = 2000
LIVE_SAMPLES = 3000
"""So many samples stay in memory for the delivery; older ones are read from disk."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM = (*_FULL, errno.EFBIG)
OWN_BYTES = 64 << 20
"""So much of the newest data, or a sixteenth of what is to stay free, leaves a disk that others fill only when it takes nothing more."""

_MAY_PASS = ("disk_full", "disk_low")
"""Want of room that others made, and may end."""


class Journal:
    """The two lanes in `folder` and the blocks in memory.

    Two locks, taken in this order: `files` guards the files and is held while the disk works; `memory` guards everything else and is
    never held so, because the sampling thread takes it.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        quiet: QuietLog,
        monotonic: Callable[[], float],
        *,
        max_bytes: int,
        min_free_bytes: int | None,
        segment_bytes: int,
        memory_bytes: int,
    ) -> None:
        self.files = threading.RLock()
        self.memory = threading.Condition()
        self.dropped: Counter[str] = Counter()
        self.refused_total = 0
        self.disk_errors_total = 0
        self.live = Live(LIVE_SAMPLES, memory_bytes)
        self.held = Held()
        self.lanes = {name: Lane(name, folder, disk) for name in (KEEP, DATA)}
        self._monotonic = monotonic
        self._folder = folder
        self._disk = disk
        self._quiet = quiet
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._segment_bytes = segment_bytes
        self._unwritten: list[Block] = []  # guarded by `files`
        self._cursor_dirty = False
        self._put_out_bytes = 0  # of segments that had to leave a full disk while their samples were in memory still
        self._adopt()
        self._place = disk.identity(folder)
        self._untold = 0  # samples that went with a folder which could not be made anew yet

    def _adopt(self) -> None:
        path = self._folder / "delivered"
        try:
            delivered = cursor.load(self._disk, path)
        except (ValueError, TypeError, AttributeError, OSError) as error:
            log.warning("spool: %s is damaged (%s); what is in the spool is delivered once more", path, error)
            delivered = {}
            with contextlib.suppress(OSError):
                self._disk.replace(path, path.with_name("delivered.damaged"))
        files = segment_files(self._folder)
        for name, lane in self.lanes.items():
            lane.adopt(files[name], delivered.get(name, cursor.Delivered()))
        self._settle_holes()

    @property
    def size_bytes(self) -> int:
        return sum(lane.size for lane in self.lanes.values())

    @property
    def waiting(self) -> int:
        """Blocks that are neither delivered nor dropped. For who holds `memory`."""
        return sum(lane.waiting_blocks for lane in self.lanes.values())

    def settle(self, blocks: Iterable[Block], held_s: float = 0.0) -> None:
        """These are delivered, or dropped and counted; for `held_s` the store may still lose them. For who holds `memory`."""
        until_s = self._monotonic() + held_s
        for block in blocks:
            block.settled = True
            if held_s > 0:
                self.held.add(block, until_s)
            self.lanes[block.lane].delivered.add(block.sequence, block.sequence)
            self.live.remove(block)
            self._cursor_dirty = True

    def give_out_again(self) -> None:
        """What the store may still lose is waiting once more. For who holds `memory`."""
        taken = self.held.take_all()
        for block in taken.values():
            if block is not None and not block.durable:
                block.settled = False
                self.live.add([block])
        for name, lane in self.lanes.items():
            lane.delivered = lane.delivered.without(sequence for place, sequence in taken if place == name)

    # --- reading

    def backlog(self, limit: int) -> list[Block]:
        """Blocks that are on disk only, newest first: events and alerts before the rest; about `limit` samples, oldest first."""
        for name in (KEEP, DATA):
            chosen = self._backlog(self.lanes[name], limit)
            if chosen:
                return chosen[::-1]
        return []

    def _backlog(self, lane: Lane, limit: int) -> list[Block]:
        with self.files:
            segments = list(lane.segments)
        chosen: list[Block] = []
        count = 0
        for segment in reversed(segments):
            with self.files:
                if segment not in lane.segments or self._is_settled(lane, segment):
                    continue
                records = lane.records(segment)
                self._settle_missing(lane, segment)
            for record in reversed(records):
                with self.memory:
                    known = record.sequence in lane.delivered or (lane.name, record.sequence) in self.live
                if known:
                    continue
                if chosen and count + record.samples > limit:
                    return chosen
                block = Block(lane.name, record.sequence, record.samples, record.newest_ns, None, None, durable=True)
                try:
                    with self.files:
                        block.decoded = lane.samples(segment, record)
                except ValueError as error:
                    self._quiet.warning("decode", "spool: a record of %s can't be read: %s", segment.path, error)
                    segment.damaged = True
                    with self.memory:
                        self.settle([block])
                    continue
                chosen.append(block)
                count += record.samples
        return chosen

    def _is_settled(self, lane: Lane, segment: Segment) -> bool:
        with self.memory:
            return lane.delivered.covers(segment.first, segment.last)

    # --- writing

    def follow(self) -> int | None:
        """If somebody took away the folder, or a file that is being written, make the folder anew. None where nothing is missing,
        else how many samples were on disk only; those that are in memory too will be written again. For who holds `files`.
        """
        try:
            if self._disk.identity(self._folder) == self._place and all(
                lane.is_in_place for lane in self.lanes.values()
            ):
                return None
            for lane in self.lanes.values():
                for segment in lane.take_away_missing():
                    lost = self._give_up(lane, segment)
                    self.dropped["removed"] += lost
                    self._untold += lost
            self._folder.mkdir(parents=True, exist_ok=True)
            self._place = self._disk.identity(self._folder)
        except (
            OSError
        ) as error:  # it can't be looked at, or not be made: samples stay in memory, and the next commit tries again
            self.disk_errors_total += 1
            self._quiet.warning("folder", "spool %s: %s", self._folder, error.strerror or error)
            return None
        self._cursor_dirty = True
        lost, self._untold = self._untold, 0
        return lost

    def _give_up(self, lane: Lane, segment: Segment) -> int:
        """The file is gone: write again what is in memory; how many samples are not."""
        with self.memory:
            spans = self.live.spans_without(lane.name, segment.first, segment.last)
            held = [block for n in range(segment.first, segment.last + 1) if (block := self.live.get(lane.name, n))]
            blocks = sum(lane.delivered.missing(last, first) for first, last in spans)
            self._settle_span(lane, segment.first, segment.last)
            self.held.forget(lane.name, segment.first, segment.last)
            for block in held:
                block.durable, block.unwritten = False, True
        self._unwritten = sorted({*self._unwritten, *held}, key=lambda block: (block.lane, block.sequence))
        return max(blocks, round(segment.samples * blocks / (segment.last - segment.first + 1)))

    def commit(self, samples: Sequence[Sample], appended_s: float | None) -> bool:
        """Write and sync the samples and what was left over; True when nothing is left unwritten. For who holds `files`."""
        again = self._put_out() if self._is_room_again() else []
        blocks = self._blocks(samples, appended_s)
        with self.memory:
            self.live.add(blocks)
            self._unwritten = [block for block in again + self._unwritten + blocks if self._is_wanted(block)]
        if self._unwritten:
            self._write_unwritten()
        with self.memory:
            self._drop_from_memory()
            self._unwritten = [block for block in self._unwritten if block.unwritten and self._is_wanted(block)]
        return not self._unwritten

    def _is_wanted(self, block: Block) -> bool:
        """Whether it must be on disk. For who holds `memory`."""
        return not block.settled or block in self.held

    def _is_room_again(self) -> bool:
        """Whether all that was put out of a full disk, and is in memory still, fits there again."""
        if not self._put_out_bytes:
            return False
        try:
            free, least = self._free()
        except OSError:
            return False
        return free - least >= self._put_out_bytes

    def _put_out(self) -> list[Block]:
        """What was put out of a full disk and is in memory still, to be written once more: under new numbers, for those in a
        segment ascend."""
        self._put_out_bytes = 0
        with self.memory:
            found = [block for block in self.live.only_here() if not block.unwritten and block.reason in _MAY_PASS]
            for block in found:
                lane = self.lanes[block.lane]
                lane.delivered.add(block.sequence, block.sequence)
                block.sequence, lane.next_sequence = lane.next_sequence, lane.next_sequence + 1
                block.unwritten = True
            self.live.renumber()
        return found

    def seal(self) -> None:
        """Let go of the files; what is in memory only is given up and counted. For who holds `files`."""
        with self.memory:
            left = self.live.only_here()
            for block in left:
                self.dropped[block.reason or "memory"] += block.count
            self.settle(left)
        if left:
            count = sum(block.count for block in left)
            log.warning("spool %s: ends with %d samples that no disk took, which are lost", self._folder, count)
        for lane in self.lanes.values():
            lane.seal()
        self.tidy()

    def _blocks(self, samples: Sequence[Sample], appended_s: float | None) -> list[Block]:
        admitted, refused = admit([_clean(sample) for sample in samples])
        if refused:
            self.refused_total += len(refused)
            self._quiet.warning(
                "refused", "spool: refused %d samples or fields, such as: %s", len(refused), refused[0].reason
            )
        blocks: list[Block] = []
        for name in (KEEP, DATA):
            lane = self.lanes[name]
            mine = [sample for sample in admitted if lane_of(sample) == name]
            for start in range(0, len(mine), BLOCK_SAMPLES):
                part = mine[start : start + BLOCK_SAMPLES]
                newest_ns = max(sample.time_ns for sample in part)
                with self.memory:
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
        for lane in self.lanes.values():
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
        self._quiet.warning("write", "spool %s: %s; samples are kept in memory", self._folder, error.strerror or error)

    def _write(self, block: Block) -> None:
        """Write one block, and make room for it at the cost of the oldest data."""
        lane = self.lanes[block.lane]
        block.reason = ""
        while True:
            try:
                lane.write(block, self._segment_bytes)
                break
            except OSError as error:
                if error.errno == errno.EFBIG and lane.active_size:
                    lane.seal()  # a limit on the size of one file: the next one has room again
                elif error.errno not in _FULL or not self._drop_oldest("disk_full"):
                    raise
        while self.size_bytes > self._max_bytes and self._drop_oldest("spool_full"):
            pass

    def _make_free_space(self) -> bool:
        """Whether there is room for data, after the oldest data has gone if need be: down to the share that is always its own."""
        try:
            while True:
                free, least = self._free()
                if free >= least:
                    return True
                self._quiet.warning("free", "spool %s: less than %.1f MB of disk are free", self._folder, least / 1e6)
                if self.lanes[DATA].size <= min(OWN_BYTES, least // 16):
                    return True  # whoever fills the disk gains nothing by what would be lost here
                if not self._drop_oldest("disk_low"):
                    return False
        except OSError:
            return True  # then the write itself will tell

    def _free(self) -> tuple[int, int]:
        """(bytes that are free, bytes that must stay so). OSError."""
        free, total = self._disk.free(self._folder)
        return free, self._min_free_bytes if self._min_free_bytes is not None else min(1 << 30, total // 10)

    def _drop_oldest(self, reason: str) -> bool:
        """Give up the oldest segment of data; False when there is none. Samples that are in no other place are counted."""
        lane = self.lanes[DATA]
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
        lost, is_in_memory = 0, False
        with self.memory:
            for record in records:
                block = self.live.get(DATA, record.sequence)
                if block is not None:
                    block.durable, block.reason = False, reason  # still in memory, and delivered from there
                    is_in_memory = True
                elif record.sequence not in lane.delivered:
                    lost += record.samples
            self._settle_span(lane, segment.first, segment.last)
            self.held.forget(DATA, segment.first, segment.last)
        if is_in_memory and reason in _MAY_PASS:
            self._put_out_bytes += segment.size
        if lost:
            self.dropped[reason] += lost
            self._quiet.warning(
                reason, "spool %s: no room (%s), the oldest %d samples were dropped", self._folder, reason, lost
            )
        return True

    def _drop_from_memory(self) -> None:
        for block in self.live.trim():
            self.dropped[block.reason or "memory"] += block.count
            self.settle([block])
            self._quiet.warning("memory", "spool %s: memory is full too; the oldest samples are dropped", self._folder)

    def tidy(self) -> None:
        """Remember what was delivered, then remove the segments that are not needed any longer, in this order."""
        for lane in self.lanes.values():
            if lane.segments and lane.segments[-1].size >= self._segment_bytes:
                lane.seal()
        with self.memory:
            dirty = self.held.release(self._monotonic()) or self._cursor_dirty
            self._cursor_dirty = False
            lanes = {name: lane.delivered.without(self.held.numbers(name)) for name, lane in self.lanes.items()}
            finished = [(lane, s) for name, lane in self.lanes.items() for s in lane.finished(lanes[name])]
        if dirty:
            try:
                cursor.save(self._disk, self._folder / "delivered", lanes)
            except OSError as error:
                # on a full disk the segments must still go: a segment that is gone needs no cursor
                self._cursor_dirty = True
                self.disk_errors_total += 1
                self._quiet.warning(
                    "cursor", "spool %s: %s while noting what was delivered", self._folder, error.strerror or error
                )
                if error.errno not in _NO_ROOM:
                    return
        for lane, segment in finished:
            with contextlib.suppress(OSError):
                lane.remove(segment)

    def _settle_holes(self) -> None:
        for lane in self.lanes.values():
            if lane.segments:
                self._settle_missing(lane, lane.segments[-1])

    def _settle_missing(self, lane: Lane, segment: Segment) -> None:
        """Numbers that a sealed segment should hold and does not will never come."""
        if segment not in lane.sealed:
            return
        records = lane.records(segment)
        expected = segment.first
        with self.memory:
            highest = max((record.sequence for record in records), default=0)
            if highest >= lane.next_sequence:  # a file that was renamed
                lane.next_sequence, segment.last = highest + 1, highest
            for record in records:
                self._settle_span(lane, expected, record.sequence - 1)
                expected = max(expected, record.sequence + 1)
            self._settle_span(lane, expected, segment.last)

    def _settle_span(self, lane: Lane, first: int, last: int) -> None:
        if first <= last and not lane.delivered.covers(first, last):
            for span in self.live.spans_without(lane.name, first, last):
                lane.delivered.add(*span)
            self._cursor_dirty = True


def _clean(sample: Sample) -> Sample:
    """Control characters in a text become spaces: an event that quotes a log keeps its words."""
    known = catalogue.MEASUREMENTS.get(sample.measurement)
    if known is None or all(not isinstance(v, str) or printable(v) == v for v in sample.fields.values()):
        return sample
    fields = {k: printable(v) if isinstance(v, str) else v for k, v in sample.fields.items()}
    return Sample(sample.measurement, sample.tags, fields, sample.time_ns)
