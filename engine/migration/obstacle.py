"""What stands in the way of moving requests to a target, seen from the source before anything is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

ANSWER_LIMIT_BYTES = 1 << 20
WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`kind` is unreachable, token, no_engine, differs or not_now; `reason` says it in words."""

    kind: str
    reason: str


async def obstacle(client: httpx.AsyncClient, target: str, identity: Mapping[str, object]) -> Obstacle | None:
    """Ask the target what runs there, with the source's token; None when requests of this identity can go on there."""
    try:
        async with client.stream("GET", f"{target}/kv/requests", timeout=WITHIN_S) as answer:
            raw = b""
            async for piece in answer.aiter_bytes():
                raw += piece
                if len(raw) > ANSWER_LIMIT_BYTES:
                    return Obstacle("no_engine", "an answer without end")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        return Obstacle("unreachable", reason_of(error))
    return judged(answer.status_code, raw, identity)


def differing(theirs: Mapping[str, object], ours: Mapping[str, object]) -> str | None:
    """One line that names the first thing in which two engines differ; None when a cache of one is a cache of the other."""
    for name, own in ours.items():
        other = theirs.get(name)
        if other != own:
            return f"the engines differ in {name}: the request comes from {str(other)[:64]!r}, here it is {str(own)[:64]!r}"
    return None


def judged(code: int, raw: bytes, identity: Mapping[str, object]) -> Obstacle | None:
    """What an answer to GET /kv/requests means for requests of this identity."""
    try:
        told = json.loads(raw)
        if code == 200:
            ours = json.loads(json.dumps(dict(identity)))  # as it arrives there
            difference = differing(ours, dict(told["identity"]))
            return Obstacle("differs", difference) if difference else None
        said = f"{code}: {str(told['error']['message'])[:500]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return Obstacle("no_engine", f"its answer to GET /kv/requests is {code}")
    if code in (401, 403):
        return Obstacle("token", said)
    return Obstacle("no_engine" if code == 404 else "not_now", said)


def reason_of(error: BaseException) -> str:
    """The system's own words for why a connection failed, where it has any."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    words = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            words = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)  # below 0: of a name
        cause = cause.__cause__ or cause.__context__
    return words
