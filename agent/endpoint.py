"""Endpoint: the agent's own HTTP address, /metrics for Prometheus and /healthz for people and supervisors."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent.latest import LatestSamples, prometheus_text
from telemetry.messages import say

CONCURRENT_LIMIT = 40
REQUEST_DEADLINE_S = 10.0
READ_TIMEOUT_S = 5.0
NO_FILE_WAIT_S = 0.1

Health = Callable[[], tuple[bool, Mapping[str, object]]]


class CannotServe(Exception):
    """The endpoint can't be opened. One line: what, why and the remedy."""


class Endpoint:
    """Serves on its own threads; what it answers comes from `latest` and `health` (well or not, and the details)."""

    def __init__(
        self,
        host: str,
        port: int,
        latest: LatestSamples,
        health: Health,
        *,
        allow_remote: bool = False,
        language: str = "en",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds at once; CannotServe when the address is refused or taken. Port 0 takes any free port."""
        if not allow_remote and not is_loopback(host):
            raise CannotServe(say("agent.start.not_loopback", language, host=host))
        try:
            self._server = _Server((host, port), latest, health, monotonic)
        except (OSError, OverflowError, TypeError, ValueError) as error:  # the last two: no name that a host can have
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotServe(say("agent.start.port_taken", language, host=host, port=port, reason=reason)) from None
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.25}, name="endpoint", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; answers under way are cut off."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    """At most CONCURRENT_LIMIT requests at a time, the next is told 429; none may take longer than REQUEST_DEADLINE_S."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], latest: LatestSamples, health: Health, monotonic: Callable[[], float]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.latest = latest
        self.health = health
        self.monotonic = monotonic
        self._places = threading.BoundedSemaphore(CONCURRENT_LIMIT)
        self._open: dict[int, tuple[float, socket.socket]] = {}
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            _refuse(request)
            self.shutdown_request(request)
            return
        self._open[id(request)] = (self.monotonic(), request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # this host has no thread left for us
            self._ended(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:
        self._open.pop(id(request), None)
        self._places.release()

    def get_request(self) -> tuple[Any, Any]:
        """Where no file can be opened any more the connection stays in the queue, and asking again at once would be a busy loop."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(NO_FILE_WAIT_S)
            raise

    def service_actions(self) -> None:
        """Called four times a second: end what drips."""
        for started_s, request in list(self._open.values()):
            if self.monotonic() - started_s > REQUEST_DEADLINE_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_TIMEOUT_S
    server_version = "pairscope"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            text = prometheus_text(self.server.latest.fresh(self.server.monotonic()))
            self._answer(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", text)
        elif path == "/healthz":
            well, details = self.server.health()
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(details, ensure_ascii=False) + "\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", "/metrics\n/healthz\n")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape a second is nothing to log."""

    def _answer(self, status: HTTPStatus, content_type: str, text: str) -> None:
        body = text.encode("utf-8", "replace")  # a lone surrogate is no reason to say nothing
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _refuse(request: socket.socket) -> None:
    """429 to a request that was not read. What it sent so far is read, so that closing does not cut off our answer."""
    with contextlib.suppress(OSError):
        request.settimeout(0.05)
        request.sendall(
            b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        request.shutdown(socket.SHUT_WR)
        request.recv(65536)
