"""Engines that are slow, hung, lying, huge, restarting or gone never hold up a tick, and what is written of them is true."""

from __future__ import annotations

import gzip
import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.collectors import engine as engine_module
from agent.collectors.engine import EngineCollector
from agent.collectors.interface import Tick
from agent.engine_ownership import EngineOwnership
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.engine_endpoint import EngineEndpoint, Page, nothing_listens
from tests.doubles.engine_texts.pairscope import pairscope
from tests.doubles.engine_texts.text import MODEL
from tests.doubles.engine_texts.vllm import vllm

TAGS = {"node": "n1"}
NOW_NS = 1_796_000_000 * 10**9
PATIENT_S = 10.0


@pytest.fixture
def server() -> Iterator[EngineEndpoint]:
    endpoint = EngineEndpoint()
    yield endpoint
    endpoint.close()


class Ticks:
    """Collects tick by tick. Every sample must fit the catalogue."""

    def __init__(self, *urls: str, wait_s: float = PATIENT_S, deadline_s: float = 2.0, **how: object) -> None:
        targets = [EngineTarget(f"chat-{letter}", url) for letter, url in zip("abcdef", urls, strict=False)]
        how.setdefault("ownership", EngineOwnership(targets, ProcessTable("/no/processes")))
        self.collector = EngineCollector(TAGS, targets, wait_s=wait_s, deadline_s=deadline_s, **how)  # type: ignore[arg-type]
        self._numbers = itertools.count(1)

    def all(self, *, is_safe: bool = True) -> list[Sample]:
        """`is_safe`: the samples come on disk before anything else happens."""
        number = next(self._numbers)
        tick = Tick(number, NOW_NS + number * 10**9, time.monotonic())
        samples = [check(sample) for sample in self.collector.collect(tick)]
        assert all(sample.time_ns == tick.time_ns for sample in samples)
        if is_safe:
            self.collector.remember(number)
        return samples

    def one(self) -> Sample:
        (sample,) = [sample for sample in self.all() if sample.measurement == "engine"]
        return sample

    def until(self, holds: Callable[[Sample], bool]) -> Sample:
        """Tick until the only engine's sample is so; only for what must come at some time."""
        give_up_s = time.monotonic() + 90
        while time.monotonic() < give_up_s:
            samples = [sample for sample in self.all() if sample.measurement == "engine"]
            if samples and holds(samples[0]):
                return samples[0]
            time.sleep(0.01)
        raise AssertionError(f"it never came; last: {samples}")

    def state(self) -> str:
        return self.collector.statuses()[0].state


