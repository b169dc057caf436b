"""A running request goes on in another engine: the same tokens, no block lost on either side, and one side only that goes on."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request as HttpRequest

from engine.migration import incoming
from engine.migration.access import Forbidden, refuse_strangers, refuse_target
from engine.migration.estimate import Shape, estimate, tokens_within
from engine.migration.parcel import CHECKSUM_BYTES, Parcel, ParcelError, open_parcel
from engine.request import Sampling
from engine.settings import EngineSettings
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import WAIT_S, ThreadServer, start_process, until

GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "ignore_eos": True}
BLOCKS = 1024
PACE = {"step_s": 0.0}
HTTP = httpx.Client(timeout=WAIT_S, trust_env=False, verify=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def settings(folder: Path) -> EngineSettings:
    return EngineSettings(
        model=str(folder),
        kv_blocks=BLOCKS,
        max_seqs=6,
        threads=1,
        drain_s=0.2,
        stream_buffer=2000,
    )


@pytest.fixture(scope="module")
def pair(settings: EngineSettings) -> Iterator[tuple[ThreadServer, ThreadServer]]:
    # blocks of another size: a cache is the same whatever it is cut into
    with (
        ThreadServer(settings) as source,
        ThreadServer(replace(settings, block_size=8, kv_blocks=2 * BLOCKS)) as target,
    ):
        yield source, target


def body(tokens: int, prompt: str = "hello", **how: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, **(how or GREEDY)}


def text_of(lines: Sequence[str]) -> str:
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    assert not [piece for piece in pieces if "error" in piece], pieces[-1]
    return "".join(piece["choices"][0]["text"] for piece in pieces)


@contextmanager
def streaming(url: str, asked: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The lines of a stream."""
    with (
        httpx.Client(timeout=WAIT_S, trust_env=False, verify=False) as http,
        http.stream("POST", f"{url}/v1/completions", json=asked | {"stream": True}) as answer,
    ):
        yield answer.iter_lines()


