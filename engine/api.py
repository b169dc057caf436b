"""What a client may ask for: OpenAI's request bodies, read and checked field by field."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from engine.queue import PRIORITIES
from engine.request import Sampling
from engine.settings import EngineSettings

Body = Mapping[str, Any]


LONGEST_DEADLINE_MS = 86_400_000


class BadRequest(ValueError):
    """The client's mistake. `field` is the one that is wrong, `code` the HTTP status."""

    def __init__(self, field: str | None, message: str, code: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. Exactly one of `prompts` (texts or token ids) and `messages` is set. `max_tokens` None: by default."""

    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, Any], ...]
    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    priority: int  # lower is served earlier
    deadline_ms: int | None  # from arrival to the last token
    n: int
    stream: bool
    include_usage: bool

    def sampling(self, choice: int, max_tokens: int) -> Sampling:
        """How choice number `choice` is sampled: each has a seed of its own, derived from the request's."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed + choice,
            max_tokens=max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
"""Known fields that this engine does not do, with the values that ask for nothing. Anything else is refused, not ignored."""


def parse_json(raw: bytes) -> Body:
    """The object in a request body."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if "int_max_str_digits" in str(error):
            raise BadRequest(None, "the body holds a number of more than 4,300 digits") from None
        raise BadRequest(None, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(None, "the body must be a JSON object")
    return body


def parse_completion(body: Body, settings: EngineSettings) -> Ask:
    """A /v1/completions body."""
    return _parse(body, settings, _prompts(body, settings), (), default_max_tokens=16)


def parse_chat(body: Body, settings: EngineSettings) -> Ask:
    """A /v1/chat/completions body."""
    return _parse(body, settings, (), _messages(body), default_max_tokens=None)


def _parse(
    body: Body,
    settings: EngineSettings,
    prompts: tuple[str | tuple[int, ...], ...],
    messages: tuple[Body, ...],
    default_max_tokens: int | None,
) -> Ask:
    for name, neutral in _WITHOUT_EFFECT.items():
        if name in body and body[name] not in neutral:
            raise BadRequest(name, f"{name} is not supported by this engine")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options", "stream_options must be an object")
    stream = _flag(body, "stream")
    if options and not stream:
        raise BadRequest("stream_options", "stream_options needs stream to be true")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model", "model must be a string")
    max_name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = _whole(body, max_name, 1, 1 << 31, None)
    seed = _whole(body, "seed", -(1 << 63), (1 << 64) - 1, None)
    top_k = _whole(body, "top_k", -1, 1 << 31, 0)
    return Ask(
        prompts=prompts,
        messages=messages,
        model=model,
        max_tokens=max_tokens if max_tokens is not None else default_max_tokens,
        temperature=_number(body, "temperature", 0.0, 2.0, 1.0),
        top_p=_number(body, "top_p", 0.0, 1.0, 1.0),
        top_k=max(0, top_k or 0),
        seed=secrets.randbits(63) if seed is None else seed,
        stop=_stop(body, settings),
        ignore_eos=_flag(body, "ignore_eos"),
        priority=_whole(body, "priority", *PRIORITIES, 0) or 0,
        deadline_ms=_whole(body, "deadline_ms", 1, LONGEST_DEADLINE_MS, None),
        n=_whole(body, "n", 1, settings.max_choices, 1) or 1,
        stream=stream,
        include_usage=_flag(options or {}, "include_usage", "stream_options."),
    )


def _whole(body: Body, name: str, low: int, high: int, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(name, f"{name} must be a whole number")
    if not low <= value <= high:
        raise BadRequest(name, f"{name} is {_shown(value)}: it must lie between {low} and {high}")
    return value


def _shown(value: int) -> str:
    digits = str(value)
    return digits if len(digits) <= 24 else f"a number of {len(digits)} digits"


def _number(body: Body, name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(name, f"{name} must be a number")
    if not low <= value <= high:
        raise BadRequest(name, f"{name} is {value}: it must lie between {low:g} and {high:g}")
    return float(value)


def _flag(body: Body, name: str, prefix: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(prefix + name, f"{prefix}{name} must be true or false")
    return bool(value)


def _stop(body: Body, settings: EngineSettings) -> tuple[str, ...]:
    value = body.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    _refuse_half_pairs("stop", "stop", stops)
    if not isinstance(stops, list) or not all(_is_text(stop) and stop for stop in stops):
        raise BadRequest("stop", "stop must be a string or a list of strings, none of them empty")
    if len(stops) > settings.max_stops:
        raise BadRequest("stop", f"stop has {len(stops)} strings: at most {settings.max_stops} are allowed")
    if max(map(len, stops), default=0) > settings.max_stop_chars:
        raise BadRequest("stop", f"a stop string may have {settings.max_stop_chars} characters at most")
    return tuple(stops)


def _prompts(body: Body, settings: EngineSettings) -> tuple[str | tuple[int, ...], ...]:
    value = body.get("prompt")
    _refuse_half_pairs("prompt", "prompt", value if isinstance(value, list) else [value])
    if _is_text(value):
        return (value,)
    if not isinstance(value, list) or not value:
        raise BadRequest(
            "prompt", "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"
        )
    if all(_is_token(item) for item in value):
        return (tuple(value),)
    prompts: list[str | tuple[int, ...]] = []
    for item in value:
        if _is_text(item):
            prompts.append(item)
        elif isinstance(item, list) and item and all(_is_token(token) for token in item):
            prompts.append(tuple(item))
        else:
            raise BadRequest("prompt", "prompt must hold texts or lists of token ids")
    if len(prompts) > settings.max_choices:
        raise BadRequest("prompt", f"prompt has {len(prompts)} entries: at most {settings.max_choices} are allowed")
    return tuple(prompts)


def _refuse_half_pairs(field: str, where: str, items: object) -> None:
    if isinstance(items, list) and any(isinstance(item, str) and not _is_text(item) for item in items):
        raise BadRequest(field, f"{where} holds half of a surrogate pair (\\ud800 to \\udfff alone), which is no text")


def _is_text(item: object) -> TypeGuard[str]:
    """Whether it is a string that can be written as UTF-8: JSON can spell half of a surrogate pair, which is no text."""
    if not isinstance(item, str):
        return False
    try:
        item.encode()  # a hundred times as fast as looking at each letter, and this is done in the event loop
    except UnicodeEncodeError:
        return False
    return True


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _messages(body: Body) -> tuple[Body, ...]:
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise BadRequest("messages", "messages must be a list of at least one message")
    return tuple(_message(item, f"messages[{number}]") for number, item in enumerate(value))


def _message(item: object, where: str) -> Body:
    if not isinstance(item, dict):
        raise BadRequest("messages", f"{where} must be an object")
    role, content = item.get("role"), item.get("content")
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else [content]
    _refuse_half_pairs("messages", where, [role, *parts])
    if not _is_text(role) or not role:
        raise BadRequest("messages", f"{where}.role must be a string")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and _is_text(p.get("text")) for p in content):
            raise BadRequest("messages", f"{where}.content may hold text parts only")
        content = "".join(part["text"] for part in content)
    if not _is_text(content):
        raise BadRequest("messages", f"{where}.content must be a text")
    return {"role": role, "content": content}
