"""InfluxDB: a real 1.6 server, and doubles that answer as the documents of 2.x and 3.x say; every refusal is one clear line."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from telemetry import lineprotocol
from telemetry.sample import Sample
from telemetry.store import StoreDown, StoreError, influxdb_draw, influxdb_rollup, open_existing, open_store, public_url
from telemetry.store.influxdb import InfluxStore
from telemetry.store.influxdb_http import parse
from telemetry.store.rollup import MINUTE_NS, QUARTER_NS

if TYPE_CHECKING:
    from tests.store_servers import Influxd

S = 10**9
T0 = 1_795_960_800 * S


def host(second: int, load: float = 1.0, node: str = "n1") -> Sample:
    return Sample("host", {"node": node}, {"load1": load}, T0 + second * S)


# --- addresses


def test_a_url_is_taken_apart_and_its_secrets_are_not_shown() -> None:
    address = parse("influxdbs://me:p%40ss@db.example:9000/prefix/fleet?org=ops&verify=0")
    assert (address.base, address.database, address.org) == ("https://db.example:9000/prefix", "fleet", "ops")
    assert not address.verify_tls
    assert address.authorization.startswith("Basic ")
    assert "p@ss" not in repr(address) and "me" not in address.shown
    assert public_url("influxdb://me:secret@db:8086/fleet?token=abc") == "influxdb://db:8086/fleet"
    assert open_store("influxdb://me:secret@db/fleet?token=abc").url == "influxdb://db:8086/fleet"


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert parse(f"influxdb://db/x?token_file={tmp_path}/token").authorization == "Token abc"
    monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", "xyz")
    assert parse("influxdb://db/x").authorization == "Token xyz"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("influxdb://db:8086", "database"),
        ("influxdb:///fleet", "database"),
        ("influxdb://db:port/fleet", "port"),
        ("influxdb://db/fleet?tokn=1", "tokn"),
        ("influxdb://db/fleet?token_file=/nowhere/token", "/nowhere/token"),
    ],
)
def test_a_wrong_url_is_named(url: str, named: str) -> None:
    with pytest.raises(StoreError, match=named):
        open_store(url)


# --- the real server


@pytest.mark.server
def test_samples_survive_a_kill_of_the_server_and_writing_goes_on(own_influxd: Callable[..., Influxd]) -> None:
    server = own_influxd()
    store = open_store(server.new_url())
    store.write([host(0)])
    server.kill()
    with pytest.raises(StoreDown, match=f"no answer from http://{server.address}"):
        store.write([host(1)])
    with pytest.raises(StoreDown):
        store.latest("host", since_ns=0)
    server.start()
    store.write([host(1)])
    assert store.samples("host", start_ns=T0, end_ns=T0 + 9 * S) == [host(0), host(1)]
    store.close()


@pytest.mark.server
def test_a_server_with_passwords_names_a_wrong_one_and_serves_a_right_one(own_influxd: Callable[..., Influxd]) -> None:
    server = own_influxd(auth=True)
    admin = InfluxStore(f"influxdb://admin:right@{server.address}/fleet")
    admin.server.call("POST", "/query", {"q": "CREATE USER admin WITH PASSWORD 'right' WITH ALL PRIVILEGES"})
    admin.server.call("POST", "/query", {"q": "CREATE USER guest WITH PASSWORD 'g'"})
    assert admin.write([host(0)]) == []
    assert len(admin.samples("host", start_ns=T0, end_ns=T0 + S)) == 1
    for user, remedy in (("admin:wrong", "password"), ("guest:g", "grant")):
        store = open_store(f"influxdb://{user}@{server.address}/fleet")
        with pytest.raises(StoreError, match=remedy) as caught:
            store.write([host(1)])
        assert not isinstance(caught.value, StoreDown)
        assert "\n" not in str(caught.value) and "wrong" not in str(caught.value)
        store.close()
    admin.server.call("POST", "/query", {"q": 'GRANT ALL ON "fleet" TO "guest"'})
    guest = open_store(f"influxdb://guest:g@{server.address}/fleet")  # may not create databases, and need not
    assert guest.write([host(2)]) == []
    assert len(guest.samples("host", start_ns=T0, end_ns=T0 + 9 * S)) == 2
    guest.close()
    admin.close()


@pytest.mark.server
def test_reading_rolling_up_and_pruning_make_no_database(influxd: Influxd) -> None:
    url = influxd.new_url()
    store = InfluxStore(url)
    assert not store.exists() and open_existing(url) is None
    assert store.latest("host", since_ns=0) == store.samples("host", start_ns=T0, end_ns=T0 + S) == []
    assert store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 60 * S, step_ns=60 * S) == []
    assert not store.rollup(T0 + 3600 * S)
    assert store.prune({"*": T0}) == store.prune({"*": T0}, MINUTE_NS) == 0
    assert store.survey().newest_ns is None
    assert store.server.address.database not in store.server.call("GET", "/query", {"q": "SHOW DATABASES"})[0]
    store.prepare()
    store.prepare()
    assert store.exists() and not store.samples("host", start_ns=T0, end_ns=T0 + S)
    store.close()


@pytest.mark.server
def test_a_database_that_vanishes_is_made_again(influxd: Influxd) -> None:
    store = InfluxStore(influxd.new_url())
    store.write([host(0)])
    store.server.call("POST", "/query", {"q": f'DROP DATABASE "{store.server.address.database}"'})
    assert store.samples("host", start_ns=T0, end_ns=T0 + S) == []
    store.server.call("POST", "/query", {"q": f'DROP DATABASE "{store.server.address.database}"'})
    assert store.write([host(1)]) == []
    assert store.samples("host", start_ns=T0, end_ns=T0 + 9 * S) == [host(1)]
    store.close()


@pytest.mark.server
def test_a_field_of_another_type_is_refused_alone_and_the_rest_of_5000_samples_stored(influxd: Influxd) -> None:
    store = InfluxStore(influxd.new_url())
    store.write([host(0)])  # makes the database
    store.server.call(
        "POST", "/write", {"db": store.server.address.database}, body=gzip.compress(b'host,node=old load1="text" 1\n')
    )
    batch = [
        Sample("host", {"node": f"n{i}"}, {"load1": 1.0, "cpu_pct": float(i)}, T0 + 86400 * 7 * S) for i in range(5000)
    ]
    # the type of a field belongs to a shard, so put one of the other type into the shard of the batch
    store.server.call(
        "POST",
        "/write",
        {"db": store.server.address.database},
        body=gzip.compress(f"host,node=odd mem_used_pct=1i {T0 + 86400 * 7 * S}\n".encode()),
    )
    batch[1234] = Sample("host", {"node": "bad"}, {"mem_used_pct": 3.5, "cpu_pct": 1.0}, T0 + 86400 * 7 * S)
    refused = store.write(batch)
    assert [(entry.sample.tags["node"], dict(entry.sample.fields)) for entry in refused] == [
        ("bad", {"mem_used_pct": 3.5})
    ]
    assert "type" in refused[0].reason
    found = store.samples("host", start_ns=T0 + 86400 * 7 * S, end_ns=T0 + 86400 * 8 * S)
    assert len([sample for sample in found if "cpu_pct" in sample.fields]) == 5000
    store.close()


@pytest.mark.server
def test_a_long_text_is_kept_whole(influxd: Influxd) -> None:
    store = open_store(influxd.new_url())
    event = Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"text": "中x" * 40_000, "code": 1}, T0)
    assert store.write([event]) == []
    assert store.samples("event", start_ns=T0, end_ns=T0 + 1) == [event]
    store.close()


@pytest.mark.server
def test_a_condition_of_a_thousand_values_is_asked_in_one_go(influxd: Influxd) -> None:
    store = open_store(influxd.new_url())
    store.write([host(0, node=f"node-{i}") for i in range(1000)])
    wanted = [f"node-{i}" for i in range(0, 1000, 2)]
    assert len(store.latest("host", since_ns=0, where={"node": wanted})) == 500
    store.close()


def asked(store: InfluxStore, query: str) -> list[list[object]]:
    return [row for series in store.server.query(query) for row in series["values"]]


@pytest.mark.server
def test_levels_have_policies_of_their_own_whose_length_follows_what_is_kept(influxd: Influxd) -> None:
    store = InfluxStore(influxd.new_url())
    store.write([host(0)])
    store.rollup(T0 + 900 * S)
    for level_ns, days in ((MINUTE_NS, 30), (QUARTER_NS, 400)):
        assert store.prune({"*": time.time_ns() - days * 86_400 * S}, level_ns) == 0
    policies = {str(row[0]): row[1] for row in asked(store, "SHOW RETENTION POLICIES")}
    assert policies["pairscope_1min"] == "720h0m0s" and policies["pairscope_15min"] == "9600h0m0s"
    assert policies["autogen"] == "0s"  # raw samples: the owner's choice
    store.close()


@pytest.mark.server
def test_samples_from_before_the_first_rollup_are_rolled_up_a_quarter_at_a_time_the_newest_first(
    influxd: Influxd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
    url = influxd.new_url()
    store = InfluxStore(url)
    store.write([host(900, load=8.0)])
    # by a writer that leaves no marks: a day ago, an hour ago on another node, and in the quarter that is marked already
    long_ago = -86_400
    old = {long_ago: ("n1", 2.0), long_ago + 30: ("n1", 4.0), -3600: ("n2", 1.0), 901: ("n1", 6.0), 1000: ("n1", 5.0)}
    store.server.write("".join(f"host,node={n} load1={v} {T0 + t * S}\n" for t, (n, v) in old.items()))

    def ranges() -> dict[str, dict[int, float]]:
        """node -> seconds after T0 -> mean over fifteen minutes"""
        span = {"start_ns": T0 + long_ago * S, "end_ns": T0 + 1800 * S, "step_ns": QUARTER_NS}
        return {
            column.tags["node"]: {
                long_ago + 900 * place: value for place, value in enumerate(column.values) if value is not None
            }
            for column in store.range("host", ["load1"], **span)
        }

    wanted = {"n1": {long_ago: 3.0, 900: pytest.approx(19 / 3)}, "n2": {-3600: 1.0}}
    reached: list[int] = []
    more = True
    while more:
        assert ranges() == wanted
        store.close()
        store = InfluxStore(url)  # whoever comes next goes on
        more = store.rollup(T0 + 1800 * S, 0.0)
        since_ns = store._rollups.since_ns()
        assert since_ns is not None
        reached.append((since_ns - T0) // S if since_ns else 0)
    steps = list(dict.fromkeys(reached))
    assert steps[1:] == [900, -3600, long_ago, 0]
    assert ranges() == wanted
    store.server.query("DELETE FROM host")
    store.close()
    store = InfluxStore(url)
    assert ranges() == wanted
    assert not store.rollup(T0 + 1800 * S)
    store.close()


@pytest.mark.server
def test_a_late_sample_is_found_by_its_hour_alone(influxd: Influxd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
    store = InfluxStore(influxd.new_url())
    store.write([host(3600 * hour) for hour in range(10)])
    while store.rollup(T0 + 40_000 * S):
        pass
    assert store._rollups.open("hour", 0, 2**62) == []
    store.write([host(7230, load=5.0)])
    asked: list[str] = []
    query = store.server.query
    monkeypatch.setattr(store._rollups, "_query", lambda text: asked.append(text) or query(text))
    while store.rollup(T0 + 40_000 * S):
        pass
    wide = [text for text in asked if "WHERE" in text and f"time >= {T0 + 7200 * S}" not in text]
    assert all("kind = 'hour'" in text for text in wide)
    assert any("kind = 'minute'" in text for text in asked)
    assert asked_values(store, T0 + 7200 * S, MINUTE_NS) == [3.0]
    store.close()


def asked_values(store: InfluxStore, start_ns: int, step_ns: int) -> list[float | None]:
    return store.range("host", ["load1"], start_ns=start_ns, end_ns=start_ns + step_ns, step_ns=step_ns)[0].values


@pytest.mark.server
def test_what_was_just_written_is_not_rolled_up_before_all_of_it_shows(
    influxd: Influxd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 3600 * S)
    store = InfluxStore(influxd.new_url())
    store.write([host(0)])
    assert store.rollup(T0 + 3600 * S, 0.01)  # there is more to do
    assert len(store._rollups.open("minute", 0, 2**62)) == 1
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
    while store.rollup(T0 + 3600 * S):
        pass
    assert store._rollups.open("minute", 0, 2**62) == store._rollups.open("hour", 0, 2**62) == []
    store.close()


@pytest.mark.server
def test_two_that_roll_up_at_once_and_a_write_between_them_lose_nothing(
    influxd: Influxd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influxdb_rollup, "SHOWN_NS", 0)
    url = influxd.new_url()
    one, two = InfluxStore(url), InfluxStore(url)
    one.prepare()
    one.rollup(T0 - 3600 * S)
    one.write([host(0)])
    stale = one._rollups.open("minute", 0, 2**62)
    two.write([host(1, load=5.0)])
    while two.rollup(T0 + 3600 * S):
        pass
    one._put(
        [lineprotocol.encode(mark.settled()) for mark in stale], ""
    )  # the slower one, with what it had read before
    for store in (one, two):
        found = store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 60 * S, step_ns=60 * S)
        assert found[0].values == [3.0]
    assert len(one._rollups.open("minute", 0, 2**62)) == 1  # so it is done once more
    one.close()
    two.close()


@pytest.mark.server
@pytest.mark.parametrize("few", [0, 64])
def test_each_series_has_its_own_buckets_whether_it_is_asked_for_alone_or_among_others(
    influxd: Influxd, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(influxdb_draw, "_FEW", few)
    store = InfluxStore(influxd.new_url())
    tags: list[dict[str, str]] = [  # a card that was changed, and hosts that were given a rack, or lost it
        {"gpu": "0", "node": "n'1"},
        {"gpu": "0", "node": "n'1", "rack": "r 1"},
        {"gpu": "0", "node": "n'1", "rack": "r 1", "uuid": "GPU-1"},
        {"gpu": "0", "node": "n'1", "uuid": "GPU-1"},
    ]
    names = ["temp_c", "throttle_reasons", "state", "xid_total"]
    store.write(
        [
            Sample(
                "gpu",
                own,
                {"temp_c": 10.0 * i + t, "throttle_reasons": 1 << (i + 40 * t), "state": i + 2 - t, "xid_total": i + t},
                T0 + (30 * (i % 3) + t) * S,
            )
            for i, own in enumerate(tags)
            for t in range(2)
        ]
    )
    span = {"start_ns": T0, "end_ns": T0 + 90 * S, "step_ns": 30 * S}
    found = store.range("gpu", names, **span, where={"node": "n'1"})
    wanted: list[tuple[dict[str, str], str, list[float | None]]] = []
    for i, own in enumerate(tags):
        drawn = (10.0 * i + 0.5, float(1 << i | 1 << i + 40), i + 2.0, i + 1.0)
        wanted += [
            (own, name, [value if place == i % 3 else None for place in range(3)])
            for name, value in zip(names, drawn, strict=True)
        ]
    assert [(column.tags, column.field, column.values) for column in found] == wanted
    assert store.range("gpu", names, **span, where={"node": "n1"}) == []
    store.close()


@pytest.mark.parametrize("version", ["v2.7.1", "3.11.2"])
def test_2x_and_3x_have_no_rollups_and_no_marks(contract: Contract, version: str) -> None:
    contract.version = version
    store = open_store(contract.url())
    store.write([host(0)])
    assert not store.rolls_up and not store.rollup(T0 + 3600 * S)
    assert all("rollup" not in body for _, _, _, body, _ in contract.asked)
    store.close()


# --- doubles


class Contract(http.server.ThreadingHTTPServer):
    """Answers as told and remembers what was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version = "v2.7.1"
        self.refuse: Callable[[str, bytes], tuple[int, str, dict[str, str]] | None] = lambda path, body: None
        self.answer: object = {"results": [{"statement_id": 0}]}
        self.asked: list[tuple[str, str, dict[str, list[str]], str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, rest: str = "/fleet?org=ops&token=t0k") -> str:
        return f"influxdb://127.0.0.1:{self.server_port}{rest}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Contract

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        self.server.asked.append(
            (self.command, parts.path, query, body.decode(), self.headers.get("Authorization") or "")
        )
        refusal = self.server.refuse(parts.path, body)
        if refusal is not None:
            status, text, headers = refusal
        elif parts.path == "/ping" or "write" in parts.path:
            status, text, headers = 204, "", {}
        else:
            status, text, headers = 200, json.dumps(self.server.answer), {}
        self.send_response(status)
        if self.server.version:
            self.send_header("X-Influxdb-Version", self.server.version)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET


@pytest.fixture
def contract() -> Iterator[Contract]:
    server = Contract()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("version", ["v2.7.1", "3.11.2"])
def test_2x_and_3x_are_written_by_bucket_and_read_by_influxql(contract: Contract, version: str) -> None:
    contract.version = version
    contract.answer = {
        "results": [
            {
                "statement_id": 0,
                "series": [{"name": "host", "tags": {"node": "n1"}, "columns": ["time", "load1"], "values": [[T0, 1]]}],
            }
        ]
    }
    store = open_store(contract.url())
    assert store.write([host(0)]) == []
    assert store.samples("host", start_ns=T0, end_ns=T0 + S) == [host(0)]
    _, write, read = contract.asked
    assert write[:2] == ("POST", "/api/v2/write") and write[2] == {"bucket": ["fleet"], "org": ["ops"]}
    assert write[3] == f"host,node=n1 load1=1.0,sample_fields=1i {T0}\n" and write[4] == "Token t0k"
    assert read[:2] == ("GET", "/query") and read[2]["db"] == ["fleet"] and read[2]["epoch"] == ["ns"]
    with pytest.raises(StoreError, match="retention"):
        contract.answer = {"results": [{"series": [{"columns": ["time", "count_load1"], "values": [[0, 4]]}]}]}
        store.prune({"host": T0})
    store.close()


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "named"),
    [
        (401, '{"code":"unauthorized","message":"unauthorized access"}', {}, StoreError, "token"),
        (403, '{"message":"forbidden"}', {}, StoreError, "grant"),
        (404, '{"code":"not found","message":"bucket \\"fleet\\" not found"}', {}, StoreError, "create 'fleet'"),
        (429, '{"message":"too fast"}', {"Retry-After": "7"}, StoreDown, "7 s"),
        (503, "", {"Retry-After": "Mon, 01 Jan 1990 00:00:00 GMT"}, StoreDown, "wait 0 s"),
        (503, "", {"Retry-After": "soon"}, StoreDown, "look at its log"),
        (200, "<html>\nSign in</html>", {}, StoreDown, "'<html> Sign in</html>'.*proxy"),
        (503, "", {}, StoreDown, "503"),
        (500, '{"error":"engine: timeout"}', {}, StoreDown, "timeout"),
    ],
)
def test_each_status_says_what_to_do(
    contract: Contract, status: int, body: str, headers: dict[str, str], kind: type[StoreError], named: str
) -> None:
    contract.refuse = lambda path, _: (status, body, headers) if "write" in path else None
    store = open_store(contract.url())
    with pytest.raises(StoreError, match=named) as caught:
        store.write([host(0)])
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value) and "t0k" not in str(caught.value)
    store.close()


