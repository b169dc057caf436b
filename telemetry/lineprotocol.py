"""Samples as InfluxDB line protocol with nanosecond times: the form on the wire, in the spool and in recordings.

What can't be written so that every reader understands it alike is refused with a ValueError that names it: control characters,
names and tag values that end in a backslash, NaN and infinities, ints beyond 64 bits. An empty tag value is the same as no tag.
Source of the grammar: InfluxDB 1.x line protocol reference; in names and tags a backslash escapes only the separators.
"""

from __future__ import annotations

import gzip
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, cast

from telemetry.sample import Sample, Value

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_MISLEADING = re.compile("[\u2028-\u202e\u2066-\u2069]")
"""Line and paragraph separators, and what turns the direction of writing, so that a line reads as something else than it is."""

_RESERVED = frozenset({"time"})  # InfluxDB's name of the time column

# one name: ordinary characters, an escaped separator, or a backslash that escapes nothing
_MEASUREMENT = re.compile(r"((?:[^\\, ]|\\[, ]|\\(?![, ]))+)")
_TAG = re.compile(r",((?:[^\\,= ]|\\[,= ]|\\(?![,= ]))+)=((?:[^\\,= ]|\\[,= ]|\\(?![,= ]))+)")
_FIELD = re.compile(r'((?:[^\\,= ]|\\[,= ]|\\(?![,= ]))+)=(?:"((?:[^"\\]|\\.)*)"|([^,\s"]+))', re.DOTALL)
_PLAIN_FIELD = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)="
    r'(?:(-?[0-9]{1,18})i|(-?[0-9]{1,18}(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?)|"([^"]*)")(?:,|\Z)'
)
_PLAIN_TIME = re.compile(r"-?[0-9]{1,18}|[1-8][0-9]{18}")
_TIME = re.compile(r" +(-?[0-9]{1,20}) *$")
_INT = re.compile(r"([+-]?[0-9]{1,20})[iu]")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_BOOLEANS = {"t": 1, "T": 1, "true": 1, "True": 1, "TRUE": 1, "f": 0, "F": 0, "false": 0, "False": 0, "FALSE": 0}


def printable(text: str) -> str:
    """`text` with every control character, lone surrogate and change of direction turned into a space; `encode` takes it."""
    return _MISLEADING.sub(" ", _UNPRINTABLE.sub(" ", text))


def encode(sample: Sample) -> str:
    """One line, without its newline. ValueError names the measurement and what can't be written."""
    head = _head(sample.measurement, tuple(sample.tags.items()))
    body = ",".join([_field(sample.measurement, name, value) for name, value in sample.fields.items()])
    if not body:
        raise ValueError(f"{sample.measurement}: no fields")
    if not INT_MIN < sample.time_ns <= INT_MAX:
        raise ValueError(f"{sample.measurement}: time {sample.time_ns} ns is beyond 64 bits")
    return f"{head} {body} {sample.time_ns}"


def encode_many(samples: Iterable[Sample]) -> str:
    """All lines, each with its newline. ValueError as `encode`."""
    return "".join([f"{encode(sample)}\n" for sample in samples])


def decode(line: str) -> Sample:
    """The sample of one line. ValueError says what is wrong. Booleans come back as 1 and 0, unsigned ints as ints."""
    line = line.rstrip("\r\n")
    return _decode_plain(line) or _decode_any(line)


def _decode_plain(line: str) -> Sample | None:
    """The common line, without escapes or oddities, three times as fast; None for any other."""
    if "\\" in line:
        return None
    head, _, rest = line.partition(" ")
    body, _, time = rest.rpartition(" ")
    named = _plain_head(head)
    if named is None or not _PLAIN_TIME.fullmatch(time):
        return None
    fields: dict[str, Value] = {}
    length = -1  # the last item has no comma
    for name, whole, number, text in _PLAIN_FIELD.findall(body):
        if whole:
            fields[name] = int(whole)
            length += len(name) + len(whole) + 3
        elif number:
            fields[name] = float(number)
            length += len(name) + len(number) + 2
        else:
            fields[name] = text
            length += len(name) + len(text) + 4
    if length != len(body):  # something lay between the items
        return None
    return Sample(named[0], named[1], fields, int(time))


@lru_cache(maxsize=4096)
def _plain_head(head: str) -> tuple[str, dict[str, str]] | None:
    measurement, *parts = head.split(",")
    pairs = [part.split("=") for part in parts]
    if not measurement or measurement.startswith("#") or any(len(pair) != 2 or not all(pair) for pair in pairs):
        return None
    return measurement, {pair[0]: pair[1] for pair in pairs}


def _decode_any(line: str) -> Sample:
    found = _MEASUREMENT.match(line)
    if found is None or line.startswith("#"):
        raise ValueError("no measurement")
    measurement = _unescape(found[1], ", ")
    place = found.end()
    tags: dict[str, str] = {}
    while found := _TAG.match(line, place):
        tags[_unescape(found[1], ",= ")] = _unescape(found[2], ",= ")
        place = found.end()
    if line[place : place + 1] != " ":
        raise ValueError(f"column {place + 1}: expected tag=value or a space")
    place = len(line) - len(line[place:].lstrip(" "))
    fields: dict[str, Value] = {}
    while found := _FIELD.match(line, place):
        name = _unescape(found[1], ",= ")
        fields[name] = _text(found[2]) if found[2] is not None else _number(name, found[3])
        place = found.end()
        if line[place : place + 1] != ",":
            break
        place += 1
    if not fields or line[place - 1 : place] == ",":
        raise ValueError(f"column {place + 1}: expected field=value")
    time = _TIME.match(line, place)
    if time is None:
        raise ValueError(f"column {place + 1}: expected a time in nanoseconds")
    time_ns = int(time[1])
    if not INT_MIN < time_ns <= INT_MAX:
        raise ValueError(f"time {time_ns} ns is beyond 64 bits")
    return Sample(measurement, tags, fields, time_ns)


