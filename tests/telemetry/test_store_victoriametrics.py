"""VictoriaMetrics: the real server with its flags, killed, full and locked; a double that refuses; every refusal is one clear line."""

from __future__ import annotations

import gzip
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from telemetry.sample import Sample
from telemetry.store import StoreDown, StoreError, open_store, public_url
from telemetry.store.victoriametrics import VictoriaStore
from telemetry.store.victoriametrics_series import lines
from telemetry.store.victoriametrics_server import parse

if TYPE_CHECKING:
    from tests.store_servers import Influxd, Victoria

S = 10**9
T0 = (int(time.time()) // 3600 - 12) * 3600 * S


def host(second: float, load: float = 1.0, node: str = "n1") -> Sample:
    return Sample("host", {"node": node}, {"load1": load}, T0 + round(second * S))


# --- addresses


def test_a_url_is_taken_apart_and_its_secrets_are_not_shown() -> None:
    address = parse("victoriametricss://me:p%40ss@vm.example/select/0?db=fleet+1&verify=0")
    assert (address.base, address.db) == ("https://vm.example:8428/select/0", "fleet 1")
    assert address.shown == "victoriametricss://vm.example:8428/select/0?db=fleet+1"
    assert not address.verify_tls and address.authorization.startswith("Basic ")
    assert "p@ss" not in repr(address) and "Basic" not in repr(address)
    assert public_url("victoriametrics://me:secret@db:8428/x?token=abc") == "victoriametrics://db:8428/x"
    assert open_store("victoriametrics://me:secret@db?token=abc").url == "victoriametrics://db:8428"
    assert parse("victoriametrics://[::1]:9").base == "http://[::1]:9"


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert parse(f"victoriametrics://db?token_file={tmp_path}/token").authorization == "Bearer abc"
    monkeypatch.setenv("PAIRSCOPE_STORE_TOKEN", "xyz")
    assert parse("victoriametrics://db").authorization == "Bearer xyz"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("victoriametrics://", "host"),
        ("victoriametrics://db:port", "port"),
        ("victoriametrics://db?tokn=1", "tokn"),
        ("victoriametrics://db?token_file=/nowhere/token", "/nowhere/token"),
        ("victoriametricss://db?ca_file=/nowhere/ca.pem", "/nowhere/ca.pem"),
    ],
)
def test_a_wrong_url_is_named(url: str, named: str) -> None:
    with pytest.raises(StoreError, match=named):
        open_store(url).latest("host", since_ns=0)


# --- the layout


def test_a_sample_is_a_line_of_numbers_and_a_line_for_each_text() -> None:
    sample = Sample(
        "gpu",
        {"node": "a b", "gpu": "\\,="},
        {"util_pct": 9.5, "throttle_reasons": -(2**60), "name": "H 200"},
        T0 + 1_000_007,
    )
    moment = T0 + 1_000_000
    assert lines(sample) == (
        "gpu,gpu=\\\\\\,\\=,node=a\\ b sample_ns=7i,util_pct=9.5,throttle_reasons=-1152921504606846976i,"
        f"throttle_reasons_hi32=-268435456i,throttle_reasons_lo32=0i {moment}\n"
        f"gpu,gpu=\\\\\\,\\=,node=a\\ b,text_value=H\\ 200 name=1 {moment}\n"
    )


@pytest.mark.server
def test_fleets_with_other_names_on_one_server_do_not_see_each_other(victoria: Victoria) -> None:
    one, two = open_store(victoria.new_url()), open_store(victoria.new_url())
    none = open_store(f"victoriametrics://{victoria.address}")
    one.write([host(0, 1.0)])
    two.write([host(0, 2.0)])
    none.write([host(0, 3.0)])
    for store, load in ((one, 1.0), (two, 2.0), (none, 3.0)):
        assert store.samples("host", start_ns=T0, end_ns=T0 + S) == [host(0, load)]
        assert store.latest("host", since_ns=T0) == [host(0, load)]
        store.close()


# --- the real server


@pytest.mark.server
def test_a_server_that_was_killed_gets_again_what_it_had_acknowledged(own_victoria: Callable[..., Victoria]) -> None:
    server = own_victoria()
    store = open_store(server.new_url())
    store.write([host(0), host(1)])
    store.write([host(2)])
    server.kill()
    with pytest.raises(StoreDown, match=f"no answer from http://{server.address}"):
        store.write([host(3)])
    with pytest.raises(StoreDown, match="is the server running"):
        store.latest("host", since_ns=0)
    server.start()
    store.write([host(3)])
    assert store.samples("host", start_ns=T0, end_ns=T0 + 9 * S) == [host(0), host(1), host(2), host(3)]
    store.close()


