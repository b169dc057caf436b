"""Framed messages over a pipe: four bytes of length, then JSON. Bounded, and nothing in them is ever executed."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

LONGEST_BYTES = 256 * 1024
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class BadFrame(Exception):
    """The other end doesn't speak the protocol, or the stream has lost its beat."""


def pack(message: Mapping[str, Any]) -> bytes:
    """One frame; ValueError when the message is too long or holds what JSON has no word for (NaN, infinity)."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > LONGEST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {LONGEST_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Puts frames together from whatever pieces arrive."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are complete now. Raises BadFrame."""
        self._held += piece
        messages: list[Message] = []
        start = 0
        while len(self._held) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held, start)
            if length > LONGEST_BYTES:
                raise BadFrame(f"a frame of {length} bytes is announced")
            end = start + _LENGTH.size + length
            if len(self._held) < end:
                break
            try:
                message = json.loads(self._held[start + _LENGTH.size : end])
            except ValueError as error:
                raise BadFrame(f"a frame is not JSON: {error}") from None
            if not isinstance(message, dict):
                raise BadFrame("a frame is not an object")
            messages.append(message)
            start = end
        del self._held[:start]
        return messages