def test_an_engine_is_read_with_its_tags(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    server.json("/version", {"version": "0.32.0"})
    ticks = Ticks(server.url)
    ticks.one()
    server.metrics(vllm(generated=(1400.0,)))
    sample = ticks.one()
    assert dict(sample.tags) == {"node": "n1", "engine": "chat-a", "kind": "vllm", "model": MODEL}
    assert sample.fields["up"] == 1
    assert sample.fields["version"] == "0.32.0"
    assert sample.fields["tokens_per_s"] > 0  # type: ignore[operator]
    assert 0 <= sample.fields["stats_age_s"] < PATIENT_S  # type: ignore[operator]
    assert ticks.state() == "ready"


def test_a_configured_kind_and_gpus_are_tags_even_before_anything_answers() -> None:
    target = EngineTarget("chat", nothing_listens(), kind="vllm", gpus="0+1")
    (sample,) = EngineCollector(TAGS, [target], wait_s=PATIENT_S).collect(Tick(1, NOW_NS, time.monotonic()))
    assert dict(sample.tags) == {"node": "n1", "engine": "chat", "kind": "vllm", "gpus": "0+1"}
    assert dict(sample.fields) == {"up": 0, "starting": 0, "gpus_mapping": "manual", "gpus_confidence": 1.0}


@pytest.mark.parametrize("path", ["/metrics/", "/v1/metrics", "/prometheus/metrics"])
def test_a_pasted_metrics_path_is_the_same_engine(server: EngineEndpoint, path: str) -> None:
    server.metrics(vllm())
    assert Ticks(server.url + path).one().fields["requests_running"] == 3.0


def test_nothing_listening_is_down_and_no_number_is_written() -> None:
    ticks = Ticks(nothing_listens())
    assert dict(ticks.one().fields) == {"up": 0, "starting": 0}
    status = ticks.collector.statuses()[0]
    assert status.state == "down"
    assert "nothing listens" in status.problem


def test_a_hung_engine_is_left_out_of_the_tick_and_the_others_are_not(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    hung = EngineEndpoint()
    hung.hang("/metrics")
    ticks = Ticks(hung.url, server.url, wait_s=2.0, deadline_s=20.0, interval_s=0.05)
    try:
        for _ in range(2):
            samples = {sample.tags["engine"]: sample for sample in ticks.all()}
            assert samples["chat-b"].fields["requests_running"] == 3.0
            assert "requests_running" not in samples.get("chat-a", Sample("engine", {}, {}, 0)).fields
        assert hung.requests.count("/metrics") == 1  # one visit at a time, none is queued
        assert samples["chat-a"].fields["up"] == 0
        assert ticks.collector.statuses()[0].state == "down"
    finally:
        hung.close()


def test_an_engine_that_hangs_after_it_answered_ages_and_repeats_no_number(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    ticks = Ticks(server.url, wait_s=0.3, interval_s=0.1)
    ticks.until(lambda sample: "requests_running" in sample.fields)
    server.hang("/metrics")
    first = ticks.one()
    assert sorted(first.fields) == ["starting", "stats_age_s", "up"]
    sample = ticks.until(lambda sample: sample.fields["up"] == 0)
    assert sorted(sample.fields) == ["starting", "stats_age_s", "up"]
    assert sample.fields["stats_age_s"] > first.fields["stats_age_s"]  # type: ignore[operator]


def test_the_numbers_of_a_slow_engine_come_with_a_later_tick_and_say_how_old_they_are(server: EngineEndpoint) -> None:
    answers = itertools.count(1)

    def slow() -> Page:
        time.sleep(0.25)
        return Page(vllm(generated=(1000.0 * next(answers),)).encode())

    server.pages["/metrics"] = slow
    ticks = Ticks(server.url, wait_s=0.02, interval_s=1.0)
    first = ticks.until(lambda sample: "generation_tokens_total" in sample.fields)
    assert first.fields["generation_tokens_total"] == 1000
    assert 0 < first.fields["stats_age_s"] < PATIENT_S  # type: ignore[operator]
    assert first.fields["up"] == 1
    second = ticks.until(lambda sample: "tokens_per_s" in sample.fields)
    assert second.fields["generation_tokens_total"] == 2000
    # 1000 tokens between two bodies that are at least 0.25 s apart, whatever the ticks' own distance is
    assert 0 < second.fields["tokens_per_s"] <= 4000  # type: ignore[operator]
    status = ticks.collector.statuses()[0]
    assert status.state == "ready"
    assert "late and seldom" in status.problem
    assert ticks.collector.late > 0


def test_a_slow_engine_has_as_long_a_rest_as_it_took_and_a_fast_one_none(server: EngineEndpoint) -> None:
    asked: list[float] = []

    def slow() -> Page:
        asked.append(time.monotonic())
        time.sleep(0.3)
        return Page(vllm().encode())

    server.pages["/metrics"] = slow
    ticks = Ticks(server.url, wait_s=0.01, interval_s=1.0)
    ticks.until(lambda _: len(asked) == 4)
    assert all(later - before >= 0.6 for before, later in itertools.pairwise(asked[1:]))
    server.metrics(vllm())
    ticks.collector._wait_s = PATIENT_S
    ticks.until(lambda sample: "requests_running" in sample.fields and not ticks.collector.statuses()[0].problem)
    before = server.requests.count("/metrics")
    for _ in range(3):
        assert "requests_running" in ticks.one().fields
    assert server.requests.count("/metrics") == before + 3


def test_a_slow_engine_is_down_only_after_three_times_its_usual_time(server: EngineEndpoint) -> None:
    def slow() -> Page:
        time.sleep(0.2)
        return Page(vllm().encode())

    server.pages["/metrics"] = slow
    ticks = Ticks(server.url, wait_s=0.01, interval_s=0.05, deadline_s=20.0)
    first = ticks.until(lambda sample: "requests_running" in sample.fields)
    usual_s = ticks.collector._engines[0].slow_s
    server.hang("/metrics")
    down = ticks.until(lambda sample: sample.fields["up"] == 0)
    assert usual_s >= 0.2
    assert down.fields["stats_age_s"] >= 3 * usual_s  # type: ignore[operator]
    assert first.fields["up"] == 1


def test_an_engine_that_is_asked_seldom_is_not_down_because_its_last_answer_is_old(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    ticks = Ticks(server.url, wait_s=0.0, interval_s=1.0)
    engine = ticks.collector._engines[0]
    ticks.until(lambda sample: sample.fields.get("up") == 1)
    server.hang("/metrics")
    ticks.until(lambda _: engine.worker.busy)
    engine.answered_s = time.monotonic() - 10.0
    assert ticks.one().fields["up"] == 1


def test_a_dripping_body_ends_at_the_deadline(server: EngineEndpoint) -> None:
    def drip() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        for _ in range(400):
            if server.released.wait(0.05):
                return
            yield b"vllm:num_requests_running 3\n"

    server.pages["/metrics"] = lambda: Page(raw=drip())
    ticks = Ticks(server.url, deadline_s=0.3)
    assert ticks.one().fields["up"] == 0
    assert "in time" in ticks.collector.statuses()[0].problem
    assert ticks.collector.errors == 1


def test_dripping_headers_end_at_the_deadline(server: EngineEndpoint) -> None:
    def drip() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        for number in range(200):
            if server.released.wait(0.05):
                return
            yield b"X-%d: y\r\n" % number

    server.pages["/metrics"] = lambda: Page(raw=drip())
    ticks = Ticks(server.url, deadline_s=0.3)
    assert ticks.one().fields["up"] == 0
    assert "in time" in ticks.collector.statuses()[0].problem


def test_half_a_character_in_what_an_engine_says_of_itself_becomes_a_space(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    server.pages["/health"] = Page(rb'{"status": "loading", "stage": "we\ud800ights"}', 503)
    ticks = Ticks(server.url)
    ticks.one()
    assert ticks.collector.statuses()[0].stage == "we ights"


@pytest.mark.parametrize(
    "body",
    [
        b"<html>not metrics</html>",
        b"\x00\xff" * 5000,
        b"",
        b"{" * 5000,
        b'vllm:x{a="' + b"\\" * 60_000,
    ],
    ids=["html", "binary", "empty", "braces", "backslashes"],
)
def test_garbage_with_a_living_engine_is_up_without_numbers(server: EngineEndpoint, body: bytes) -> None:
    server.pages["/metrics"] = Page(body)
    ticks = Ticks(server.url)
    assert dict(ticks.one().fields) == {"up": 1}


def test_good_lines_among_garbage_are_kept(server: EngineEndpoint) -> None:
    server.pages["/metrics"] = Page(b"\xff\xfe{{{\n" + vllm().encode() + b"vllm:num_requests_running{{ 9\n")
    assert Ticks(server.url).one().fields["requests_running"] == 3.0


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nvllm:num_requests_running 3\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000,
        b"",
    ],
    ids=["not http", "cut off", "endless headers", "closed at once"],
)
def test_what_is_no_http_answer_is_down_with_a_reason(server: EngineEndpoint, raw: bytes) -> None:
    server.pages["/metrics"] = lambda: Page(raw=iter([raw]))
    del server.pages["/health"]
    server.pages["/health"] = lambda: Page(raw=iter([raw]))
    ticks = Ticks(server.url)
    assert dict(ticks.one().fields) == {"up": 0, "starting": 0}
    assert ticks.collector.statuses()[0].problem
    assert ticks.collector.errors == 1


def bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br"])
def test_a_bomb_or_an_unknown_encoding_is_an_error_and_no_number(server: EngineEndpoint, encoding: str) -> None:
    server.pages["/metrics"] = Page(bomb(), headers={"Content-Encoding": encoding})
    ticks = Ticks(server.url, deadline_s=20.0)
    assert "requests_running" not in ticks.one().fields
    assert ticks.collector.errors == 1


def test_a_gzipped_exposition_is_read(server: EngineEndpoint) -> None:
    server.pages["/metrics"] = Page(gzip.compress(vllm().encode()), headers={"Content-Encoding": "gzip"})
    assert Ticks(server.url).one().fields["requests_running"] == 3.0


def test_an_endless_body_ends_at_the_limit_or_the_deadline(server: EngineEndpoint) -> None:
    def endless() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        while not server.released.is_set():
            yield b"vllm:num_requests_running 3\n" * 2000

    server.pages["/metrics"] = lambda: Page(raw=endless())
    ticks = Ticks(server.url)
    assert "requests_running" not in ticks.one().fields
    assert ticks.collector.errors == 1


def test_a_redirect_is_not_followed(server: EngineEndpoint) -> None:
    other = EngineEndpoint()
    other.metrics(vllm())
    server.pages["/metrics"] = Page(status=302, headers={"Location": other.url + "/metrics"})
    try:
        assert "requests_running" not in Ticks(server.url).one().fields
        assert other.requests == []
    finally:
        other.close()


@pytest.mark.parametrize("status", [404, 501, 401])
def test_metrics_that_are_off_are_told_apart_from_an_engine_that_is_down(server: EngineEndpoint, status: int) -> None:
    server.pages["/metrics"] = Page(status=status)
    server.json("/v1/models", {"data": [{"id": "org/M", "owned_by": "vllm"}]})
    ticks = Ticks(server.url)
    sample = ticks.one()
    assert dict(sample.fields) == {"up": 1}
    assert (sample.tags["kind"], sample.tags["model"]) == ("vllm", "org/M")
    assert "--disable-log-stats" in ticks.collector.statuses()[0].problem


def test_a_vllm_without_its_families_has_its_metrics_off(server: EngineEndpoint) -> None:
    server.metrics("process_cpu_seconds_total 5\npython_info 1\n")
    server.json("/v1/models", {"data": [{"id": "org/M", "owned_by": "vllm"}]})
    ticks = Ticks(server.url)
    assert dict(ticks.one().fields) == {"up": 1}
    assert "--disable-log-stats" in ticks.collector.statuses()[0].problem


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"id": 5}]}, [1], "x", None, {"data": {"0": 1}}])
def test_a_strange_list_of_models_is_no_harm(server: EngineEndpoint, models: object) -> None:
    server.pages["/metrics"] = Page(status=404)
    server.json("/v1/models", models)
    assert Ticks(server.url).one().fields["up"] == 1


