"""One column of a device's table: a number a row, or, while all its readings are the same, that number and a byte a row.

Most of what a GPU tells hardly ever changes (limits, link, state, counters of faults), and a fleet's window is mostly that.
"""

from __future__ import annotations

from array import array
from itertools import compress, repeat
from typing import TypeAlias, overload

NAN = float("nan")


class Steady:
    """A column with one reading in it, in every row in which it was read; NaN in the others, as in an array."""

    __slots__ = ("_told", "_typecode", "read", "reading")

    def __init__(self, typecode: str, reading: float, read: bytearray) -> None:
        """`typecode`: of the array that it stands for, in whose precision the reading is; `read`: by row, 1 or 0."""
        self._typecode = typecode
        self._told = reading  # as it came
        self.reading: float = array(typecode, (reading,))[0]
        self.read = read

    def take(self, reading: float) -> bool:
        """Put it into the newest row; False where it is another one and needs an array."""
        if reading != self._told:
            if array(self._typecode, (reading,))[0] != self.reading:
                return False
            self._told = reading
        self.read[-1] = 1
        return True

    def spread(self) -> array[float]:
        """The same as an array."""
        return array(self._typecode, (self.reading if read else NAN for read in self.read))

    def append(self, _nothing: float) -> None:
        """A row in which it has not been read yet."""
        self.read.append(0)

    @overload
    def __getitem__(self, rows: int) -> float: ...
    @overload
    def __getitem__(self, rows: slice) -> list[float]: ...
    def __getitem__(self, rows: int | slice) -> float | list[float]:
        if isinstance(rows, slice):
            return [self.reading if read else NAN for read in self.read[rows]]
        return self.reading if self.read[rows] else NAN

    def __delitem__(self, rows: slice) -> None:
        del self.read[rows]

    def points(self, times: array[int], low: int, high: int) -> list[tuple[int, float]]:
        """(time, reading) of each row from `low` to before `high` in which it was read."""
        return list(zip(compress(times[low:high], self.read[low:high]), repeat(self.reading), strict=False))

    def count(self, low: int, high: int) -> int:
        """In how many rows it was read, from `low` to before `high`."""
        return self.read.count(1, low, high)


Column: TypeAlias = "array[float] | Steady"


def settled(column: Column) -> Column:
    """The column as a steady one, where all its rows hold the same reading."""
    if isinstance(column, Steady) or not column or column[0] != column[-1] or column.count(column[0]) != len(column):
        return column
    return Steady(column.typecode, column[0], bytearray(b"\1") * len(column))
