"""`pairscope export`: samples out of any store as tables, one file a measurement, in CSV or (beside, in parquet.py) Parquet."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from pairscope.moment import iso
from pairscope.progress import Advance
from pairscope.record import Nothing
from pairscope.selection import Selection, in_time_order
from pairscope.whole_file import CannotCopy, WholeFile
from telemetry import catalogue
from telemetry.catalogue import COMMON_TAGS, Kind
from telemetry.messages import say
from telemetry.sample import Value
from telemetry.store import Store
from telemetry.store.buckets import aggregates, matches, order

FORMATS = ("parquet", "csv")
MOST_WIDE = 4_000
MOST_CELLS = 200_000
"""Cells asked of the store at once when it draws together."""

Cell = Value | None
Row = Sequence[Cell]
Tags = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Heading:
    """One column: `type` is None for the time (int nanoseconds)."""

    name: str
    type: type[float] | type[int] | type[str] | None
    unit: str = ""
    title: str = ""
    kind: str = ""


class Writer(Protocol):
    """Takes rows in pieces; `close` completes the file but leaves it open, `abandon` lets it go as it is. It may follow `close`."""

    def put(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


MakeWriter = Callable[[IO[bytes], Sequence[Heading]], Writer]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the samples become rows: raw without `every_ns`, else drawn together as `how` (an aggregate of the store)."""

    fields: tuple[str, ...] = ()  # none: all of them
    every_ns: int | None = None
    how: str = "auto"
    wide: bool = False  # one row a time, one column a series and field; numbers only
    language: str = "en"


@dataclass(slots=True)
class Exported:
    path: Path
    measurement: str
    rows: int
    bytes: int


def export(
    store: Store,
    selection: Selection,
    shape: Shape,
    places: Mapping[str, Path],
    make: MakeWriter,
    *,
    force: bool,
    advance: Advance,
) -> list[Exported]:
    """One file for each measurement of `places` that has rows; all appear at the end, or none. Nothing if there are no rows.

    CannotCopy for a file that can't be written and for fields that can't be drawn together so, StoreError as the store.
    """
    done: list[Exported] = []
    span = selection.end_ns - selection.start_ns
    with ExitStack() as files:
        for number, (measurement, path) in enumerate(places.items()):
            chosen = replace(selection, measurements=(measurement,))
            table = _table(store, chosen, shape)
            if table is None:
                continue
            headings, pieces = table
            rows = 0
            file: IO[bytes] | None = None
            for reached_ns, piece in pieces:
                if piece and file is None:
                    file = files.enter_context(WholeFile(path, force=force, language=shape.language))
                    writer = make(file, headings)
                    files.callback(writer.abandon)
                if piece:
                    writer.put(piece)
                    rows += len(piece)
                share = number * span + reached_ns - selection.start_ns
                advance(share / len(places), rows + sum(one.rows for one in done))
            if file is not None:
                writer.close()
                file.flush()  # a disk that is full says so before any file is in its place
                os.fsync(file.fileno())
                done.append(Exported(path, measurement, rows, file.tell()))
    if not done:
        raise Nothing
    return done


Pieces = Iterator[tuple[int, list[Row]]]


def _table(store: Store, selection: Selection, shape: Shape) -> tuple[list[Heading], Pieces] | None:
    """The columns, and the rows piece by piece in time order; None where the store has no such series."""
    measurement = selection.measurements[0]
    fields = _fields(measurement, shape)
    series = [
        tags
        for tags in store.series(measurement, since_ns=selection.start_ns)
        if matches(tags, selection.where) and tags
    ]
    if not series or not fields:
        return None
    if shape.wide:
        return _wide(store, selection, shape, fields)
    tags = _tag_names(measurement, series)
    headings = [
        Heading("time", None),
        *(Heading(name, str) for name in tags),
        *(_heading(measurement, name, shape) for name in fields),
    ]

    def rows() -> Pieces:
        for reached_ns, points in _points(store, selection, shape, fields):
            found: list[Row] = []
            for time_ns, place, cells in points:
                row = [cells.get(name) for name in fields]
                if any(cell is not None for cell in row):
                    found.append([time_ns, *(place.get(name) or None for name in tags), *row])
            yield reached_ns, found

    return headings, rows()


