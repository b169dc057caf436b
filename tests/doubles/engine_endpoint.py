"""An engine's HTTP endpoint that does what a test tells it to: serve text, load, hang, drip, send bombs, lie, go away."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.ports import free_port


@dataclass
class Page:
    """One answer. `raw` is written to the socket as it is, headers and all, instead of an HTTP answer."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: Iterator[bytes] | None = None


class EngineEndpoint:
    """`pages[path]` is a Page or a function that makes one for each request; other paths are 404. `requests` lists what was asked,
    `headers` how it was asked last, by path, and `posted` what was sent.
    """

    def __init__(self, port: int = 0) -> None:
        self.pages: dict[str, Page | Callable[[], Page]] = {"/health": Page()}
        self.requests: list[str] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.posted: list[tuple[str, object]] = []
        self.released = threading.Event()  # what hangs, hangs until this is set
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.requests.append(self.path)
                endpoint.headers[self.path] = dict(self.headers.items())
                page = endpoint.pages.get(self.path, Page(status=404))
                page = page() if callable(page) else page
                with contextlib.suppress(OSError):
                    if page.raw is not None:
                        for piece in page.raw:
                            self.wfile.write(piece)
                            self.wfile.flush()
                        return
                    self.send_response(page.status)
                    for name, value in {"Content-Length": str(len(page.body)), **page.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(page.body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                endpoint.posted.append((self.path, json.loads(body)))
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def metrics(self, text: str) -> None:
        self.pages["/metrics"] = Page(text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def hang(self, path: str) -> None:
        """Take the request and say nothing."""

        def wait() -> Page:
            self.released.wait(120)
            return Page(raw=iter(()))

        self.pages[path] = wait

    def json(self, path: str, body: object, status: int = 200) -> None:
        self.pages[path] = Page(json.dumps(body).encode(), status)

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


def nothing_listens() -> str:
    """An address on which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"
