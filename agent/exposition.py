"""Exposition: reads Prometheus text from engines that may be broken or hostile. A bad line costs that line; time is linear
in the input, and memory is bounded by the limits.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

RAW_LIMIT_BYTES = 16 << 20
INFLATED_LIMIT_BYTES = 16 << 20
LINE_LIMIT_BYTES = 64 << 10
SAMPLE_LIMIT = 50_000
LINES_LIMIT = 200_000
"""The same few samples over and over, to the limit of the body, would take half a minute."""

LABEL_LIMIT = 64
NAME_LIMIT_BYTES = 128
VALUE_LIMIT_BYTES = 1024
TIMESTAMP_WINDOW_MS = 3_600_000
"""A sample that carries a timestamp further than this from now is not of now."""

QUOTED_LIMIT_BYTES = 1 << 20
"""A body that is one JSON string must be held whole; it is small where an engine has this defect."""

_CACHED_BLOCK_CHARS = 512
_INFLATE_STEP_BYTES = 64 << 10

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(
    r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*(,|\})', re.ASCII | re.DOTALL
)
_BLOCK_END = re.compile(r"[ \t]*\}")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.ASCII | re.IGNORECASE)
_TIMESTAMP = re.compile(r"-?[0-9]{1,19}(?:\.[0-9]{1,9})?", re.ASCII)

Labels = tuple[tuple[str, str], ...]
"""Name and value pairs, sorted by name."""


class TooLarge(Exception):
    """The body is beyond a limit; nothing of it is used. The message says which limit."""


class Unreadable(Exception):
    """The body's encoding is unknown or broken; nothing of it is used."""


@dataclass(slots=True)
class Exposition:
    """What was read: values by family and labels, and what was left out and why. NaN and infinities are no values."""

    series: dict[str, dict[Labels, float]] = field(default_factory=dict)
    samples: int = 0
    bad_lines: int = 0
    duplicates: int = 0  # the last of equal series wins
    without_value: int = 0
    outdated: int = 0
    over_limit: int = 0  # samples beyond SAMPLE_LIMIT, lines beyond LINES_LIMIT
    stamps_ms: dict[str, dict[Labels, float]] = field(default_factory=dict)  # of the series that carry a timestamp
    is_json_list: bool = False  # the body begins as a JSON list does, which no exposition does

    def value(self, name: str) -> float | None:
        """The value of a family that has exactly one series."""
        found = self.series.get(name)
        return next(iter(found.values())) if found is not None and len(found) == 1 else None


class Reader:
    """Takes the body piece by piece as it arrives; holds no more than one unfinished line.

    A body that is one JSON string of the text, as some builds of llama.cpp send it, is read as that text.
    """

    def __init__(self, now_ms: int | None = None) -> None:
        self._now_ms = now_ms
        self._rest = bytearray()
        self._skipping = False  # inside a line that is too long
        self._read = Exposition()
        self._lines = 0
        self._has_begun = False
        self._quoted: bytearray | None = None  # the body so far, while it may be one JSON string

    def feed(self, chunk: bytes) -> None:
        if not self._has_begun:
            opening = chunk.lstrip(b" \t\r\n")[:1]
            self._has_begun = bool(opening)
            self._read.is_json_list = opening == b"["
            self._quoted = bytearray() if opening == b'"' else None
        if self._quoted is None:
            self._feed(chunk)
            return
        self._quoted += chunk
        if len(self._quoted) > QUOTED_LIMIT_BYTES:
            self._unquote(lambda quoted: quoted)

    def close(self) -> Exposition:
        if self._quoted is not None:
            self._unquote(_json_string)
        self._finish(bytes(self._rest))
        self._rest.clear()
        return self._read

    def _unquote(self, meant: Callable[[bytes], bytes]) -> None:
        quoted, self._quoted = bytes(self._quoted or b""), None
        self._feed(meant(quoted))

    def _feed(self, chunk: bytes) -> None:
        pieces = chunk.split(b"\n")
        if len(pieces) > 1:
            self._finish(bytes(self._rest) + pieces[0])
            for line in pieces[1:-1]:
                self._line(line)
            self._rest = bytearray(pieces[-1])
        elif not self._skipping:
            self._rest += chunk
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest.clear()
            self._skipping = True

    def _finish(self, line: bytes) -> None:
        if self._skipping:
            self._skipping = False
            self._read.bad_lines += 1
        else:
            self._line(line)

    def _line(self, raw: bytes) -> None:
        if not raw or raw[0] == 0x23:  # '#'
            return
        self._lines += 1
        if self._lines > LINES_LIMIT:
            self._read.over_limit += 1
            return
        if len(raw) > LINE_LIMIT_BYTES:
            self._read.bad_lines += 1
            return
        try:
            line = raw.decode("utf-8").strip(" \t\r")
        except UnicodeDecodeError:
            self._read.bad_lines += 1
            return
        if line and line[0] != "#" and not self._sample(line):
            self._read.bad_lines += 1

    def _sample(self, line: str) -> bool:
        """Whether the line is a sample; what it says is kept unless it is no value, outdated or one too many."""
        name = _NAME.match(line)
        if name is None or len(name.group()) > NAME_LIMIT_BYTES:
            return False
        start = name.end()
        while line[start : start + 1] in (" ", "\t"):
            start += 1
        labels: Labels = ()
        rest = line[start:]
        if rest.startswith("{"):
            split = _split_labels(rest)
            if split is None:
                return False
            labels, rest = split
        elif start == name.end():
            return False  # the name runs into something that is no part of a name
        words = rest.split(" # ", 1)[0].split()
        if not 1 <= len(words) <= 2 or (len(words) == 2 and not _TIMESTAMP.fullmatch(words[1])):
            return False
        value = _value(words[0])
        if value is None:
            return False
        if not math.isfinite(value):
            self._read.without_value += 1
        elif len(words) == 2 and self._now_ms is not None and not _is_of_now(words[1], self._now_ms):
            self._read.outdated += 1
        else:
            self._keep(name.group(), labels, value)
            if len(words) == 2:
                self._read.stamps_ms.setdefault(name.group(), {})[labels] = _stamp_ms(words[1])
        return True

    def _keep(self, name: str, labels: Labels, value: float) -> None:
        read = self._read
        family = read.series.setdefault(name, {})
        if labels in family:
            read.duplicates += 1
        elif read.samples >= SAMPLE_LIMIT:
            read.over_limit += 1
            return
        else:
            read.samples += 1
        family[labels] = value


