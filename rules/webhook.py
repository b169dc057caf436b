"""Telling the outside: the message, the durable outbox, and the thread that delivers it to one webhook, in order.

A message is on disk, synced, before the first attempt; it leaves the disk when the receiver took it (2xx) or refused it for good.
The same message may arrive twice after a crash, always under the same idempotency key.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from rules.statefile import sync_folder, write_text
from telemetry.deadline import Deadline
from telemetry.deadline import transport as timed
from telemetry.messages import say

log = logging.getLogger(__name__)

RETRIED = frozenset((408, 425, 429))  # and every 5xx
PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE))
"""Failures of a read that say nothing of the message: it is read again."""
KEPT = 1000
"""Messages in the outbox; beyond this the oldest is put among the dead, of whom as many are kept: a receiver that is down for
weeks fills no disk."""


class WebhookError(ValueError):
    """The webhook can't be used as configured; one line that says why, and what to do."""

    def __init__(self, key: str, **values: object) -> None:
        self.key, self.values = f"rules.webhook.{key}", values
        super().__init__(self.told("en"))

    def told(self, language: str) -> str:
        return say(self.key, language, **self.values)


@dataclass(frozen=True, slots=True)
class Message:
    """`key` is the idempotency key; `body` the JSON text that is sent, the same on every attempt."""

    key: str
    body: str


class Outbox:
    """A folder of messages, oldest first. Made for one writer and one sender in one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dead = folder / "dead"
        self.dead.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in folder.glob("*.new"):
            unfinished.unlink(missing_ok=True)
        self._held: dict[str, Message] = {}  # by the name of the file that the disk did not take
        self._settling = threading.Lock()  # of `_held` and `_settled`
        self._settled: dict[str, Path | None] = {}  # and where to; they are here still where the disk can't be written
        self._number = max((_number(path) for path in self.waiting()), default=0)
        self.filled = threading.Event()

    def put(self, message: Message) -> None:
        """Durable when this returns. A message whose key waits already is the same message.

        OSError when it can't be kept, as on a full disk: then it is held in memory and told from there, until `save` has kept it.
        """
        waiting = self.waiting()
        if any(path.name.endswith(f"-{message.key}.json") for path in waiting):
            return
        self._number += 1
        path = self.folder / f"{self._number:012d}-{message.key}.json"
        for oldest in waiting[: max(0, len(waiting) + 1 - KEPT)]:
            self.bury(oldest, "the outbox is full")
        try:
            write_text(path, message.body)
        except OSError:
            self._held[path.name] = message
            raise
        finally:
            self.filled.set()

    def save(self) -> bool:
        """Keep what is held in memory alone, where the disk takes it now. Whether all that waits is on disk."""
        for name, message in list(self._held.items()):
            with self._settling:
                if name not in self._held:  # told in the meantime
                    continue
                try:
                    write_text(self.folder / name, message.body)
                except OSError:
                    return False
                del self._held[name]
        return True

    def waiting(self) -> list[Path]:
        names = {path.name for path in self.folder.glob("*.json")} - self._settled.keys() | self._held.keys()
        return [self.folder / name for name in sorted(names)]

    def read(self, path: Path) -> Message:
        return self._held.get(path.name) or Message(path.stem.partition("-")[2], path.read_text("utf-8"))

    def delivered(self, path: Path) -> None:
        """Off the list, even where the disk can't be written any more: then OSError, and it leaves the disk with a later one."""
        self._settle(path, None)
        sync_folder(self.folder)

    def bury(self, path: Path, why: str) -> None:
        """Keep a message that nobody takes, out of the way, and say so."""
        log.error("webhook: message %s is given up (%s); kept in %s", path.name, why, self.dead)
        self._settle(path, self.dead / path.name)
        for oldest in sorted(self.dead.glob("*.json"))[:-KEPT]:
            oldest.unlink(missing_ok=True)

    def _settle(self, path: Path, to: Path | None) -> None:
        with self._settling:
            self._settled[path.name] = to
            self._held.pop(path.name, None)
            for name, place in list(self._settled.items()):
                if place is None:
                    (self.folder / name).unlink(missing_ok=True)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        (self.folder / name).replace(place)
                del self._settled[name]


