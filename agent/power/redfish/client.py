"""Client: asks one BMC for documents, with one session of its own, within limits, whatever the BMC does."""

from __future__ import annotations

import base64
import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

from agent.exposition import TooLarge, Unreadable, inflate
from agent.power.fault import BmcFault, Trouble
from agent.power.redfish.document import Json, NotADocument, link, parse, table
from agent.power.redfish.trust import Untrusted, context_of, seen_fingerprint, why_untrusted
from agent.settings import BmcTarget
from telemetry.deadline import Deadline, transport

ROOT = "/redfish/v1/"
SESSIONS = "/redfish/v1/SessionService/Sessions"
BODY_LIMIT_BYTES = 1 << 20
"""The largest documents of power and sensors have some 200 KiB. Parsing holds up the whole agent, a tenth of a second at this size."""

VISIT_LIMIT_BYTES = 8 << 20
REQUEST_S = 6.0
CONNECT_S = 3.0
LOGOUT_S = 0.6
REDIRECTS = 2

REFUSALS = 3
PAUSE_S = 3600.0
"""After three refusals in a row one attempt an hour: BMCs lock an account, or an address, that keeps trying."""

_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}", re.ASCII)
_CROWDED = (409, 429, 500, 502, 503, 507)


class Missing(Exception):
    """The BMC has no such document, or this account no right to it."""


class Unanswered(Exception):
    """This one document could not be had; the message is the reason in a few words."""


class OutOfTime(Exception):
    """The visit's time is over."""


class Way(Enum):
    """How requests show who asks."""

    ANONYMOUS = "anonymous"  # no user is configured
    SESSION = "session"
    BASIC = "basic"  # the BMC has no session service
    BASIC_FOR_NOW = "basic for now"  # it has no session left


@dataclass(frozen=True, slots=True)
class Login:
    """The headers that go with every request, and the session to be ended. Its representation shows neither."""

    way: Way
    headers: Mapping[str, str]
    session: str | None = None

    def __repr__(self) -> str:
        return f"Login({self.way.value})"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: httpx.Headers
    body: bytes