def _fields(measurement: str, shape: Shape) -> list[str]:
    """The fields that are exported. CannotCopy for one that is asked for and unknown, or can't be drawn together so."""
    known = catalogue.MEASUREMENTS[measurement].fields
    for name in shape.fields:
        if name not in known:
            key = "recording.export.field_wrong"
            raise CannotCopy(say(key, shape.language, name=name, measurement=measurement, known=", ".join(known)))
    fields = [name for name in known if not shape.fields or name in shape.fields]
    if shape.every_ns is None:
        return [name for name in fields if not shape.wide or known[name].kind is not Kind.TEXT]
    fitting = {"rate": (Kind.COUNTER,), "or": (Kind.MASK, Kind.STATE)}.get(
        shape.how, (Kind.GAUGE, Kind.COUNTER, Kind.STATE, Kind.MASK)
    )
    if not shape.fields:
        fields = [name for name in fields if known[name].kind in fitting]
    try:
        aggregates(measurement, fields, shape.how)
    except ValueError as error:
        raise CannotCopy(str(error)) from None
    return fields


def _heading(measurement: str, name: str, shape: Shape, column: str = "") -> Heading:
    field = catalogue.field(measurement, name)
    drawn = shape.every_ns is not None and shape.how in ("mean", "rate")
    unit = catalogue.unit_of(name)
    if drawn and shape.how == "rate":
        unit = f"{unit or '1'}/s"
    return Heading(column or name, float if drawn else field.type, unit, field.title_en, str(field.kind))


def _tag_names(measurement: str, series: Iterable[Tags]) -> list[str]:
    """Every tag that the series have, those of the catalogue first and in its order."""
    have = {name for tags in series for name in tags}
    listed = [*COMMON_TAGS, *catalogue.MEASUREMENTS[measurement].tags]
    return [*(name for name in dict.fromkeys(listed) if name in have), *sorted(have - set(listed))]


Point = tuple[int, Tags, Mapping[str, Value]]


def _points(
    store: Store, selection: Selection, shape: Shape, fields: Sequence[str]
) -> Iterator[tuple[int, Sequence[Point]]]:
    """(reached, points of one series and time), in the order of time, then tags."""
    if shape.every_ns is None:
        for reached_ns, samples in in_time_order(store, selection):
            yield reached_ns, [(sample.time_ns, sample.tags, sample.fields) for sample in samples]
        return
    measurement = selection.measurements[0]
    whole = {name: _heading(measurement, name, shape).type is int for name in fields}
    count = max(1, len(store.series(measurement, since_ns=selection.start_ns)))
    length_ns = max(1, MOST_CELLS // (count * len(fields))) * shape.every_ns
    start_ns = selection.start_ns // shape.every_ns * shape.every_ns
    while start_ns < selection.end_ns:
        end_ns = min(start_ns + length_ns, selection.end_ns)
        found: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Tags, dict[str, Value]]] = {}
        for column in store.range(
            measurement,
            fields,
            start_ns=start_ns,
            end_ns=end_ns,
            step_ns=shape.every_ns,
            aggregate=shape.how,
            where=selection.where,
        ):
            key = order(column.tags)
            for number, value in enumerate(column.values):
                if value is not None:
                    at = found.setdefault((start_ns + number * shape.every_ns, key), (column.tags, {}))
                    at[1][column.field] = int(value) if whole[column.field] else value
        yield end_ns, [(time_ns, *found[time_ns, key]) for time_ns, key in sorted(found)]
        start_ns += length_ns


