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
from telemetry.deadline import Deadline, transport
from telemetry.lineprotocol import printable

CONNECT_TIMEOUT_S = 0.5
DEADLINE_S = 10.0
"""For metrics: some engines tell them between two steps only, and a step may hold a long prompt."""

SMALL_DEADLINE_S = 2.0
"""For what is asked besides."""

SMALL_BODY_BYTES = 256 << 10
RESTART_HEADER = "Process-Start-Time-Unix"
"""llama.cpp's; a clock without a date, whatever its name says."""

_HEADERS = {
    "Accept": "text/plain;version=0.0.4, */*;q=0.5",
    "Accept-Encoding": "identity",
    "User-Agent": "pairscope-agent",
}
_LIMITS = httpx.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=15)


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
    restart_token: str = ""  # differs from process to process, and means nothing else


class Condition(StrEnum):
    """What an engine says of itself at /health."""

    SILENT = "silent"  # no usable answer
    LOADING = "loading"
    READY = "ready"  # also of an engine that has no /health
    UNWELL = "unwell"  # it answers that it can't serve: stalled, draining, dead


@dataclass(frozen=True, slots=True)
class Health:
    """What /health says: `word` is its own status word; `stage` and `progress` (0..1) while it loads. `is_plain` marks a bare 503,
    which some engines answer while they load and others while their queue is full.
    """

    condition: Condition
    word: str = ""
    stage: str = ""
    progress: float | None = None
    is_plain: bool = False


class EngineClient:
    """HTTP to one engine, used by one thread at a time. No proxies and no redirects, so the key goes nowhere else."""

    def __init__(
        self,
        base_url: str,
        deadline_s: float = DEADLINE_S,
        monotonic: Callable[[], float] = time.monotonic,
        api_key: str = "",
    ) -> None:
        self._base_url = base_url
        self._deadline_s = deadline_s
        self._deadline = Deadline(deadline_s, monotonic)
        self._monotonic = monotonic
        self._client = httpx.Client(
            timeout=httpx.Timeout(deadline_s, connect=min(CONNECT_TIMEOUT_S, deadline_s)),
            transport=transport(self._deadline, _LIMITS),
            headers={**_HEADERS, "Authorization": f"Bearer {api_key}"} if api_key else _HEADERS,
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
        token = printable(response.headers.get(RESTART_HEADER, ""))[:64]
        return Scrape(Outcome.OK, self._monotonic(), 200, reader.close(), restart_token=token)

    def health(self) -> Health:
        """How the engine says it is."""
        answer = self.get_json("/health")
        if answer is None:
            return Health(Condition.SILENT)
        status, body = answer
        said = body if isinstance(body, dict) else {}
        word, stage = _word(said.get("status")), _word(said.get("stage"))
        if status < 500:
            return Health(Condition.READY, word)
        if status != 503 or word not in ("", "loading"):
            return Health(Condition.UNWELL, word or f"HTTP {status}")
        return Health(Condition.LOADING, word, stage, _share(said.get("progress")), is_plain=not word)

    def get_json(self, path: str) -> tuple[int, object] | None:
        """Status and JSON body (None when it is no JSON) of a small answer; None when there was no usable answer at all."""
        try:
            return self.ask_json(path, deadline_s=min(SMALL_DEADLINE_S, self._deadline_s))
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable):
            return None

    def ask_json(self, path: str, question: object = None, deadline_s: float | None = None) -> tuple[int, object]:
        """As `get_json`, with `question` sent as JSON where there is one; raises what httpx raises, TooLarge and Unreadable."""
        body = bytearray()
        with self._answer(path, question, deadline_s) as (response, chunks):
            for piece in inflate(chunks, response.headers.get("content-encoding", "")):
                body += piece
                if len(body) > SMALL_BODY_BYTES:
                    return response.status_code, None
        try:
            return response.status_code, _clean(json.loads(body))
        except (ValueError, RecursionError):
            return response.status_code, None

    @contextmanager
    def _answer(
        self, path: str, question: object = None, deadline_s: float | None = None
    ) -> Iterator[tuple[httpx.Response, Iterator[bytes]]]:
        """The response and its raw body; httpx.TimeoutException once the whole of it takes longer than the deadline."""
        self._deadline.begin(deadline_s)
        method = "GET" if question is None else "POST"
        with self._client.stream(method, self._base_url + path, json=question) as response:
            yield response, response.iter_raw()


def _word(said: object) -> str:
    return said[:64] if isinstance(said, str) else ""


def _clean(said: object) -> object:
    """JSON's strings without what can't be written out again: control characters and halves of surrogate pairs."""
    if isinstance(said, str):
        return printable(said)
    if isinstance(said, list):
        return [_clean(entry) for entry in said]
    if isinstance(said, dict):
        return {printable(name): _clean(entry) for name, entry in said.items()}
    return said


def _share(said: object) -> float | None:
    is_number = isinstance(said, int | float) and not isinstance(said, bool)
    return float(said) if is_number and 0 <= said <= 1 else None  # type: ignore[arg-type, operator]
