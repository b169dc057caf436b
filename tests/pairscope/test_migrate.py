"""`pairscope migrate`: what it moves, what it prints, and that its arithmetic contradicts what can't be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.pairscope.command_line import pairscope

MOVED = {"request": "r7", "tokens": 321, "bytes": 8_000_000, "seconds": 0.25, "sending_s": 0.2}


class Source(ThreadingHTTPServer):
    """An engine that answers as told, and keeps what it was asked. `obstacle` is what it finds at any target."""

    def __init__(self, ends: dict[str, dict[str, Any]]) -> None:
        self.ends = ends
        self.obstacle: dict[str, str] | None = None
        self.refuses: tuple[int, str] | None = None
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Source

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        if self.server.refuses is not None:
            self._say(self.server.refuses[1], self.server.refuses[0])
            return
        requests = [{"id": id} for id in self.server.ends]
        self._say(json.dumps({"requests": requests, "bytes_per_token": 46_080, "identity": {}}))

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/kv/target":
            self._say(json.dumps({"obstacle": self.server.obstacle}))
            return
        self.server.asked.append((self.headers["Authorization"], order))
        lines = [{"sent_bytes": 4, "of_bytes": 8}, self.server.ends[order["request"]]]
        self._say("".join(json.dumps(line) + "\n" for line in lines))

    def _say(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def source(**ends: dict[str, Any]) -> Iterator[Source]:
    with Source(ends) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_all_that_runs_is_moved_with_bytes_time_and_bandwidth_against_the_links(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    refused = {"error": "the target says 409: the engines differ in dtype", "resumed": True}
    with source(r7={"migrated": MOVED, "link_s": 0.1}, r9=refused) as engine:
        shown = pairscope("migrate", engine.url, "http://b:1", "--token-file", str(tmp_path / "token"))
        as_json = pairscope("migrate", engine.url, "http://b:1", "--json", "--no-link-test", "--request", "r7")
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "r7: 321 tokens, 8.00 MB moved; it stood still for 250.0 ms; 40.0 MB/s",
        "  the link gives 80.0 MB/s for as many bytes that are thrown away: 50 % of it; at its rate the cache takes 100.0 ms",
        "r9: not moved: the target says 409: the engines differ in dtype",
    ]
    assert engine.asked[:2] == [
        ("Bearer s3cret", {"target": "http://b:1", "request": "r7", "link": True}),
        ("Bearer s3cret", {"target": "http://b:1", "request": "r9", "link": True}),
    ]
    assert engine.asked[2] == (None, {"target": "http://b:1", "request": "r7", "link": False})
    assert as_json.exit_code == 0
    assert json.loads(as_json.stdout) == [MOVED | {"bandwidth_bytes_s": 40e6, "link_bytes_s": 80e6, "expected_s": 0.1}]


def test_where_nothing_runs_it_says_so() -> None:
    with source() as engine:
        told = pairscope("migrate", engine.url, "http://b:1")
    assert (told.exit_code, told.stdout) == (1, f"no request runs at {engine.url}\n")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("unreachable", "the source can't reach the target http://b:1 (so it is); start it"),
        ("token", "the target http://b:1 does not take the source's token (so it is); set the same migrate_token"),
        (
            "no_engine",
            "the target http://b:1 is no PairScope engine (so it is); give the address of a `pairscope engine`",
        ),
        ("differs", "requests can't go on at the target http://b:1: so it is; start it with the source's model"),
        ("not_now", "the target http://b:1 takes no requests now (so it is); try again when GET /health"),
        ("another one", "the target http://b:1 takes no requests now (so it is)"),
    ],
)
def test_a_target_that_can_take_nothing_is_told_before_anything_moves_or_when_nothing_runs(
    kind: str, line: str
) -> None:
    for ends in ({"r7": {"migrated": MOVED}}, {}):
        with source(**ends) as engine:
            engine.obstacle = {"kind": kind, "reason": "so it is"}
            told = pairscope("migrate", engine.url, "http://b:1")
        assert (told.exit_code, told.stdout, engine.asked) == (2, "", [])
        assert line in told.stderr and len(told.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "body", "line"),
    [
        (200, "<html>", "answers, but not as a PairScope engine does; give the address of a `pairscope engine`"),
        (404, "<html>", "answers, but not as a PairScope engine does"),
        (
            401,
            '{"error": {"message": "wrong"}}',
            "answers 401: wrong; give the file that holds its migrate_token: --token-file",
        ),
        (403, '{"error": {"message": "no"}}', "answers 403: no; set the same migrate_token on both engines"),
        (
            503,
            '{"error": {"message": "loading"}}',
            "answers 503: loading; try again when GET /health answers 200 there",
        ),
    ],
)
def test_what_the_source_answers_instead_is_told_with_the_remedy(code: int, body: str, line: str) -> None:
    with source() as engine:
        engine.refuses = (code, body)
        told = pairscope("migrate", engine.url, "http://b:1")
    assert told.exit_code == 2
    assert line in told.stderr and len(told.stderr.splitlines()) == 1


def test_the_exit_codes_are_told_by_help() -> None:
    assert "Exit code 0: all moved" in " ".join(pairscope("migrate", "--help").stdout.replace("│", " ").split())


def test_the_calculator_contradicts_120_ms_for_the_cache_of_a_13b() -> None:
    told = pairscope(
        "migrate", "--estimate", "--shape", "40x40x128", "--tokens", "4096", "--link", "10", "--within", "120"
    )
    assert told.exit_code == 0
    assert told.stdout.splitlines() == [
        "4,096 tokens x 819,200 B = 3,355.4 MB; over 10 Gbit/s that takes 2,684 ms at least",
        "within 120 ms this link carries 183 tokens; all 4,096 need 224 Gbit/s",
    ]
    small = json.loads(pairscope("migrate", "--estimate", "--shape", "28x4x128", "--json").stdout)
    assert (small["bytes"], round(small["seconds"], 3)) == (234_881_024, 0.188)


def test_the_calculator_takes_the_shape_of_a_running_engine() -> None:
    with source() as engine:
        told = pairscope("migrate", engine.url, "--estimate", "--tokens", "1000", "--link", "1", "--lang", "zh")
    assert told.stdout == "1,000 个 token x 46,080 B = 46.1 MB；经 1 Gbit/s 至少需 369 ms\n"


def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    for arguments, line in (
        (("http://a:1",), "name the engine that the requests leave"),
        (("--estimate",), "needs the source's address or --shape"),
        (("--estimate", "--shape", "3x0x1"), "--shape 3x0x1 is not"),
        (
            ("http://127.0.0.1:1", "http://b:1"),
            "http://127.0.0.1:1 does not answer (Connection refused); start the engine",
        ),
        (("http://[", "http://b:1"), "http://[ is no address of an engine; write it as http://"),
        (("10.0.0.1:8601", "http://b:1"), "10.0.0.1:8601 is no address of an engine"),
        (("http://a:1", "b"), "b is no address of an engine"),
        (("http://a:1", "http://u:p@b:1/"), "http://...@b:1/ is no address of an engine"),
        (("http://a:1/", "http://a:1"), "source and target are the same engine"),
        (("http://a:1", "http://b:1", "--token-file", str(tmp_path / "none")), "can't be read: No such file"),
    ):
        told = pairscope("migrate", *arguments)
        assert told.exit_code == 2
        assert line in told.stderr
        assert len(told.stderr.splitlines()) == 1
