"""OpenAI's response bodies, for completions and chat, whole and as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def body(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The form of one answer: `chat` decides between the two endpoints' shapes."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[Choice], usage: Usage) -> Json:
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": usage.body(),
        }

    def opening(self, index: int) -> Json | None:
        """The first event of a chat choice says who speaks; a completion has none."""
        return self._event(index, {"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, choice: Choice) -> Json:
        if self.chat:
            return self._event(choice.index, {"content": choice.text} if choice.text else {}, choice.finish_reason)
        body = {"index": choice.index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
        return {**self._head("text_completion"), "choices": [body]}

    def usage_event(self, usage: Usage) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage.body()}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _event(self, index: int, delta: Json, finish_reason: str | None) -> Json:
        body = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [body]}

    def _whole_choice(self, choice: Choice) -> Json:
        said: Json = {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
        return {"index": choice.index, **said, "logprobs": None, "finish_reason": choice.finish_reason}


def error_body(code: int, message: str, field: str | None = None) -> Json:
    kinds = {
        404: "not_found_error",
        413: "invalid_request_error",
        400: "invalid_request_error",
        403: "permission_error",
        405: "invalid_request_error",
        431: "invalid_request_error",
        429: "rate_limit_error",
    }
    kind = kinds.get(code, "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def encode(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
