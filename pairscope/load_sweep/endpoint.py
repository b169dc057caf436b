"""An OpenAI-compatible endpoint as a client sees it: what it serves, and one streamed answer with the time of each piece."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import httpx

from pairscope.traffic import texts
from telemetry.lineprotocol import printable
from telemetry.messages import say

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OTHER_WAY = frozenset({400, 404, 405, 422, 501})
"""Statuses after which another route, or a body without `ignore_eos`, may do."""

MOST_LINE = 1 << 20
MOST_BODY = 1 << 20
SMALL_TIMEOUT_S = 10.0
SAMPLE_WORDS = (16, 96)
SAMPLE_TOKENS = 8
USUAL_TOKENS_A_WORD = 1.35


class EndpointProblem(Exception):
    """What is wrong with an endpoint: a key of `load_sweep.endpoint`, and what its sentence holds."""

    def __init__(self, key: str, /, **told: object) -> None:
        super().__init__(key)
        self.key = key
        self.told = told

    def text(self, language: str) -> str:
        told = {name: value.text(language) if isinstance(value, Reason) else value for name, value in self.told.items()}
        return say(f"load_sweep.endpoint.{self.key}", language, **told)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an answer did not end well: a key of `load_sweep.reason`, and what its sentence holds."""

    key: str
    told: Mapping[str, object] = field(default_factory=dict)

    def text(self, language: str) -> str:
        return say(f"load_sweep.reason.{self.key}", language, **self.told)


@dataclass(frozen=True, slots=True)
class Served:
    """`words` of a prompt make about `tokens_a_word` tokens each, and `tokens_besides` come on top of them."""

    base_url: str
    model: str
    context: int | None
    path: str
    fixed_ends: bool  # it takes ignore_eos
    tokens_a_word: float
    tokens_besides: float
    tells_usage: bool


@dataclass(slots=True)
class Streamed:
    """One answer. Times are monotonic; `pieces_s` are those of the pieces of text, `problem` is why it did not end well."""

    asked: int
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    finish: str = ""
    problem: Reason | None = None
    status: int = 200


def base_of(url: str) -> str:
    """Without a slash or /v1 at the end. EndpointProblem for what is no address."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
        raise EndpointProblem("address", url=printable(url)[:200])
    return re.sub(r"(/v1)?/*$", "", url.split("?", 1)[0].split("#", 1)[0].rstrip("/"))


def client_for(connections: int, timeout_s: float, api_key: str) -> httpx.AsyncClient:
    """No proxies and no redirects, so that the key goes nowhere else. `timeout_s` is how long no piece may come."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout_s, connect=SMALL_TIMEOUT_S),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        trust_env=False,
        follow_redirects=False,
    )


async def meet(client: httpx.AsyncClient, base_url: str, model: str | None, *, natural_ends: bool) -> Served:
    """Ask what is served, and with two small requests how it takes and counts them. EndpointProblem says what is wrong."""
    names, context = await _models(client, base_url)
    if model is not None and names and model not in names:
        known = ", ".join(printable(name)[:80] for name in list(names)[:8])
        raise EndpointProblem("model", url=base_url, model=printable(model)[:80], known=known)
    if model is None and not names:
        raise EndpointProblem("no_model", url=base_url)
    name = model if model is not None else next(iter(names))
    trial = Served(base_url, name, context.get(name), COMPLETIONS, not natural_ends, USUAL_TOKENS_A_WORD, 0.0, False)
    served, short = await _first_answer(client, trial, natural_ends)
    if short.prompt_tokens is None:
        return served
    long = await stream(client, served, prompt_of(SAMPLE_WORDS[1], random.Random(2)), SAMPLE_TOKENS)
    if long.problem or long.prompt_tokens is None:
        raise EndpointProblem("answer", url=base_url, reason=long.problem or Reason("no_usage"))
    slope = (long.prompt_tokens - short.prompt_tokens) / (SAMPLE_WORDS[1] - SAMPLE_WORDS[0])
    slope = min(max(slope, 0.2), 20.0)
    besides = max(0.0, short.prompt_tokens - slope * SAMPLE_WORDS[0])
    return Served(
        base_url, name, served.context, served.path, served.fixed_ends, slope, besides, short.tokens is not None
    )


async def _first_answer(client: httpx.AsyncClient, trial: Served, natural_ends: bool) -> tuple[Served, Streamed]:
    """The first way of asking that the endpoint takes, with its answer."""
    first: Streamed | None = None
    for fixed_ends in (False,) if natural_ends else (True, False):
        for path in (COMPLETIONS, CHAT):
            served = Served(
                trial.base_url, trial.model, trial.context, path, fixed_ends, USUAL_TOKENS_A_WORD, 0.0, False
            )
            answer = await stream(client, served, prompt_of(SAMPLE_WORDS[0], random.Random(1)), SAMPLE_TOKENS)
            if not answer.problem:
                if not natural_ends and not fixed_ends:
                    raise EndpointProblem("ends", url=trial.base_url)
                return served, answer
            if answer.status not in OTHER_WAY:
                key = "loading" if answer.status == 503 else "answer"
                raise EndpointProblem(key, url=trial.base_url, reason=answer.problem)
            first = first or answer
    assert first is not None
    raise EndpointProblem("answer", url=trial.base_url, reason=first.problem)


