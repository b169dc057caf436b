"""One HTTP request for text, from checked body to the last byte: tokenise, generate, stream, and notice who has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.answers import LAST_EVENT, Answer, Choice, Usage, encode, error_body, event
from engine.api import Ask, BadRequest
from engine.chat import ChatTemplateError
from engine.core import Output
from engine.request import Finish
from engine.sending import while_there
from engine.service import EngineService, Ticket

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class GenerationFailed(Exception):
    """The engine gave the request up. `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def tokenise(service: EngineService, ask: Ask) -> list[list[int]]:
    """Token ids of each prompt, made in a worker thread: a long text must not hold up the others' streams."""
    return await asyncio.get_running_loop().run_in_executor(service.tokenisers, _tokenise, service, ask)


def _tokenise(service: EngineService, ask: Ask) -> list[list[int]]:
    tokenizer, began = service.tokenizer, time.perf_counter()
    try:
        if ask.messages:
            return [tokenizer.encode_chat(ask.messages)]
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in ask.prompts]
    except ChatTemplateError as error:
        raise BadRequest("messages", str(error)) from None
    finally:
        service.note_tokenised(time.perf_counter() - began)


def max_tokens_of(service: EngineService, ask: Ask, prompt: Sequence[int], vocab: int) -> int:
    """How many tokens this prompt may get. BadRequest when prompt and output don't fit into the context."""
    field = "messages" if ask.messages else "prompt"
    context = service.engine.context
    if not prompt:
        raise BadRequest(field, f"{field} has no tokens")
    room = context - len(prompt)
    if room < 1:
        raise BadRequest(field, f"{field} has {len(prompt)} tokens: the context of this model ends at {context}")
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise BadRequest(field, f"{field} holds a token id that is not in 0..{vocab - 1}")
    if ask.max_tokens is None:
        return min(room, service.settings.default_chat_tokens)
    if ask.max_tokens > room:
        raise BadRequest(
            "max_tokens",
            f"max_tokens is {ask.max_tokens}: with {len(prompt)} prompt tokens at most {room} fit into the context of {context}",
        )
    return ask.max_tokens


def open_tickets(
    service: EngineService, ask: Ask, prompts: Sequence[Sequence[int]], limits: Sequence[int], arrived_s: float
) -> list[Ticket]:
    """One ticket per prompt and choice, in the order of their indices."""
    deadline_s = arrived_s + ask.deadline_ms / 1000 if ask.deadline_ms is not None else None
    return [
        service.open(prompt, ask.sampling(choice, limit), arrived_s, ask.stream, ask.priority, deadline_s)
        for prompt, limit in zip(prompts, limits, strict=True)
        for choice in range(ask.n)
    ]


def _check(output: Output) -> Output:
    if output.finish in (Finish.ERROR, Finish.ABORT):
        stopping = output.finish is Finish.ABORT
        raise GenerationFailed(503 if stopping else 500, output.error or "the request was aborted")
    return output


class Generation(Response):
    """An ASGI response that generates. A client that goes away, streaming or not, closes its tickets at once."""

    def __init__(self, tickets: list[Ticket], prompt_tokens: int, answer: Answer, ask: Ask) -> None:
        self._tickets = tickets
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._ask = ask
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_there(self._stream(send) if self._ask.stream else self._whole(send), receive)
        finally:
            for ticket in self._tickets:
                ticket.close()

    async def _whole(self, send: Send) -> None:
        try:
            choices = await asyncio.gather(*(_collect(index, t) for index, t in enumerate(self._tickets)))
        except GenerationFailed as error:
            await _send_json(send, error.code, error_body(error.code, str(error)))
            return
        await _send_json(send, 200, self._answer.whole(list(choices), self._usage()))
        for ticket in self._tickets:
            ticket.delivered(ticket.request.num_output)

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            streams = [self._pieces(index, ticket, write) for index, ticket in enumerate(self._tickets)]
            await asyncio.gather(*streams)
            if self._ask.include_usage:
                await write(event(self._answer.usage_event(self._usage())))
        except GenerationFailed as error:
            await write(event(error_body(error.code, str(error))))
        await write(LAST_EVENT)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, index: int, ticket: Ticket, write: Callable[[bytes], Awaitable[None]]) -> None:
        opening = self._answer.opening(index)
        if opening is not None:
            await write(event(opening))
        async for output in _outputs(ticket):
            if output.text or output.finish is not None:
                reason = output.finish.value if output.finish is not None else None
                await write(event(self._answer.piece(Choice(index, output.text, reason))))
            # Tokens without text, of a special token or a half character, wait for no client: they must not pause its request.
            ticket.delivered(output.tokens)

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, sum(ticket.request.num_output for ticket in self._tickets))


async def _outputs(ticket: Ticket) -> AsyncIterator[Output]:
    while True:
        output = _check(await ticket.next())
        yield output
        if output.finish is not None:
            return


async def _collect(index: int, ticket: Ticket) -> Choice:
    text = ""
    async for output in _outputs(ticket):
        text += output.text
    assert output.finish is not None
    return Choice(index, text, output.finish.value)


async def _send_json(send: Send, code: int, body: Mapping[str, object]) -> None:
    content = encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})