def _wide(
    store: Store, selection: Selection, shape: Shape, fields: Sequence[str]
) -> tuple[list[Heading], Pieces] | None:
    measurement = selection.measurements[0]
    found = store.range(
        measurement,
        fields,
        start_ns=selection.start_ns,
        end_ns=selection.end_ns,
        step_ns=selection.end_ns - selection.start_ns,
        aggregate="last",
        where=selection.where,
    )
    if not found:
        return None
    if len(found) > MOST_WIDE:
        raise CannotCopy(say("recording.export.too_wide", shape.language, count=len(found), most=MOST_WIDE))
    names = _tag_names(measurement, [column.tags for column in found])
    telling = [n for n in names if n == "node" or len({column.tags.get(n, "") for column in found}) > 1]
    places: dict[tuple[tuple[tuple[str, str], ...], str], int] = {}
    headings = [Heading("time", None)]
    rank = {name: place for place, name in enumerate(fields)}
    for column in sorted(found, key=lambda one: (order(one.tags), rank[one.field])):
        told = ",".join(f"{name}={column.tags[name]}" for name in telling if name in column.tags)
        places[order(column.tags), column.field] = len(headings)
        headings.append(_heading(measurement, column.field, shape, f"{column.field}{{{told}}}"))

    def rows() -> Pieces:
        row: list[Cell] = []
        for reached_ns, points in _points(store, selection, shape, fields):
            piece: list[Row] = []
            for time_ns, tags, cells in points:
                key = order(tags)
                if not row or row[0] != time_ns:
                    row = [time_ns, *[None] * (len(headings) - 1)]
                    piece.append(row)
                for name in fields:
                    place = places.get((key, name))
                    if place is not None and name in cells:
                        row[place] = cells[name]
            yield reached_ns, [one for one in piece if any(cell is not None for cell in one[1:])]

    return headings, rows()


class CsvWriter:
    """RFC 4180 in UTF-8: CRLF, quotes where needed, a header; an absent value is an empty cell, times are ISO 8601 with nine digits.

    A text that a spreadsheet would take for a formula (it begins with = + - @, also in full width) gets an apostrophe before it,
    and so does one that begins with an apostrophe, so that taking one away gives the text back.
    Source: OWASP, CSV injection.
    """

    FORMULA = tuple("=+-@＝＋－＠'")

    def __init__(self, file: IO[bytes], headings: Sequence[Heading]) -> None:
        self._text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        self._writer = csv.writer(self._text)
        self._writer.writerow([self._cell(heading.name) for heading in headings])

    def put(self, rows: Sequence[Row]) -> None:
        self._writer.writerows([_time(row[0]), *map(self._cell, row[1:])] for row in rows)

    def close(self) -> None:
        self._text.flush()
        self._text.detach()

    def abandon(self) -> None:
        with suppress(OSError, ValueError):  # ValueError: detached already
            self._text.detach()

    def _cell(self, cell: Cell) -> str:
        if cell is None:
            return ""
        if isinstance(cell, str):
            return f"'{cell}" if cell.startswith(self.FORMULA) else cell
        return repr(cell)


def _time(cell: Cell) -> str:
    assert isinstance(cell, int)
    seconds, rest = divmod(cell, 10**9)
    return f"{iso(seconds * 10**9)[:-1]}.{rest:09d}Z"


def places_of(
    out: Path, measurements: Sequence[str], format_: str | None, language: str
) -> tuple[str, dict[str, Path]]:
    """(format, file of each measurement): `out` itself by its suffix for one measurement, else a folder of them.

    CannotCopy for several measurements in one file, for none named, and for an unknown format.
    """
    suffix = out.suffix.removeprefix(".")
    if format_ is not None and format_ not in FORMATS:
        raise CannotCopy(say("recording.export.format_wrong", language, text=format_, known=", ".join(FORMATS)))
    if suffix in FORMATS:
        if len(measurements) != 1:
            raise CannotCopy(say("recording.export.one_a_file", language, path=out, folder=out.with_suffix("")))
        return format_ or suffix, {measurements[0]: out}
    if suffix:
        raise CannotCopy(say("recording.export.suffix_wrong", language, path=out))
    chosen = format_ or FORMATS[0]
    return chosen, {name: out / f"{name}.{chosen}" for name in measurements}


def export_into(
    out: Path, places: Mapping[str, Path], work: Callable[[], list[Exported]], language: str
) -> list[Exported]:
    """`work`, with the folder `out` made for it where it needs one, and taken away again if nothing comes into it."""
    is_folder = out not in places.values()
    made = is_folder and not out.exists()
    if made:
        try:
            out.mkdir()
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotCopy(say("recording.file.unwritable", language, path=out, reason=reason)) from None
    try:
        return work()
    except BaseException:
        if made:
            with suppress(OSError):
                out.rmdir()
        raise
