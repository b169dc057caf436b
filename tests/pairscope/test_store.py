"""`pairscope store`: prepared twice without harm, told in words and as JSON, in both languages; what is wrong ends in exit code 2."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from agent.doctor import store as doctor
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


@pytest.mark.server
def test_the_advice_for_an_influxdb_can_be_pasted_and_keeps_events_and_verdicts(influxd: Influxd) -> None:
    url = f"influxdb://{influxd.address}/The%20%22fleet%22"
    assert asked("check", "--store", url)[1]["store"][0] == "error"
    _, found = asked("init", "--store", url)
    statement = found["settings"][2].partition(": ")[2]
    assert statement == 'ALTER RETENTION POLICY "autogen" ON "The \\"fleet\\"" DURATION 90d'
    said(influxd, statement)
    code, found = asked("check", "--store", url)
    assert code == 0 and "settings" not in found and found["retention"][1].endswith("after 90 days")
    assert found["rollups"][:2] == ("ok", "minutes are kept 90 days, quarters of an hour 730 days")
    said(influxd, statement.replace("90d", "7d"))
    code, found = asked("check", "--store", url)
    assert code == 1 and found["settings"][1].endswith("7 days only, events and verdicts too")
    assert found["settings"][2].partition(": ")[2] == statement


def said(influxd: Influxd, statement: str) -> None:
    """As `influx` sends it; the server's refusal fails."""
    body = urllib.parse.urlencode({"q": statement}).encode()
    with urllib.request.urlopen(f"http://{influxd.address}/query", body, timeout=20) as answer:
        assert "error" not in answer.read().decode()


@pytest.mark.server
def test_check_tells_the_rollups_as_the_server_has_them_and_makes_none(
    influxd: Influxd, deduplicating_victoria: Victoria, victoria: Victoria, tmp_path: Path
) -> None:
    with closing(open_store(influx := influxd.new_url())) as store:
        store.write([Sample("host", {"node": "n1"}, {"load1": 1.0}, time.time_ns())])
    for _ in range(2):
        assert asked("check", "--store", influx)[1]["rollups"][0] == "absent"
    assert asked("init", "--store", influx)[1]["rollups"] == asked("check", "--store", influx)[1]["rollups"]
    for server, level in ((deduplicating_victoria, "ok"), (victoria, "absent")):
        assert asked("check", "--store", server.new_url())[1]["rollups"][0] == level
    embedded = f"sqlite://{tmp_path}/s.db"
    assert asked("init", "--store", embedded)[1]["rollups"] == asked("check", "--store", embedded)[1]["rollups"]


@pytest.mark.server
def test_wrong_credentials_are_told_as_what_the_agent_retries_and_an_impossible_address_as_what_stops_it(
    own_influxd: Callable[..., Influxd], free_port: Callable[[], int]
) -> None:
    closed = own_influxd(auth=True)
    made = urllib.parse.urlencode({"q": "CREATE USER root WITH PASSWORD 'r' WITH ALL PRIVILEGES"}).encode()
    urllib.request.urlopen(f"http://{closed.address}/query", made, timeout=20).close()
    remedies = {
        f"influxdb://{closed.address}/x": "retries until it is right",
        f"influxdb://me:wrong@{closed.address}/x": "retries until it is right",
        "influxdb://nosuch.invalid/x": "retries until it is right",
        f"influxdb://127.0.0.1:{free_port()}/x": "start it",
        "influxdb://127.0.0.1/": "would not start",
        "influxdb://127.0.0.1/x?token_file=/nowhere": "would not start",
    }
    for url, remedy in remedies.items():
        for command in ("init", "check"):
            assert remedy in asked(command, "--store", url)[1]["store"][2], (url, command)
        assert remedy in doctor.findings(url, "en")[0].remedy, url
