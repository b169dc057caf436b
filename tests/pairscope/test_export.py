"""Export: typed tables out of any store, whole or not at all, and no cell that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pairscope import parquet
from pairscope import selection as reading
from pairscope.export import CsvWriter, Exported, Heading, MakeWriter, Row, Shape, export, export_into, places_of
from pairscope.parquet import ParquetWriter
from pairscope.record import Nothing
from pairscope.selection import Selection
from pairscope.whole_file import CannotCopy
from telemetry.sample import Sample
from telemetry.store import Store, open_store
from tests.pairscope.command_line import pairscope
from tests.pairscope.recordings import T0, S, everything, samples, sqlite_store, unseen
from tests.store_servers import Influxd

ROOT = Path(__file__).parents[2]
WRITERS: dict[str, MakeWriter] = {"csv": CsvWriter, "parquet": ParquetWriter}


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Store]:
    with closing(sqlite_store(tmp_path, "filled")) as store:
        store.write(samples())
        yield store


def exported(
    store: Store,
    out: Path,
    measurement: str = "gpu",
    shape: Shape | None = None,
    selection: Selection | None = None,
    force: bool = False,
) -> Exported:
    kind, places = places_of(out, [measurement], None, "en")
    chosen = selection or everything()
    done = export(store, chosen, shape or Shape(), places, WRITERS[kind], force=force, advance=unseen)
    return done[0]


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    heading, *rows = csv.reader(io.StringIO(path.read_bytes().decode("utf-8"), newline=""), strict=True)
    return heading, rows


def test_parquet_has_the_catalogues_types_units_and_nulls(filled: Store, tmp_path: Path) -> None:
    done = exported(filled, tmp_path / "gpu.parquet")
    schema = pq.read_schema(tmp_path / "gpu.parquet")
    kinds = {name: schema.field(name).type for name in ("time", "node", "util_pct", "xid_total", "throttle_reasons")}
    assert kinds == {
        "time": pa.timestamp("ns", "UTC"),
        "node": pa.string(),
        "util_pct": pa.float64(),
        "xid_total": pa.int64(),
        "throttle_reasons": pa.int64(),
    }
    assert schema.field("power_w").metadata[b"unit"] == b"W" and schema.field("util_pct").metadata[b"unit"] == b"%"
    assert schema.field("throttle_reasons").metadata[b"kind"] == b"mask"
    table = pq.read_table(tmp_path / "gpu.parquet")
    assert table.num_rows == done.rows == 160
    wanted = [sample for sample in samples() if sample.measurement == "gpu"]
    for row, sample in zip(range(160), wanted, strict=True):
        assert table.column("time")[row].value == sample.time_ns
        got = {name: table.column(name)[row].as_py() for name in table.column_names[1:]}
        assert {name: cell for name, cell in got.items() if cell is not None} == {**sample.tags, **sample.fields}


def test_a_counter_beyond_fifty_three_bits_and_a_text_are_exact(filled: Store, tmp_path: Path) -> None:
    exported(filled, tmp_path / "engine.parquet", "engine")
    table = pq.read_table(tmp_path / "engine.parquet")
    assert table.column("generation_tokens_total")[1].as_py() == 2**62 + 1
    assert table.column("version")[0].as_py() == 'v "0" \\ 中'


def test_csv_holds_the_same_cells_by_rfc_4180(filled: Store, tmp_path: Path) -> None:
    exported(filled, tmp_path / "engine.csv", "engine")
    raw = (tmp_path / "engine.csv").read_bytes()
    assert raw.count(b"\r\n") == raw.count(b"\n") == 81
    heading, rows = read_csv(tmp_path / "engine.csv")
    first = dict(zip(heading, rows[0], strict=True))
    assert first["time"] == datetime.fromtimestamp(T0 // S, UTC).strftime("%Y-%m-%dT%H:%M:%S") + ".123456789Z"
    assert (first["node"], first["version"], first["tokens_per_s"]) == ("n 1,=", 'v "0" \\ 中', "0.1")
    assert first["generation_tokens_total"] == str(2**62) and first["ttft_p50_s"] == ""


def test_no_text_of_a_csv_begins_as_a_formula_and_each_can_be_told_back(tmp_path: Path) -> None:
    chance = random.Random(5)
    texts = ["".join(chance.choices("=+-@＝'\"\\, ;|a1中", k=chance.randint(1, 8))) + "x" for _ in range(500)]
    with closing(sqlite_store(tmp_path, "hostile")) as store:
        refused = store.write(
            [
                Sample("event", {"node": "n", "kind": "xid", "subject": text}, {"text": text, "code": -n}, T0 + n)
                for n, text in enumerate(texts)
            ]
        )
        assert refused == []
        exported(store, tmp_path / "event.csv", "event")
    heading, rows = read_csv(tmp_path / "event.csv")
    for row, text in zip(rows, texts, strict=True):
        for name in ("subject", "text"):
            cell = row[heading.index(name)]
            assert not cell.startswith(tuple("=+-@＝"))
            assert (cell[1:] if cell.startswith("'") else cell) == text
    assert rows[3][heading.index("code")] == "-3"


def test_buckets_are_those_of_the_store_with_the_kinds_own_way_to_be_drawn(filled: Store, tmp_path: Path) -> None:
    start = T0
    exported(filled, tmp_path / "a.parquet", shape=Shape(every_ns=10 * S), selection=Selection(start, start + 40 * S))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 16
    assert (
        table.schema.field("throttle_reasons").type == pa.int64()
        and table.schema.field("util_pct").type == pa.float64()
    )
    first = {
        name: table.column(name)[0].as_py() for name in ("node", "gpu", "util_pct", "xid_total", "throttle_reasons")
    }
    mask = 0
    for second in range(10):
        mask |= 1 << (4 * second % 40)
    assert first == {
        "node": "n 1,=",
        "gpu": "0",
        "util_pct": pytest.approx(90 + 18 / 1000),
        "xid_total": 36,
        "throttle_reasons": mask,
    }
    assert [table.column("time")[n].value for n in (0, 4, 15)] == [T0, T0 + 10 * S, T0 + 30 * S]


def test_rates_are_of_counters_only_and_per_second(filled: Store, tmp_path: Path) -> None:
    exported(
        filled, tmp_path / "r.parquet", shape=Shape(every_ns=10 * S, how="rate"), selection=Selection(T0, T0 + 40 * S)
    )
    table = pq.read_table(tmp_path / "r.parquet")
    assert "util_pct" not in table.column_names
    assert table.column("xid_total")[4].as_py() == pytest.approx(4.0)
    assert table.schema.field("energy_j").metadata[b"unit"] == b"J/s"
    with pytest.raises(CannotCopy, match="bits"):
        exported(filled, tmp_path / "x.csv", shape=Shape(("temp_c",), 10 * S, "or"))


@pytest.mark.server
def test_both_backends_make_the_same_tables(filled: Store, influxd: Influxd, tmp_path: Path) -> None:
    with closing(open_store(influxd.new_url())) as other:
        other.write(samples())
        for shape in (Shape(), Shape(every_ns=7 * S), Shape(("temp_c", "xid_total"), wide=True)):
            exported(filled, tmp_path / "one.csv", shape=shape, force=True)
            exported(other, tmp_path / "two.csv", shape=shape, force=True)
            assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()


def test_wide_is_one_row_a_time_and_one_column_a_series_and_field(filled: Store, tmp_path: Path) -> None:
    exported(filled, tmp_path / "w.csv", shape=Shape(("temp_c", "xid_total"), wide=True))
    heading, rows = read_csv(tmp_path / "w.csv")
    assert len(rows) == 40 and len(heading) == 9
    # gpu 0 of node n2 is the third of a second's four
    place = heading.index("xid_total{node=n2,gpu=0,uuid=GPU-10}")
    assert [row[place] for row in rows[:3]] == ["2", "6", "10"]


def test_wide_rows_can_be_drawn_together_over_buckets(filled: Store, tmp_path: Path) -> None:
    span = Selection(T0, T0 + 40 * S, ("n2",))
    exported(filled, tmp_path / "w.csv", shape=Shape(("temp_c", "xid_total"), 10 * S, wide=True), selection=span)
    heading, rows = read_csv(tmp_path / "w.csv")
    assert heading[1:] == [
        f"{name}{{node=n2,gpu={gpu},uuid=GPU-1{gpu}}}" for gpu in "01" for name in ("temp_c", "xid_total")
    ]
    assert len(rows) == 4
    for bucket, row in enumerate(rows):
        for gpu in range(2):
            places = [4 * second + 2 + gpu for second in range(10 * bucket, 10 * bucket + 10)]
            assert row[1 + 2 * gpu : 3 + 2 * gpu] == [repr(40.25 + sum(places) / 10), str(places[-1])]


def test_a_table_that_would_be_too_wide_is_refused(
    filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pairscope.export.MOST_WIDE", 10)
    with pytest.raises(CannotCopy, match="--field"):
        exported(filled, tmp_path / "w.csv", shape=Shape(wide=True))
    assert not list(tmp_path.glob("*.csv")) and not list(tmp_path.glob(".*"))


def test_row_groups_are_bounded(filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = len(pq.read_schema(exported(filled, tmp_path / "whole.parquet").path))
    monkeypatch.setattr(parquet, "GROUP_CELLS", 30 * columns)
    monkeypatch.setattr(reading, "MOST", 20)
    exported(filled, tmp_path / "a.parquet")
    file = pq.ParquetFile(tmp_path / "a.parquet")
    sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert sum(sizes) == 160 and max(sizes) < 50 and len(sizes) > 3


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_export_that_breaks_leaves_no_file_and_no_folder(filled: Store, tmp_path: Path, kind: str) -> None:
    made = WRITERS[kind]
    put: list[int] = []

    class Breaks:
        def __init__(self, file: IO[bytes], headings: list[Heading]) -> None:
            self.inner = made(file, headings)

        def put(self, rows: list[Row]) -> None:
            self.inner.put(rows)
            put.append(len(rows))
            if sum(put) > 100:
                raise KeyboardInterrupt

        def close(self) -> None:
            self.inner.close()

        def abandon(self) -> None:
            self.inner.abandon()

    out = tmp_path / "all"
    _, places = places_of(out, ["event", "engine", "gpu"], kind, "en")

    def work() -> list[Exported]:
        return export(filled, everything(), Shape(), places, Breaks, force=False, advance=unseen)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        export_into(out, places, work, "en")
    assert not out.exists()


def test_a_folder_gets_one_file_a_measurement_that_has_samples(filled: Store, tmp_path: Path) -> None:
    span = ("--from", str(T0), "--to", str(T0 + 60 * S), "--format", "csv")
    done = pairscope("export", str(tmp_path / "night"), "--store", filled.url, "--json", *span)
    assert done.exit_code == 0, done.stderr
    rows = {one["measurement"]: one["rows"] for one in json.loads(done.stdout)["files"]}
    assert rows == {"gpu": 160, "engine": 80, "event": 1}
    assert {path.name for path in (tmp_path / "night").iterdir()} == {"gpu.csv", "engine.csv", "event.csv"}


def test_a_file_takes_one_measurement_and_names_what_is_wrong(filled: Store, tmp_path: Path) -> None:
    for out, names, format_, said in (
        ("a.csv", ["gpu", "host"], None, "--measurement"),
        ("a.xlsx", ["gpu"], None, "parquet or .csv"),
        ("a", ["gpu"], "json", "json"),
    ):
        with pytest.raises(CannotCopy, match=said):
            places_of(tmp_path / out, names, format_, "en")
    with pytest.raises(CannotCopy, match=r"no_such.*temp_c"):
        exported(filled, tmp_path / "a.csv", shape=Shape(("no_such",)))
    with pytest.raises(Nothing):
        exported(filled, tmp_path / "a.csv", "psu")
    assert not list(tmp_path.glob("*.csv"))