class RedfishClient:
    """Used by one thread at a time; only `interrupt` may come from another. `begin` starts a visit; within it `get` brings documents.

    The password goes out only on a connection whose certificate was checked, and neither it nor the token is ever logged or part of
    an exception.
    """

    def __init__(self, target: BmcTarget, monotonic: Callable[[], float] = time.monotonic) -> None:
        for name in ("httpx", "httpcore"):  # at DEBUG the latter writes headers, and so the token
            logging.getLogger(name).setLevel(logging.WARNING)
        self._target = target
        self._monotonic = monotonic
        self._base = httpx.URL(target.url).copy_with(path="/", query=None, fragment=None)
        self._deadline = Deadline(REQUEST_S, monotonic)
        self._http: httpx.Client | None = None
        self._login: Login | None = None
        self._until_s = monotonic()
        self._volume = 0  # bytes of all bodies of this visit
        self._renewed = False  # in this visit
        self._served = False  # something was given in this visit to who we say we are
        self._refusals = 0
        self._refusal = ""
        self._paused_until_s: float | None = None
        self._leaving = threading.Event()
        self._logging_in = False
        self._asking = False

    def begin(self, within_s: float) -> None:
        """A new visit, which has `within_s` for all that it asks."""
        self._until_s = self._monotonic() + within_s
        self._renewed = self._served = False
        self._volume = 0
        if self._login is not None and self._login.way is Way.BASIC_FOR_NOW:
            self._login = None

    def get(self, path: str) -> Json:
        """The document at `path`. Missing, Unanswered or OutOfTime where it can't be had; BmcFault where nothing can."""
        if self._volume > VISIT_LIMIT_BYTES:
            raise Unanswered(f"more than {VISIT_LIMIT_BYTES >> 20} MiB in one visit")
        answer = self._ask(path)
        if answer.status == 401 and self._login is not None and self._login.way is not Way.ANONYMOUS:
            answer = self._ask_again(path, answer)
        if answer.status in (401, 403):
            if self._served:
                raise Missing(path)
            raise self._refused(f"HTTP {answer.status}")
        if answer.status in (404, 405, 410, 501):
            raise Missing(path)
        if answer.status != 200:
            if self._login is not None and self._login.way is Way.BASIC_FOR_NOW and not self._served:
                raise BmcFault(Trouble.CROWDED, f"HTTP {answer.status}")
            raise Unanswered(f"HTTP {answer.status}")
        if path != ROOT:  # which is open to all
            self._served = True
            self._refusals = 0
        try:
            return parse(answer.body)
        except NotADocument as error:
            raise Unanswered(f"no JSON object ({error})") from None

    def logout(self) -> None:
        """End the session, if there is one. One that could not be ended is kept, and used or ended later."""
        login = self._login
        if login is None or login.session is None:
            self._login = None
            return
        self._until_s = self._monotonic() + LOGOUT_S
        try:
            answer = self._send("DELETE", login.session, login.headers)
        except (BmcFault, Unanswered, OutOfTime):
            return
        if answer.status < 500:
            self._login = None

    def interrupt(self) -> None:
        """From another thread: ask nothing more. What is under way ends at once, but for a login: its session would be lost."""
        self._leaving.set()
        if self._asking and not self._logging_in:
            self._deadline.cut()

    def close(self) -> None:
        """End the session and all connections."""
        self._leaving.clear()
        self.logout()
        self._leaving.set()
        if self._http is not None:
            self._http.close()
            self._http = None

    def _ask(self, path: str) -> Answer:
        if self._login is None:
            self._log_in()
        return self._send("GET", path, self._login.headers if self._login else {})

    def _ask_again(self, path: str, refused: Answer) -> Answer:
        """After a 401: once a visit with a new session, since the old one may have expired."""
        if self._renewed or self._login is None or self._login.way is not Way.SESSION:
            return refused
        self._renewed = True
        until_s = self._until_s
        self.logout()  # it may live on, and be only refused for this
        self._login, self._until_s = None, until_s
        return self._ask(path)

    def _log_in(self) -> None:
        target = self._target
        if not target.user:
            self._login = Login(Way.ANONYMOUS, {})
            return
        if self._paused_until_s is not None:
            if self._monotonic() < self._paused_until_s:
                raise BmcFault(Trouble.REFUSED, self._refusal)
            self._paused_until_s = None
        sessions = self._sessions_path()
        if sessions is None:
            self._login = self._basic(Way.BASIC)
            return
        self._logging_in = True
        try:
            answer = self._send("POST", sessions, {}, {"UserName": target.user, "Password": target.password})
            self._login = self._opened(answer)
        finally:
            self._logging_in = False
        if self._leaving.is_set():
            raise OutOfTime

    def _opened(self, answer: Answer) -> Login:
        """What a BMC's answer to a login means."""
        if answer.status in (400, 401, 403):  # iLO answers 400 to a wrong password
            raise self._refused(f"HTTP {answer.status}")
        if answer.status in _CROWDED:
            return self._basic(Way.BASIC_FOR_NOW)
        token = answer.headers.get("x-auth-token", "")
        if answer.status not in (200, 201, 202, 204) or not _TOKEN.fullmatch(token):
            return self._basic(Way.BASIC)
        return Login(Way.SESSION, {"X-Auth-Token": token}, self._session_path(answer))

    def _session_path(self, answer: Answer) -> str | None:
        location = answer.headers.get("location", "")
        if location:
            joined = self._same_origin(location)
            if joined is not None:
                return joined
        try:
            return link(parse(answer.body))
        except NotADocument:
            return None

    def _sessions_path(self) -> str | None:
        """Where sessions are opened, by the service's root, which is open to all; None where it has no such service."""
        answer = self._send("GET", ROOT, {})
        if answer.status in (404, 410):
            raise BmcFault(Trouble.UNUSABLE, f"{ROOT}: HTTP {answer.status}")
        if answer.status != 200:
            return SESSIONS
        try:
            root = parse(answer.body)
        except NotADocument as error:
            raise BmcFault(Trouble.UNUSABLE, f"{ROOT}: no JSON object ({error})") from None
        links = table(root.get("Links")) or table(root.get("links"))
        sessions = link(links.get("Sessions"))
        if sessions is None and link(root.get("SessionService")) is not None:
            sessions = SESSIONS
        return sessions

    def _basic(self, way: Way) -> Login:
        pair = f"{self._target.user}:{self._target.password}".encode()
        return Login(way, {"Authorization": f"Basic {base64.b64encode(pair).decode()}"})

    def _refused(self, reason: str) -> BmcFault:
        if self._login is not None and self._login.session is None:
            self._login = None
        self._refusals += 1
        self._refusal = reason
        if self._refusals >= REFUSALS:
            self._paused_until_s = self._monotonic() + PAUSE_S * random.uniform(1.0, 1.1)
        return BmcFault(Trouble.REFUSED, reason)

    def _send(
        self, method: str, path: str, headers: Mapping[str, str], content: Mapping[str, str] | None = None
    ) -> Answer:
        """One request and its whole answer, over redirects that stay on the BMC."""
        for _ in range(REDIRECTS + 1):
            answer = self._exchange(method, path, headers, content)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            moved = self._same_origin(answer.headers.get("location", ""))
            if moved is None:
                raise Unanswered("a redirect to another place")
            path = moved
        raise Unanswered("too many redirects")

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], content: Mapping[str, str] | None
    ) -> Answer:
        """A kept connection that the BMC closed meanwhile is no fault: a reading request is made once more."""
        try:
            return self._once(method, path, headers, content)
        except httpx.ConnectTimeout:
            raise BmcFault(Trouble.UNREACHABLE, f"no connection within {CONNECT_S:.0f} s") from None
        except httpx.TimeoutException:
            if self._monotonic() >= self._until_s or self._leaving.is_set():
                raise OutOfTime from None
            raise Unanswered("too slow") from None
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable) as error:
            if self._leaving.is_set():
                raise OutOfTime from None
            if method == "GET" and isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
                return self._second_try(method, path, headers)
            raise Unanswered(_few_words(error)) from None

    def _second_try(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        try:
            return self._once(method, path, headers, None)
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except (httpx.HTTPError, httpx.InvalidURL, TooLarge, Unreadable) as error:
            raise Unanswered(_few_words(error)) from None

    def _once(self, method: str, path: str, headers: Mapping[str, str], content: Mapping[str, str] | None) -> Answer:
        self._asking = True  # before the question whether to leave: then `interrupt` finds the one or the other
        try:
            left_s = self._until_s - self._monotonic()
            self._deadline.begin(min(left_s, REQUEST_S))
            if left_s <= 0 or self._leaving.is_set():
                raise OutOfTime
            body: dict[str, Any] = {} if content is None else {"content": json.dumps(content).encode()}
            if content is not None:
                headers = {**headers, "Content-Type": "application/json"}
            url = self._base.copy_with(raw_path=path.encode())
            with self._connected().stream(method, url, headers=headers, **body) as response:
                body_bytes = _received(response)
            self._volume += len(body_bytes)
            return Answer(response.status_code, response.headers, body_bytes)
        finally:
            self._asking = False

    def _connected(self) -> httpx.Client:
        if self._http is None:
            limits = httpx.Limits(
                max_connections=1, max_keepalive_connections=1, keepalive_expiry=2 * self._target.every_s
            )
            self._http = httpx.Client(
                timeout=httpx.Timeout(REQUEST_S, connect=CONNECT_S),
                transport=transport(self._deadline, limits, context_of(self._target)),
                headers={
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                    "OData-Version": "4.0",
                    "User-Agent": "pairscope-agent",
                },
                trust_env=False,
                follow_redirects=False,
            )
        return self._http

    def _same_origin(self, location: str) -> str | None:
        """The path of an address on this BMC; None for any other."""
        try:
            joined = self._base.join(location)
        except (httpx.InvalidURL, ValueError):
            return None
        if (joined.scheme, joined.host, joined.port) != (self._base.scheme, self._base.host, self._base.port):
            return None
        return link(joined.raw_path.decode("ascii", "replace")) if location else None

    def _unreachable(self, error: httpx.ConnectError) -> BmcFault:
        refusal = why_untrusted(error)
        if refusal is None:
            return BmcFault(Trouble.UNREACHABLE, _few_words(error))
        if isinstance(refusal, Untrusted):
            return BmcFault(Trouble.UNTRUSTED, "it is not the one that was pinned", refusal.fingerprint)
        seen = seen_fingerprint(self._base.host, self._base.port or 443, CONNECT_S)
        return BmcFault(Trouble.UNTRUSTED, refusal.verify_message or "not verified", seen)


def _received(response: httpx.Response) -> bytes:
    body = bytearray()
    for piece in inflate(response.iter_raw(), response.headers.get("content-encoding", "")):
        body += piece
        if len(body) > BODY_LIMIT_BYTES:
            raise TooLarge(f"beyond {BODY_LIMIT_BYTES >> 20} MiB")
    return bytes(body)


def _few_words(error: Exception) -> str:
    """What an error of the HTTP library says; its own texts name addresses and lengths, never what was sent."""
    return str(error)[:120] or type(error).__name__
