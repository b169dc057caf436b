"""What a server that goes away is told to be: TLS is guessed at only where it never answered."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from telemetry.store import StoreDown, open_store


class Dying(BaseHTTPRequestHandler):
    """Answers until `over` is set, then closes without a word."""

    over = threading.Event()

    def do_GET(self) -> None:
        if self.over.is_set():
            self.close_connection = True
            return
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["influxdb", "victoriametrics"])
@pytest.mark.parametrize("answered", [True, False])
def test_a_store_that_had_answered_is_not_told_to_speak_tls(kind: str, answered: bool) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store = open_store(f"{kind}://127.0.0.1:{server.server_port}/fleet")
    try:
        Dying.over.clear()
        if answered:
            with pytest.raises(StoreDown, match="503"):
                store.samples("host", start_ns=0, end_ns=10**9)
        Dying.over.set()
        with pytest.raises(StoreDown, match="closed the connection without an answer") as told:
            store.samples("host", start_ns=0, end_ns=10**9)
        assert ("TLS" in str(told.value)) is not answered
    finally:
        store.close()
        server.shutdown()
        server.server_close()