def _number(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdigit() else 0


def place_of(url: str) -> str:
    """The part of a webhook URL that may be logged: the rest is often a secret. WebhookError for anything but http and https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WebhookError("no_address")
    try:
        httpx.URL(url)
        parts.hostname.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise WebhookError("no_url", reason=str(error).splitlines()[0]) from None
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        raise WebhookError("no_port") from None
    return f"{parts.scheme}://{parts.hostname}{port}"


def signature(secret: str, body: str, at_s: int) -> str:
    """`t=<seconds>,v1=<hex>`: HMAC-SHA256 over "<seconds>.<body>", for the header X-PairScope-Signature."""
    digest = hmac.new(secret.encode(), f"{at_s}.{body}".encode(), hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


class Sender(threading.Thread):
    """Delivers the outbox to one URL. One message at a time and in order: a resolved one never overtakes its firing one."""

    def __init__(
        self,
        outbox: Outbox,
        url: str,
        *,
        secret: str | None = None,
        timeout_s: float = 10.0,
        backoff_s: Sequence[float] = (1.0, 60.0),
        transport: httpx.BaseTransport | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="webhook", daemon=True)
        self.place = place_of(url)
        self._outbox = outbox
        self._url = url
        self._secret = secret
        self._backoff_s = backoff_s
        self._now_s = now_s
        self._stopping = threading.Event()
        self.failures = 0  # in a row
        self._deadline = Deadline(timeout_s)  # of a whole attempt: a receiver that drips its answer holds nobody up
        transport = transport or timed(self._deadline, httpx.Limits(max_connections=1, max_keepalive_connections=1))
        self._client = httpx.Client(timeout=timeout_s, follow_redirects=False, transport=transport, trust_env=False)
        for noisy in ("httpx", "httpcore"):  # they log whole URLs
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def stop(self, timeout_s: float) -> None:
        """Ask to end; an attempt under way may outlive the wait, and its message stays in the outbox."""
        self._stopping.set()
        self._outbox.filled.set()
        if self.is_alive():
            self.join(timeout_s)

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                waiting = self._outbox.waiting()
                wait_s = self._deliver(waiting[0], self.failures) if waiting else None
            except OSError as error:  # the outbox's own disk, or no descriptor is left to read it with
                wait_s = self._retry(f"outbox: {error.strerror}", self.failures, None)
            self.failures = self.failures + 1 if wait_s is not None else 0
            if wait_s is not None:
                self._stopping.wait(wait_s)
            elif not waiting:
                self._outbox.filled.wait(5.0)
                self._outbox.filled.clear()

    def _deliver(self, path: Path, failures: int) -> float | None:
        """None when the message is off the list; else the seconds to wait before the next attempt."""
        try:
            message = self._outbox.read(path)
        except FileNotFoundError:  # put among the dead in the meantime
            return None
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            self._outbox.bury(path, f"unreadable: {type(error).__name__}")
            return None
        headers = {"Content-Type": "application/json", "User-Agent": "pairscope", "Idempotency-Key": message.key}
        if self._secret:
            headers["X-PairScope-Signature"] = signature(self._secret, message.body, int(self._now_s()))
        try:
            self._deadline.begin()
            request = self._client.build_request("POST", self._url, content=message.body.encode(), headers=headers)
            response = self._client.send(request, stream=True)  # the status is all that is asked for
            response.close()
        except Exception as error:  # whatever a receiver may do: the message waits, and this thread goes on
            return self._retry(f"{type(error).__name__}", failures, None)
        if response.is_success:
            self._outbox.delivered(path)
            return None
        if response.status_code in RETRIED or response.status_code >= 500:
            return self._retry(f"status {response.status_code}", failures, response.headers.get("Retry-After"))
        moved = "; a redirect is not followed, so name its end as webhook_url" if response.is_redirect else ""
        self._outbox.bury(path, f"{self.place} answered {response.status_code}{moved}")
        return None

    def _retry(self, why: str, failures: int, after: str | None) -> float:
        first, most = self._backoff_s
        wait_s = float(min(first * 2.0 ** min(failures, 20), most) * random.uniform(0.7, 1.0))
        asked = retry_after_s(after, self._now_s())
        if asked is not None:
            wait_s = max(wait_s, min(asked, 600.0))
        if failures == 0 or failures % 20 == 0:
            log.warning("webhook: %s: %s; trying again", self.place, why)
        return wait_s


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date; None when it says nothing usable."""
    if header is None:
        return None
    if header.strip().isascii() and header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None


def encode(payload: object) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