def test_loading_is_not_up_and_shows_how_far_it_is(server: EngineEndpoint) -> None:
    server.metrics(pairscope(generated=0.0))
    server.json("/health", {"status": "loading", "stage": "weights", "progress": 0.42}, 503)
    ticks = Ticks(server.url)
    assert ticks.one().fields["up"] == 0
    status = ticks.collector.statuses()[0]
    assert (status.state, status.stage, status.progress) == ("loading", "weights", 0.42)
    server.json("/health", {"status": "ready"})
    assert ticks.one().fields["up"] == 1
    assert ticks.state() == "ready"


def test_a_stalled_engine_is_told_apart_from_one_that_is_down(server: EngineEndpoint) -> None:
    server.metrics(pairscope() + 'pairscope_stats_age_s{model_name="m"} 42.5\n')
    server.json("/health", {"status": "stalled", "stats_age_s": 42.5}, 503)
    ticks = Ticks(server.url)
    sample = ticks.one()
    assert sample.fields["up"] == 1
    assert sample.fields["stats_age_s"] >= 42.5  # type: ignore[operator]
    assert "stalled" in ticks.collector.statuses()[0].problem
    assert ticks.state() == "down"


def test_a_dead_engine_behind_a_living_server_is_down(server: EngineEndpoint) -> None:
    server.pages["/metrics"] = Page(status=500)
    server.json("/health", {"status": "dead", "reason": "x"}, 500)
    ticks = Ticks(server.url)
    assert ticks.one().fields == {"up": 0, "starting": 0}
    assert "dead" in ticks.collector.statuses()[0].problem