def test_one_poison_line_of_5000_is_found_by_halving(contract: Contract) -> None:
    stored: set[str] = set()

    def refuse(path: str, body: bytes) -> tuple[int, str, dict[str, str]] | None:
        if "write" not in path:
            return None
        if b"poison" in body:
            return 400, '{"message":"unable to parse"}', {}
        stored.update(body.decode().splitlines())
        return None

    contract.refuse = refuse
    store = open_store(contract.url())
    batch = [host(i, node="poison" if i == 3333 else f"n{i}") for i in range(5000)]
    refused = store.write(batch)
    assert [entry.sample for entry in refused] == [batch[3333]]
    assert len(stored) == 4999
    assert len([1 for entry in contract.asked if "write" in entry[1]]) <= 2 * 13 + 1
    store.close()


def test_a_batch_that_is_too_large_is_halved(contract: Contract) -> None:
    contract.refuse = lambda path, body: (413, "too large", {}) if "write" in path and body.count(b"\n") > 100 else None
    store = open_store(contract.url())
    assert store.write([host(i) for i in range(300)]) == []
    lines = [line for entry in contract.asked for line in entry[3].splitlines() if entry[3].count("\n") <= 100]
    assert len(lines) == len(set(lines)) == 300
    store.close()


@pytest.mark.parametrize(("version", "named"), [("", "does not say that it is an InfluxDB"), ("relay", "InfluxDB")])
def test_a_server_of_another_kind_is_named(contract: Contract, version: str, named: str) -> None:
    contract.version = version
    with pytest.raises(StoreError, match=named) as caught:
        open_store(contract.url()).write([host(0)])
    assert not isinstance(caught.value, StoreDown)