def parse(body: bytes | str, now_ms: int | None = None) -> Exposition:
    """A whole body at once."""
    reader = Reader(now_ms)
    reader.feed(body.encode() if isinstance(body, str) else body)
    return reader.close()


def inflate(chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The body behind a Content-Encoding (identity, gzip, deflate), in bounded pieces.

    Raises TooLarge as soon as a limit is passed, raw or inflated, and Unreadable for other encodings or broken data.
    """
    coding = encoding.strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise Unreadable(f"content encoding {coding[:40]!r} is not supported")
    raw = inflated = 0
    inflater = None if coding in ("", "identity") else zlib.decompressobj(wbits=47)  # gzip or zlib by its header
    for chunk in chunks:
        raw += len(chunk)
        if raw > RAW_LIMIT_BYTES:
            raise TooLarge(f"body is beyond {RAW_LIMIT_BYTES >> 20} MiB")
        if inflater is None:
            yield chunk
            continue
        pending = chunk
        while pending and not inflater.eof:
            try:
                piece = inflater.decompress(pending, _INFLATE_STEP_BYTES)
            except zlib.error as error:
                raise Unreadable(f"broken {coding} body: {error}") from None
            inflated += len(piece)
            if inflated > INFLATED_LIMIT_BYTES:
                raise TooLarge(f"body is beyond {INFLATED_LIMIT_BYTES >> 20} MiB when inflated")
            pending = inflater.unconsumed_tail
            yield piece
    if inflater is not None and not inflater.eof:
        raise Unreadable(f"{coding} body ends early")


def _json_string(body: bytes) -> bytes:
    """What a JSON string says; the body itself where it is none."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return body
    return said.encode("utf-8", "replace") if isinstance(said, str) else body


def _split_labels(rest: str) -> tuple[Labels, str] | None:
    """Labels of a text that starts with "{", and what follows the block; None when it is malformed."""
    end = rest.rfind("}") + 1
    block = rest[:end]
    found = _cached_labels(block) if len(block) <= _CACHED_BLOCK_CHARS else _labels(block)
    if found is None:
        return None
    labels, position = found  # it ends before the last brace where that one is an exemplar's
    return labels, rest[position:]


def _labels(block: str) -> tuple[Labels, int] | None:
    """The pairs of a block that starts with "{", and where it ends; None when it is malformed or beyond the limits."""
    found: dict[str, str] = {}
    position = 1
    while True:
        closing = _BLOCK_END.match(block, position)
        if closing is not None:
            return tuple(sorted(found.items())), closing.end()
        label = _LABEL.match(block, position)
        if label is None or len(found) >= LABEL_LIMIT:
            return None
        name, value, separator = label.groups()
        if name in found or len(name) > NAME_LIMIT_BYTES or len(value) > VALUE_LIMIT_BYTES:
            return None
        found[name] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        position = label.end()
        if separator == "}":
            return tuple(sorted(found.items())), position


_cached_labels = lru_cache(maxsize=4096)(_labels)
"""An engine sends the same label blocks in every scrape."""


def _unescape(match: re.Match[str]) -> str:
    return {"n": "\n", "\\": "\\", '"': '"'}.get(match.group(1), match.group())


def _value(word: str) -> float | None:
    """ASCII digits only: float() itself would take underscores and full-width digits."""
    if len(word) > 64:
        return None
    if _NUMBER.fullmatch(word):
        return float(word)
    return math.nan if _NO_NUMBER.fullmatch(word) else None


def _stamp_ms(word: str) -> float:
    """The text format's timestamps are milliseconds; a value with a fraction is OpenMetrics' seconds."""
    return float(word) * 1000 if "." in word else float(word)


def _is_of_now(word: str, now_ms: int) -> bool:
    return abs(_stamp_ms(word) - now_ms) <= TIMESTAMP_WINDOW_MS