def test_a_bare_503_is_loading_at_first_and_only_busy_later(
    server: EngineEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEALTH_EVERY_S", 0.0)
    server.metrics(vllm())
    server.pages["/health"] = Page(status=503)
    ticks = Ticks(server.url)
    assert (ticks.one().fields["up"], ticks.state()) == (0, "loading")
    server.pages["/health"] = Page()
    assert (ticks.one().fields["up"], ticks.state()) == (1, "ready")
    server.pages["/health"] = Page(status=503)
    assert (ticks.one().fields["up"], ticks.state()) == (1, "ready")


def test_an_engine_with_a_full_queue_at_the_first_look_is_up(server: EngineEndpoint) -> None:
    server.metrics("tgi_queue_size 128\ntgi_batch_current_size 32\n")
    server.json("/health", {"error": "unhealthy", "error_type": "healthcheck"}, 503)
    ticks = Ticks(server.url)
    sample = ticks.one()
    assert (sample.tags["kind"], sample.fields["up"], sample.fields["requests_waiting"]) == ("tgi", 1, 128)
    assert ticks.state() == "ready"


def test_an_engine_that_restarts_between_two_ticks_is_loading_and_not_up(server: EngineEndpoint) -> None:
    server.metrics(pairscope(uptime_s=500.0))
    ticks = Ticks(server.url)
    assert ticks.one().fields["up"] == 1
    server.metrics(pairscope(uptime_s=0.5, generated=0.0))
    server.json("/health", {"status": "loading", "stage": "weights", "progress": 0.0}, 503)
    (sample, event) = ticks.all()
    assert (sample.fields["up"], sample.fields["starting"]) == (0, 1)
    assert ticks.state() == "loading"
    assert event.tags["kind"] == "restart"


def test_a_restart_gives_no_rate_across_it(server: EngineEndpoint) -> None:
    server.metrics(pairscope(generated=5000.0))
    ticks = Ticks(server.url)
    ticks.one()
    server.metrics(pairscope(generated=5050.0))
    assert ticks.one().fields["tokens_per_s"] > 0  # type: ignore[operator]
    server.metrics(pairscope(generated=20.0))
    after = ticks.one()
    assert "tokens_per_s" not in after.fields
    assert after.fields["generation_tokens_total"] == 20


def test_an_engine_that_dies_and_comes_back_is_down_then_up_without_a_rate_over_the_gap(server: EngineEndpoint) -> None:
    server.metrics(pairscope(generated=100.0))
    ticks = Ticks(server.url)
    ticks.one()
    port = server.port
    server.close()
    down = ticks.until(lambda sample: sample.fields["up"] == 0)
    assert "requests_running" not in down.fields
    again = EngineEndpoint(port)
    again.metrics(pairscope(generated=900_000.0))
    try:
        up = ticks.until(lambda sample: sample.fields["up"] == 1)
        assert "tokens_per_s" not in up.fields
        again.metrics(pairscope(generated=900_030.0))
        assert ticks.one().fields["tokens_per_s"] > 0  # type: ignore[operator]
    finally:
        again.close()


def events(samples: list[Sample]) -> list[tuple[str, str, str]]:
    found = [sample for sample in samples if sample.measurement == "event"]
    return [(event.tags["kind"], event.tags["subject"], str(event.fields["text"])) for event in found]


def test_a_new_version_is_a_deployment(server: EngineEndpoint) -> None:
    server.metrics(pairscope(version="0.1.0"))
    ticks = Ticks(server.url)
    assert events(ticks.all()) == []
    server.metrics(pairscope(version="0.2.0", config_hash="ff"))
    assert events(ticks.all()) == [("deploy", "chat-a", "pairscope 0.1.0 -> 0.2.0")]
    assert events(ticks.all()) == []


def test_another_configuration_of_the_same_version_is_a_change_of_configuration(server: EngineEndpoint) -> None:
    server.metrics(pairscope(config_hash="aa"))
    ticks = Ticks(server.url)
    ticks.all()
    server.metrics(pairscope(config_hash="bb"))
    (event,) = [sample for sample in ticks.all() if sample.measurement == "event"]
    assert event.tags["kind"] == "config"
    assert event.fields["detail"] == "aa -> bb"


def test_a_deployment_while_the_agent_was_away_is_noticed(server: EngineEndpoint, tmp_path: Path) -> None:
    server.metrics(pairscope(version="0.1.0"))
    Ticks(server.url, identities=tmp_path / "engines.json").all()
    server.metrics(pairscope(version="0.2.0"))
    killed = Ticks(server.url, identities=tmp_path / "engines.json")
    assert [kind for kind, _, _ in events(killed.all(is_safe=False))] == ["deploy"]
    later = Ticks(server.url, identities=tmp_path / "engines.json")
    assert [kind for kind, _, _ in events(later.all())] == ["deploy"], "a kill before it was on disk has lost the event"
    last = Ticks(server.url, identities=tmp_path / "engines.json")
    assert events(last.all()) == []


@pytest.mark.parametrize("content", ["", "[1]", '{"chat-a": 3}', "\x00\x01"])
def test_a_damaged_memory_of_versions_starts_anew(server: EngineEndpoint, tmp_path: Path, content: str) -> None:
    path = tmp_path / "engines.json"
    path.write_text(content)
    server.metrics(pairscope())
    assert events(Ticks(server.url, identities=path).all()) == []
    assert "ab12" in path.read_text()


def test_a_restart_of_a_watched_engine_is_an_event(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    ticks = Ticks(server.url)
    ticks.all()
    server.metrics(vllm(start_s=1_795_999_999.0))
    assert [kind for kind, _, _ in events(ticks.all())] == ["restart"]


def test_the_version_is_asked_for_again_after_a_restart(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    server.json("/version", {"version": "0.31.0"})
    ticks = Ticks(server.url)
    assert ticks.one().fields["version"] == "0.31.0"
    server.metrics(vllm(start_s=1_795_999_999.0))
    server.json("/version", {"version": "0.32.0"})
    assert ticks.until(lambda sample: sample.fields.get("version") == "0.32.0")


def test_a_serving_engine_is_not_asked_for_its_health_at_every_tick(server: EngineEndpoint) -> None:
    server.metrics(pairscope())
    ticks = Ticks(server.url)
    for _ in range(5):
        ticks.one()
    assert server.requests.count("/metrics") == 5
    assert server.requests.count("/health") == 1


def test_a_failing_visit_costs_its_engine_only(server: EngineEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    server.metrics(vllm())
    other = EngineEndpoint()
    other.metrics(pairscope())
    real = engine_module.detect

    def detect(exposition: object, kind: str) -> object:
        found = real(exposition, kind)  # type: ignore[arg-type]
        if found is not None and found.kind == "vllm":
            raise ZeroDivisionError
        return found

    monkeypatch.setattr(engine_module, "detect", detect)
    ticks = Ticks(server.url, other.url)
    try:
        assert [sample.tags["engine"] for sample in ticks.all() if "requests_running" in sample.fields] == ["chat-b"]
        assert ticks.collector.errors == 1
    finally:
        other.close()


def test_each_rank_of_a_split_model_is_a_sample_of_its_own(server: EngineEndpoint) -> None:
    text = pairscope()
    for rank, (steps, own, waited) in {"0": (40, 1.0, 3.0), "1": (39, 3.5, 0.25)}.items():
        for family, value in (("steps", steps), ("compute_seconds", own), ("wait_seconds", waited)):
            text += f'pairscope_rank_{family}_total{{model_name="{MODEL}",rank="{rank}"}} {value}\n'
    server.metrics(text)
    ticks = Ticks(server.url)
    ticks.until(lambda sample: sample.fields.get("up") == 1)
    ranks = [sample for sample in ticks.all() if sample.measurement == "rank"]
    assert [(s.tags["engine"], s.tags["rank"], s.fields["steps_total"], s.fields["compute_s"]) for s in ranks] == [
        ("chat-a", "0", 40, 1.0),
        ("chat-a", "1", 39, 3.5),
    ]
