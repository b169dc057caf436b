"""`pairscope store`: prepared twice without harm, told in words and as JSON, in both languages; what is wrong ends in exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from pairscope.cli import app
from telemetry.sample import Sample
from telemetry.store import open_store

if TYPE_CHECKING:
    from tests.store_servers import Influxd, Victoria

T0 = 1_795_960_800 * 10**9


def asked(*arguments: str) -> tuple[int, dict[str, tuple[str, str, str]]]:
    """(exit code, source -> level, text, remedy)"""
    result = CliRunner().invoke(app, ["store", *arguments, "--json"])
    answer = json.loads(result.stdout)
    assert {"ok": 0, "warning": 1, "error": 2}[answer["worst"]] == result.exit_code
    return result.exit_code, {f["source"]: (f["level"], f["text"], f["remedy"]) for f in answer["findings"]}


def test_an_embedded_store_is_made_and_made_again_without_harm(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/deep/store.db"
    assert asked("init", "--store", url)[0] == 0
    store = open_store(url)
    store.write([Sample("host", {"node": "n1"}, {"load1": 1.0}, T0)])
    store.close()
    code, found = asked("init", "--store", url)
    assert code == 0 and found["rollups"][0] == "ok" and "90" in found["rollups"][1]
    code, found = asked("check", "--store", url)
    assert code == 0 and found["write"][0] == "ok"
    assert "2026-11-29 14:00:00 UTC" in found["samples"][1]


def test_a_store_that_is_not_there_or_of_no_kind_is_an_error_with_its_remedy(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    for scheme in ("influxdb", "victoriametrics"):
        code, found = asked("check", "--store", f"{scheme}://me:s3cret@127.0.0.1:{free_port()}/x")
        level, text, remedy = found["store"]
        assert code == 2 and level == "error" and "is the server running" in text and remedy
        assert "s3cret" not in text
    code, found = asked("init", "--store", "nosuch://x")
    assert code == 2 and "unknown kind" in found["store"][1]


def test_it_speaks_both_languages(tmp_path: Path) -> None:
    absent = (("en", "there is no such store"), ("zh", "没有该存储"))
    for language, word in absent:
        result = CliRunner().invoke(app, ["store", "check", "--store", f"sqlite://{tmp_path}/s.db", "--lang", language])
        assert result.exit_code == 2 and word in result.stdout
    assert not list(tmp_path.iterdir())
    assert asked("init", "--store", f"sqlite://{tmp_path}/s.db")[0] == 0
    for language, word in (("en", "can be written"), ("zh", "可写入")):
        result = CliRunner().invoke(app, ["store", "check", "--store", f"sqlite://{tmp_path}/s.db", "--lang", language])
        assert result.exit_code == 0 and word in result.stdout


@pytest.mark.server
def test_a_server_is_told_what_its_operator_should_set(
    victoria: Victoria,
    deduplicating_victoria: Victoria,
    influxd: Influxd,
) -> None:
    code, found = asked("init", "--store", victoria.new_url())
    assert code == 1 and found["settings"][0] == "warning" and "-retentionPeriod" in found["settings"][2]
    assert found["rollups"][0] == "absent"
    code, found = asked("init", "--store", deduplicating_victoria.new_url())
    assert found["rollups"][0] == "ok" and "whole fleet" in found["rollups"][1]
    code, found = asked("init", "--store", influxd.new_url())
    assert code == 1 and "RETENTION POLICY" in found["settings"][2]
    assert found["rollups"][0] == "ok" and found["retention"][1] == "the server keeps raw samples for ever"
