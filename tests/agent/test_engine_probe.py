"""The one-token probe asks as a client would, one at a time, and tells a broken engine from one that can't be asked."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping

import pytest

from agent.collectors.engine import EngineCollector
from agent.collectors.engine_probe import EngineProbe
from agent.collectors.interface import Tick
from agent.engine_ownership import EngineOwnership
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from telemetry.catalogue import check
from telemetry.sample import Sample, Value
from tests.doubles.engine_endpoint import EngineEndpoint, Page
from tests.doubles.engine_texts.vllm import vllm

KEY = "sk-very-secret-1234"
TOKEN = {"choices": [{"text": ""}]}


@pytest.fixture
def server() -> Iterator[EngineEndpoint]:
    endpoint = EngineEndpoint()
    yield endpoint
    endpoint.close()


def probe(server: EngineEndpoint, *, every_s: float = 60.0, deadline_s: float = 10.0, api_key: str = "") -> EngineProbe:
    target = EngineTarget("chat", server.url, probe_every_s=every_s, api_key=api_key)
    return EngineProbe(target, deadline_s)


def ended(made: EngineProbe, kind: str = "vllm", model: str = "label") -> Mapping[str, Value]:
    """What one probe brings."""
    made.take(Tick(1, 1, 100.0), kind, model, is_up=True)
    give_up_s = time.monotonic() + 90
    while made._jobs._worker.busy:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    return made.take(Tick(2, 2, 100.5), kind, model, is_up=True)


def test_a_token_is_asked_for_by_the_name_under_which_the_engine_serves(server: EngineEndpoint) -> None:
    server.json("/v1/models", {"data": [{"id": "served"}, {"id": "lora"}]})
    server.json("/v1/completions", TOKEN)
    fields = ended(probe(server))
    assert fields["probe_ok"] == 1
    assert 0 < fields["probe_s"] < 10  # type: ignore[operator]
    ((path, question),) = server.posted
    assert path == "/v1/completions"
    assert question == {"model": "served", "prompt": "Hi", "max_tokens": 1, "temperature": 0}


def test_a_long_name_is_asked_for_whole_and_one_that_is_no_text_not_at_all(server: EngineEndpoint) -> None:
    long = "/models/" + "x" * 200
    for served, asked in ((long, long), (7, "label")):
        server.json("/v1/models", {"data": [{"id": served}]})
        server.json("/v1/completions", TOKEN)
        assert ended(probe(server))["probe_ok"] == 1
        assert server.posted[-1][1]["model"] == asked  # type: ignore[index]


def test_an_engine_without_completions_is_asked_in_a_chat(server: EngineEndpoint) -> None:
    server.json("/v1/chat/completions", TOKEN)
    assert ended(probe(server))["probe_ok"] == 1
    question = dict(server.posted[1][1])  # type: ignore[call-overload]
    assert question["messages"] == [{"role": "user", "content": "Hi"}]
    assert (question["model"], question["max_tokens"], question["temperature"]) == ("label", 1, 0)


@pytest.mark.parametrize(
    ("kind", "path", "answer", "limit"),
    [
        ("tgi", "/generate", {"generated_text": ""}, ("parameters", "max_new_tokens")),
        ("llamacpp", "/completion", {"content": ""}, ("n_predict",)),
        ("ollama", "/api/generate", {"response": "H"}, ("options", "num_predict")),
    ],
)
def test_each_kind_is_asked_on_its_own_route(
    server: EngineEndpoint, kind: str, path: str, answer: object, limit: tuple[str, ...]
) -> None:
    server.json(path, answer)
    assert ended(probe(server), kind)["probe_ok"] == 1
    ((asked, question),) = server.posted
    for key in limit:
        question = question[key]  # type: ignore[index]
    assert (asked, question) == (path, 1)


def test_an_ollama_without_a_loaded_model_is_not_made_to_load_one(server: EngineEndpoint) -> None:
    server.json("/api/generate", {"response": "H"})
    assert ended(probe(server), "ollama", "") == {}
    assert server.posted == []


@pytest.mark.parametrize(
    "page",
    [
        Page(b'{"choices": []}'),
        Page(b'{"error": "CUDA error"}'),
        Page(b"[]"),
        Page(b"not json"),
        Page(b"{}", 500),
        Page(b"{}", 503),
        Page(b"{}", 429),
        Page(status=302, headers={"Location": "/v1/chat/completions"}),
    ],
)
def test_an_answer_without_a_token_is_a_failure_and_has_no_time(server: EngineEndpoint, page: Page) -> None:
    server.pages["/v1/completions"] = page
    server.json("/v1/chat/completions", TOKEN)
    assert ended(probe(server)) == {"probe_ok": 0}


def test_an_engine_that_keeps_silent_fails_at_the_deadline(server: EngineEndpoint) -> None:
    server.hang("/v1/completions")
    made = probe(server, deadline_s=0.3)
    assert ended(made) == {"probe_ok": 0}
    assert made.last is not None
    assert made.last.detail == "timeout"


@pytest.mark.parametrize("status", [400, 404, 405, 422, 501])
def test_an_engine_that_has_no_such_route_neither_fails_nor_succeeds(server: EngineEndpoint, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        server.pages[path] = Page(b"{}", status)
    made = probe(server)
    assert ended(made) == {}
    assert made.last is not None
    assert made.last.trouble == "no_route"


def test_there_is_never_more_than_one_under_way_and_each_is_told_once(server: EngineEndpoint) -> None:
    server.hang("/v1/completions")
    made = probe(server, every_s=1.0)
    for number in range(30):
        assert made.take(Tick(number, 1, 100.0 + 10 * number), "vllm", "m", is_up=True) == {}
        time.sleep(0.005)
    server.released.set()
    give_up_s = time.monotonic() + 90
    told = []
    while len(told) < 1 and time.monotonic() < give_up_s:
        told += [fields for fields in [made.take(Tick(99, 1, 0.0), "vllm", "m", is_up=True)] if fields]
    assert told == [{"probe_ok": 0}]
    assert made.take(Tick(100, 1, 0.0), "vllm", "m", is_up=True) == {}
    assert len(server.posted) == 1


def test_an_engine_that_is_down_is_not_asked(server: EngineEndpoint) -> None:
    made = probe(server)
    for number in range(5):
        made.take(Tick(number, 1, 1000.0 * number), "vllm", "m", is_up=False)
    assert not made._jobs.pending


def test_the_key_goes_with_metrics_and_probe_and_nowhere_else(
    server: EngineEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    elsewhere = EngineEndpoint()
    server.metrics(vllm())
    server.pages["/v1/completions"] = Page(status=307, headers={"Location": elsewhere.url + "/v1/completions"})
    try:
        collector = collected(server, api_key=KEY)
        samples = until_probed(collector)
        assert server.headers["/metrics"]["Authorization"] == f"Bearer {KEY}"
        assert server.headers["/v1/completions"]["Authorization"] == f"Bearer {KEY}"
        assert elsewhere.requests == []
        said = (repr(collector._engines[0].target), repr(samples), repr(collector.statuses()), caplog.text)
        assert not [text for text in said if KEY in text]
    finally:
        elsewhere.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_probe_that_is_refused_names_the_key_that_it_needs(server: EngineEndpoint, status: int) -> None:
    server.metrics(vllm())
    server.pages["/v1/completions"] = Page(b"{}", status)
    collector = collected(server)
    sample = until_probed(collector)
    assert sample.fields["probe_ok"] == 0
    assert sample.fields["up"] == 1
    tick(collector)
    assert "api_key_file" in collector.statuses()[0].problem
    assert f"HTTP {status}" in collector.statuses()[0].problem


def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="api_key") as error:
        EngineTarget("chat", "http://127.0.0.1:1", api_key="two\nlines")
    assert "lines" not in str(error.value)


_numbers = itertools.count(1)


def collected(server: EngineEndpoint, api_key: str = "") -> EngineCollector:
    targets = [EngineTarget("chat", server.url, probe_every_s=60.0, api_key=api_key)]
    blind = EngineOwnership(targets, ProcessTable("/no/processes"))
    return EngineCollector({"node": "n"}, targets, wait_s=10.0, deadline_s=10.0, ownership=blind)


def tick(collector: EngineCollector) -> Sample:
    found = [check(sample) for sample in collector.collect(Tick(next(_numbers), 10**18, time.monotonic()))]
    return found[0]


def until_probed(collector: EngineCollector) -> Sample:
    give_up_s = time.monotonic() + 90
    while time.monotonic() < give_up_s:
        sample = tick(collector)
        if "probe_ok" in sample.fields:
            return sample
        time.sleep(0.02)
    raise AssertionError("no probe ended")
