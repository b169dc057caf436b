"""`pairscope replay`: a recording into a store, as it was or as if it happened at another time.

What is moved to another time is no measurement of that time. It is marked `origin=replay` unless it is marked already, so that rules,
alerts and pages tell it apart; the judgements in it are left out, since the triage service of the store judges anew; and it is refused
where the same nodes are alive in the store, since the two would be taken for one.
"""

from __future__ import annotations

import gzip
import io
import os
import select
import shutil
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from pairscope.moment import iso, moment_ns, span_ns
from pairscope.progress import Advance
from pairscope.whole_file import CannotCopy
from rules.strays import passed_by
from telemetry import lineprotocol
from telemetry.catalogue import REPLAYED
from telemetry.lineprotocol import Problem, Recording
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import Rejected, Store, StoreDown, StoreError, public_url
from telemetry.store.admission import admit

BATCH = 2_000
TOLD = 3  # problems that are named
ALIVE_NS = 600 * 10**9
PATIENCE_S = 30.0
SILENT_MS = 3_000
"""A pipe into which nobody writes for so long is told of."""

JUDGEMENTS = frozenset(("pair", "verdict", "alert"))
ORIGINS = ("auto", "keep", REPLAYED)
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Shift:
    """How times move: by a span, or so that the first (or the last) sample lies at a moment."""

    by_ns: int = 0
    first_at_ns: int | None = None
    last_at_ns: int | None = None

    @property
    def needs_reading(self) -> bool:
        return self.first_at_ns is not None or self.last_at_ns is not None


def parse_shift(text: str, *, paced: bool, now_ns: int) -> Shift:
    """now: the last sample happens now, or, when it is paced, the first one. A moment: that of the first. +2h, -7d: by so much.

    ValueError for anything else.
    """
    if text == "now":
        return Shift(first_at_ns=now_ns) if paced else Shift(last_at_ns=now_ns)
    if text[:1] in ("+", "-"):
        span = span_ns(text[1:])
        return Shift(by_ns=span if text[0] == "+" else -span)
    return Shift(first_at_ns=moment_ns(text))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to the samples on their way. `speed` is of the recording's own time, None as fast as it goes."""

    shift: Shift | None = None
    speed: float | None = None
    origin: str = "auto"
    prefix: str = ""  # put before the names of nodes
    dry_run: bool = False
    language: str = "en"

    @property
    def marks(self) -> bool:
        return self.origin == REPLAYED or (self.origin == "auto" and self.shift is not None)


@dataclass(slots=True)
class Replayed:
    """What was read and written. `problems` are the first bad lines and refused samples, with their lines."""

    samples: int = 0
    bad_lines: int = 0
    refused: int = 0
    judgements: int = 0
    strays: int = 0  # of a clock that was wrong for a moment, in a replay that moves or paces its times
    ends_early: bool = False
    given_up_at: int | None = None  # line of what is no recording
    offset_ns: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    nodes: set[str] = field(default_factory=set)
    measurements: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def note(self, sample: Sample) -> None:
        self.samples += 1
        self.measurements[sample.measurement] = self.measurements.get(sample.measurement, 0) + 1
        self.nodes.add(sample.tags.get("node", ""))
        self.first_ns = sample.time_ns if self.first_ns is None else min(self.first_ns, sample.time_ns)
        self.last_ns = sample.time_ns if self.last_ns is None else max(self.last_ns, sample.time_ns)


class Source:
    """A recording that can be read twice: a file, or a pipe, which is kept in an unnamed temporary file when need be."""

    def __init__(self, path: Path, language: str, tell: Callable[[str], None]) -> None:
        self.path = path
        self._language = language
        self._tell = tell
        self._kept: IO[bytes] | None = None
        self._raw: IO[bytes] | None = None
        self._is_file = str(path) != "-" and path.is_file()
        self.size: int | None = path.stat().st_size if self._is_file else None
        self.ends_early = False

    def keep(self) -> None:
        if not self._is_file and self._kept is None:
            with self._explained():
                self._kept = tempfile.TemporaryFile()  # noqa: SIM115 - it goes with the process
                shutil.copyfileobj(self._open(), self._kept)
            self.size = self._kept.tell()

    def read(self) -> Recording:
        """From the start. CannotCopy when it can't be opened."""
        with self._explained():
            if self._kept is not None:
                self._kept.seek(0)
                raw: io.BufferedReader = io.BufferedReader(io.FileIO(self._kept.fileno(), closefd=False))
            else:
                raw = self._open()
            self._raw = raw
            packed = raw.peek(2)[:2] == _GZIP
        return lineprotocol.read(cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw)

    def _open(self) -> io.BufferedReader:
        if str(self.path) == "-":
            return cast(io.BufferedReader, sys.stdin.buffer)
        kind = self.path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(21, "is a folder")
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):  # it may have no end
            raise CannotCopy(say("recording.device", self._language, path=self.path))
        return self._open_pipe() if stat.S_ISFIFO(kind) else self.path.open("rb")

    def _open_pipe(self) -> io.BufferedReader:
        """Opening it like a file would wait for a writer, for ever if there is none, and say nothing."""
        pipe = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        written = select.poll()
        written.register(pipe, select.POLLIN)
        if not written.poll(SILENT_MS):
            self._tell(say("recording.replay.silent", self._language, path=self.path))
            while not written.poll(SILENT_MS):  # a signal in the instant before the call doesn't end it
                pass
        os.set_blocking(pipe.fileno(), True)
        return pipe

    def samples(self, recording: Recording) -> Iterator[Sample]:
        """Until the end, or until the packed data break off, which `ends_early` then says."""
        try:
            with self._explained():
                yield from recording
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.ends_early = True
        finally:
            if self._raw is not None:
                self._raw.close()

    @property
    def done_bytes(self) -> int:
        return self._raw.tell() if self._raw is not None and not self._raw.closed and self.size is not None else 0

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except gzip.BadGzipFile:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotCopy(say("recording.unreadable", self._language, path=self.path, reason=reason)) from None