@lru_cache(maxsize=16384)
def _head(measurement: str, tags: tuple[tuple[str, str], ...]) -> str:
    head = _name(measurement, ", ", "measurement")
    if measurement.startswith("#"):
        raise ValueError(f"measurement {measurement!r} starts a comment")
    for name, value in sorted(tags):
        if value:
            if name in _RESERVED:
                raise ValueError(f"{measurement}: tag {name!r} is a reserved name")
            head += f",{_name(name, ',= ', 'tag name')}={_name(value, ',= ', f'tag {name!r}')}"
    return head


@lru_cache(maxsize=4096)
def _key(name: str) -> str:
    if name in _RESERVED:
        raise ValueError(f"field {name!r} is a reserved name")
    return _name(name, ",= ", "field name")


def _name(text: str, separators: str, what: str) -> str:
    if not text:
        raise ValueError(f"{what} is empty")
    if _UNPRINTABLE.search(text):
        raise ValueError(f"{what} {text!r} holds a control character")
    if text.endswith("\\"):
        raise ValueError(f"{what} {text!r} ends in a backslash, which would hide the next separator")
    for separator in separators:
        text = text.replace(separator, "\\" + separator)
    return text


def _field(measurement: str, name: str, value: Value) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{measurement}: field {name!r} is {value}, not a finite number")
        return f"{_key(name)}={float(value)!r}"
    if isinstance(value, bool):
        raise ValueError(f"{measurement}: field {name!r} is a bool; flags are 0 or 1")
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(f"{measurement}: field {name!r} is {value}, beyond 64 bits")
        return f"{_key(name)}={int(value)}i"
    if isinstance(value, str):
        if _UNPRINTABLE.search(value):
            raise ValueError(f"{measurement}: field {name!r} holds a control character")
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{_key(name)}="{quoted}"'
    raise ValueError(f"{measurement}: field {name!r} is {type(value).__name__}, not a number or text")


def _unescape(text: str, separators: str) -> str:
    if "\\" in text:
        for separator in separators:
            text = text.replace("\\" + separator, separator)
    return text


def _text(text: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", text) if "\\" in text else text


def _number(name: str, text: str) -> float | int:
    if whole := _INT.fullmatch(text):
        value = int(whole[1])
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(f"field {name!r} is {value}, beyond 64 bits")
        return value
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"field {name!r} is {text}, beyond the range of a float")
        return number
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    raise ValueError(f"field {name!r}: {text[:40]!r} is not a number, a quoted text or a boolean")


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that could not be read."""

    line: int  # from 1
    reason: str


class Recording:
    """An iterator over the samples of a recording. Bad lines are counted, the first of them described, and passed over.

    What is no recording, and may have no end, is given up: it begins with MAX_BAD_FIRST bad lines, or comes to a line without an end.
    """

    MAX_LINE_BYTES = 8 << 20
    MAX_PROBLEMS = 100
    MAX_BAD_FIRST = 10_000
    MAX_SKIPPED_BYTES = 64 << 20

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.lines = 0
        self.bad_lines = 0
        self.is_given_up = False
        self._has_samples = False
        self.problems: list[Problem] = []  # the first MAX_PROBLEMS

    @property
    def samples(self) -> Iterator[Sample]:
        return self

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        while not self.is_given_up and (raw := self._file.readline(self.MAX_LINE_BYTES)):
            self.lines += 1
            if len(raw) == self.MAX_LINE_BYTES and not raw.endswith(b"\n"):
                self._skip_line()
                self._bad(f"longer than {self.MAX_LINE_BYTES} bytes")
                continue
            text = raw.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                found = decode(raw.decode("utf-8"))
                self._has_samples = True
                return found
            except ValueError as error:  # UnicodeDecodeError is one
                self._bad("not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error))
        self._file.close()
        raise StopIteration

    def _skip_line(self) -> None:
        skipped = self.MAX_LINE_BYTES
        while (piece := self._file.readline(self.MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
            skipped += len(piece)
            if skipped >= self.MAX_SKIPPED_BYTES:
                self.is_given_up = True
                return

    def _bad(self, reason: str) -> None:
        self.bad_lines += 1
        if self.bad_lines >= self.MAX_BAD_FIRST and not self._has_samples:
            self.is_given_up = True
        if len(self.problems) < self.MAX_PROBLEMS:
            self.problems.append(Problem(self.lines, reason))


def read(source: str | Path | IO[bytes] | IO[str]) -> Recording:
    """The samples of a recording: a path (`.gz` too) or an open file. OSError if it can't be opened.

    After the iteration, `bad_lines` and `problems` say what could not be read.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        return Recording(cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb"))
    if isinstance(source, io.TextIOBase):
        buffer = getattr(source, "buffer", None)
        return Recording(buffer if buffer is not None else io.BytesIO(source.read().encode("utf-8", "surrogatepass")))
    return Recording(cast(IO[bytes], source))
