"""A lane: one ordered stream of blocks and the segment files that hold it. Events and alerts have a lane of their own."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from agent.spool.cursor import Delivered
from agent.spool.disk import Disk, write_whole
from agent.spool.segment import Record, encode, pack, scan, to_lines, to_samples, unpack
from telemetry.sample import Sample

log = logging.getLogger(__name__)

KEEP, DATA = "keep", "data"
KEPT_MEASUREMENTS = frozenset({"event", "alert", "verdict"})
"""Never dropped for want of room."""

_NAME = re.compile(r"(keep|data)-(\d{12,20})(?:-\d+)?\.seg")
_QUARANTINED = 4
_BASE_EVERY = 64
"""A record on its own is followed by so many that lean on it: damage to it costs about a minute. Events never lean on others."""


@dataclass(slots=True, eq=False)
class Block:
    """What one commit put into one lane: samples that are written, delivered and forgotten together."""

    lane: str
    sequence: int
    count: int  # samples in it
    newest_ns: int  # wall time of the newest sample
    appended_s: float | None  # monotonic time at which the newest was appended; None when it comes from an earlier run
    decoded: list[Sample] | None  # None when only `packed` is kept, to spare memory
    packed: bytes = b""
    durable: bool = False
    reason: str = ""  # what keeps it from being durable
    settled: bool = False  # delivered, or dropped and counted
    unwritten: bool = True  # still to be written to disk

    def samples(self) -> list[Sample]:
        return self.decoded if self.decoded is not None else to_samples(unpack(self.packed))

    def lines(self) -> bytes:
        return to_lines(self.decoded) if self.decoded is not None else unpack(self.packed)

    def spare_memory(self) -> None:
        """Keep the packed form only."""
        if self.decoded is not None:
            self.packed = pack(self.lines())
            self.decoded = None


@dataclass(slots=True, eq=False)
class Segment:
    path: Path
    first: int  # sequence of its first record
    last: int
    size: int
    damaged: bool = False
    samples: int = 0  # that this run has written


class Lane:
    """The segments of one lane, oldest first. A segment of an earlier run is never written to again, so a torn tail needs no repair.

    Not thread-safe: the spool guards `delivered` and `next_sequence` by one lock, the files by another.
    """

    def __init__(self, name: str, folder: Path, disk: Disk) -> None:
        self.name = name
        self.delivered = Delivered()
        self.segments: list[Segment] = []
        self.next_sequence = 1
        self._folder = folder
        self._disk = disk
        self._descriptor: int | None = None  # of the last segment while it is written to
        self._identity: tuple[int, int] | None = None  # of its file
        self._synced = (0, 0)  # size and last sequence of that segment that are on the medium
        self._base: tuple[int, bytes] | None = None  # sequence and lines of the record that others lean on
        self._leaning = 0
        self._last_scan: tuple[Path, int, tuple[Record, ...]] | None = None
        self._last_base: tuple[Path, int, bytes] | None = None

    @property
    def size(self) -> int:
        return sum(segment.size for segment in list(self.segments))

    @property
    def active_size(self) -> int:
        """Bytes in the segment that is being written; 0 when none is."""
        return 0 if self._descriptor is None else self.segments[-1].size

    @property
    def waiting_blocks(self) -> int:
        """Blocks that are neither delivered nor dropped."""
        return self.delivered.missing(self.next_sequence - 1)

    @property
    def sealed(self) -> list[Segment]:
        return list(self.segments if self._descriptor is None else self.segments[:-1])

    # --- from an earlier run

    def adopt(self, paths: list[Path], delivered: Delivered) -> None:
        """Take over the segment files of earlier runs; only the newest is read. OSError of that one file is survived."""
        self.delivered = delivered
        named = sorted((max(1, int(found[2])), path) for path in paths if (found := _NAME.fullmatch(path.name)))
        for first, path in named:
            with contextlib.suppress(OSError):
                self.segments.append(Segment(path, first, first, path.stat().st_size))
        for segment, after in zip(self.segments, self.segments[1:], strict=False):
            segment.last = max(segment.first, after.first - 1)
        highest = delivered.highest
        if self.segments:
            newest = self.segments[-1]
            numbers = [record.sequence for record in self.records(newest)]
            newest.last = max([newest.first, *numbers])
            highest = max(highest, newest.last)
        self.next_sequence = highest + 1
        expected = 1
        for segment in self.segments:
            delivered.add(expected, segment.first - 1)
            expected = segment.last + 1
        delivered.add(expected, highest)

    def records(self, segment: Segment) -> tuple[Record, ...]:
        """What a segment holds, also of one that is being written. Damage is noted and passed over; numbers that are missing from
        a sealed segment count as delivered, for they will never come."""
        if self._last_scan is not None and self._last_scan[:2] == (segment.path, segment.size):
            return self._last_scan[2]
        active = self._descriptor is not None and segment is self.segments[-1]
        try:
            data = self._disk.read(segment.path)
        except OSError as error:
            log.warning("spool: %s can't be read (%s); its samples are lost", segment.path, error.strerror)
            data = b""
            segment.damaged = True
        found = scan(data[: segment.size] if active else data)
        if found.damaged_bytes and not segment.damaged:
            segment.damaged = True
            log.warning(
                "spool: %s has %d damaged bytes; its %d whole records are used",
                segment.path,
                found.damaged_bytes,
                len(found.records),
            )
        self._last_scan = (segment.path, segment.size, found.records)
        return found.records

    def samples(self, segment: Segment, record: Record) -> list[Sample]:
        """What one record holds. ValueError when it, or the one that it leans on, is damaged."""
        if record.base == 0:
            return to_samples(unpack(record.payload))
        if self._last_base is None or self._last_base[:2] != (segment.path, record.base):
            base = next((r for r in self.records(segment) if r.sequence == record.base and r.base == 0), None)
            if base is None:
                raise ValueError(f"the record {record.base} that it leans on is damaged")
            self._last_base = (segment.path, record.base, unpack(base.payload))
        return to_samples(unpack(record.payload, self._last_base[2]))

    # --- writing

    def write(self, block: Block, segment_bytes: int) -> None:
        """Append to the newest segment. After an OSError nothing of the block is in it."""
        lines = block.lines()
        if self._descriptor is not None and self.segments[-1].size >= segment_bytes:
            self.seal()
        if self._descriptor is None:
            self._begin(block.sequence)
        assert self._descriptor is not None
        segment = self.segments[-1]
        if self._leaning >= _BASE_EVERY or self.name == KEEP:
            self._base = None
        number, base = self._base or (0, b"")
        record = encode(Record(block.sequence, block.count, block.newest_ns, pack(lines, base), number))
        try:
            write_whole(self._disk, self._descriptor, record)
        except OSError:
            try:
                self._disk.truncate(self._descriptor, segment.size)
            except OSError:
                self.seal()  # a torn record at the end of a sealed segment does no harm
            raise
        segment.size += len(record)
        segment.samples += block.count
        segment.last = block.sequence
        self._leaning += 1
        if self._base is None:
            self._base, self._leaning = (block.sequence, lines), 0

    def _begin(self, sequence: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)  # someone may have removed it
        path = self._folder / f"{self.name}-{sequence:012d}.seg"
        number = 1
        while path.exists():
            path = self._folder / f"{self.name}-{sequence:012d}-{number}.seg"
            number += 1
        self._descriptor = self._disk.create(path)
        self._identity = self._disk.identity(path)
        self.segments.append(Segment(path, sequence, sequence, 0))
        self._synced = (0, sequence)
        try:
            self._disk.sync_folder(self._folder)
        except OSError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Seal the newest segment; an empty one goes."""
        self.seal()
        if self.segments[-1].size == 0:
            with contextlib.suppress(OSError):
                self._disk.unlink(self.segments[-1].path)
            self.segments.pop()

    def sync(self) -> None:
        """What was written is on the medium when it returns. After an OSError the segment is cut back to what was there before:
        a failed sync may have thrown the pages away, and a second one would lie."""
        if self._descriptor is None or self._synced[0] == self.segments[-1].size:
            return
        segment = self.segments[-1]
        try:
            self._disk.sync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.truncate(self._descriptor, self._synced[0])
            segment.size, segment.last = self._synced
            self._abandon()
            raise
        self._synced = (segment.size, segment.last)

    def seal(self) -> None:
        self._base = None
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._disk.close(self._descriptor)
            self._descriptor = None

    # --- removing

    def take_away_missing(self) -> list[Segment]:
        """The segments whose files somebody removed, which are segments no longer; the one that was being written is sealed."""
        if self._descriptor is not None and self._disk.identity(self.segments[-1].path) != self._identity:
            self.seal()
        missing = [segment for segment in self.sealed if self._disk.identity(segment.path) is None]
        self.segments = [segment for segment in self.segments if segment not in missing]
        return missing

    @property
    def is_in_place(self) -> bool:
        """Whether the file that is being written, if any, is still where it was made."""
        return self._descriptor is None or self._disk.identity(self.segments[-1].path) == self._identity

    def finished(self, delivered: Delivered) -> list[Segment]:
        """Sealed segments of which everything is delivered."""
        return [segment for segment in self.sealed if delivered.covers(segment.first, segment.last)]

    def remove(self, segment: Segment, *, keep_damaged: bool = True) -> None:
        """Unlink; a few damaged ones are put aside for whoever looks into it. OSError leaves it for the next time."""
        if not (segment.damaged and keep_damaged and self._put_aside(segment)):
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(segment.path)
        self.segments.remove(segment)

    def _put_aside(self, segment: Segment) -> bool:
        aside = self._folder / "damaged"
        try:
            aside.mkdir(exist_ok=True)
            kept = sorted(aside.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in kept[: max(0, len(kept) - _QUARANTINED + 1)]:
                self._disk.unlink(old)
            self._disk.replace(segment.path, aside / segment.path.name)
        except OSError:
            return False
        return True


def lane_of(sample: Sample) -> str:
    return KEEP if sample.measurement in KEPT_MEASUREMENTS else DATA


def segment_files(folder: Path) -> dict[str, list[Path]]:
    """The segment files in a folder, by lane."""
    found: dict[str, list[Path]] = {KEEP: [], DATA: []}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name and path.is_file():
            found[name[1]].append(path)
    return found