def replay(
    path: Path,
    store: Store | None,
    plan: Plan,
    *,
    advance: Advance,
    tell: Callable[[str], None] = lambda _line: None,
    wait: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> Replayed:
    """Play `path` (`-` is stdin) into the store, or only look what would be played with `plan.dry_run` (then no store is needed).

    The same file again changes nothing: the same samples overwrite themselves. CannotCopy and StoreError in one line.
    """
    source = Source(path, plan.language, tell)
    offset_ns = _offset_ns(source, plan)
    done = Replayed(offset_ns=offset_ns)
    gate = _Gate(store, plan) if store is not None and not plan.dry_run else None
    pace = Pace(plan.speed, monotonic) if plan.speed is not None and not plan.dry_run else None
    batch: list[Sample] = []
    lines: list[int] = []

    def write() -> None:
        refused = gate.write(batch, done) if gate is not None else admit(batch)[1]
        _count(batch, lines, refused, done)
        batch.clear()
        lines.clear()
        advance(source.done_bytes, done.samples)

    recording = source.read()
    strays: list[Sample] = []
    numbered = ((sample, recording.lines) for sample in source.samples(recording))
    for sample, place in passed_by(numbered, strays) if plan.shift is not None or pace is not None else numbered:
        moved = _moved(sample, offset_ns, plan)
        if plan.marks and moved.measurement in JUDGEMENTS:
            done.judgements += 1
            continue
        if pace is not None and (left_s := pace.left_s(moved.time_ns)) > 0:
            write()
            wait(left_s)
        batch.append(moved)
        lines.append(place)
        if len(batch) >= BATCH:
            write()
    write()
    done.strays = len(strays)
    done.bad_lines = recording.bad_lines
    done.problems = sorted([*recording.problems[:TOLD], *done.problems], key=lambda problem: problem.line)[:TOLD]
    done.ends_early = source.ends_early
    done.given_up_at = recording.lines if recording.is_given_up else None
    return done


def _offset_ns(source: Source, plan: Plan) -> int:
    """What is added to every time. The recording is read once for it when its first or last time must be known."""
    if plan.shift is None:
        return 0
    if not plan.shift.needs_reading:
        return plan.shift.by_ns
    source.keep()
    first: int | None = None
    last: int | None = None
    for sample, _ in passed_by(((each, 0) for each in source.samples(source.read())), []):
        if not (plan.marks and sample.measurement in JUDGEMENTS):
            first = sample.time_ns if first is None else min(first, sample.time_ns)
            last = sample.time_ns if last is None else max(last, sample.time_ns)
    if first is None or last is None:
        return 0
    if plan.shift.first_at_ns is not None:
        return plan.shift.first_at_ns - first
    assert plan.shift.last_at_ns is not None
    return plan.shift.last_at_ns - last


def _moved(sample: Sample, offset_ns: int, plan: Plan) -> Sample:
    if not (plan.marks or plan.prefix):
        return sample if not offset_ns else replace(sample, time_ns=sample.time_ns + offset_ns)
    tags = dict(sample.tags)
    if plan.marks and not tags.get("origin"):
        tags["origin"] = REPLAYED
    if plan.prefix and "node" in tags:
        tags["node"] = plan.prefix + tags["node"]
    return replace(sample, tags=tags, time_ns=sample.time_ns + offset_ns)


class Pace:
    """When a sample is due: as long after the first one as in the recording, divided by the speed. Nothing waits for the past."""

    def __init__(self, speed: float, monotonic: Callable[[], float]) -> None:
        self._speed = speed
        self._monotonic = monotonic
        self._start: tuple[int, float] | None = None

    def left_s(self, time_ns: int) -> float:
        if self._start is None:
            self._start = time_ns, self._monotonic()
        return (time_ns - self._start[0]) / 1e9 / self._speed - (self._monotonic() - self._start[1])


class _Gate:
    """Writes batches, waits while the store is down, and refuses nodes that are alive in it."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._looked: set[tuple[str, str]] = set()

    def write(self, batch: list[Sample], done: Replayed) -> list[Rejected]:
        if self._plan.shift is not None:
            for sample in batch:
                self._refuse_alive(sample.tags.get("node", ""), sample.tags.get("origin", ""))
        until_s, pause_s = time.monotonic() + PATIENCE_S, 0.5
        while True:
            try:
                return self._store.write(batch)
            except StoreDown as error:
                if time.monotonic() > until_s:
                    raise self._broken_off(error, done) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
            except StoreError as error:
                raise self._broken_off(error, done) from None

    def _broken_off(self, error: StoreError, done: Replayed) -> StoreError:
        if not done.samples:
            return error
        language = self._plan.language
        return StoreError(say("recording.replay.broken_off", language, error=error.told(language), count=done.samples))

    def _refuse_alive(self, node: str, origin: str) -> None:
        if (node, origin) in self._looked:
            return
        self._looked.add((node, origin))
        since_ns = time.time_ns() - ALIVE_NS
        for measurement in ("host", "gpu", "engine"):
            for heard in self._store.latest(measurement, since_ns=since_ns, where={"node": node}):
                if heard.tags.get("origin", "") != origin:
                    where = public_url(self._store.url)
                    raise CannotCopy(say("recording.replay.alive", self._plan.language, store=where, node=node))


def _count(batch: list[Sample], lines: list[int], refused: list[Rejected], done: Replayed) -> None:
    """Note what was written; a sample of which only some fields were refused counts as written and as refused."""
    gone: set[int] = set()
    if refused:
        places: dict[tuple[object, ...], list[int]] = {}
        for place, sample in enumerate(batch):
            places.setdefault(_identity(sample), []).append(place)
        for entry in refused:
            alike = [p for p in places[_identity(entry.sample)] if entry.sample.fields.keys() <= batch[p].fields.keys()]
            place = next((p for p in alike if p not in gone), alike[-1])
            if len(entry.sample.fields) == len(batch[place].fields):
                gone.add(place)
            if len(done.problems) < TOLD:
                done.problems.append(Problem(lines[place], entry.reason))
        done.refused += len(refused)
    for place, sample in enumerate(batch):
        if place not in gone:
            done.note(sample)


def replayed_lines(path: Path, store_url: str, plan: Plan, done: Replayed) -> Iterator[tuple[str, bool]]:
    """What a person is told, line by line, and whether it is a warning."""

    def line(key: str, **values: object) -> str:
        return say(f"recording.replay.{key}", plan.language, **values)

    if done.bad_lines:
        yield line("bad", path=path, count=done.bad_lines), True
    if done.strays:
        yield line("strays", path=path, count=done.strays), True
    if done.refused:
        yield line("refused", path=path, count=done.refused), True
    for problem in done.problems:
        yield line("problem", line=problem.line, reason=problem.reason[:200]), True
    if done.given_up_at is not None:
        yield line("given_up", path=path, line=done.given_up_at), True
    if done.ends_early:
        yield line("ends_early", path=path), True
    if done.judgements:
        yield line("judgements", count=done.judgements), False
    if done.first_ns is None or done.last_ns is None:
        yield line("done_empty", path=path), True
        return
    yield (
        line(
            "would" if plan.dry_run else "done",
            count=done.samples,
            nodes=len(done.nodes),
            store=public_url(store_url),
            first=iso(done.first_ns),
            last=iso(done.last_ns),
        ),
        False,
    )


def replayed_json(path: Path, store_url: str, plan: Plan, done: Replayed) -> dict[str, object]:
    return {
        "path": str(path),
        "store": public_url(store_url),
        "dry_run": plan.dry_run,
        "samples": done.samples,
        "nodes": len(done.nodes),
        "measurements": dict(sorted(done.measurements.items())),
        "first": None if done.first_ns is None else iso(done.first_ns),
        "last": None if done.last_ns is None else iso(done.last_ns),
        "shift_s": done.offset_ns / 1e9,
        "marked": plan.marks,
        "bad_lines": done.bad_lines,
        "refused": done.refused,
        "judgements_left_out": done.judgements,
        "strays_left_out": done.strays,
        "ends_early": done.ends_early,
        "given_up_at": done.given_up_at,
        "problems": [{"line": problem.line, "reason": problem.reason[:200]} for problem in done.problems],
    }


def _identity(sample: Sample) -> tuple[object, ...]:
    return sample.measurement, sample.time_ns, tuple(sorted((k, v) for k, v in sample.tags.items() if v))
