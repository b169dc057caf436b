"""The form in which a request and its KV cache travel: versioned, with a checksum, and checked field by field on arrival."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from engine.queue import PRIORITIES
from engine.request import Sampling

MAGIC = b"PSKV"
VERSION = 1
_HEAD = struct.Struct("<4sHI")  # magic, version, bytes of the JSON header
CHECKSUM_BYTES = 32
HEADER_LIMIT_BYTES = 1 << 20
PIECE_BYTES = 1 << 18
_SEED = 1 << 64


class ParcelError(ValueError):
    """What came is no parcel of this form, in one line."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One request on its way. `computed` of its `tokens` have K and V in `cache`. A draw depends on seed and position only, so
    that `sampling` and the number of output tokens are the whole state of its generator.
    """

    identity: Mapping[str, object]  # see engine.assembly.Assembled
    tokens: tuple[int, ...]  # prompt and output
    prompt: int
    computed: int
    sampling: Sampling
    priority: int
    deadline_in_s: float | None  # from now
    cache: bytes | memoryview

    def pieces(self) -> Iterator[bytes]:
        """The bytes that travel: head, JSON, tokens as 32-bit numbers, cache, BLAKE2b of all before."""
        header = json.dumps(
            {
                "identity": dict(self.identity),
                "tokens": len(self.tokens),
                "prompt": self.prompt,
                "computed": self.computed,
                "cache_bytes": len(self.cache),
                "priority": self.priority,
                "deadline_in_s": self.deadline_in_s,
                "sampling": {name: getattr(self.sampling, name) for name in Sampling.__dataclass_fields__},
            }
        ).encode()
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        cache = memoryview(self.cache)
        cut = (bytes(cache[at : at + PIECE_BYTES]) for at in range(0, len(cache), PIECE_BYTES))
        for piece in chain((_HEAD.pack(MAGIC, VERSION, len(header)) + header + _packed(self.tokens),), cut):
            digest.update(piece)
            yield piece
        yield digest.digest()

    @property
    def nbytes(self) -> int:
        """Of the cache; head, tokens and checksum are some hundred bytes and four a token more."""
        return len(self.cache)


def open_parcel(raw: bytes | bytearray) -> Parcel:
    """What was packed. ParcelError for anything else: another form or version, a byte that differs, a value out of its bounds."""
    view = memoryview(raw)
    if len(raw) < _HEAD.size + CHECKSUM_BYTES:
        raise ParcelError("the parcel is cut off")
    magic, version, size = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ParcelError("this is no parcel of a request")
    if version != VERSION:
        raise ParcelError(f"the parcel has version {version}, this engine reads {VERSION}")
    if hashlib.blake2b(view[:-CHECKSUM_BYTES], digest_size=CHECKSUM_BYTES).digest() != view[-CHECKSUM_BYTES:]:
        raise ParcelError("the parcel's checksum is wrong: it was damaged or cut off on its way")
    if size > min(HEADER_LIMIT_BYTES, len(raw)):
        raise ParcelError("the parcel's header is too long")
    begin = _HEAD.size + size
    try:
        header = json.loads(bytes(view[_HEAD.size : begin]))
        if not isinstance(header, dict) or not isinstance(header["identity"], dict):
            raise ParcelError("the parcel's header is no object")
        return _parcel(header, view[begin:-CHECKSUM_BYTES])
    except ParcelError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ParcelError(f"the parcel's header can't be read: {type(error).__name__}") from None


def _parcel(header: Mapping[str, Any], rest: memoryview) -> Parcel:
    count = _whole(header, "tokens", 1, 1 << 24)
    prompt = _whole(header, "prompt", 1, count)
    computed = _whole(header, "computed", 0, count - 1)
    cache_bytes = _whole(header, "cache_bytes", 0, 1 << 48)
    if len(rest) != 4 * count + cache_bytes:
        raise ParcelError(f"the parcel holds {len(rest)} bytes, its header says {4 * count + cache_bytes}")
    deadline = header["deadline_in_s"]
    return Parcel(
        identity=header["identity"],
        tokens=_unpacked(rest[: 4 * count]),
        prompt=prompt,
        computed=computed,
        sampling=_sampling(header["sampling"]),
        priority=_whole(header, "priority", *PRIORITIES),
        deadline_in_s=None if deadline is None else _number(header, "deadline_in_s", -1e9, 1e9),
        cache=rest[4 * count :],
    )


def _sampling(told: Mapping[str, Any]) -> Sampling:
    stops = told["stop"]
    if (
        not isinstance(stops, list)
        or len(stops) > 64
        or not all(isinstance(s, str) and 0 < len(s) <= 10_000 for s in stops)
    ):
        raise ParcelError("stop is not a short list of texts")
    if not isinstance(told["ignore_eos"], bool):
        raise ParcelError("ignore_eos is neither true nor false")
    return Sampling(
        temperature=_number(told, "temperature", 0.0, 2.0),
        top_p=_number(told, "top_p", 0.0, 1.0),
        top_k=_whole(told, "top_k", 0, 1 << 31),
        seed=_whole(told, "seed", -_SEED, _SEED),
        max_tokens=_whole(told, "max_tokens", 1, 1 << 31),
        stop=tuple(stops),
        ignore_eos=told["ignore_eos"],
    )


def _whole(table: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = table[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ParcelError(f"{name} is no whole number between {low} and {high}")
    return value


def _number(table: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = table[name]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise ParcelError(f"{name} is no number between {low:g} and {high:g}")
    return float(value)


def _packed(tokens: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _unpacked(raw: memoryview) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}I", raw)
