"""InfluxDB 2.x and 3.x: doubles that do what their documents and known defects say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from pairscope.cli import app
from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store import StoreDown, StoreError, open_store
from telemetry.store.influxdb import InfluxStore
from telemetry.store.influxdb_samples import COUNT
from tests.telemetry.test_store_influxdb import Contract

S = 10**9
T0 = 1_795_960_800 * S
HOUR = 3600 * S
Answer = tuple[int, str, dict[str, str]]


@pytest.fixture
def contract() -> Iterator[Contract]:
    server = Contract()
    yield server
    server.shutdown()
    server.server_close()


def host(second: float, load: float) -> Sample:
    return Sample("host", {"node": "n1"}, {"load1": load}, T0 + round(second * S))


def found(*series: dict[str, object]) -> str:
    return json.dumps({"results": [{"statement_id": 0, "series": list(series)} if series else {"statement_id": 0}]})


# --- what 3.x takes


def test_no_measurement_is_wider_than_3x_takes_nor_has_a_tag_and_a_field_of_one_name() -> None:
    for measurement in catalogue.MEASUREMENTS.values():
        tags = {*catalogue.COMMON_TAGS, *measurement.tags}
        assert len(tags) + len(measurement.fields) + len(("time", COUNT)) <= 500  # columns of a table
        assert not tags & measurement.fields.keys()
        assert COUNT not in measurement.fields and COUNT not in tags


@pytest.mark.parametrize("shape", ["tags", "columns"])
def test_tags_are_read_whether_3x_gives_them_with_the_series_or_as_columns(contract: Contract, shape: str) -> None:
    contract.version = "3.0.1"
    columns, row = ["time", "load1"], [T0, 2.5]
    series: dict[str, object] = {"name": "host", "columns": columns, "values": [row]}
    if shape == "tags":
        series["tags"] = {"node": "n1", "rack": ""}
    else:
        series |= {"columns": [*columns, "node", "rack"], "values": [[*row, "n1", None]]}
    contract.answer = {"results": [{"statement_id": 0, "series": [series]}]}
    store = open_store(contract.url())
    assert store.samples("host", start_ns=T0, end_ns=T0 + S) == [host(0, 2.5)]
    assert store.latest("host", since_ns=T0) == store.latest("host", since_ns=T0, fields=["load1"]) == [host(0, 2.5)]
    assert not any("SHOW SERIES" in str(query) for _, _, query, _, _ in contract.asked)  # which 3.x doesn't have
    store.close()


@pytest.fixture
def core(contract: Contract) -> Contract:
    """Reads no more than 72 h at once; holds one sample an hour for eight days."""
    contract.version = "3.2.0"
    rows = [[T0 - hour * HOUR, float(hour)] for hour in range(192, 0, -1)]

    def answer(path: str, body: bytes) -> Answer | None:
        if path != "/query":
            return None
        statement = contract.asked[-1][2].get("q", [""])[0]
        times = re.search(r"time >= (\d+) AND time < (\d+)", statement)
        if times is None:
            return 200, found(), {}
        first_ns, end_ns = int(times[1]), int(times[2])
        chosen = [row for row in rows if first_ns <= row[0] < end_ns]
        if chosen and min(end_ns, T0) - max(first_ns, int(rows[0][0])) > 72 * HOUR:
            error = "Query would exceed file limit of 432 parquet files. Please specify a smaller time range"
            return 400, json.dumps({"error": error}), {}
        if not chosen:
            return 200, found(), {}
        grouped = re.search(r"GROUP BY time\((\d+)ns\)", statement)
        columns = ["time", "load1"]
        if grouped is not None:
            step_ns = int(grouped[1])
            buckets: dict[int, list[float]] = {}
            for time_ns, value in chosen:
                buckets.setdefault(int(time_ns) // step_ns * step_ns, []).append(value)
            if "count(" in statement:
                columns = ["time", "count", "mean", "min", "max"]
                values: list[list[float]] = [[t, len(v), sum(v) / len(v), min(v), max(v)] for t, v in buckets.items()]
            else:
                values = [[t, sum(v) / len(v)] for t, v in buckets.items()]
        else:
            values = (
                chosen[-1:] if "DESC LIMIT 1" in statement else chosen[:1] if "ASC LIMIT 1" in statement else chosen
            )
        tags = {} if "count(" in statement else {"tags": {"node": "n1"}}
        return 200, found({"name": "host", "columns": columns, "values": values, **tags}), {}

    contract.refuse = answer
    return contract


def test_what_core_does_not_read_at_once_is_read_in_parts(core: Contract) -> None:
    store = open_store(core.url())
    span = {"start_ns": T0 - 192 * HOUR, "end_ns": T0}
    assert [s.fields["load1"] for s in store.samples("host", **span)] == [float(hour) for hour in range(192, 0, -1)]
    assert [s.fields["load1"] for s in store.latest("host", since_ns=0)] == [1.0]
    (column,) = store.range("host", ["load1"], **span, step_ns=2 * HOUR)
    assert column.values == [hour - 0.5 for hour in range(192, 0, -2)]
    (spread,) = store.spread("host", ["load1"], **span, step_ns=2 * HOUR)
    assert (spread.mean[0], spread.low[0], spread.high[-1]) == (191.5, 191.0, 2.0)
    assert None not in spread.mean
    survey = store.survey()
    assert (survey.oldest_ns, survey.newest_ns) == (T0 - 192 * HOUR, T0 - HOUR)
    with pytest.raises(StoreError, match="file limit"):
        store.range("host", ["load1"], **span, step_ns=192 * HOUR)
    store.close()


def test_a_503_with_a_page_of_html_and_a_429_without_a_body_are_for_now_and_one_line(contract: Contract) -> None:
    contract.version = "3.2.0"
    for status, body in ((503, "<html>\n<h1>busy</h1>\r\n" + "x" * 100_000), (429, ""), (502, "\x1b[2Jgateway")):
        contract.refuse = lambda path, _, told=(status, body): (*told, {}) if "write" in path else None  # type: ignore[misc]
        store = open_store(contract.url())
        with pytest.raises(StoreDown) as caught:
            store.write([host(0, 1.0)])
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
        store.close()


# --- buckets and databases


class Buckets:
    """The management of a 2.x server, and of a 3.x one."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.made: list[dict[str, object]] = []
        self.orgs = [{"id": "0a1b", "name": "ops"}]
        self.forbidden = False
        contract.refuse = self.answer

    def answer(self, path: str, body: bytes) -> Answer | None:
        command, *_ = self.contract.asked[-1]
        if path in ("/api/v2/buckets", "/api/v2/orgs", "/api/v3/configure/database") and self.forbidden:
            return 403, '{"code":"forbidden","message":"insufficient permissions"}', {}
        if path == "/api/v2/orgs":
            return 200, json.dumps({"orgs": self.orgs}), {}
        if command == "POST" and path in ("/api/v2/buckets", "/api/v3/configure/database"):
            self.made.append(json.loads(body))
            return 201, "{}", {}
        if path == "/api/v2/buckets":
            if not self.made:
                return 404, '{"code":"not found","message":"bucket \\"fleet\\" not found"}', {}
            other = {"id": "2", "name": "fleet2", "retentionRules": [{"everySeconds": 1}]}
            return 200, json.dumps({"buckets": [other, {"id": "1", **self.made[0]}]}), {}
        if path == "/query" and self.contract.version.startswith("3") and not self.made:
            return 404, '{"error":"database not found: fleet"}', {}
        return None


