"""How a sample is laid out as series of VictoriaMetrics, which hold a float at a millisecond and nothing else, and back again.

Field `f` of measurement `m` is the series `m_f` with the sample's tags as labels. Beside it stands what a
float and a millisecond can't hold:

- `m_sample_ns`, for every sample: the nanoseconds of its time below the millisecond. A sample is there if this is.
- `m_f_hi32` and `m_f_lo32`: both halves of a whole number beyond 2^53, such as a mask of 64 bits.
- a text is a label, `text_value`, of a series whose value is 1; a long one is several series, told apart by `text_part`.
  So each distinct text is a series: right for events and versions, a burden where a text changes every second.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from telemetry.sample import Sample, Value

MS = 10**6
EXACT = 2**53
MARK = "sample_ns"
TEXT, PART = "text_value", "text_part"
ROLLUP = "rollup"  # the server's own label of what it drew
RESERVED = ("__name__", "db", TEXT, PART, ROLLUP)
TEXT_PART_BYTES = 8000  # a label's value is cut at 16 KiB by the server
MOST_LABELS = 24  # of 30, the server's limit, less ours; those beyond it would be dropped
LONGEST_LABEL_BYTES = 16_000

Tags = Mapping[str, str]
Key = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Device:
    """What was read of one series of samples: its tags, the marks and the values by the millisecond."""

    tags: Tags
    marks: dict[int, int] = field(default_factory=dict)
    values: dict[str, dict[int, Any]] = field(default_factory=dict)

    def time_ns(self, at_ms: int) -> int:
        return at_ms * MS + self.marks[at_ms]

    def points(self, name: str, start_ns: int, end_ns: int) -> list[tuple[int, Any]]:
        """(time_ns, value) of one field, oldest first."""
        marks = self.marks
        found = [(t * MS + marks[t], v) for t, v in self.values.get(name, {}).items() if t in marks]
        return sorted(point for point in found if start_ns <= point[0] < end_ns)


class Series(NamedTuple):
    """What the labels of a series tell: the sample's tags, those as a key, its name, and what it holds of a text."""

    tags: Tags
    key: Key
    name: str
    text: str
    part: str
    function: str  # of the server, by which it was drawn


@lru_cache(maxsize=1 << 16)
def identity(exported: str) -> Series:
    """From the beginning of a series in an export, {"metric":{...}}. ValueError, KeyError and the like for anything else."""
    labels = json.loads(exported)["metric"]
    tags = {name: value for name, value in labels.items() if name not in RESERVED}
    key = tuple(sorted(tags.items()))
    return Series(
        tags, key, labels.get("__name__", ""), labels.get(TEXT, ""), labels.get(PART, ""), labels.get(ROLLUP, "")
    )


def taken_apart(measurement: str, labels: Mapping[str, str]) -> tuple[Tags, str]:
    """(the sample's tags, what follows the measurement in the series' name)."""
    tags = {name: value for name, value in labels.items() if name not in RESERVED}
    return tags, labels.get("__name__", "").removeprefix(f"{measurement}_")


# --- a sample as lines


