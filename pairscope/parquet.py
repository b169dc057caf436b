"""Rows as Parquet through pyarrow: types from the catalogue, units in the columns' metadata, row groups of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from pairscope import __version__
from pairscope.export import Heading, Row

GROUP_CELLS = 1 << 19
"""A row group is written when it holds so many: some 4 MB. The list of the groups stays in memory, 110 KiB for one of 61 columns."""

POOL = pa.system_memory_pool()  # gives back what is freed; the others keep it for later

TYPES = {float: pa.float64(), int: pa.int64(), str: pa.string(), None: pa.timestamp("ns", "UTC")}


class ParquetWriter:
    """An absent value is null. The metadata of a column hold `unit`, `title` and `kind`, those of the file who wrote it."""

    def __init__(self, file: IO[bytes], headings: Sequence[Heading]) -> None:
        fields = [
            pa.field(
                heading.name,
                TYPES[heading.type],
                metadata={
                    name: text
                    for name, text in (("unit", heading.unit), ("title", heading.title), ("kind", heading.kind))
                    if text
                },
            )
            for heading in headings
        ]
        self._schema = pa.schema(fields, metadata={"created_by": f"pairscope {__version__}"})
        texts = [heading.name for heading in headings if heading.type is str]  # numbers seldom repeat
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd", use_dictionary=texts, memory_pool=POOL)
        self._batches: list[Any] = []
        self._cells = 0

    def put(self, rows: Sequence[Row]) -> None:
        columns = zip(*rows, strict=True)
        arrays = [
            pa.array(column, field.type, memory_pool=POOL) for column, field in zip(columns, self._schema, strict=True)
        ]
        self._batches.append(pa.record_batch(arrays, schema=self._schema))
        self._cells += len(rows) * len(self._schema)
        if self._cells >= GROUP_CELLS:
            self._write_group()

    def close(self) -> None:
        self._write_group()
        self._writer.close()

    def abandon(self) -> None:
        with suppress(OSError, pa.ArrowException):  # left to itself it would end the file when that is gone
            self._writer.close()

    def _write_group(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches, self._schema))
            self._batches, self._cells = [], 0
