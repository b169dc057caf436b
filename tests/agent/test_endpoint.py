"""The agent's own endpoint: what it shows is fresh and well-formed, and no client can take it over."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent import endpoint as endpoint_module
from agent.endpoint import CONCURRENT_LIMIT, CannotServe, Endpoint, is_loopback
from agent.latest import LatestSamples, prometheus_text
from agent.sampler import SLOW_KINDS, slow_fields
from agent.settings import AgentSettings, EngineTarget
from telemetry.catalogue import MEASUREMENTS
from telemetry.sample import Sample, Value
from tests import loopback

NODE = {"node": "n1"}


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Read by the Prometheus client library's own parser."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def every_field() -> list[Sample]:
    """One sample of each measurement with all of its fields, each with a value of its own."""
    made = []
    number = 1
    for measurement in MEASUREMENTS.values():
        fields: dict[str, Value] = {}
        for name, field in measurement.fields.items():
            fields[name] = f"text {number}" if field.type is str else field.type(number)
            number += 1
        made.append(Sample(measurement.name, {**NODE, **dict.fromkeys(measurement.tags, "t")}, fields, 5))
    return made


def test_every_field_of_the_catalogue_is_shown_by_its_name_with_its_help_and_type() -> None:
    latest = LatestSamples(1.0)
    latest.publish(every_field(), 10.0)
    text = prometheus_text(latest.fresh(10.0))
    shown = values(text)
    for sample in every_field():
        tags = tuple(sorted(sample.tags.items()))
        for name, value in sample.fields.items():
            metric = f"pairscope_{sample.measurement}_{name}"
            if sample.measurement in ("event", "verdict", "alert", "pair"):
                assert metric not in text
            elif not isinstance(value, str):
                # the client library gives every counter the ending _total
                assert shown.get((metric, tags), shown.get((f"{metric}_total", tags))) == value
                assert f"\n{metric}{{" in text
                kind = MEASUREMENTS[sample.measurement].fields[name].kind
                assert f"# TYPE {metric} {'counter' if kind == 'counter' else 'gauge'}\n" in text
                assert f"# HELP {metric} " in text
    info = [labels for name, labels in shown if name == "pairscope_engine_info"]
    assert {"version", "config_hash", "counter_style"} <= dict(info[0]).keys()


def test_labels_are_escaped() -> None:
    tags = {"node": 'a "b" \\ c\nd', "gpu": "0"}
    text = prometheus_text([Sample("gpu", tags, {"temp_c": 61.5}, 5)])
    assert values(text) == {("pairscope_gpu_temp_c", tuple(sorted(tags.items()))): 61.5}


def test_a_series_vanishes_after_three_intervals_and_its_sibling_stays() -> None:
    latest = LatestSamples(2.0)
    one, two = (Sample("gpu", {**NODE, "gpu": gpu}, {"temp_c": 50.0}, 5) for gpu in "01")
    latest.publish([one, two], 100.0)
    latest.publish([two], 104.0)
    assert latest.fresh(106.0) == [one, two]
    assert latest.fresh(106.1) == [two]
    latest.publish([], 120.0)
    assert latest.fresh(120.0) == []


def test_a_newer_sample_replaces_the_older_one_whole() -> None:
    latest = LatestSamples(1.0)
    latest.publish([Sample("gpu", NODE, {"temp_c": 50.0, "power_w": 300.0}, 5)], 10.0)
    newer = Sample("gpu", NODE, {"temp_c": 51.0}, 6)
    latest.publish([newer], 11.0)
    assert latest.fresh(11.0) == [newer]


def test_a_slow_field_stands_for_its_own_time_and_not_beside_a_state_that_says_out() -> None:
    latest = LatestSamples(1.0, {"gpu": {"mem_used_bytes": 15.0}})
    latest.publish([Sample("gpu", NODE, {"temp_c": 50.0, "mem_used_bytes": 7.0, "state": 0}, 1)], 10.0)
    latest.publish([Sample("gpu", NODE, {"temp_c": 51.0, "state": 0}, 2)], 11.0)
    assert latest.fresh(11.0) == [Sample("gpu", NODE, {"mem_used_bytes": 7.0, "temp_c": 51.0, "state": 0}, 2)]
    for second in range(12, 27):
        latest.publish([Sample("gpu", NODE, {"state": 0}, second)], float(second))
        assert ("mem_used_bytes" in latest.fresh(float(second))[0].fields) == (second <= 25)
    latest.publish([Sample("gpu", NODE, {"mem_used_bytes": 8.0, "state": 0}, 27)], 27.0)
    latest.publish([Sample("gpu", NODE, {"state": 4}, 28)], 28.0)
    latest.publish([Sample("gpu", NODE, {"state": 0}, 29)], 29.0)
    assert latest.fresh(29.0) == [Sample("gpu", NODE, {"state": 0}, 29)]


def test_what_an_engine_told_stands_until_it_is_asked_again_and_not_once_it_is_down() -> None:
    target = EngineTarget("a", "http://127.0.0.1:1", probe_every_s=20.0)
    settings = AgentSettings(Path("/nowhere"), "sqlite:///x.db", node="n1", engines=(target,))
    latest = LatestSamples(1.0, slow_fields(settings), {}, {}, SLOW_KINDS)
    slow, fast = ({**NODE, "engine": kind, "kind": kind} for kind in ("llamacpp", "vllm"))
    told: dict[str, Value] = {"up": 1, "generation_tokens_total": 7, "stats_age_s": 0.0, "probe_ok": 1, "probe_s": 0.5}

    def shown(second: float) -> list[set[str]]:
        return [set(sample.fields) - {"up", "stats_age_s"} for sample in latest.fresh(second)]

    latest.publish([Sample("engine", tags, told, 1) for tags in (slow, fast)], 100.0)
    for second in range(101, 162):
        now: dict[str, Value] = {"up": 1, "stats_age_s": second - 100.0}
        latest.publish([Sample("engine", tags, now, second) for tags in (slow, fast)], float(second))
        probed = {"probe_ok", "probe_s"} if second <= 160 else set()
        assert shown(float(second)) == [probed | ({"generation_tokens_total"} if second <= 125 else set()), probed]
    latest.publish([Sample("engine", slow, told, 200)], 200.0)
    latest.publish([Sample("engine", slow, {"up": 1, "probe_ok": 0}, 201)], 201.0)
    assert shown(201.0) == [{"generation_tokens_total", "probe_ok"}]
    latest.publish([Sample("engine", slow, {"up": 0, "starting": 0}, 202)], 202.0)
    assert shown(202.0) == [{"starting"}]


@pytest.fixture
def well() -> dict[str, object]:
    return {"well": True, "status": "ok"}


@pytest.fixture
def served(well: dict[str, object]) -> Iterator[str]:
    latest = LatestSamples(1.0)
    latest.publish([Sample("host", NODE, {"cpu_pct": 12.5}, 5)], 10.0)
    endpoint = Endpoint("127.0.0.1", 0, latest, lambda: (bool(well["well"]), well), monotonic=lambda: 10.5)
    endpoint.start()
    yield f"http://127.0.0.1:{endpoint.port}"
    endpoint.close()


def test_metrics_are_served_as_prometheus_text(served: str) -> None:
    answer = loopback.get(f"{served}/metrics?x=1")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert values(answer.text) == {("pairscope_host_cpu_pct", (("node", "n1"),)): 12.5}


def test_health_is_json_and_its_status_follows(served: str, well: dict[str, object]) -> None:
    assert (loopback.get(f"{served}/healthz").status_code, loopback.get(f"{served}/healthz").json()["status"]) == (
        200,
        "ok",
    )
    well["well"] = False
    assert loopback.get(f"{served}/healthz").status_code == 503


def test_health_with_half_a_character_in_it_is_still_told(served: str, well: dict[str, object]) -> None:
    well["engine"] = "we\ud800ights"
    assert loopback.get(f"{served}/healthz").json()["engine"] == "we?ights"


def test_other_paths_and_methods_are_refused(served: str) -> None:
    assert loopback.get(f"{served}/../etc/passwd").status_code == 404
    assert loopback.post(f"{served}/metrics").status_code == 501
    head = httpx.head(f"{served}/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert "python" not in head.headers["server"].lower()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("gpu-host.example", False),
        ("", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_an_address_that_others_can_reach_is_refused_unless_told() -> None:
    latest = LatestSamples(1.0)
    with pytest.raises(CannotServe, match="allow_remote"):
        Endpoint("0.0.0.0", 0, latest, lambda: (True, {}))
    Endpoint("0.0.0.0", 0, latest, lambda: (True, {}), allow_remote=True).close()


@pytest.mark.parametrize("host", ["é..b", "a\0b", f"{'a' * 70}.b"])
def test_a_name_that_no_host_can_have_is_one_line(host: str) -> None:
    with pytest.raises(CannotServe) as refused:
        Endpoint(host, 0, LatestSamples(1.0), lambda: (True, {}), allow_remote=True)
    assert "\n" not in str(refused.value)


def test_a_port_in_use_is_one_line_with_port_and_remedy(free_port: Callable[[], int]) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(CannotServe) as refused:
            Endpoint("127.0.0.1", port, LatestSamples(1.0), lambda: (True, {}))
    assert str(port) in str(refused.value)
    assert "\n" not in str(refused.value)


def open_sockets(served: str, count: int) -> list[socket.socket]:
    port = int(served.rpartition(":")[2])
    return [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]


def test_more_than_forty_at_once_are_told_so_and_places_come_free_again(served: str) -> None:
    idle = open_sockets(served, CONCURRENT_LIMIT)
    try:
        refused = until_status(served, 429)
        assert refused.headers["retry-after"] == "1"
    finally:
        for sock in idle:
            sock.close()
    assert until_status(served, 200).status_code == 200


def until_status(served: str, status: int) -> httpx.Response:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        with contextlib.suppress(httpx.TransportError):
            answer = loopback.get(f"{served}/metrics")
            if answer.status_code == status:
                return answer
    raise AssertionError(f"never {status}")


def test_a_host_without_a_thread_left_costs_its_requests_only_and_no_place(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refused: list[str] = []

    def no_thread(thread: threading.Thread) -> None:
        if "process_request" in thread.name:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(CONCURRENT_LIMIT + 1):
            with pytest.raises(httpx.TransportError):
                loopback.get(f"{served}/metrics")
    assert len(refused) > CONCURRENT_LIMIT
    assert loopback.get(f"{served}/metrics").status_code == 200


def test_a_host_without_a_file_left_is_not_asked_in_a_busy_loop(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    waits: list[float] = []

    def no_file(_server: object) -> None:
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.TCPServer, "get_request", no_file)
        patch.setattr(
            endpoint_module.time, "sleep", lambda wait_s: waits.append(wait_s) or threading.Event().wait(0.01)
        )
        with open_sockets(served, 1)[0]:
            give_up_s = time.monotonic() + 90
            while len(attempts) < 5 and time.monotonic() < give_up_s:
                threading.Event().wait(0.01)
    assert len(attempts) >= 5
    assert set(waits) == {endpoint_module.NO_FILE_WAIT_S}
    assert loopback.get(f"{served}/metrics").status_code == 200


def test_a_request_that_drips_is_ended(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "REQUEST_DEADLINE_S", -1.0)
    (sock,) = open_sockets(served, 1)
    with sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert sock.recv(1000) == b""


def test_many_clients_at_once_all_get_an_answer(served: str) -> None:
    statuses: list[int] = []

    def ask() -> None:
        for _ in range(10):
            with contextlib.suppress(httpx.TransportError):
                statuses.append(loopback.get(f"{served}/metrics").status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 80