@lru_cache(maxsize=16384)
def labels_problem(tags: Key) -> str:
    if len(tags) > MOST_LABELS:
        return f"has {len(tags)} tags; the server keeps {MOST_LABELS}"
    for name, value in tags:
        if name in RESERVED:
            return f"tag {name!r} is a reserved name"
        if max(len(name.encode()), len(value.encode())) > LONGEST_LABEL_BYTES:
            return f"tag {name[:40]!r} is longer than {LONGEST_LABEL_BYTES} bytes"
    return ""


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Of samples of one series and millisecond one, whose fields are the later ones': the server could not tell them apart."""
    made: dict[tuple[str, Key, int], Sample] = {}
    for sample in samples:
        key = (sample.measurement, tuple(sorted(sample.tags.items())), sample.time_ns // MS)
        before = made.get(key)
        if before is not None:
            sample = Sample(sample.measurement, sample.tags, {**before.fields, **sample.fields}, sample.time_ns)
        made[key] = sample
    return list(made.values())


@lru_cache(maxsize=16384)
def _head(measurement: str, tags: Key) -> str:
    return measurement + "".join(f",{_escaped(name)}={_escaped(value)}" for name, value in sorted(tags))


def _escaped(text: str) -> str:
    # unlike InfluxDB, this reader takes a backslash before a backslash away
    return text.replace("\\", "\\\\").replace(",", "\\,").replace("=", "\\=").replace(" ", "\\ ")


def lines(sample: Sample) -> str:
    """The sample's lines, each with its newline: the numbers in one, every text in its own."""
    head = _head(sample.measurement, tuple(sample.tags.items()))
    at_ms, below_ns = divmod(sample.time_ns, MS)
    moment = at_ms * MS
    numbers = [f"{MARK}={below_ns}i"]
    texts = ""
    for name, value in sample.fields.items():
        if isinstance(value, float):
            numbers.append(f"{name}={value!r}")
        elif isinstance(value, int):
            numbers.append(f"{name}={value}i")
            if abs(value) > EXACT:
                numbers.append(f"{name}_hi32={value >> 32}i,{name}_lo32={value & 0xFFFFFFFF}i")
        else:
            for part, text in _parts(value):
                labels = "".join(f",{label}={_escaped(v)}" for label, v in ((PART, part), (TEXT, text)) if v)
                texts += f"{head}{labels} {name}=1 {moment}\n"
    return f"{head} {','.join(numbers)} {moment}\n{texts}"


def _parts(text: str) -> list[tuple[str, str]]:
    """(label of the part, its text); the label tells the whole it belongs to, its place and how many there are."""
    raw = text.encode("utf-8")
    if len(raw) <= TEXT_PART_BYTES:
        return [("", text)]
    pieces: list[str] = []
    start = 0
    while start < len(raw):
        end = min(start + TEXT_PART_BYTES, len(raw))
        while end < len(raw) and raw[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        pieces.append(raw[start:end].decode("utf-8"))
        start = end
    return [(f"{zlib.crc32(raw):08x} {place}/{len(pieces)}", piece) for place, piece in enumerate(pieces)]


def joined(parts: Mapping[str, str]) -> str | None:
    """The text again; None when a part is missing."""
    wholes = [text for part, text in parts.items() if not part]
    for sum_ in sorted({part.split(" ")[0] for part in parts if part}):
        mine = {part.split(" ")[1]: text for part, text in parts.items() if part.startswith(f"{sum_} ")}
        count = int(next(iter(mine)).partition("/")[2])
        text = "".join(mine.get(f"{place}/{count}", "") for place in range(count))
        if f"{zlib.crc32(text.encode('utf-8')):08x}" == sum_:
            wholes.append(text)
    return max(wholes, default=None)


# --- lines as samples


def by_time(times: Sequence[int], values: Sequence[Any], type_: type[Any], found: dict[int, Any]) -> None:
    """Put values in by their time; of several at one time the largest stays; the server keeps any of them."""
    if not found and len(set(times)) == len(times) and None not in values:
        found.update(zip(times, map(type_, values), strict=True))
        return
    for at_ms, value in zip(times, values, strict=True):
        if value is not None and (at_ms not in found or value > found[at_ms]):
            found[at_ms] = type_(value)


def join_halves(device: Device) -> None:
    """Whole numbers beyond 2^53 from their halves, where these belong to the value that stands there."""
    for high_name in [name for name in device.values if name.endswith("_hi32")]:
        name = high_name.removesuffix("_hi32")
        highs, lows = device.values.pop(high_name), device.values.pop(f"{name}_lo32", {})
        about = device.values.get(name, {})
        for at_ms, high in highs.items():
            exact = (high << 32) | lows.get(at_ms, 0)
            if at_ms in about and at_ms in lows and math.isclose(exact, about[at_ms], rel_tol=1e-9):
                about[at_ms] = exact


def to_samples(measurement: str, device: Device, at: Iterable[int], start_ns: int, end_ns: int) -> Iterator[Sample]:
    for at_ms in at:
        time_ns = device.time_ns(at_ms)
        if start_ns <= time_ns < end_ns:
            fields: dict[str, Value] = {
                name: values[at_ms] for name, values in device.values.items() if at_ms in values
            }
            if fields:
                yield Sample(measurement, device.tags, fields, time_ns)
