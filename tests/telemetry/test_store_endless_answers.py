"""An answer of a store's server that is too large, too slow or without end is told as such in time and costs no more memory."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, http_answer, open_store

MIB = 1 << 20
KINDS = ("influxdb", "victoriametrics")
OK = b"HTTP/1.1 200 OK\r\nX-Influxdb-Version: 1.8.10\r\nX-Influxdb-Build: OSS\r\n"
VECTOR = b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"1"]}]}}'

Send = Callable[[bytes], None]
Answer = Callable[[str, Send], None]


class Misbehaving:
    """Says in a sane way who it is, and answers everything else as told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self._ending = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), client.makefile("rb") as lines:
            while request := lines.readline().decode():
                length = 0
                while (line := lines.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                sent = lines.read(length)
                path = request.split(" ")[1]
                if path.startswith("/ping"):
                    client.sendall(OK + b"Content-Length: 0\r\n\r\n")
                elif path == "/metrics" or b"1+default+2" in sent:
                    body = VECTOR if b"default" in sent else b""
                    client.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                else:
                    self.answer(path, client.sendall)

    def drip(self, send: Send, what: bytes, every_s: float = 0.05) -> None:
        """Byte by byte without end, until the other side has gone."""
        while not self._ending.wait(every_s):
            send(what)

    def close(self) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextlib.contextmanager
def served(kind: str, answer: Callable[[Misbehaving, Send], None]) -> Iterator[tuple[Store, Misbehaving]]:
    server = Misbehaving(lambda _path, send: answer(server, send))
    store = open_store(f"{kind}://127.0.0.1:{server.port}" + ("/fleet" if kind == "influxdb" else ""))
    try:
        yield store, server
    finally:
        store.close()
        server.close()


def read(store: Store) -> None:
    store.samples("host", start_ns=time.time_ns() - 60 * 10**9, end_ns=time.time_ns())


def write(store: Store) -> None:
    store.write([Sample("host", {"node": "n1"}, {"load1": 1.5}, time.time_ns())])


def endless(server: Misbehaving, send: Send) -> None:
    send(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        send(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def bomb(server: Misbehaving, send: Send) -> None:
    packed = gzip.compress(bytes(64 * MIB))
    send(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)


def failing_bomb(server: Misbehaving, send: Send) -> None:
    packed = gzip.compress(bytes(64 * MIB))
    head = b"HTTP/1.1 500 Oh no\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    send(head % len(packed) + packed)


def dripping_body(server: Misbehaving, send: Send) -> None:
    send(OK + b"Content-Length: 100000\r\n\r\n")
    server.drip(send, b" ")


def dripping_head(server: Misbehaving, send: Send) -> None:
    send(OK + b"X-Endless: ")
    server.drip(send, b"x")


def dripping_chunks(server: Misbehaving, send: Send) -> None:
    send(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    server.drip(send, b"1\r\n \r\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [endless, bomb, failing_bomb])
def test_a_body_without_end_is_given_up_at_the_limit_of_its_decoded_size(
    kind: str, answer: Callable[[Misbehaving, Send], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answer, "QUERIES", http_answer.Bounds(3 * MIB, 60.0))
    with served(kind, answer) as (store, _):
        tracemalloc.start()
        try:
            for ask, most in ((read, "3 MiB"), (write, "1 MiB")):
                with pytest.raises(StoreDown, match=f"more than {most}") as caught:
                    ask(store)
                assert "超过" in caught.value.told("zh")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    allowed = 16 * MIB if answer is endless else 16 * MIB + 64 * MIB  # the double itself makes the bomb
    assert peak < allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", [dripping_body, dripping_head, dripping_chunks])
def test_an_answer_that_drips_is_given_up_when_its_whole_time_is_over(
    kind: str, answer: Callable[[Misbehaving, Send], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answer, "QUERIES", http_answer.Bounds(256 * MIB, 0.5))
    monkeypatch.setattr(http_answer, "WRITES", http_answer.Bounds(MIB, 0.3))
    with served(kind, answer) as (store, _):
        for ask, within in ((read, "0.5 s"), (write, "0.3 s")):
            asked_s = time.monotonic()
            with pytest.raises(StoreDown, match=f"not whole after {within}") as caught:
                ask(store)
            assert time.monotonic() - asked_s < 15.0  # for ever, otherwise
            assert "不完整" in caught.value.told("zh")


@pytest.mark.parametrize("kind", KINDS)
def test_the_connection_of_an_answer_that_was_given_up_is_not_used_again(kind: str) -> None:
    sane = threading.Event()

    def answer(server: Misbehaving, send: Send) -> None:
        if sane.is_set():
            send(b"HTTP/1.1 204 No Content\r\n\r\n")
        else:
            endless(server, send)

    with served(kind, answer) as (store, server):
        with pytest.raises(StoreDown, match="more than 1 MiB"):
            write(store)
        before = server.connections
        sane.set()
        write(store)
        assert server.connections == before + 1
        write(store)
        assert server.connections == before + 1
