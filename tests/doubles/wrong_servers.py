"""Servers that are no store, or one that refuses: what a mistyped address, an expired certificate or a wrong password meets."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

Answer = Callable[[str], tuple[int, str]]
"""(status, body) for a path."""


class Foreign(http.server.ThreadingHTTPServer):
    """Answers every request as told, with TLS where there is a context."""

    daemon_threads = True

    def __init__(
        self, answer: Answer, *, context: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.headers = dict(headers or {})
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Foreign

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, text = self.server.answer(self.path)
        body = text.encode()
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


class Banner:
    """Speaks first and no HTTP, as an SSH server does."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.server_port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with client, contextlib.suppress(OSError):
                    client.settimeout(2.0)
                    client.sendall(b"SSH-2.0-OpenSSH_9.6\x1b[31m\r\n")
                    client.recv(65536)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def anything(_path: str) -> tuple[int, str]:
    return 200, "<html>Welcome \x1b[31m\nto a web server</html>"


def prometheus(path: str) -> tuple[int, str]:
    if path.startswith("/api/v1/query"):
        return 400, '{"status":"error","errorType":"bad_data","error":"1:3: parse error"}'
    return 404, "404 page not found\n"


def elasticsearch(path: str) -> tuple[int, str]:
    if path == "/":
        return 200, '{"version":{"number":"8.1.0"},"tagline":"You Know, for Search"}'
    return 400, '{"error":{"type":"illegal_argument","reason":"no handler"},"status":400}'


def later_victoria(path: str) -> tuple[int, str]:
    """One whose /ping says that it is an InfluxDB 1.8."""
    if path.startswith("/api/v1/query"):
        return 200, '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"1"]}]}}'
    return (204, "") if path.startswith("/ping") else (200, '{"results":[]}')


def influxdb(status: int, message: str) -> Answer:
    """A 2.x or 3.x server that answers everything but /ping so."""
    return lambda path: (204, "") if path.startswith("/ping") else (status, json.dumps({"message": message}))


def certificate(folder: Path, name: str, san: str, *, days: int = 30) -> tuple[Path, ssl.SSLContext]:
    """(its file, the server's side) of a certificate that is signed by itself; expired with negative `days`."""
    key, request, made, extra = (folder / f"{name}.{kind}" for kind in ("key", "csr", "crt", "ext"))
    extra.write_text(f"subjectAltName={san}\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)]
    sign = ["-req", "-in", str(request), "-signkey", str(key), "-days", str(days), "-extfile", str(extra)]
    for command in (
        ["req", *new_key, "-out", str(request), "-subj", f"/CN={name}"],
        ["x509", *sign, "-out", str(made)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return made, context
