"""Who answers at an engine's address: where its metrics are, what it tells besides, and which flag is missing where it tells none."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

import pytest

from agent.collectors.dialects.registry import KINDS
from agent.collectors.engine import EngineCollector
from agent.collectors.interface import Tick
from agent.engine_ownership import EngineOwnership
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from telemetry.catalogue import check
from telemetry.messages import say
from telemetry.sample import Sample
from tests.doubles.engine_endpoint import EngineEndpoint, Page
from tests.doubles.engine_texts.llamacpp import llamacpp, quoted
from tests.doubles.engine_texts.lmdeploy import lmdeploy
from tests.doubles.engine_texts.nim import nim
from tests.doubles.engine_texts.sglang import rank, sglang
from tests.doubles.engine_texts.text import MODEL
from tests.doubles.engine_texts.tgi import tgi
from tests.doubles.engine_texts.trtllm import ITERATIONS, trtllm
from tests.doubles.engine_texts.vllm import vllm

NOW_NS = 1_796_000_000 * 10**9
METRICS_TYPE = {"Content-Type": "text/plain; version=0.0.4"}


@pytest.fixture
def server() -> Iterator[EngineEndpoint]:
    endpoint = EngineEndpoint()
    yield endpoint
    endpoint.close()


class Watch:
    """Ticks of a collector for one engine, on a clock that only the test moves."""

    def __init__(self, server: EngineEndpoint, kind: str = "auto", language: str = "en") -> None:
        self.now_s = 1_000.0
        target = EngineTarget("chat", server.url, kind=kind)
        self.collector = EngineCollector(
            {"node": "n"},
            [target],
            wait_s=10.0,
            language=language,
            ownership=EngineOwnership([target], ProcessTable("/no/processes")),
            monotonic=lambda: self.now_s,
        )
        self._numbers = itertools.count(1)

    def tick(self, passed_s: float = 1.0) -> list[Sample]:
        self.now_s += passed_s
        number = next(self._numbers)
        return [check(sample) for sample in self.collector.collect(Tick(number, NOW_NS + number * 10**9, self.now_s))]

    def engine(self, passed_s: float = 1.0) -> Sample:
        (sample,) = [sample for sample in self.tick(passed_s) if sample.measurement == "engine"]
        return sample

    @property
    def problem(self) -> str:
        return self.collector.statuses()[0].problem


def test_a_list_that_reading_empties_is_read_once_and_the_metrics_are_found_beside_it(server: EngineEndpoint) -> None:
    server.json("/metrics", ITERATIONS)
    server.pages["/prometheus/metrics"] = Page(trtllm().encode(), headers=METRICS_TYPE)
    server.json("/version", {"version": "1.2.0"})
    watch = Watch(server)
    for _ in range(40):
        sample = watch.engine()
    assert server.requests.count("/metrics") == 1
    assert (sample.tags["kind"], sample.tags["model"], sample.fields["version"]) == ("trtllm", MODEL, "1.2.0")
    assert sample.fields["generation_tokens_total"] == 81_000


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("body", [ITERATIONS, []], ids=["iterations", "emptied"])
def test_a_list_without_metrics_beside_it_names_both_flags(
    server: EngineEndpoint, body: list[object], language: str
) -> None:
    server.json("/metrics", body)
    watch = Watch(server, language=language)
    for _ in range(70):
        sample = watch.engine()
    assert server.requests.count("/metrics") == 1
    assert sample.fields == {"up": 1}
    assert "return_perf_metrics" in watch.problem
    assert "enable_iter_perf_stats" in watch.problem


def test_a_configured_trtllm_never_has_its_list_read(server: EngineEndpoint) -> None:
    server.json("/metrics", ITERATIONS)
    watch = Watch(server, kind="trtllm")
    for _ in range(70):
        watch.tick()
    assert "/metrics" not in server.requests


@pytest.mark.parametrize("kind", ["auto", "nim"])
def test_a_nim_is_read_at_its_own_path(server: EngineEndpoint, kind: str) -> None:
    server.pages["/v1/metrics"] = Page(nim().encode(), headers=METRICS_TYPE)
    server.json("/v1/version", {"release": "1.8.4", "api": "2.0.0"})
    watch = Watch(server, kind)
    for _ in range(5):
        sample = watch.engine()
    assert (sample.tags["kind"], sample.fields["version"]) == ("nim", "1.8.4")
    assert server.requests.count("/metrics") == (1 if kind == "auto" else 0)


def test_an_older_nim_is_read_at_the_usual_path(server: EngineEndpoint) -> None:
    server.metrics(nim())
    assert Watch(server, "nim").engine().fields["generation_tokens_total"] == 15_000


def test_an_ollama_tells_its_model_and_version_and_says_why_there_is_no_more(server: EngineEndpoint) -> None:
    server.json("/api/ps", {"models": [{"model": "tiny:1b", "name": "tiny:1b", "size_vram": 9}]})
    server.json("/api/version", {"version": "0.33.1"})
    server.json("/v1/models", {"data": [{"id": "another:7b", "owned_by": "library"}]})
    watch = Watch(server)
    for _ in range(40):
        sample = watch.engine()
    assert (sample.tags["kind"], sample.tags["model"]) == ("ollama", "tiny:1b")
    assert sample.fields == {"up": 1, "version": "0.33.1"}
    assert "no metrics" in watch.problem
    assert "llama-server --metrics" in watch.problem
    assert server.requests.count("/metrics") == 1


def test_an_ollama_without_a_resident_model_names_none(server: EngineEndpoint) -> None:
    server.json("/api/ps", {"models": []})
    server.json("/api/version", {"version": "0.33.1"})
    server.json("/v1/models", {"data": [{"id": "another:7b", "owned_by": "library"}]})
    assert "model" not in Watch(server).engine().tags


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", sorted(KINDS - {"ollama"}))
def test_every_kind_has_a_sentence_for_metrics_that_are_off(server: EngineEndpoint, kind: str, language: str) -> None:
    owner = {"trtllm": "tensorrt_llm", "dynamo": "nvidia"}.get(kind, kind)
    server.json("/v1/models", {"data": [{"id": "m", "owned_by": owner}]})
    server.pages["/metrics"] = Page(b'{"error": {"code": 501}}', 501)
    watch = Watch(server, language=language)
    assert watch.engine().tags["kind"] == kind
    assert watch.problem == say(f"agent.engine.metrics_off_{kind}", language)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("vllm", "--disable-log-stats"),
        ("sglang", "--enable-metrics"),
        ("llamacpp", "--metrics"),
        ("lmdeploy", "--disable-metrics"),
        ("trtllm", "return_perf_metrics"),
        ("triton", "--allow-metrics"),
        ("dynamo", "DYN_SYSTEM_PORT"),
        ("ray", "log_engine_metrics"),
    ],
)
def test_a_configured_kind_that_shows_nothing_names_its_flag(server: EngineEndpoint, kind: str, flag: str) -> None:
    server.metrics("process_cpu_seconds_total 5\n")
    server.pages["/prometheus/metrics"] = Page(status=404)
    watch = Watch(server, kind)
    watch.tick()
    assert flag in watch.problem


def test_an_engine_of_another_kind_than_configured_is_called_by_its_name(server: EngineEndpoint) -> None:
    server.metrics(sglang())
    watch = Watch(server, "vllm")
    assert watch.engine().fields["up"] == 1
    assert "sglang" in watch.problem
    assert "vllm" in watch.problem


def test_sglang_tells_version_ranks_and_launch_arguments_but_no_key(server: EngineEndpoint) -> None:
    info = {
        "version": "0.5.23",
        "dp_size": 4,
        "tp_size": 2,
        "chunked_prefill_size": 8192,
        "api_key": "s3cret",
        "port": 1,
    }
    server.metrics(sglang())
    server.json("/server_info", info)
    watch = Watch(server)
    sample = watch.engine()
    assert (sample.fields["version"], sample.fields["partial"]) == ("0.5.23", 1)
    assert "only a part" in watch.problem
    before = sample.fields["config_hash"]
    for change, same in (({"api_key": "other", "port": 2, "max_total_num_tokens": 77}, True), ({"tp_size": 4}, False)):
        server.json("/server_info", {**info, **change})
        assert (watch.engine(40.0).fields["config_hash"] == before) is same


def test_an_older_sglang_tells_it_at_the_older_path(server: EngineEndpoint) -> None:
    server.metrics(sglang(ranks=[rank(0, tp_rank=0)]))
    server.json("/get_server_info", {"version": "0.4.6", "dp_size": 1})
    sample = Watch(server).engine()
    assert (sample.fields["version"], sample.fields["partial"]) == ("0.4.6", 0)


def test_tgi_tells_model_and_version_in_its_info(server: EngineEndpoint) -> None:
    server.metrics(tgi())
    server.json("/info", {"model_id": "org/T", "version": "3.3.7", "max_total_tokens": 4096, "sha": "abc"})
    sample = Watch(server).engine()
    assert (sample.tags["model"], sample.fields["version"]) == ("org/T", "3.3.7")
    assert sample.fields["config_hash"]


def test_llamacpp_tells_build_and_model_in_its_props(server: EngineEndpoint) -> None:
    server.pages["/metrics"] = Page(quoted(llamacpp()))
    settings = {"n_ctx": 8192, "params": {"seed": 1}}
    props = {"build_info": "b11434-ab", "model_path": "/models/Tiny.gguf", "default_generation_settings": settings}
    server.json("/props", {**props, "total_slots": 4, "chat_template": "x" * 50_000})
    sample = Watch(server).engine()
    assert (sample.tags["model"], sample.fields["version"]) == ("Tiny.gguf", "b11434-ab")
    assert sample.fields["requests_running"] == 3.0


def test_llamacpp_is_left_alone_between_scrapes_and_is_up_all_the_while(server: EngineEndpoint) -> None:
    server.metrics(llamacpp())
    watch = Watch(server)
    samples = [watch.engine() for _ in range(31)]
    assert server.requests.count("/metrics") == 4
    assert all(sample.fields["up"] == 1 for sample in samples)
    assert [index for index, sample in enumerate(samples) if "requests_running" in sample.fields] == [0, 10, 20, 30]
    assert max(float(sample.fields["stats_age_s"]) for sample in samples) <= 10.0


def test_another_restart_token_is_a_restart_though_every_counter_grew(server: EngineEndpoint) -> None:
    def answer(token: int, predicted: float) -> None:
        server.pages["/metrics"] = Page(
            llamacpp(predicted=predicted).encode(), headers={"Process-Start-Time-Unix": str(token)}
        )

    watch = Watch(server)
    for number in range(8):
        answer(1_234_567, 7_000 + 10 * number)
        sample = watch.engine(10.0)
    assert sample.fields["tokens_per_s"] == 1.0
    answer(7_654_321, 900_000)
    samples = watch.tick(10.0)
    assert "tokens_per_s" not in samples[0].fields
    assert [sample.tags["kind"] for sample in samples[1:]] == ["restart"]


def test_a_metric_that_a_new_version_lacks_is_an_event_that_names_it(server: EngineEndpoint) -> None:
    old = {"kv_names": ("gpu_cache_usage_perc",), "prefix_names": ("gpu_prefix_cache",)}
    server.metrics(vllm(**old))  # type: ignore[arg-type]
    server.json("/version", {"version": "0.8.5"})
    watch = Watch(server)
    watch.tick()
    server.metrics(vllm())
    server.json("/version", {"version": "0.32.0"})
    events = [sample for _ in range(6) for sample in watch.tick(40.0) if sample.measurement == "event"]
    assert [event.tags["kind"] for event in events] == ["deploy", "config"]
    text = str(events[1].fields["text"])
    assert "0.32.0" in text
    assert "vllm:gpu_cache_usage_perc" in text
    assert "vllm:gpu_prefix_cache_hits_total" in text
    assert "vllm:generation_tokens_total" not in text


def test_a_new_version_with_every_family_is_a_deployment_and_no_more(server: EngineEndpoint) -> None:
    server.metrics(vllm())
    server.json("/version", {"version": "0.31.0"})
    watch = Watch(server)
    watch.tick()
    server.json("/version", {"version": "0.32.0"})
    events = [sample for _ in range(6) for sample in watch.tick(40.0) if sample.measurement == "event"]
    assert [event.tags["kind"] for event in events] == ["deploy"]


def test_detection_takes_one_request_where_metrics_are_in_their_place(server: EngineEndpoint) -> None:
    server.metrics(lmdeploy())
    assert Watch(server).engine().tags["kind"] == "lmdeploy"
    assert [path for path in server.requests if path not in ("/metrics", "/health")] == []


@pytest.mark.parametrize("body", ['"', '"x', "[", "[[[[", '"\\ud800"', json.dumps("a 1\n" * 10)])
def test_strange_beginnings_of_a_body_are_no_harm(server: EngineEndpoint, body: str) -> None:
    server.pages["/metrics"] = Page(body.encode())
    began_s = time.monotonic()
    assert Watch(server).engine().fields["up"] == 1
    assert time.monotonic() - began_s < 60
