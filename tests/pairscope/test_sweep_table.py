"""`pairscope sweep --table`: a table from elsewhere is judged, drawn and written; a mistake in it is one line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pairscope.load_sweep.knee import Point
from pairscope.load_sweep.table import read_table, written
from tests.pairscope.command_line import pairscope

TABLE = """batch,tokens_per_s,ttft_ms,memory_pct
8,210,45,38%
16,380,62,52
32,620,98,74
48,680,156,89
64,655,240,96
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "measured.csv"
    path.write_text(TABLE)
    return path


def test_a_table_is_judged_in_words_in_both_languages(table: Path) -> None:
    done = pairscope("sweep", "--table", str(table))
    assert done.exit_code == 0
    assert "Recommended: a batch of 40" in done.output
    assert "above 32 and not above 48" in done.output
    assert "建议批大小 40" in pairscope("sweep", "--table", str(table), "--lang", "zh").output


def test_json_holds_points_knee_and_advice(table: Path) -> None:
    told = json.loads(pairscope("sweep", "--table", str(table), "--json", "--ttft-limit", "130").stdout)
    assert told["recommended"] == 40
    assert told["knee"]["above"] == 32
    assert told["points"][0] == {"batch": 8, "tokens_per_s": 210.0, "ttft_p50_s": 0.045, "memory_pct": 38.0}
    assert [cap["what"] for cap in told["caps"]] == ["ttft", "memory"]


def test_the_plot_marks_the_knee_and_the_recommendation(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.svg"
    assert pairscope("sweep", "--table", str(table), "--out", str(out)).exit_code == 0
    texts = [node.text for node in ET.fromstring(out.read_text("utf-8")).iter("{http://www.w3.org/2000/svg}text")]
    assert "knee between 32 and 48" in texts
    assert "recommended: 40" in texts
    assert {"8", "16", "32", "48", "64"} <= set(texts)


def test_what_is_written_as_csv_is_judged_the_same(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.csv"
    assert pairscope("sweep", "--table", str(table), "--out", str(out)).exit_code == 0
    assert read_table(out, "en") == read_table(table, "en")
    assert out.read_text().splitlines()[1] == "8,210,45,38"


def test_every_column_comes_back(tmp_path: Path) -> None:
    points = [Point(b, 1.5 * b, 0.1, 0.2, 0.03, 0.04, 5, 6, 7.5, 8.5, 9.5, 10.5, 11.5, 12) for b in (1, 2)]
    path = tmp_path / "all.csv"
    path.write_text(written(points))
    for before, after in zip(points, read_table(path, "en"), strict=True):
        for name in Point.__dataclass_fields__:
            assert getattr(after, name) == pytest.approx(getattr(before, name)), name


def test_markdown_holds_the_table_and_the_words(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.md"
    assert pairscope("sweep", "--table", str(table), "--out", str(out)).exit_code == 0
    text = out.read_text("utf-8")
    assert "**Recommended: a batch of 40" in text
    assert "| 48 | 680.0 |" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch,ttft_ms\n8,1\n16,2\n", "no column tokens_per_s"),
        ("batch,tokens_per_s\n8,fast\n16,2\n", "line 2: tokens_per_s is 'fast'"),
        ("batch,tokens_per_s\n8,1\n0,2\n", "line 3: batch is '0'"),
        ("batch,tokens_per_s\n8,1\n16,0\n", "line 3: tokens_per_s is '0'"),
        ("batch,tokens_per_s\n8,1\n16,nan\n", "line 3: tokens_per_s is 'nan'"),
        ("batch,tokens_per_s\n8.5,1\n16,2\n", "line 2: batch is '8.5'"),
        ("batch,tokens_per_s,memory_pct\n8,1,130\n16,2,1\n", "memory_pct is '130'"),
        ("batch,tokens_per_s\n8,1\n8,2\n", "batch 8 twice"),
        ("batch,tokens_per_s\n8,1\n", "fewer than two lines"),
        ("batch,tokens_per_s\n8\n16,2\n", "line 2: tokens_per_s is ''"),
        ("", "no column batch"),
    ],
)
def test_a_mistake_in_a_table_is_one_line_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path, out = tmp_path / "wrong.csv", tmp_path / "out.svg"
    path.write_text(text)
    done = pairscope("sweep", "--table", str(path), "--out", str(out))
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_told_before_anything_else(table: Path, tmp_path: Path) -> None:
    assert "ends in .svg" in pairscope("sweep", "--table", str(table), "--out", str(tmp_path / "a.png")).stderr
    assert pairscope("sweep", "--table", str(table), "--out", str(table)).exit_code == 2
    assert table.read_text() == TABLE


def test_neither_an_engine_nor_a_table_is_a_mistake_with_its_remedy() -> None:
    done = pairscope("sweep")
    assert done.exit_code == 2
    assert "--table FILE" in done.stderr