async def _models(client: httpx.AsyncClient, base_url: str) -> tuple[list[str], dict[str, int]]:
    """Names of the served models, and their context in tokens where it is told."""
    try:
        response = await client.get(f"{base_url}/v1/models", timeout=SMALL_TIMEOUT_S)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise EndpointProblem("unreachable", url=base_url) from None
    except httpx.TimeoutException:
        raise EndpointProblem("silent", url=base_url) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EndpointProblem("not_http", url=base_url, reason=printable(str(error))[:120]) from None
    if response.status_code in (401, 403):
        raise EndpointProblem("key", url=base_url, status=response.status_code)
    if response.status_code == 503:
        raise EndpointProblem("loading", url=base_url, reason=Reason("status", {"status": 503, "text": ""}))
    try:
        body = response.json() if response.status_code == 200 and len(response.content) <= MOST_BODY else None
    except (ValueError, RecursionError):
        body = None
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        raise EndpointProblem("not_openai", url=base_url, status=response.status_code)
    found = [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    lengths = {entry["id"]: entry["max_model_len"] for entry in found if type(entry.get("max_model_len")) is int}
    return [entry["id"] for entry in found], lengths


def prompt_of(words: int, source: random.Random) -> str:
    """Random words, so that no prompt begins as another one did and nothing comes out of a prefix cache."""
    return " ".join(source.choices(_words(), k=max(1, words)))


def words_for(served: Served, tokens: int) -> int:
    return max(1, round((tokens - served.tokens_besides) / served.tokens_a_word))


_WORDS: list[str] = []


def _words() -> list[str]:
    if not _WORDS:
        questions, passages = texts()
        _WORDS.extend(sorted(set(re.findall(r"[a-z]{3,}", " ".join((*questions, *passages))))))
    return _WORDS


async def stream(
    client: httpx.AsyncClient, served: Served, prompt: str, tokens: int, into: Streamed | None = None
) -> Streamed:
    """Ask and take the answer to its end, into one that others watch where it is given. Only cancelling raises."""
    answer = into or Streamed(tokens)
    body: dict[str, object] = {
        "model": served.model,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if served.fixed_ends:
        body["ignore_eos"] = True
    if served.path == CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    answer.sent_s = time.monotonic()
    try:
        async with client.stream("POST", served.base_url + served.path, json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.problem = Reason("status", {"status": response.status_code, "text": await _reason(response)})
                return answer
            async for line in _lines(response):
                if line.startswith(b"data:") and not _take(answer, line[5:].strip()):
                    break
    except httpx.TimeoutException:
        answer.problem = Reason("timeout")
    except httpx.HTTPError as error:
        answer.problem = Reason("broken", {"text": printable(str(error))[:160] or type(error).__name__})
    answer.ended_s = time.monotonic()
    if answer.problem is None:
        answer.problem = _wanting(answer, served)
    return answer


def _wanting(answer: Streamed, served: Served) -> Reason | None:
    """What an answer lacks that came without an error."""
    if not answer.finish or not answer.pieces_s:
        return Reason("broke_off" if answer.pieces_s else "no_stream")
    if served.fixed_ends and answer.tokens is not None and answer.tokens < answer.asked:
        return Reason("early", {"tokens": answer.tokens, "asked": answer.asked})
    return None


def _take(answer: Streamed, data: bytes) -> bool:
    """One event; False at the last one."""
    if data == b"[DONE]":
        return False
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        answer.problem = Reason("no_json")
        return False
    if event.get("error"):
        answer.problem = Reason("told", {"text": _message(event)})
        return False
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.tokens = _count(usage, "completion_tokens")
        answer.prompt_tokens = _count(usage, "prompt_tokens")
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(choice, dict):
        delta = choice.get("delta")
        said = delta if isinstance(delta, dict) else {}
        if choice.get("text") or said.get("content") or said.get("reasoning_content") or said.get("reasoning"):
            answer.pieces_s.append(time.monotonic())
        answer.finish = str(choice.get("finish_reason") or answer.finish)
    return True


def _count(usage: Mapping[str, object], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and 0 <= value < 1 << 40 else None


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MOST_LINE:
            raise httpx.DecodingError("a line of the stream has no end")
        await asyncio.sleep(0)  # a flood must not keep the others from their turn
    if rest:
        yield rest


async def _reason(response: httpx.Response) -> str:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MOST_BODY:
            break
    try:
        return _message(json.loads(body))
    except (ValueError, RecursionError):
        return printable(body[:160].decode("utf-8", "replace")).strip()


def _message(body: object) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return printable(str(message))[:200]
