"""The double's web service: sessions that are counted, TLS, and faults by path."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.doubles.redfish.documents import Documents

USER = "watcher"
PASSWORD = "Tr0ub4dor&3-not-for-any-log"
SESSIONS = "/redfish/v1/SessionService/Sessions"


@dataclass(frozen=True)
class Asked:
    """One request as it came. `auth` is none, session, basic, expired or wrong."""

    method: str
    path: str
    auth: str


@dataclass
class Reply:
    """What is answered instead of the document. `body` may be pieces, with a pause before each."""

    status: int = 200
    body: bytes | Iterator[bytes] = b"{}"
    location: str = ""
    wait_s: float = 0.0
    raw: bool = False  # `body` is written as it is, headers and all


Fault = Callable[["RedfishBmc"], Reply]


class RedfishBmc:
    """Serves `documents`; `faults[path]` answers in a document's place. `asked` is all that was asked, `sessions` what is open."""

    def __init__(self, documents: Documents, certificate: tuple[Path, Path] | None = None) -> None:
        self.documents = documents
        self.faults: dict[str, Fault] = {}
        self.asked: list[Asked] = []
        self.sessions: dict[str, str] = {}  # token -> path
        self.opened = 0
        self.session_limit = 8
        self.has_sessions = True
        self.login_status: int | None = None  # answers every login with this
        self.login_wait_s = 0.0
        self.slash_redirects = False
        self.released = threading.Event()
        self.password = PASSWORD
        self._lock = threading.Lock()
        bmc = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                bmc._get(self)

            def do_POST(self) -> None:
                bmc._post(self)

            def do_DELETE(self) -> None:
                bmc._delete(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def expire(self) -> None:
        """All sessions end, as by a restart of the BMC's service."""
        self.sessions.clear()

    def paths(self, method: str = "GET") -> list[str]:
        return [asked.path for asked in self.asked if asked.method == method]

    def _note(self, handler: BaseHTTPRequestHandler) -> str:
        token, basic = handler.headers.get("X-Auth-Token"), handler.headers.get("Authorization")
        if token is not None:
            auth = "session" if token in self.sessions else "expired"
        elif basic is not None:
            pair = base64.b64decode(basic.removeprefix("Basic ")).decode()
            auth = "basic" if pair == f"{USER}:{self.password}" else "wrong"
        else:
            auth = "none"
        self.asked.append(Asked(handler.command, handler.path, auth))
        return auth

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        auth = self._note(handler)
        path = handler.path
        fault = self.faults.get(path)
        if fault is not None:
            self._answer(handler, fault(self))
        elif self.slash_redirects and path != "/redfish/v1/" and not path.endswith("/"):
            self._answer(handler, Reply(308, b"", location=f"{path}/"))
        elif auth not in ("session", "basic") and path != "/redfish/v1/":
            self._answer(handler, Reply(401))
        else:
            document = self.documents.get(path, self.documents.get(path.rstrip("/")))
            self._answer(handler, Reply(404) if document is None else Reply(body=json.dumps(document).encode()))

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        self._note(handler)
        said = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length", "0"))) or b"{}")
        if handler.path.rstrip("/") != SESSIONS or not self.has_sessions:
            return self._answer(handler, Reply(404))
        if self.login_wait_s:
            time.sleep(self.login_wait_s)
        if self.login_status is not None:
            return self._answer(handler, Reply(self.login_status))
        if (said.get("UserName"), said.get("Password")) != (USER, self.password):
            return self._answer(handler, Reply(401))
        with self._lock:
            if len(self.sessions) >= self.session_limit:
                return self._answer(handler, Reply(503, b'{"error": {"code": "Base.1.8.SessionLimitExceeded"}}'))
            self.opened += 1
            token, path = f"token-{self.opened:04d}-secret-of-the-session", f"{SESSIONS}/{self.opened}"
            self.sessions[token] = path
        body = json.dumps({"@odata.id": path}).encode()
        handler.send_response(201)
        handler.send_header("X-Auth-Token", token)
        handler.send_header("Location", f"{self.url}{path}" if self.opened % 2 else path)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        return None

    def _delete(self, handler: BaseHTTPRequestHandler) -> None:
        auth = self._note(handler)
        token = handler.headers.get("X-Auth-Token", "")
        if auth != "session":
            return self._answer(handler, Reply(401))
        if self.sessions.get(token) != handler.path:
            return self._answer(handler, Reply(404))
        del self.sessions[token]
        return self._answer(handler, Reply(204, b""))

    def _answer(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        with contextlib.suppress(OSError):
            if reply.wait_s:
                self.released.wait(reply.wait_s)
            pieces = iter([reply.body]) if isinstance(reply.body, bytes) else reply.body
            if reply.raw:
                handler.close_connection = True
                for piece in pieces:
                    handler.wfile.write(piece)
                    handler.wfile.flush()
                return
            body = b"".join(pieces)
            handler.send_response(reply.status)
            handler.send_header("Content-Type", "application/json")
            if reply.location:
                handler.send_header("Location", reply.location)
            if reply.status != 204:
                handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)


def status(code: int) -> Fault:
    return lambda _bmc: Reply(code)


def body(text: bytes | str | object) -> Fault:
    if isinstance(text, bytes):
        return lambda _bmc: Reply(body=text)
    return lambda _bmc: Reply(body=json.dumps(text).encode())


def slow(wait_s: float) -> Fault:
    return lambda _bmc: Reply(wait_s=wait_s)


def redirect(location: str, code: int = 302) -> Fault:
    return lambda _bmc: Reply(code, b"", location=location)


def hang(bmc: RedfishBmc) -> Reply:
    """Take the request and say nothing until the double is closed."""
    bmc.released.wait(120)
    return Reply(raw=True, body=b"")


def drip(bmc: RedfishBmc) -> Reply:
    """A body that never ends, a byte now and then."""

    def pieces() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
        while not bmc.released.wait(0.1):
            yield b" "

    return Reply(raw=True, body=pieces())


def drip_headers(bmc: RedfishBmc) -> Reply:
    def pieces() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX-Slow: "
        while not bmc.released.wait(0.1):
            yield b"z"

    return Reply(raw=True, body=pieces())


def endless(_bmc: RedfishBmc) -> Reply:
    """A body far beyond any limit."""

    def pieces() -> Iterator[bytes]:
        yield b'HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n{"Name": "'
        for _ in range(2000):
            yield b"x" * 65536

    return Reply(raw=True, body=pieces())


def certificate(folder: Path, openssl: str, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, made now."""
    made = (folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", str(made[0]), "-keyout", str(made[1])),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return made
