"""The form of a segment: records one after another, each able to prove that it is whole and to be found again after damage.

    "PSP1" | u32 payload bytes | u32 crc32 | u64 sequence | u64 base | u32 samples | i64 newest time, ns | payload

all little-endian; the CRC covers everything after itself. The payload is zlib-packed line protocol. Where `base` is not 0, the
lines of the record of that number, earlier in the same segment, were the dictionary: one second is much like the one before it,
which makes it a third as long.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry import lineprotocol
from telemetry.sample import Sample

MARKER = b"PSP1"
MAX_PAYLOAD_BYTES = 64 << 20
MAX_UNPACKED_BYTES = 256 << 20
DICTIONARY_BYTES = 32 << 10  # zlib looks no further back
_HEAD = struct.Struct("<4sII")
_BODY = struct.Struct("<QQIq")
OVERHEAD_BYTES = _HEAD.size + _BODY.size


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `payload` is still packed."""

    sequence: int
    samples: int
    newest_ns: int
    payload: bytes
    base: int = 0  # the record whose lines are the dictionary; 0 for none


@dataclass(frozen=True, slots=True)
class Scan:
    """What a segment holds. `damaged_bytes` were passed over; `torn_bytes` are the beginning of a record that a crash cut off."""

    records: tuple[Record, ...]
    damaged_bytes: int
    torn_bytes: int


def pack(lines: bytes, base: bytes = b"") -> bytes:
    """Packed lines; `base` holds lines that are alike."""
    packer = zlib.compressobj(3, zdict=base[-DICTIONARY_BYTES:]) if base else zlib.compressobj(3)
    return packer.compress(lines) + packer.flush()


def unpack(payload: bytes, base: bytes = b"") -> bytes:
    """The lines of a payload. ValueError for one that was not made by `pack` with the same base."""
    unpacker = zlib.decompressobj(zdict=base[-DICTIONARY_BYTES:]) if base else zlib.decompressobj()
    try:
        lines = unpacker.decompress(payload, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"payload: {error}") from None
    if not unpacker.eof:
        raise ValueError("payload: cut off, or too large unpacked")
    return lines


def to_lines(samples: Sequence[Sample]) -> bytes:
    """ValueError as `lineprotocol.encode`."""
    return lineprotocol.encode_many(samples).encode("utf-8")


def to_samples(lines: bytes) -> list[Sample]:
    """The inverse. ValueError for anything else."""
    return [lineprotocol.decode(line) for line in lines.decode("utf-8").split("\n") if line]


def encode(record: Record) -> bytes:
    body = _BODY.pack(record.sequence, record.base, record.samples, record.newest_ns) + record.payload
    return _HEAD.pack(MARKER, len(record.payload), zlib.crc32(body)) + body


def scan(data: bytes) -> Scan:
    """All whole records, whatever lies between them. Never raises."""
    records: list[Record] = []
    damaged = 0
    place = 0
    view = memoryview(data)
    while place < len(data):
        length, state = _record_at(view, place)
        if state == "whole":
            sequence, base, samples, newest_ns = _BODY.unpack_from(data, place + _HEAD.size)
            payload = data[place + OVERHEAD_BYTES : place + length]
            records.append(Record(sequence, samples, newest_ns, payload, base))
            place += length
            continue
        found = _next_whole(data, view, place + 1)
        if found < 0:
            if state == "torn":
                return Scan(tuple(records), damaged, len(data) - place)
            return Scan(tuple(records), damaged + len(data) - place, 0)
        damaged += found - place
        place = found
    return Scan(tuple(records), damaged, 0)


def _next_whole(data: bytes, view: memoryview, place: int) -> int:
    while (place := data.find(MARKER, place)) >= 0:
        if _record_at(view, place)[1] == "whole":
            return place
        place += 1
    return -1


def _record_at(view: memoryview, place: int) -> tuple[int, str]:
    """(length of the record, whole | torn | damaged)."""
    rest = len(view) - place
    if rest < OVERHEAD_BYTES:
        head = bytes(view[place : place + len(MARKER)])
        return 0, "torn" if MARKER.startswith(head) else "damaged"
    marker, payload_bytes, crc = _HEAD.unpack_from(view, place)
    if marker != MARKER or payload_bytes > MAX_PAYLOAD_BYTES:
        return 0, "damaged"
    length = OVERHEAD_BYTES + payload_bytes
    if length > rest:
        return length, "torn"
    if zlib.crc32(view[place + _HEAD.size : place + length]) != crc:
        return length, "damaged"
    return length, "whole"
