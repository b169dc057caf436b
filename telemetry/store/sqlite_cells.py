"""A rollup's cells in the embedded store: their tables, and how a cell lies in a row."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from sqlite3 import Connection
from typing import Any, NamedTuple, cast

from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Value
from telemetry.store.rollup import (
    MINUTE_NS,
    QUARTER_NS,
    Cell,
    Counter,
    Gauge,
)
from telemetry.store.sqlite_file import Damaged

MINUTE, FLEET, QUARTER = 1, 2, 3
"""What a mark asks for: the minute of a series, the minute of all series together, the quarter of a series."""
FLEET_PREFIX = "fleet:"
"""The series of all series together has this before its measurement's name, so that no reader takes it for a device."""
_MOST = 2**63 - 1
SQL_TYPES: Mapping[type, str] = {float: "REAL", int: "INTEGER", str: "TEXT"}

Place = tuple[int, int]
"""A series and the start of a minute or quarter."""
Timed = tuple[int, Cell]
"""A cell and the start of its minute or quarter."""
Cells = dict[str, dict[int, list[Timed]]]
"""field -> series -> cells in time order."""


def raw_table(measurement: str) -> str:
    return f"raw_{measurement}"


def cell_table(measurement: str, level_ns: int) -> str:
    return f"{'min1' if level_ns == MINUTE_NS else 'min15'}_{measurement}"


def columns_of(connection: Connection, table: str) -> frozenset[str]:
    return frozenset(str(row[1]) for row in connection.execute(f'PRAGMA table_info("{table}")'))


def selected(fields: Iterable[catalogue.Field]) -> str:
    return "".join(f', "{field.name}"' for field in fields)


def quarter_of(time_ns: int) -> int:
    return time_ns // QUARTER_NS * QUARTER_NS


class Row(NamedTuple):
    """A row of cells: `n` raw samples, the first and the last at these times. In the table the times count from `start_ns`."""

    series: int
    start_ns: int
    n: int
    first_ns: int
    last_ns: int

    def absolute(self) -> Row:
        return self._replace(first_ns=self.first_ns + self.start_ns, last_ns=self.last_ns + self.start_ns)


# A gauge that every sample had and that never moved is its number, and so is a counter; any other is packed.
PACKED_GAUGE = struct.Struct("<Iddd")
_COUNTERS = {int: struct.Struct("<qqqqq"), float: struct.Struct("<qqddd")}


def encode(field: catalogue.Field, row: Row, cell: Cell) -> Value | bytes:
    if isinstance(cell, Gauge):
        plain = cell.n == row.n and cell.low == cell.high
        return cell.mean if plain else PACKED_GAUGE.pack(*cell)
    if isinstance(cell, Counter):
        plain = (
            not cell.grown and cell.first == cell.last and (cell.first_ns, cell.last_ns) == (row.first_ns, row.last_ns)
        )
        if plain:
            return cell.last
        times = (cell.first_ns - row.start_ns, cell.last_ns - row.start_ns)
        values = (cell.first, min(cell.grown, _MOST) if field.type is int else cell.grown, cell.last)
        return _COUNTERS[field.type].pack(*times, *values)
    return cell


def decode(field: catalogue.Field, row: Row, value: Any) -> Cell:
    """Damaged for what `encode` never wrote."""
    try:
        if field.kind is Kind.GAUGE:
            return Gauge(*PACKED_GAUGE.unpack(value)) if type(value) is bytes else Gauge(row.n, value, value, value)
        if field.kind is Kind.COUNTER:
            if type(value) is not bytes:
                return Counter(row.first_ns, value, 0, row.last_ns, value)
            first_ns, last_ns, first, grown, last = _COUNTERS[field.type].unpack(value)
            return Counter(row.start_ns + first_ns, first, grown, row.start_ns + last_ns, last)
    except struct.error:
        raise Damaged(f"a cell of {field.name} is damaged") from None
    if not isinstance(value, field.type):
        raise Damaged(f"a cell of {field.name} is damaged")
    return cast("Cell", value)
