"""Clients that come, share prefixes and go away at random, over real HTTP, while the cache is too small for them: every answer that
is read to its end is right, and in the end every block is free.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.settings import EngineSettings
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import WAIT_S, ThreadServer, until

BLOCKS = 28
BEGINNINGS = ("Once upon a time there was a queue. " * 3, "Every block has an owner, and every owner a name. " * 2, "")


@pytest.fixture(scope="module", params=["recompute", "swap"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), seed=4, tie_word_embeddings=False)
    settings = EngineSettings(
        model=str(folder), kv_blocks=BLOCKS, max_seqs=6, threads=1, preemption=request.param, max_context=400
    )
    with ThreadServer(settings) as running:
        yield running


def body_of(number: int, stream: bool) -> dict[str, object]:
    source = random.Random(number % 23)  # some ask the same as others
    prompt = source.choice(BEGINNINGS) + "abc"[: source.randint(1, 3)] * source.randint(1, 30)
    tokens = source.randint(1, 120)
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


def read_whole(server: ThreadServer, number: int) -> str:
    body = body_of(number, False) | {"priority": number % 3, "deadline_ms": 60_000}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def go_away(server: ThreadServer, number: int) -> None:
    """Ask, read a little or nothing, and close; the connection is reset when something was left unread."""
    raw = json.dumps(body_of(number, bool(number % 2))).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=WAIT_S) as client:
        client.sendall(head + raw)
        client.settimeout(random.Random(number).choice((0.001, 0.01, 0.05)))
        with contextlib.suppress(TimeoutError):
            client.recv(random.Random(number).choice((1, 200, 2000)))


@pytest.mark.parametrize("count", [50, pytest.param(1_500, marks=pytest.mark.long)])
def test_clients_that_stay_get_the_right_text_and_those_that_go_leave_nothing(server: ThreadServer, count: int) -> None:
    alone = {kind: read_whole(server, kind) for kind in range(23)}

    def one(number: int) -> None:
        if number % 5 < 3:
            go_away(server, number)
        else:
            assert read_whole(server, number) == alone[number % 23]

    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(one, number) for number in range(count)]:
            done.result()
    until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0, "nobody is left")
    scheduler = server.service.engine.scheduler
    until(lambda: scheduler.pool.num_taken == 0, "all blocks are free")
    scheduler.check()
    until(lambda: server.metric("kv_blocks_free") == BLOCKS, "it is told that they are")
    assert server.metric("prefix_hits_total") > 16 * count / 5
    assert server.metric("prefix_evictions_total") > 0
    assert server.metric("preemptions_total") > 0
    if scheduler.host is not None:
        assert server.metric("preemptions_swap_total") == server.metric("preemptions_total")
        assert server.metric("kv_blocks_swapped") == 0