@pytest.mark.server
def test_a_server_that_was_away_for_long_gets_again_what_it_had_acknowledged_just_before(
    own_victoria: Callable[..., Victoria], monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = [0.0]
    usual = time.monotonic
    monkeypatch.setattr("telemetry.store.victoriametrics.time.monotonic", lambda: usual() + later_s[0])
    server = own_victoria()
    store = open_store(server.new_url())
    store.write([host(0), host(1)])
    server.kill()
    for later_s[0] in (1.0, 70.0, 600.0):
        with pytest.raises(StoreDown):
            store.write([host(2)])
    server.start()
    store.write([host(2)])
    assert store.samples("host", start_ns=T0, end_ns=T0 + 9 * S) == [host(0), host(1), host(2)]
    store.close()


@pytest.mark.server
def test_a_server_with_a_password_names_a_wrong_one_and_serves_a_right_one(
    own_victoria: Callable[..., Victoria],
) -> None:
    server = own_victoria("-httpAuth.username=me", "-httpAuth.password=r/ght")
    right = open_store(f"victoriametrics://me:r%2Fght@{server.address}")
    assert right.write([host(0)]) == []
    assert right.latest("host", since_ns=0) == [host(0)]
    right.close()
    for url in (f"victoriametrics://me:wr0ng@{server.address}", f"victoriametrics://{server.address}?token=wr0ng"):
        store = open_store(url)
        for ask in (lambda s: s.write([host(1)]), lambda s: s.latest("host", since_ns=0)):
            with pytest.raises(StoreError, match="refuses the credentials") as caught:
                ask(store)
            assert not isinstance(caught.value, StoreDown)
            assert "\n" not in str(caught.value) and "wr0ng" not in str(caught.value)
        store.close()


@pytest.mark.server
def test_a_server_whose_disk_is_full_says_so_and_still_answers(own_victoria: Callable[..., Victoria]) -> None:
    server = own_victoria("-storage.minFreeDiskSpaceBytes=900000GB")
    store = VictoriaStore(server.new_url())
    # the server looks at its disk once a second
    deadline_s = time.monotonic() + 90
    while not store.server(again=True).is_read_only and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert "free some of its disk" in store.survey().write_problem
    with pytest.raises(StoreDown, match=r"free some of its disk") as caught:
        store.write([host(0)])
    assert "\n" not in str(caught.value) and server.address in str(caught.value)
    assert store.latest("host", since_ns=0) == []
    store.close()


@pytest.mark.server
def test_what_the_server_would_drop_or_cut_in_silence_is_refused_by_name(own_victoria: Callable[..., Victoria]) -> None:
    server = own_victoria("-retentionPeriod=2d")
    store = open_store(server.new_url())
    day = 86_400
    bad = [
        (host(-3 * day), "-retentionPeriod=2d"),
        (host(4 * day), "two days ahead"),
        (Sample("host", {f"t{i}": "x" for i in range(40)}, {"load1": 1.0}, T0), "40 tags"),
        (Sample("host", {"node": "n" * 20_000}, {"load1": 1.0}, T0), "longer than 16000 bytes"),
        (Sample("host", {"node": "n", "db": "x"}, {"load1": 1.0}, T0), "reserved"),
        (Sample("host", {"node": "n", "text_value": "x"}, {"load1": 1.0}, T0), "reserved"),
    ]
    most = Sample("host", {f"t{i}": "x" * 600 for i in range(24)}, {"load1": 1.0}, T0)
    refused = store.write([most, *(sample for sample, _ in bad)])
    assert [entry.sample for entry in refused] == [sample for sample, _ in bad]
    for entry, (_, named) in zip(refused, bad, strict=True):
        assert named in entry.reason
    assert store.samples("host", start_ns=0, end_ns=T0 + 9 * day * S) == [most]
    store.close()


@pytest.mark.server
def test_a_range_is_drawn_by_the_server_only_where_copies_of_a_sample_do_not_count(
    victoria: Victoria, deduplicating_victoria: Victoria, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for server in (victoria, deduplicating_victoria):
        store = VictoriaStore(server.new_url())
        batch = [host(t / 10, float(t * t % 97)) for t in range(600) if not 200 <= t < 330]
        store.write(batch)
        store.write(batch[5:9])
        asked: list[str] = []
        call = store._call
        monkeypatch.setattr(
            store, "_call", lambda path, *a, call=call, asked=asked, **k: asked.append(path) or call(path, *a, **k)
        )
        answers.append(
            [
                store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 70 * S, step_ns=step, aggregate=how)[0].values
                for how in ("mean", "min", "max", "last")
                for step in (1_700_000_000, 60 * S)
            ]
        )
        assert ("/api/v1/query_range" in asked) is (server is deduplicating_victoria)
        store.close()
    for here, there in zip(*answers, strict=True):
        assert there == [value if value is None else pytest.approx(value, rel=1e-12) for value in here]
        assert any(value is not None for value in here)


@pytest.mark.server
def test_a_store_that_never_wrote_reads_what_others_did(deduplicating_victoria: Victoria) -> None:
    url = deduplicating_victoria.new_url()
    writer = VictoriaStore(url)
    writer.write([host(0, 1.0), host(1, 5.0)])
    assert len(writer.latest("host", since_ns=T0)) == 1  # and so it is readable
    reader = VictoriaStore(url)
    assert reader.latest("host", since_ns=T0) == [host(1, 5.0)]
    assert reader.samples("host", start_ns=T0, end_ns=T0 + 2 * S) == [host(0, 1.0), host(1, 5.0)]
    assert reader.series("host") == [{"node": "n1"}]
    span = {"start_ns": T0, "end_ns": T0 + S, "step_ns": 60 * S}
    assert reader.range("host", ["load1"], **span)[0].values == [3.0]  # type: ignore[arg-type]
    assert reader.spread("host", ["load1"], **span)[0].high == [5.0]  # type: ignore[arg-type]
    writer.close()
    reader.close()


@pytest.mark.server
def test_newest_samples_of_series_that_ended_at_many_times_are_all_found(victoria: Victoria) -> None:
    store = open_store(victoria.new_url())
    rows = [host(60.5 * i, float(i), node=f"n{i:03}") for i in range(150)]
    store.write([*rows, *(host(-1, 99.0, node=f"n{i:03}") for i in range(150))])
    assert store.latest("host", since_ns=0) == rows
    store.close()


@pytest.mark.server
def test_a_condition_of_a_thousand_values_or_of_odd_names_is_met(deduplicating_victoria: Victoria) -> None:
    store = open_store(deduplicating_victoria.new_url())
    store.write([host(0, 1.0, node=f"node-{i:04}.example.org") for i in range(1000)])
    wanted = [f"node-{i:04}.example.org" for i in range(0, 1000, 2)]
    assert len(store.latest("host", since_ns=0, where={"node": wanted})) == 500
    (spread,) = store.spread("host", ["load1"], start_ns=T0, end_ns=T0 + S, step_ns=S, where={"node": wanted})
    assert spread.mean == [1.0]
    odd = Sample("host", {"node": "n", 'a b"\\c': "x"}, {"load1": 2.0}, T0)
    store.write([odd])
    assert store.latest("host", since_ns=0, where={'a b"\\c': "x"}) == [odd]
    assert store.latest("host", since_ns=0, where={"node": ["n", "a\nb"], "__name__": "gpu"}) == []
    store.close()


@pytest.mark.server
def test_an_influxdb_is_not_taken_for_a_victoriametrics(influxd: Influxd) -> None:
    store = open_store(f"victoriametrics://{influxd.address}")
    with pytest.raises(StoreError, match="is an InfluxDB; use influxdb:") as caught:
        store.write([host(0)])
    assert not isinstance(caught.value, StoreDown)
    store.close()


@pytest.mark.server
def test_a_survey_names_the_flags_that_an_operator_should_set(
    victoria: Victoria, deduplicating_victoria: Victoria, own_victoria: Callable[..., Victoria]
) -> None:
    long = own_victoria("-retentionPeriod=100d", "-dedup.minScrapeInterval=30s")
    advice = {}
    for name, server in (("bare", victoria), ("dedup", deduplicating_victoria), ("long", long)):
        store = open_store(server.new_url())
        survey = store.survey()
        advice[name] = (survey.advice, survey.retention_s)
        store.close()
    assert advice == {
        "bare": (("dedup_off", "retention_short"), 31 * 86_400.0),
        "dedup": (("retention_short",), 31 * 86_400.0),
        "long": (("dedup_long",), 100 * 86_400.0),
    }


# --- doubles


class Contract(http.server.ThreadingHTTPServer):
    """Answers as a VictoriaMetrics does, or refuses as told; remembers the lines that it took."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuse: Callable[[str, str], tuple[int, str, dict[str, str]] | None] = lambda path, body: None
        self.asked: list[tuple[str, str]] = []
        self.lines: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, scheme: str = "victoriametrics") -> str:
        return f"{scheme}://127.0.0.1:{self.server_port}?token=t0k"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Contract

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = gzip.decompress(raw).decode() if self.headers.get("Content-Encoding") == "gzip" else raw.decode()
        path = urlsplit(self.path).path
        self.server.asked.append((path, self.headers.get("Authorization") or ""))
        probe = '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"1"]}]}}'
        refusal = self.server.refuse(path, body)
        status, text, headers = refusal or (200, probe if path == "/api/v1/query" else "", {})
        if path == "/write" and refusal is None:
            self.server.lines += body.splitlines()
        self.send_response(status)
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


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "named"),
    [
        (401, "", {}, StoreError, "token"),
        (403, "forbidden", {}, StoreError, "grant"),
        (404, "", {}, StoreError, "check host, port and path"),
        (302, "", {"Location": "http://127.0.0.1:1/"}, StoreError, "HTTP 302"),
        (429, "too many concurrent requests", {"Retry-After": "7"}, StoreDown, "7 s"),
        (503, "the storage is in read-only mode; check -storage.minFreeDiskSpaceBytes", {}, StoreDown, "free some"),
        (503, "cannot handle more than 8\nconcurrent inserts", {}, StoreDown, "8 concurrent"),
        (500, "oops", {}, StoreDown, "500"),
        (503, "", {"Retry-After": "-1"}, StoreDown, "look at its log"),
        (200, "<html>\nSign in</html>", {}, StoreDown, "'<html> Sign in</html>'.*proxy"),
    ],
)
def test_each_status_says_what_to_do(
    contract: Contract, status: int, body: str, headers: dict[str, str], kind: type[StoreError], named: str
) -> None:
    contract.refuse = lambda path, _: (status, body, headers) if path == "/write" else None
    store = open_store(contract.url())
    with pytest.raises(StoreError, match=named) as caught:
        store.write([host(0)])
    assert type(caught.value) is kind
    if isinstance(caught.value, StoreDown):
        assert caught.value.retry_after_s == (7.0 if headers.get("Retry-After") == "7" else None)
    assert "\n" not in str(caught.value) and "t0k" not in str(caught.value)
    assert {authorization for _, authorization in contract.asked} == {"Bearer t0k"}
    store.close()


def test_one_poison_line_of_5000_is_found_by_halving_and_a_batch_too_large_is_parted(contract: Contract) -> None:
    def refuse(path: str, body: str) -> tuple[int, str, dict[str, str]] | None:
        if path == "/write" and "poison" in body:
            return 400, 'remoteAddr: "1.2.3.4:5"; requestURI: /write; cannot unmarshal', {}
        return (413, "too large", {}) if path == "/write" and body.count("\n") > 3000 else None

    contract.refuse = refuse
    store = open_store(contract.url())
    batch = [host(i / 10, node="poison" if i == 3333 else f"n{i}") for i in range(5000)]
    refused = store.write(batch)
    assert [(entry.sample, entry.reason) for entry in refused] == [(batch[3333], "cannot unmarshal")]
    stored = [line for line in contract.lines if line.startswith("host,")]
    assert len(stored) == len(set(stored)) == 4999
    assert len([1 for path, _ in contract.asked if path == "/write"]) <= 2 * 13 + 1 + 1  # the marks behind them
    store.close()


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"status":"success"}', '{"status":"error","error":"x"}', "<html>"])
def test_an_answer_that_is_no_answer_is_an_error_not_an_empty_result(contract: Contract, answer: str) -> None:
    store = open_store(contract.url())
    store.write([host(0)])  # so that the server is known
    contract.refuse = lambda path, _: (200, answer, {})
    with pytest.raises(StoreError, match="not that of VictoriaMetrics"):
        store.latest("host", since_ns=0)
    contract.refuse = lambda path, _: (200, '{"metric":{}}' if "export" in path else answer, {})
    with pytest.raises(StoreError, match="not that of VictoriaMetrics"):
        store.samples("host", start_ns=0, end_ns=T0)
    store.close()


def test_a_prometheus_is_not_taken_for_a_victoriametrics(contract: Contract) -> None:
    # it does not know the operator that is asked for
    contract.refuse = lambda path, _: (400, '{"status":"error","errorType":"bad_data","error":"parse error"}', {})
    with pytest.raises(StoreError, match="does not answer as a VictoriaMetrics") as caught:
        open_store(contract.url()).write([host(0)])
    assert not isinstance(caught.value, StoreDown)


def test_a_plain_http_server_behind_a_tls_url_is_a_tls_failure(contract: Contract) -> None:
    store = open_store(contract.url("victoriametricss"))
    with pytest.raises(StoreError, match="speaks no TLS; use victoriametrics:") as caught:
        store.write([host(0)])
    assert "\n" not in str(caught.value) and type(caught.value) is StoreError
    store.close()


def test_a_port_where_nobody_listens_is_down_not_an_error(free_port: Callable[[], int]) -> None:
    store = open_store(f"victoriametrics://me:s3cret@127.0.0.1:{free_port()}")
    with pytest.raises(StoreDown, match="is the server running") as caught:
        store.write([host(0)])
    assert "s3cret" not in str(caught.value)
    store.close()