def running(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HTTP.get(f"{url}/kv/requests").json()["requests"]
    return found


def migrate(url: str, target: str, id: str, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What was told on the way, and what came of it."""
    order = {"target": target, "request": id, **more}
    answer = HTTP.post(f"{url}/kv/migrate", json=order)
    assert answer.status_code == 200, answer.text
    *way, end = (json.loads(line) for line in answer.text.splitlines())
    return way, end


def whole_text(server: ThreadServer, asked: dict[str, Any]) -> str:
    return str(server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"])


def all_free(server: ThreadServer) -> None:
    count = server.service.engine.scheduler.pool.num_blocks
    until(lambda: server.metric("kv_blocks_free") == count, "all blocks are free")
    until(lambda: server.service.num_open == 0, "no request is open")
    assert server.service.engine.scheduler.held == []


@contextmanager
def under_way(server: ThreadServer, asked: dict[str, Any]) -> Iterator[tuple[str, Iterator[str]]]:
    """A request that is being generated: its id, and what its client reads."""
    PACE["step_s"] = 0.02
    try:
        with streaming(server.url, asked) as lines:
            until(lambda: any(r["output"] > 9 for r in running(server.url)), "it runs")
            yield running(server.url)[-1]["id"], read(lines)
    finally:
        PACE["step_s"] = 0.0


def read(lines: Iterator[str]) -> Iterator[str]:
    PACE["step_s"] = 0.0
    yield from lines


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_that_moves_has_the_tokens_of_one_that_stays(
    pair: tuple[ThreadServer, ThreadServer], how: dict[str, Any]
) -> None:
    source, target = pair
    asked = body(300, "a prompt of more than one block", **how)
    expected = whole_text(target, asked)
    before = {name: source.metric(name) for name in ("requests_finished_total", "generation_tokens_total")}
    arrived = target.metric("requests_migrated_in_total")
    with under_way(source, asked) as (id, lines):
        at = running(source.url)[0]["output"]
        way, end = migrate(source.url, target.url, id, link=True)
        until(lambda: source.metric("kv_blocks_free") == BLOCKS, "the source has its blocks back at once")
        assert text_of(list(lines)) == expected
    done = end["migrated"]
    assert done["request"] == id
    assert done["bytes"] == (done["tokens"] - 1) * 2 * 2 * 2 * 8 * 4  # layers x (K, V) x KV heads x head_dim x float32
    assert way[-1] == {"sent_bytes": done["bytes"], "of_bytes": done["bytes"]}
    assert 0 < done["sending_s"] <= done["seconds"]
    assert end["link_s"] > 0
    all_free(source)
    all_free(target)
    until(lambda: target.metric("requests_migrated_in_total") == arrived + 1, "the move is counted")
    # each token is counted where it was made, and the request where it ended
    assert source.metric("requests_finished_total") == before["requests_finished_total"]
    made_here = source.metric("generation_tokens_total") - before["generation_tokens_total"]
    assert at <= made_here < 300
    assert source.metric("migrated_out_bytes_total") >= done["bytes"] <= target.metric("migrated_in_bytes_total")


def test_a_stop_string_that_began_before_the_move_is_met_after_it(pair: tuple[ThreadServer, ThreadServer]) -> None:
    source, target = pair
    asked = body(300, "stop", **SAMPLED)
    whole = whole_text(source, asked)
    with under_way(source, asked) as (id, _):
        moved_at = running(source.url)[0]["output"]
    all_free(source)
    for begin in range(moved_at + 5, len(whole) - 6):  # letters are tokens here, as good as
        stop = whole[begin : begin + 4]
        if whole.index(stop) == begin and "\ufffd" not in stop:
            break
    expected = whole_text(source, asked | {"stop": [stop]})
    assert len(expected) < len(whole)
    with under_way(source, asked | {"stop": [stop]}) as (id, lines):
        assert "migrated" in migrate(source.url, target.url, id)[1]
        assert text_of(list(lines)) == expected
    all_free(source)
    all_free(target)


def test_two_engine_processes_hand_over_eight_bit_caches_of_several_requests(
    folder: Path, free_port: Callable[[], int]
) -> None:
    # a client that doesn't read holds its request up after 64 tokens
    how = {"model": str(folder), "kv_blocks": BLOCKS, "threads": 1, "stream_buffer": 64, "stall_timeout_s": WAIT_S}
    ports = [free_port(), free_port()]
    processes = [start_process(how | {"port": port, "kv_dtype": "int8", "drain_s": 0.1}) for port in ports]
    source, target = (f"http://127.0.0.1:{port}" for port in ports)
    try:
        for url in (source, target):
            until(lambda url=url: answers(url), f"{url} is ready")
        asked = [body(900, "one"), body(900, "three three three"), body(3000, "two", **SAMPLED)]
        alone = [HTTP.post(f"{target}/v1/completions", json=one) for one in asked]
        expected = [answer.json()["choices"][0]["text"] for answer in alone]
        with streaming(source, asked[0]) as a, streaming(source, asked[1]) as b, ThreadPoolExecutor() as pool:
            c = pool.submit(HTTP.post, f"{source}/v1/completions", json=asked[2])
            until(lambda: [r["output"] > 60 for r in running(source)] == [True] * 3, "all three run")
            ends = list(pool.map(lambda r: migrate(source, target, r["id"])[1], running(source)))
            assert [list(end) for end in ends] == [["migrated"]] * 3
            texts = [text_of(list(a)), text_of(list(b)), c.result().json()["choices"][0]["text"]]
            assert texts == expected
        assert running(source) == running(target) == []
    finally:
        for process in processes:
            process.terminate()
        assert [end_of(process) for process in processes] == [0, 0]


def answers(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def end_of(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=WAIT_S)
    return process.returncode


@pytest.mark.parametrize(
    ("difference", "named"),
    [({"kv_dtype": "int8"}, "kv_dtype"), ({"dtype": "bfloat16"}, "dtype"), ({"model": "other"}, "checkpoint")],
)
def test_an_engine_that_differs_is_named_in_one_line_and_the_request_goes_on(
    pair: tuple[ThreadServer, ThreadServer],
    settings: EngineSettings,
    tmp_path: Path,
    difference: dict[str, str],
    named: str,
) -> None:
    source, _ = pair
    if "model" in difference:
        difference = {"model": str(write_checkpoint(tmp_path, seed=5, max_position_embeddings=4096))}
    asked = body(300)
    expected = whole_text(source, asked)
    failed = source.metric("migrations_failed_total")
    with ThreadServer(replace(settings, **difference)) as other, under_way(source, asked) as (id, lines):
        _, end = migrate(source.url, other.url, id)
        assert end["resumed"] is True
        assert f"the target says 409: the engines differ in {named}: " in end["error"]
        assert "\n" not in end["error"]
        all_free(other)
        assert text_of(list(lines)) == expected
    all_free(source)
    until(lambda: source.metric("migrations_failed_total") == failed + 1, "the failure is counted")


class Answering(BaseHTTPRequestHandler):
    """What is no engine: a page for whoever asks."""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>it works</html>")


def test_what_stands_in_the_way_of_a_target_is_told_before_anything_moves(
    pair: tuple[ThreadServer, ThreadServer], settings: EngineSettings
) -> None:
    source, target = pair

    def obstacle(url: str) -> dict[str, str] | None:
        answer = HTTP.post(f"{source.url}/kv/target", json={"target": url})
        assert answer.status_code == 200, answer.text
        found: dict[str, str] | None = answer.json()["obstacle"]
        assert found is None or "\n" not in found["reason"]
        return found

    assert obstacle(target.url) is None
    assert HTTP.post(f"{source.url}/kv/target", json={"to": target.url}).status_code == 400
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{dead.getsockname()[1]}"
        assert obstacle(url) == {"kind": "unreachable", "reason": "Connection refused"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        found = obstacle(f"http://127.0.0.1:{page.server_port}")
        assert found == {"kind": "no_engine", "reason": "its answer to GET /kv/requests is 200"}
        page.shutdown()
    with ThreadServer(replace(settings, kv_dtype="int8")) as other:
        found = obstacle(other.url)
        assert found is not None and found["kind"] == "differs" and "the engines differ in " in found["reason"]
    with ThreadServer(replace(settings, migrate_token="s3cret-s3cret"), wait_ready=False) as secured:
        found = obstacle(secured.url)
        assert found == {"kind": "token", "reason": "401: the migrate_token is missing or wrong"}
    with ThreadServer(settings, wait_ready=False) as loading:
        service = loading.service
        until(lambda: service.ready, "it is loaded")
        service.draining = True
        found = obstacle(loading.url)
        assert found == {"kind": "not_now", "reason": "503: the server is stopping"}


def test_a_target_without_room_refuses_and_keeps_nothing(
    pair: tuple[ThreadServer, ThreadServer], settings: EngineSettings
) -> None:
    source, _ = pair
    with ThreadServer(replace(settings, kv_blocks=80)) as small:  # 1,280 tokens, which is its context, too
        pool = small.service.engine.scheduler.pool
        with under_way(source, body(1500)) as (id, _):
            _, end = migrate(source.url, small.url, id)
            assert "the request may grow to 1505 tokens: the context here ends at 1280" in end["error"]
        with under_way(source, body(300)) as (id, _):
            others = pool.take(pool.num_free)
            _, end = migrate(source.url, small.url, id)
            assert "no room in the KV cache" in end["error"]
            assert end["resumed"] is True
            assert pool.num_taken == 80
            pool.give_back(others)
        all_free(small)
    all_free(source)


class Deceitful(ThreadingHTTPServer):
    """A target that takes every parcel, and then does what it is told to."""

    def __init__(self, then: str) -> None:
        self.then = then
        super().__init__(("127.0.0.1", 0), _Deceit)

    def __enter__(self) -> Deceitful:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Deceit(BaseHTTPRequestHandler):
    server: Deceitful
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        if "Transfer-Encoding" in self.headers:
            while (size := int(self.rfile.readline() or b"0", 16)) and self.rfile.read(size + 2):
                pass
            self.rfile.readline()
        if self.path == "/kv/requests":
            self._say(b'{"id": "m1"}')
            return
        if self.server.then == "no":
            self._say(b'{"error": {"message": "it has waited too long"}}', 404)
        elif self.server.then == "nonsense":
            self._say(b'{"tokens": "x", "text": 3, "finish": null, "error": null}\n')
        elif self.server.then == "breaks off":
            self._say(b'{"tokens": [70, 71], "text": "FG", "finish": null, "error": null}\n')
        self.close_connection = True  # for "silence" without a word

    def do_GET(self) -> None: ...

    def _say(self, answer: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.mark.parametrize(
    ("then", "resumed", "told"),
    [
        ("no", True, None),
        ("silence", False, "lost while it moved to another engine: the target can't be reached"),
        ("breaks off", None, "where it went on: its answer broke off"),
        ("nonsense", None, "where it went on: the target answers what no engine of this kind does"),
    ],
)
def test_a_request_goes_on_at_one_side_or_ends_with_an_error_never_at_both(
    pair: tuple[ThreadServer, ThreadServer], then: str, resumed: bool | None, told: str | None
) -> None:
    source, _ = pair
    asked = body(300)
    expected = whole_text(pair[1], asked)
    with Deceitful(then) as target, under_way(source, asked) as (id, lines):
        _, end = migrate(source.url, target.url, id)
        assert end.get("resumed") is resumed
        got = list(lines)
        target.shutdown()
    if told is None:
        assert text_of(got) == expected
    else:
        error = json.loads(got[-4 if not got[-1] else -3].removeprefix("data: "))
        assert told in error["error"]["message"]
    all_free(source)


def test_where_nobody_listens_the_request_goes_on(pair: tuple[ThreadServer, ThreadServer]) -> None:
    source, _ = pair
    asked = body(300)
    expected = whole_text(source, asked)
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        with under_way(source, asked) as (id, lines):
            _, end = migrate(source.url, f"http://127.0.0.1:{dead.getsockname()[1]}", id)
            assert end == {
                "error": "the target can't be reached (ConnectError); the request goes on here",
                "resumed": True,
            }
            assert text_of(list(lines)) == expected
    all_free(source)


def test_a_client_that_leaves_after_the_move_ends_its_request_at_the_target(
    pair: tuple[ThreadServer, ThreadServer],
) -> None:
    source, target = pair
    with under_way(source, body(1500)) as (id, _):
        migrate(source.url, target.url, id)
        until(lambda: [r["output"] > 64 for r in running(target.url)] == [True], "it goes on there")
        all_blocks = target.service.engine.scheduler.pool.num_blocks
        assert target.metric("kv_blocks_free") < all_blocks
    all_free(target)
    all_free(source)


def test_a_request_whose_source_falls_silent_is_given_up(
    pair: tuple[ThreadServer, ThreadServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    monkeypatch.setattr(incoming, "PARKED_S", 0.3)
    with under_way(source, body(300)) as (id, _):
        raw = packed(source, id)
    answer = HTTP.post(f"{target.url}/kv/requests", content=raw)
    assert "id" in answer.json(), answer.text
    parked = answer.json()["id"]
    all_free(target)
    late = HTTP.post(f"{target.url}/kv/requests/{parked}/continue")
    assert late.status_code == 404


def packed(server: ThreadServer, id: str) -> bytes:
    """The parcel of a request that stays where it is."""
    assembled, engine = server.service.assembled, server.service.engine
    request = next(r for r in engine.requests if r.id == id)
    computed, tokens = request.num_computed, tuple(request.tokens)
    while len(tokens) != computed + 1:  # the engine goes on meanwhile: what is read has to be of one moment
        computed, tokens = request.num_computed, tuple(request.tokens)
    cache = assembled.cache.read(request.blocks, computed)
    parcel = Parcel(
        assembled.identity,
        tokens,
        request.prompt,
        computed,
        request.sampling,
        0,
        None,
        cache,
    )
    return b"".join(parcel.pieces())


def test_damaged_and_forged_parcels_are_refused_and_leave_nothing(pair: tuple[ThreadServer, ThreadServer]) -> None:
    source, target = pair
    with under_way(source, body(300)) as (id, _):
        raw = packed(source, id)
    whole = open_parcel(raw)
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1
    nan = b"".join(replace(whole, cache=b"\xff" * whole.nbytes).pieces())
    foreign = b"".join(replace(whole, tokens=(9999, *whole.tokens[1:])).pieces())
    short = b"".join(replace(whole, cache=bytes(whole.cache)[:-4]).pieces())
    endless = b"".join(replace(whole, sampling=replace(whole.sampling, max_tokens=1 << 30)).pieces())
    for parcel, code, reason in (
        (bytes(flipped), 400, "checksum"),
        (raw[:-7], 400, "checksum"),
        (b"", 400, "cut off"),
        (b"GARB" + raw[4:], 400, "no parcel"),
        (raw[:4] + b"\x02\x00" + raw[6:], 400, "version 2, this engine reads 1"),
        (nan, 400, "not finite"),
        (foreign, 400, "token that this model doesn't have"),
        (short, 400, "expected"),
        (endless, 409, "the context here ends at"),
        (bytes(64 << 20), 413, "don't fit"),
    ):
        answer = HTTP.post(f"{target.url}/kv/requests", content=parcel)
        assert (answer.status_code, reason in answer.json()["error"]["message"]) == (code, True), answer.text
        assert target.service.engine.scheduler.pool.num_taken == 0
    all_free(target)


def test_every_field_of_a_parcel_arrives_and_none_of_a_wrong_type_does() -> None:
    sampling = Sampling(0.7, 0.8, 9, -5, 77, ("a", "é"), True)
    parcel = Parcel({"layers": 3, "dtype": "x"}, (5, 6, 7, 8), 2, 3, sampling, -4, 1.5, b"0123456789")
    opened = open_parcel(b"".join(parcel.pieces()))
    assert replace(opened, cache=bytes(opened.cache)) == parcel
    for change in ({"prompt": 9}, {"computed": 4}, {"priority": 11}, {"deadline_in_s": float("nan")}):
        with pytest.raises(ParcelError):
            open_parcel(b"".join(replace(parcel, **change).pieces()))
    for wrong in ({"temperature": True}, {"seed": 1.5}, {"stop": ("",)}, {"top_p": 3.0}, {"max_tokens": 0}):
        with pytest.raises(ParcelError):
            open_parcel(b"".join(replace(parcel, sampling=replace(sampling, **wrong)).pieces()))
    assert len(b"".join(parcel.pieces())) > CHECKSUM_BYTES + parcel.nbytes


def http_request(client: str, **headers: str) -> HttpRequest:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return HttpRequest({"type": "http", "client": (client, 5), "headers": raw, "method": "POST", "path": "/kv/link"})


def test_only_this_machine_or_the_token_moves_requests_and_no_web_page() -> None:
    refuse_strangers(http_request("127.0.0.1"), None)
    refuse_strangers(http_request("::1"), None)
    refuse_strangers(http_request("10.0.0.9", authorization="Bearer s3cret"), "s3cret")
    for request, token, code in (
        (http_request("10.0.0.9"), None, 403),
        (http_request("127.0.0.1", origin="http://127.0.0.1:8601"), None, 403),
        (http_request("127.0.0.1"), "s3cret", 401),
        (http_request("10.0.0.9", authorization="Bearer s3creT"), "s3cret", 401),
        (http_request("10.0.0.9", authorization="Bearer sécret"), "s3cret", 401),
    ):
        with pytest.raises(Forbidden) as refused:
            refuse_strangers(request, token)
        assert refused.value.code == code
    assert refuse_target("http://[::1]:8601/", None) == "http://[::1]:8601"
    assert refuse_target("https://gpu7:8601", "s3cret") == "https://gpu7:8601"
    for url in ("http://10.0.0.9:8601", "http://127.0.0.1.example.org"):
        with pytest.raises(Forbidden, match="without migrate_token"):
            refuse_target(url, None)
    for url in ("ftp://127.0.0.1", "http://u:p@127.0.0.1", "http://127.0.0.1/?a", "http://[", "x", "http://h:99999"):
        with pytest.raises(Forbidden, match="target"):
            refuse_target(url, "s3cret")


def test_a_server_with_a_token_asks_for_it(settings: EngineSettings) -> None:
    secured = replace(settings, migrate_token="s3cret-s3cret")
    assert "s3cret" not in repr(secured)
    assert secured.fingerprint() == settings.fingerprint()
    with ThreadServer(secured) as source, ThreadServer(secured) as target:
        assert source.http.get("/kv/requests").status_code == 401
        known = {"Authorization": "Bearer s3cret-s3cret"}
        with streaming(source.url, body(300)) as lines:
            until(lambda: source.http.get("/kv/requests", headers=known).json()["requests"], "it runs")
            order = {"target": target.url, "request": "r1"}
            answer = source.http.post("/kv/migrate", json=order, headers=known)
            assert "migrated" in json.loads(answer.text.splitlines()[-1])
            assert len(text_of(list(lines))) > 0


def test_the_calculator_contradicts_120_ms_for_4096_tokens_of_a_13b_over_ten_gigabits() -> None:
    # Llama 2 13B: 40 layers, 40 heads of 128, no grouped queries; Qwen2 7B: 28 layers, 4 KV heads of 128
    llama, qwen, link = Shape(40, 40, 128), Shape(28, 4, 128), 10e9 / 8
    assert llama.bytes_per_token == 819_200
    assert round(estimate(llama.bytes_per_token, 4096, link).seconds, 2) == 2.68
    assert tokens_within(llama.bytes_per_token, 0.12, link) == 183
    assert round(estimate(llama.bytes_per_token, 4096, link).rate_within(0.12) * 8 / 1e9) == 224
    assert round(estimate(qwen.bytes_per_token, 4096, link).seconds, 3) == 0.188
