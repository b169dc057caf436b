"""Clients that are slow, greedy, rude or wrong, over real sockets: nobody else notices, and nothing of them stays."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from bench.engine_abuse import HOSTILE
from engine import connection
from engine.api import Ask, BadRequest, parse_chat, parse_completion, parse_json
from engine.core import StepRunner
from engine.settings import EngineSettings
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import WAIT_S, ThreadServer, until

GREEDY = {"temperature": 0, "ignore_eos": True}
BLOCKS = 1024


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    return EngineSettings(
        model=str(folder),
        kv_blocks=BLOCKS,
        max_seqs=4,
        max_waiting=300,
        threads=1,
        stream_buffer=64,
        stall_timeout_s=0.5,
    )


@pytest.fixture(scope="module")
def server(settings: EngineSettings) -> Iterator[ThreadServer]:
    with ThreadServer(settings) as running:
        yield running


def address(server: ThreadServer) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rsplit(":", 1)[1])


def raw_request(**body: Any) -> bytes:
    content = json.dumps({"prompt": "go on", **GREEDY} | body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content


def connect(server: ThreadServer, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(WAIT_S)
    client.connect(address(server))
    return client


def nothing_left(server: ThreadServer) -> None:
    until(lambda: server.service.num_open == 0, "no request is open")
    until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0, "nobody runs or waits")
    until(lambda: server.metric("kv_blocks_free") == BLOCKS, "all blocks are free")
    server.service.engine.scheduler.check()


@contextmanager
def tokenising_held(server: ThreadServer, wanted: str) -> Iterator[threading.Event]:
    """Whoever tokenises a text that begins with `wanted` stays in it until the end of this; the event says that somebody does."""
    tokenizer, there, go_on = server.service.tokenizer, threading.Event(), threading.Event()
    encode = tokenizer.encode

    def held(text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith(wanted):
            there.set()
            assert go_on.wait(WAIT_S)
        return encode(text, add_special_tokens)

    with patch.object(tokenizer, "encode", held):
        try:
            yield there
        finally:
            go_on.set()


def test_while_a_prompt_is_tokenised_health_streams_and_other_prompts_go_on(server: ThreadServer) -> None:
    with ThreadPoolExecutor(1) as pool, tokenising_held(server, "long") as there:
        slow = pool.submit(server.http.post, "/v1/completions", json={"prompt": "long", "max_tokens": 2, **GREEDY})
        assert there.wait(WAIT_S)
        assert server.http.get("/health").status_code == 200
        body = {"prompt": "short", "max_tokens": 200, "stream": True, **GREEDY}
        assert server.http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        assert not slow.done()
    assert slow.result().status_code == 200
    nothing_left(server)


def test_a_client_that_goes_while_its_prompt_is_tokenised_leaves_nothing(server: ThreadServer) -> None:
    aborted = server.metric("requests_aborted_total")
    with tokenising_held(server, "doomed") as there:
        with connect(server) as client:
            client.sendall(raw_request(prompt="doomed", max_tokens=4000))
            assert there.wait(WAIT_S)
        assert server.http.get("/health").status_code == 200
    until(lambda: server.metric("requests_aborted_total") == aborted + 1, "it is noticed")
    nothing_left(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_in_the_midst_of_its_prompt_leaves_nothing(server: ThreadServer, stream: bool) -> None:
    engine = server.service.engine
    runner, in_prompt, go_on = engine._runner, threading.Event(), threading.Event()

    class Held(StepRunner):
        def run(self, plan: Any) -> Any:
            if any(row.count > 1 and not row.samples for row in plan.rows):
                in_prompt.set()
                assert go_on.wait(WAIT_S)
            return runner.run(plan)

    engine._runner = Held()
    aborted = server.metric("requests_aborted_total")
    try:
        with connect(server) as client:
            client.sendall(raw_request(prompt="x" * 3000, max_tokens=900, stream=stream))
            assert in_prompt.wait(WAIT_S)
        until(lambda: server.service.num_open == 0, "the server has noticed")
    finally:
        go_on.set()
        engine._runner = runner
    nothing_left(server)
    until(lambda: server.metric("requests_aborted_total") == aborted + 1, "it is counted")
    assert server.metric("generation_tokens_total") < 4000


def test_a_megabyte_of_text_and_eighty_prompts_at_once_are_each_answered(server: ThreadServer) -> None:
    huge = "a word and " * 95_000
    assert len(huge) < server.service.settings.max_body_bytes < 1.01 * len(huge)

    def ask(number: int) -> tuple[int, str]:
        body = {"prompt": huge if number == 0 else f"{number} " * 300, "max_tokens": 2, **GREEDY}
        answer = server.http.post("/v1/completions", json=body)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(80) as pool:
        answers = list(pool.map(ask, range(80)))
        assert server.http.get("/health").status_code == 200
    assert answers[0][0] == 400
    assert "1045000 tokens: the context of this model ends at 4096" in answers[0][1]
    assert {code for code, _ in answers[1:]} == {200}
    nothing_left(server)


def test_a_long_list_of_token_ids_is_checked_like_a_short_one(server: ThreadServer) -> None:
    for prompt, message in (([7] * 200_000, "200000 tokens"), ([*[7] * 200_000, "x"], "texts or lists")):
        answer = server.http.post("/v1/completions", json={"prompt": prompt})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_a_body_that_trickles_is_not_waited_for(settings: EngineSettings) -> None:
    with ThreadServer(replace(settings, body_timeout_s=0.3)) as server, connect(server) as client:
        client.sendall(raw_request(max_tokens=5)[:-3])
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_second_request_that_never_ends_its_head_is_let_go_as_the_first_is(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server) as client:
        is_healthy(client)
        monkeypatch.setattr(connection, "HEADERS_WITHIN_S", 0.3)
        is_healthy(client)
        client.sendall(b"GET /heal")
        assert client.recv(1) == b""


def test_a_connection_between_requests_is_kept_longer_than_a_head_may_take(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server) as client:
        is_healthy(client)
        monkeypatch.setattr(connection, "HEADERS_WITHIN_S", 0.1)
        is_healthy(client)
        with connect(server) as other:
            assert other.recv(1) == b""  # it came later, said nothing, and its time is over
        is_healthy(client)


def is_healthy(client: socket.socket) -> None:
    """One request and its whole answer on a connection that stays."""
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        piece = client.recv(4096)
        assert piece, answer
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_clients_that_never_read_their_streams_lose_their_places_to_those_that_do(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TAKES_WITHIN_S", 0.5)
    aborted = server.metric("requests_aborted_total")
    clients = [connect(server, 4096) for _ in range(12)]
    try:
        for client in clients:
            client.sendall(raw_request(max_tokens=4000, stream=True))
        # the first may have been given up before the last is heard
        until(
            lambda: server.service.num_open + server.metric("requests_aborted_total") - aborted >= 12, "all have asked"
        )
        body = {"prompt": "read", "max_tokens": 20, "priority": -10, **GREEDY}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        until(lambda: server.service.num_open == 0, "no place is kept for those that take nothing")
        until(lambda: server.metric("requests_aborted_total") == aborted + 12, "each of them is given up")
        for client in clients:
            assert ended(client)
    finally:
        for client in clients:
            client.close()
    nothing_left(server)


def test_a_stream_that_has_no_text_for_longer_than_its_buffer_is_not_taken_for_a_stalled_client(
    server: ThreadServer, settings: EngineSettings
) -> None:
    engine = server.service.engine
    runner, silent = engine._runner, server.service.tokenizer.inner.token_to_id("<|end|>")

    class Silent(StepRunner):
        """Goes on by special tokens, of which nothing is shown."""

        def run(self, plan: Any) -> Any:
            result = runner.run(plan)
            return replace(result, tokens=tuple((row, silent) for row, _ in result.tokens))

    engine._runner = Silent()
    aborted = server.metric("requests_aborted_total")
    try:
        body = {"prompt": "hush", "max_tokens": 3 * settings.stream_buffer, "stream": True, **GREEDY}
        answer = server.http.post("/v1/completions", json=body).text
    finally:
        engine._runner = runner
    assert '"finish_reason":"length"' in answer
    assert "error" not in answer
    assert server.metric("requests_aborted_total") == aborted
    nothing_left(server)


def ended(client: socket.socket) -> bool:
    """Whether there is an end behind what has come already."""
    with suppress(ConnectionResetError):
        while client.recv(65536):
            pass
    return True


def test_an_answer_that_is_no_stream_and_not_taken_does_not_keep_its_connection(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TAKES_WITHIN_S", 0.3)
    with connect(server, 4096) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 30)  # half a megabyte of answers
        until(lambda: has_connection(server, client), "it is connected")
        until(lambda: not has_connection(server, client), "the server has let go")


def has_connection(server: ThreadServer, client: socket.socket) -> bool:
    inner = server._server
    assert inner is not None
    connections = [*inner._server.server_state.connections]
    return client.getsockname() in [one.client for one in connections]


def test_a_client_that_is_slow_but_takes_something_is_served_to_the_end(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TAKES_WITHIN_S", 1.0)
    with connect(server, 4096) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        taken = 0
        while piece := client.recv(1024):
            taken += len(piece)
            threading.Event().wait(0.02)
    assert taken > 10_000


def test_while_every_connection_is_served_a_newcomer_is_refused_and_nobody_loses_its_answer(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False)  # without a connection so far
    inner = server._server
    assert inner is not None
    until(lambda: not inner._server.server_state.connections, "nobody is connected")
    monkeypatch.setattr(connection, "connection_limit", lambda: 3)
    with tokenising_held(server, "held") as there:
        clients = [connect(server) for _ in range(3)]
        for client in clients:
            client.sendall(raw_request(prompt="held", max_tokens=2))
        assert there.wait(WAIT_S)
        until(lambda: all(not one.awaits_headers for one in inner._server.server_state.connections), "all have asked")
        with connect(server) as newcomer:
            assert is_refused(newcomer)
    for client in clients:
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        client.close()
    nothing_left(server)


def is_refused(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(20_000)),
        b"GET /" + b"a" * 100_000,
    ],
    ids=["one header", "many headers", "path"],
)
def test_a_head_without_measure_is_refused(server: ThreadServer, head: bytes) -> None:
    with connect(server) as client:
        try:
            client.sendall(head)
            answer = client.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert server.http.get("/health").status_code == 200


def test_more_than_64_header_lines_are_refused_and_the_64th_is_taken(server: ThreadServer) -> None:
    ours = {f"x-{number}": "1" for number in range(64 - len(server.http.headers) - 1)}  # and the host
    assert server.http.get("/health", headers=ours).status_code == 200
    answer = server.http.get("/health", headers={**ours, "x-more": "1"})
    assert answer.status_code == 431
    assert "65 header lines" in answer.json()["error"]["message"]


def test_two_lengths_of_a_body_are_refused(server: ThreadServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with connect(server) as client:
        client.sendall(head)
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 10**6}, "n"),
        ({"n": 1e300}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"best_of": 10**9}, "best_of"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"top_logprobs": 20}, "top_logprobs"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"logit_bias": {str(n): 1 for n in range(50_000)}}, "logit_bias"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"seed": 10**40}, "seed"),
    ],
    ids=lambda value: f"{value!r:.25}",
)
def test_what_would_cost_much_is_refused_before_anything_is_tokenised(
    server: ThreadServer, change: dict[str, Any], field: str
) -> None:
    with tokenising_held(server, "costly") as there:
        answer = server.http.post("/v1/completions", json={"prompt": "costly", **GREEDY} | change)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert not there.is_set()


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_each_hostile_body_of_the_bench_is_refused_and_none_is_tokenised(server: ThreadServer, number: int) -> None:
    with patch.object(server.service.tokenizer, "encode", side_effect=AssertionError("tokenised")) as encode:
        answer = server.http.post("/v1/completions", content=HOSTILE[number])
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000 and not encode.called


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = [
    "prompt",
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
]
NAMES += [
    "stop",
    "stream",
    "stream_options",
    "ignore_eos",
    "priority",
    "deadline_ms",
    "best_of",
    "logprobs",
    "tools",
    "min_p",
]


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), st.booleans())
@effort(max_examples=150, deadline=None)
def test_any_json_is_a_checked_request_or_a_mistake_with_a_name(fields: dict[str, Any], chat: bool) -> None:
    usual = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body = parse_json(json.dumps(usual | fields).encode())
    try:
        ask = (parse_chat if chat else parse_completion)(body, EngineSettings())
    except BadRequest as error:
        assert error.field is None or error.field.split(".")[0].split("[")[0] in NAMES
        assert len(str(error)) < 400
    else:
        assert isinstance(ask, Ask)
        assert 1 <= ask.n <= 8
        assert len(ask.stop) <= 4


@given(st.binary(max_size=60))
@effort(max_examples=100, deadline=None)
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        assert isinstance(parse_json(raw), dict)


def test_refused_while_stopping_says_when_to_come_again(settings: EngineSettings, tmp_path: Path) -> None:
    with ThreadServer(replace(settings, drain_s=WAIT_S, stall_timeout_s=WAIT_S)) as server:
        with connect(server) as running, connect(server) as client:
            running.sendall(raw_request(max_tokens=3000, stream=True))
            assert running.recv(10)
            server.ask_to_stop()
            until(lambda: server.service.draining, "draining")
            client.sendall(raw_request(max_tokens=1))
            head = client.recv(4096).split(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 503 ")
            assert b"retry-after: 1" in head
        assert server.join() == 0