def test_the_bucket_of_2x_is_made_once_with_the_time_that_samples_are_kept(contract: Contract) -> None:
    server = Buckets(contract)
    store = InfluxStore(contract.url())
    assert not store.exists()
    store.prepare(30 * 86_400.0)
    store.prepare(90 * 86_400.0)
    assert store.exists()
    rules = [{"type": "expire", "everySeconds": 30 * 86_400}]
    assert server.made == [{"orgID": "0a1b", "name": "fleet", "retentionRules": rules}]
    survey = store.survey()
    assert survey.retention_s == 30 * 86_400 and survey.advice == ("bucket_short",)
    server.made[0]["retentionRules"] = []
    assert store.survey().advice == ("bucket_endless",)
    server.forbidden = True  # a token that may only read and write the bucket
    assert store.survey().advice == ("bucket_retention",) and store.survey().write_problem == ""
    assert all(authorization == "Token t0k" for *_, authorization in contract.asked)
    store.close()


def test_the_database_of_3x_is_made_once_with_the_time_that_samples_are_kept(contract: Contract) -> None:
    contract.version = "3.2.0"
    server = Buckets(contract)
    store = InfluxStore(contract.url())
    assert not store.exists()
    store.prepare(30 * 86_400.0)
    store.prepare(90 * 86_400.0)
    assert server.made == [{"db": "fleet", "retention_period": "720h"}]
    store.close()


@pytest.mark.parametrize("version", ["v2.7.1", "3.2.0"])
def test_who_may_not_make_a_bucket_is_told_so(contract: Contract, version: str) -> None:
    contract.version = version
    server = Buckets(contract)
    store = InfluxStore(contract.url())
    server.orgs = [{"id": "1", "name": "a"}, {"id": "2", "name": "b"}]
    if version == "v2.7.1":
        with pytest.raises(StoreError, match=r"\?org="):
            store.prepare()
    server.forbidden = True
    contract.answer = {"results": [{"error": "database not found: fleet"}]}
    with pytest.raises(StoreError, match="administrator"):
        store.prepare()
    assert server.made == []
    store.close()


def test_store_init_makes_the_bucket(contract: Contract) -> None:
    server = Buckets(contract)
    result = CliRunner().invoke(app, ["store", "init", "--store", contract.url(), "--json"])
    levels = {entry["source"]: entry["level"] for entry in json.loads(result.stdout)["findings"]}
    assert levels["store"] == levels["write"] == "ok" and "error" not in levels.values()
    assert [made["name"] for made in server.made] == ["fleet"]
