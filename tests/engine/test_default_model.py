"""The model that comes with the product, served by the real process, answers in sensible English."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests import loopback
from tests.engine.running import WAIT_S, start_process, until
from tests.ports import free_port


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    started = start_process({"port": port, "kv_memory_gib": 0.5})
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _ready(started, address), "the default model is ready")
        yield address
    finally:
        started.terminate()
        assert started.wait(WAIT_S) == 0
        started.communicate()


def _ready(started: subprocess.Popen[str], address: str) -> bool:
    assert started.poll() is None, "the server has ended"
    try:
        return loopback.get(f"{address}/health", timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def post(url: str) -> Callable[[str, dict[str, object]], httpx.Response]:
    return lambda path, body: loopback.post(url + path, json=body, timeout=WAIT_S)


def test_the_capital_of_france_is_paris(post: Callable[[str, dict[str, object]], httpx.Response]) -> None:
    got = post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).json()
    assert got["model"] == "smollm2-135m-instruct"
    assert got["choices"][0]["text"].startswith(" Paris")


def test_a_question_is_answered_in_a_sentence_that_ends_by_itself(
    post: Callable[[str, dict[str, object]], httpx.Response],
) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    got = post("/v1/chat/completions", {"messages": messages, "max_tokens": 60, "temperature": 0}).json()
    assert got["choices"][0]["finish_reason"] == "stop"
    assert "capital of France is Paris" in got["choices"][0]["message"]["content"]


def test_sampled_text_is_still_english(post: Callable[[str, dict[str, object]], httpx.Response]) -> None:
    messages = [{"role": "user", "content": "Write two sentences about the sea."}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    text = post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    words = [word.strip(".,!?;:\"'()").lower() for word in text.split()]
    assert len(words) > 10
    assert len({"the", "a", "of", "and", "is", "in", "to", "sea", "ocean", "water", "its", "with"} & set(words)) >= 4