def test_an_answer_that_is_no_answer_is_an_error_not_an_empty_result(contract: Contract) -> None:
    store = open_store(contract.url())
    row_is_short = {"columns": ["time", "load1"], "values": [[1]]}
    series = (5, [5], [{}], [{"columns": 5, "values": 5}], [{**row_is_short, "tags": 5}], [row_is_short])
    wrong_types = [{"results": [5]}, {"results": [None]}, *({"results": [{"series": found}]} for found in series)]
    for answer in (
        [], {}, {"results": []}, {"error": "shard gone"}, {"results": [{"error": "shard gone"}]}, *wrong_types
    ):  # fmt: skip
        contract.answer = answer
        with pytest.raises(StoreError):
            store.samples("host", start_ns=0, end_ns=T0)
    store.close()


def test_a_plain_http_server_behind_a_tls_url_is_a_tls_failure(contract: Contract) -> None:
    store = open_store(contract.url().replace("influxdb://", "influxdbs://"))
    with pytest.raises(StoreError, match=r"TLS|no answer") as caught:
        store.write([host(0)])
    assert "\n" not in str(caught.value)
    store.close()


def test_a_port_where_nobody_listens_is_down_not_an_error(free_port: Callable[[], int]) -> None:
    store = open_store(f"influxdb://127.0.0.1:{free_port()}/fleet")
    with pytest.raises(StoreDown, match="is the server running"):
        store.write([host(0)])
    store.close()
