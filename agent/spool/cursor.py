"""What was delivered: sequence numbers as a few closed intervals, and the file that remembers them."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.spool.disk import Disk, replace_file


class Delivered:
    """A set of sequence numbers that stays small because they are delivered in runs. 1 is the first number."""

    def __init__(self, runs: list[tuple[int, int]] | None = None) -> None:
        self._runs: list[tuple[int, int]] = []  # closed, apart from each other, ascending
        for first, last in runs or []:
            self.add(first, last)

    @property
    def runs(self) -> list[tuple[int, int]]:
        return list(self._runs)

    @property
    def highest(self) -> int:
        """0 when nothing was delivered."""
        return self._runs[-1][1] if self._runs else 0

    def missing(self, highest: int, lowest: int = 1) -> int:
        """How many of lowest..highest are not in it."""
        inside = sum(max(0, min(last, highest) - max(first, lowest) + 1) for first, last in self._runs)
        return max(0, highest - lowest + 1) - inside

    def __contains__(self, number: int) -> bool:
        return self.covers(number, number)

    def covers(self, first: int, last: int) -> bool:
        """Whether every number of first..last is in it; an empty span always is."""
        if first > last:
            return True
        place = bisect_right(self._runs, (first, 2**64)) - 1
        return place >= 0 and self._runs[place][1] >= last

    def add(self, first: int, last: int) -> None:
        if first > last:
            return
        kept: list[tuple[int, int]] = []
        for run in self._runs:
            if run[1] + 1 < first or run[0] > last + 1:
                kept.append(run)
            else:
                first, last = min(first, run[0]), max(last, run[1])
        place = bisect_right(kept, (first, last))
        kept.insert(place, (first, last))
        self._runs = kept

    def without(self, numbers: Iterable[int]) -> Delivered:
        """A copy that lacks these."""
        gaps = sorted(set(numbers))
        left = Delivered()
        for first, last in self._runs:
            start = first
            for gap in gaps[bisect_left(gaps, first) : bisect_right(gaps, last)]:
                if start < gap:
                    left._runs.append((start, gap - 1))
                start = gap + 1
            if start <= last:
                left._runs.append((start, last))
        return left


def save(disk: Disk, path: Path, lanes: Mapping[str, Delivered]) -> None:
    """Durable when it returns. OSError leaves the old file as it was."""
    body = json.dumps({lane: delivered.runs for lane, delivered in lanes.items()}, separators=(",", ":"))
    replace_file(disk, path, f"{zlib.crc32(body.encode()):08x} {body}\n".encode())


def load(disk: Disk, path: Path) -> dict[str, Delivered]:
    """Empty when there is no file. ValueError when it is damaged; then everything is delivered once more, which is harmless."""
    try:
        text = disk.read(path).decode("ascii")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    crc, _, body = text.rstrip("\n").partition(" ")
    if f"{zlib.crc32(body.encode()):08x}" != crc:
        raise ValueError("checksum does not fit")
    runs = json.loads(body)
    return {str(lane): Delivered([(int(a), int(b)) for a, b in pairs]) for lane, pairs in runs.items()}
