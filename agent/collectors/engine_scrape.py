"""Engine scrape: asks one engine's endpoint over HTTP, within a deadline and limits, whatever the endpoint does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import httpx

from agent.exposition import Exposition, Reader, TooLarge, Unreadable, inflate

CONNECT_TIMEOUT_S = 0.5
DEADLINE_S = 2.0
SMALL_BODY_BYTES = 64 << 10
_HEADERS = {
    "Accept": "text/plain;version=0.0.4, */*;q=0.5",
    "Accept-Encoding": "identity",
    "User-Agent": "pairscope-agent",
}


class Outcome(StrEnum):
    """What came of a request."""

    OK = "ok"
    REFUSED = "refused"  # nothing listens: the engine is down
    TIMEOUT = "timeout"  # something listens but did not finish within the deadline
    STATUS = "status"  # an HTTP status other than 200
    BAD = "bad"  # an answer that can't be used: beyond the limits, broken encoding, not HTTP


@dataclass(frozen=True, slots=True)
class Scrape:
    """One attempt to read the metrics. `received_s` is the monotonic time at which the body had arrived."""

    outcome: Outcome
    received_s: float
    status: int = 0
    exposition: Exposition | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """What /health says. `loading` with stage and progress while the model loads; an engine without /health is taken as ready."""

    alive: bool
    loading: bool = False
    stage: str = ""
    progress: float | None = None


class EngineClient:
    """HTTP to one engine, used by one thread at a time. No proxies, no redirects, no credentials."""

    def __init__(self, base_url: str, deadline_s: float = DEADLINE_S, monotonic: Callable[[], float] = time.monotonic):
        self._base_url = base_url
        self._deadline_s = deadline_s
        self._monotonic = monotonic
        self._client = httpx.Client(
            timeout=httpx.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s)),
            limits=httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=15),
            headers=_HEADERS,
            trust_env=False,
            follow_redirects=False,
        )

    def close(self) -> None:
        self._client.close()

    def scrape(self, now_ms: int, path: str = "/metrics") -> Scrape:
        """Read the metrics; never raises for what an endpoint does."""
        reader = Reader(now_ms)
        try:
            with self._answer(path) as (response, chunks):
                if response.status_code != 200:
                    return Scrape(Outcome.STATUS, self._monotonic(), response.status_code)
                for piece in inflate(chunks, response.headers.get("content-encoding", "")):
                    reader.feed(piece)
        except httpx.ConnectError as error:
            return Scrape(Outcome.REFUSED, self._monotonic(), reason=str(error))
        except httpx.TimeoutException as error:
            return Scrape(Outcome.TIMEOUT, self._monotonic(), reason=type(error).__name__)
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable) as error:
            return Scrape(Outcome.BAD, self._monotonic(), reason=str(error))
        return Scrape(Outcome.OK, self._monotonic(), 200, reader.close())

    def health(self) -> Health:
        """Whether the engine is alive, and how far it has loaded."""
        answer = self.get_json("/health")
        if answer is None:
            return Health(alive=False)
        status, body = answer
        if status != 503:
            return Health(alive=True)
        said = body if isinstance(body, dict) else {}
        progress = said.get("progress")
        stage = said.get("stage")
        usable = isinstance(progress, int | float) and not isinstance(progress, bool) and 0 <= progress <= 1
        return Health(
            alive=True,
            loading=True,
            stage=stage[:64] if isinstance(stage, str) else "",
            progress=float(progress) if usable and progress is not None else None,
        )

    def get_json(self, path: str) -> tuple[int, object] | None:
        """Status and JSON body (None when it is no JSON) of a small answer; None when there was no usable answer at all."""
        body = bytearray()
        try:
            with self._answer(path) as (response, chunks):
                for piece in inflate(chunks, response.headers.get("content-encoding", "")):
                    body += piece
                    if len(body) > SMALL_BODY_BYTES:
                        return response.status_code, None
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable):
            return None
        try:
            return response.status_code, json.loads(body)
        except (ValueError, RecursionError):
            return response.status_code, None

    @contextmanager
    def _answer(self, path: str) -> Iterator[tuple[httpx.Response, Iterator[bytes]]]:
        """The response and its raw body; httpx.ReadTimeout once the whole of it takes longer than the deadline.

        httpx's own timeouts are for each read, so an endpoint that drips would never meet one.
        """
        deadline_s = self._monotonic() + self._deadline_s

        def within_deadline(response: httpx.Response) -> Iterator[bytes]:
            for chunk in response.iter_raw():
                yield chunk
                if self._monotonic() > deadline_s:
                    raise httpx.ReadTimeout("the body did not end within the deadline", request=response.request)

        with self._client.stream("GET", self._base_url + path) as response:
            yield response, within_deadline(response)
