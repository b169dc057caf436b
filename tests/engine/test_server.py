"""The server over real HTTP, on a tiny model: answers, streams, errors, limits, clients that go away or are slow."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import connection
from engine.metrics import HISTOGRAMS
from engine.settings import EngineSettings
from telemetry.catalogue import ENGINE
from tests import loopback
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import ThreadServer, until

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    return EngineSettings(model=str(folder), kv_blocks=1024, max_seqs=4, max_waiting=6, threads=1, drain_s=1.0)


@pytest.fixture(scope="module")
def server(settings: EngineSettings) -> Iterator[ThreadServer]:
    with ThreadServer(settings) as running:
        yield running


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def free_again(server: ThreadServer) -> None:
    until(lambda: server.metric("kv_blocks_free") == 1024, "all blocks free")
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0
    assert server.service.engine.scheduler.pool.num_taken == 0


def test_a_completion_has_text_a_reason_and_exact_usage(server: ThreadServer) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9, **GREEDY}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    got = answer.json()
    assert got["object"] == "text_completion"
    assert got["model"] == "tiny"
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["choices"][0]["text"]
    assert got["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


def test_text_and_token_ids_give_the_same_completion(server: ThreadServer) -> None:
    ids = server.service.tokenizer.encode("hello")
    texts = [
        server.http.post("/v1/completions", json={"prompt": p, "max_tokens": 6, **GREEDY}).json()["choices"][0]["text"]
        for p in ("hello", ids)
    ]
    assert texts[0] == texts[1]


def test_a_list_of_prompts_gives_a_choice_each_and_n_gives_several(server: ThreadServer) -> None:
    body = {"prompt": ["one", "three", "one"], "max_tokens": 5, **GREEDY}
    got = server.http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    assert got["choices"][0]["text"] == got["choices"][2]["text"] != got["choices"][1]["text"]
    assert got["usage"]["prompt_tokens"] == 11
    sampled = {"prompt": "x", "max_tokens": 12, "n": 3, "seed": 7, "ignore_eos": True}
    first, second = (server.http.post("/v1/completions", json=sampled).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["text"] for choice in second["choices"]]
    assert first["usage"]["completion_tokens"] == 36


def test_a_stream_gives_the_same_text_piece_by_piece_and_usage_when_asked(server: ThreadServer) -> None:
    body = {"prompt": "stream me", "max_tokens": 20, **GREEDY}
    whole = server.http.post("/v1/completions", json=body).json()
    got = server.http.post("/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert got.headers["content-type"].startswith("text/event-stream")
    pieces = events(got)
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces[:-1]) == whole["choices"][0]["text"]
    reasons = [piece["choices"][0]["finish_reason"] for piece in pieces[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({piece["id"] for piece in pieces}) == 1
    plain = events(server.http.post("/v1/completions", json=body | {"stream": True}))
    assert all(piece["choices"] and "usage" not in piece for piece in plain)


def test_chat_streams_and_answers_alike(server: ThreadServer) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 12, **GREEDY}
    whole = server.http.post("/v1/chat/completions", json=body).json()
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    same = server.http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": parts}]})
    assert same.json()["choices"][0]["message"] == message
    pieces = events(server.http.post("/v1/chat/completions", json=body | {"stream": True}))
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(piece["object"] == "chat.completion.chunk" for piece in pieces)
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == message["content"]
    # the prompt went through the model's template: special tokens around it, not only its own five bytes
    assert whole["usage"]["prompt_tokens"] == len("user\nhello\nassistant\n") + 3


def test_streams_of_several_choices_share_one_connection(server: ThreadServer) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    whole = server.http.post("/v1/completions", json=body).json()
    pieces = events(server.http.post("/v1/completions", json=body | {"stream": True}))
    for choice in whole["choices"]:
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]


def test_a_stop_string_ends_the_text_before_it(server: ThreadServer) -> None:
    body = {"prompt": "hello", "max_tokens": 60, **GREEDY}
    text = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = next(text[at : at + 2] for at in range(8, len(text)) if "\ufffd" not in text[at : at + 2])
    for extra in ({"stop": stop}, {"stop": ["\u2603nowhere", stop]}):
        got = server.http.post("/v1/completions", json=body | extra).json()
        assert got["choices"][0]["finish_reason"] == "stop"
        assert got["choices"][0]["text"] == text[: text.index(stop)]
        assert got["usage"]["completion_tokens"] < 60


def test_a_seed_gives_the_same_text_alone_and_among_others(server: ThreadServer) -> None:
    body = {"prompt": "dice", "max_tokens": 40, "seed": 11, "temperature": 1.3, "top_p": 0.9, "ignore_eos": True}
    alone = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        others = [body | {"seed": n, "prompt": "x" * n} for n in (1, 30, 2)]
        answers = [pool.submit(server.http.post, "/v1/completions", json=b) for b in (body, *others)]
        assert answers[0].result().json()["choices"][0]["text"] == alone


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "prompt must be"),
    ({"prompt": []}, "prompt", "prompt must be"),
    ({"prompt": ""}, "prompt", "has no tokens"),
    ({"prompt": [1, "x"]}, "prompt", "texts or lists"),
    ({"prompt": [1, 264]}, "prompt", "0..263"),
    ({"prompt": ["x"] * 9}, "prompt", "at most 8"),
    ({"prompt": "x" * 5000}, "prompt", "5000 tokens: the context of this model ends at 4096"),
    ({"max_tokens": 0}, "max_tokens", "between 1"),
    ({"max_tokens": "5"}, "max_tokens", "whole number"),
    ({"max_tokens": True}, "max_tokens", "whole number"),
    ({"max_tokens": 4096}, "max_tokens", "at most 4095 fit"),
    ({"temperature": -0.1}, "temperature", "between 0 and 2"),
    ({"temperature": float("nan")}, "temperature", "must be a number"),
    ({"temperature": float("inf")}, "temperature", "must be a number"),
    ({"top_p": 1.5}, "top_p", "between 0 and 1"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"seed": "abc"}, "seed", "whole number"),
    ({"n": 0}, "n", "between 1 and 8"),
    ({"n": 9}, "n", "between 1 and 8"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"),
    ({"stop": ["a" * 65]}, "stop", "64 characters"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"stop": [5]}, "stop", "list of strings"),
    ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
    ({"prompt": ["a", "\udfff"]}, "prompt", "half of a surrogate pair"),
    ({"prompt": "a", "stop": "\ud800"}, "stop", "half of a surrogate pair"),
    ({"prompt": "a", "deadline_ms": 1e300}, "deadline_ms", "a number of 301 digits"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream": True, "stream_options": []}, "stream_options", "must be an object"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"logprobs": 3}, "logprobs", "not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"model": 5}, "model", "must be a string"),
    ({"priority": 11}, "priority", "between -10 and 10"),
    ({"priority": "high"}, "priority", "whole number"),
    ({"deadline_ms": 0}, "deadline_ms", "between 1 and 86400000"),
    ({"deadline_ms": 1.5}, "deadline_ms", "whole number"),
]


@pytest.mark.parametrize(("change", "field", "message"), BAD, ids=[f"{c!r:.40}" for c, _, _ in BAD])
def test_a_wrong_field_is_refused_by_name(
    server: ThreadServer, change: dict[str, Any], field: str, message: str
) -> None:
    raw = json.dumps({"prompt": "x", "max_tokens": 1} | change)
    answer = server.http.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_priority_and_deadline_reach_the_engine(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    add = server.service.engine.add
    monkeypatch.setattr(server.service.engine, "add", lambda request: (seen.append(request), add(request)))
    body = {"prompt": ["x", "y"], "max_tokens": 2, "priority": -3, "deadline_ms": 60_000, **GREEDY}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert server.http.post("/v1/completions", json={"prompt": "z", "max_tokens": 2, **GREEDY}).status_code == 200
    assert [request.priority for request in seen] == [-3, -3, 0]
    waits = [None if r.deadline_s is None else r.deadline_s - r.arrived_s for r in seen]
    assert waits == [pytest.approx(60.0), pytest.approx(60.0), None]
    assert server.metric("deadline_missed_total") == 0


def test_a_deadline_before_which_no_token_can_come_is_refused_at_once(server: ThreadServer) -> None:
    stats = server.service.engine.stats
    prompt = [9] * 4000
    own = len(prompt) * 2 * server.service.engine._cost.layer_weights / stats.peaks.flops_per_s
    body = {"prompt": prompt, "max_tokens": 2, **GREEDY}
    if own > 0.001:  # else not even a millisecond is too short for this machine
        refused = server.http.post("/v1/completions", json=body | {"deadline_ms": 1})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "of work at least" in refused.json()["error"]["message"]
    assert server.http.post("/v1/completions", json=body | {"deadline_ms": 600_000}).status_code == 200
    free_again(server)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (None, "at least one"),
        ([], "at least one"),
        (["hi"], "messages[0] must be an object"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text parts only"),
    ],
)
def test_wrong_messages_are_refused_by_place(server: ThreadServer, messages: Any, where: str) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert where in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"prompt": ' + b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(server: ThreadServer, raw: bytes) -> None:
    answer = server.http.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_values_that_ask_for_nothing_are_taken(server: ThreadServer) -> None:
    neutral = {"logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "logit_bias": {}}
    more = {"user": "somebody", "top_k": -1, "stop": None, "seed": None, "n": None, "echo": False}
    answer = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2} | neutral | more)
    assert answer.status_code == 200


def test_an_unknown_model_path_or_method_is_told_apart(server: ThreadServer) -> None:
    unknown = server.http.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["param"] == "model"
    assert "'gpt-9' is not served here; this server has 'tiny'" in unknown.json()["error"]["message"]
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "there is no /v1/nothing here"
    assert server.http.get("/v1/completions").status_code == 405
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["tiny"]
    assert server.http.get("/v1/models/tiny").json()["max_model_len"] == 4096
    assert server.http.get("/v1/models/other").status_code == 404


def test_a_body_beyond_the_limit_is_refused_announced_or_not(server: ThreadServer) -> None:
    large = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    assert server.http.post("/v1/completions", content=large).status_code == 413

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(large), 60_000):
            yield large[at : at + 60_000]

    assert server.http.post("/v1/completions", content=pieces()).status_code == 413
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request_and_frees_its_blocks(server: ThreadServer, stream: bool) -> None:
    free_again(server)
    aborted = server.metric("requests_aborted_total")
    body = json.dumps({"prompt": "go on", "max_tokens": 4000, "stream": stream, **GREEDY}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
        client.sendall(head + body)
        until(lambda: server.metric("kv_blocks_free") < 1020, "the request runs")
        assert server.metric("requests_running") == 1
    free_again(server)
    until(lambda: server.metric("requests_aborted_total") == aborted + 1, "it is counted")


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(server: ThreadServer) -> None:
    free_again(server)
    body = {"prompt": "x", "max_tokens": 4000, **GREEDY}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    clients = []
    for _ in range(6):
        clients.append(socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))))
        clients[-1].sendall(head + raw)
    until(lambda: server.metric("requests_waiting") == 2, "four run, two wait")
    clients[5].close()
    until(lambda: server.metric("requests_waiting") == 1, "one has left the queue")
    assert server.metric("requests_running") == 4
    for client in clients:
        client.close()
    free_again(server)


def test_a_full_queue_turns_away_and_says_so(server: ThreadServer) -> None:
    free_again(server)
    body = {"prompt": "x", "max_tokens": 4000, **GREEDY}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    clients = []
    for _ in range(10):
        clients.append(socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))))
        clients[-1].sendall(head + raw)
    until(lambda: server.metric("requests_waiting") == 6, "the queue is full")
    refused = server.http.post("/v1/completions", json=body)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for client in clients:
        client.close()
    free_again(server)


def test_what_a_slow_client_has_not_taken_is_not_delivered_and_in_the_end_it_is_given_up(
    settings: EngineSettings,
) -> None:
    with ThreadServer(replace(settings, stream_buffer=64, stall_timeout_s=0.5)) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, **GREEDY}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            client.sendall(head + body)
            until(
                lambda: server.metric("generation_tokens_total") - server.metric("delivered_tokens_total") >= 64,
                "the buffer is full",
            )
            until(lambda: server.metric("requests_aborted_total") == 1, "the client is given up")
            generated = server.metric("generation_tokens_total")
            assert generated < 2000  # it paused long before the end
            assert generated - server.metric("delivered_tokens_total") <= 64
        free_again(server)


def test_the_metrics_are_those_of_the_catalogue_and_fit_together(settings: EngineSettings) -> None:
    with ThreadServer(settings) as server:
        for tokens in (3, 5):
            server.http.post("/v1/completions", json={"prompt": "x" * 20, "max_tokens": tokens, **GREEDY})
        text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    beyond = {
        "engine_info",
        "recomputed_tokens",
        "flops",
        "bytes",
        "peak_flops_per_s",
        "peak_bytes_per_s",
        "stage_seconds",
    }
    known = {name.removesuffix("_total") for name in ENGINE.fields}
    named = {name.removeprefix("pairscope_") for name in families}
    assert all(name.startswith("pairscope_") for name in families)
    assert named - beyond - set(HISTOGRAMS) <= known
    assert set(HISTOGRAMS) <= named
    values = {
        sample.name.removeprefix("pairscope_"): sample.value
        for family in families.values()
        for sample in family.samples
        if "le" not in sample.labels
    }
    labels = {tuple(s.labels.get("model_name", "?") for s in f.samples) for f in families.values()}
    assert {name for group in labels for name in group} == {"tiny"}
    assert values["generation_tokens_total"] == values["delivered_tokens_total"] == 8
    assert values["prompt_tokens_total"] == values["prompt_length_tokens_sum"] == 40
    assert values["requests_finished_total"] == values["request_latency_seconds_count"] == 2
    assert values["output_length_tokens_sum"] == 8
    assert values["time_to_first_token_seconds_count"] == values["queue_time_seconds_count"] == 2
    assert values["inter_token_latency_seconds_count"] == 6
    assert values["steps_total"] == values["step_time_seconds_count"] == 8
    assert values["queue_time_seconds_sum"] <= values["time_to_first_token_seconds_sum"]
    assert values["time_to_first_token_seconds_sum"] <= values["request_latency_seconds_sum"]
    assert values["kv_blocks_free"] == values["kv_blocks_count"] == 1024
    assert values["prompt_len_max"] == 20
    assert 0 < values["mfu_pct"] <= 100
    assert 0 < values["mbu_pct"] <= 100
    assert "context_mean" not in values  # nothing runs: unknown, not zero


def test_running_numbers_are_exact_while_a_request_runs(server: ThreadServer) -> None:
    free_again(server)
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3000, "stream": True, **GREEDY}
    ):
        until(
            lambda: server.metric("requests_running") == 1 and server.metric("context_mean") > 100,
            "a hundred tokens are cached",
        )
        with server.service.engine.stats.lock:
            occupancy = server.service.engine.stats.occupancy
    assert occupancy.running == 1
    written = occupancy.slots_written
    assert occupancy.blocks_taken == -(-written // 16)
    allocated = occupancy.blocks_taken * 16
    assert occupancy.kv_fragmentation_pct == pytest.approx(100 * (allocated - written) / allocated)
    assert occupancy.context_mean == written
    free_again(server)


def test_hostile_bodies_never_get_a_500(server: ThreadServer, settings: EngineSettings) -> None:
    values: list[Any] = [None, True, -1, 0, 1e308, "x", "\ud800", [], [[]], {}, {"a": [None]}, ["x", 1], 2**70, [2**70]]
    names = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "stream_options"]
    for name in (*names, "model", "ignore_eos", "logprobs", "priority", "deadline_ms"):
        for value in values:
            raw = json.dumps({"prompt": "x", "max_tokens": 1} | {name: value})
            answer = server.http.post("/v1/completions", content=raw)
            assert answer.status_code in (200, 400, 404), (name, value, answer.text)
    free_again(server)


def test_the_folder_of_this_test_is_what_is_served(server: ThreadServer, settings: EngineSettings) -> None:
    assert Path(settings.model).is_dir()
    assert server.service.settings == settings


def test_a_client_that_never_ends_its_headers_is_let_go(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_WITHIN_S", 0.3)
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as client:
        client.sendall(b"GET /heal")
        assert client.recv(1) == b""


def test_of_more_connections_than_the_process_can_hold_the_newest_stay(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "connection_limit", lambda: 10)
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    clients = [socket.create_connection(address, timeout=30) for _ in range(20)]
    try:
        until(lambda: sum(is_closed(client) for client in clients) >= 10, "ten connections are closed")
        assert [is_closed(client) for client in clients] == [True] * 10 + [False] * 10
        assert loopback.get(f"{server.url}/health").status_code == 200  # nobody is kept out by those that ask nothing
    finally:
        for client in clients:
            client.close()
    monkeypatch.undo()
    assert 8 <= connection.connection_limit() <= 512
    assert loopback.get(f"{server.url}/health").status_code == 200


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
