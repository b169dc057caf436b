"""The outbox and its sender over real sockets: kept until taken, in order, retried, signed, silent about secrets."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rules.alerts import AlertMachine
from rules.notification import Voice, messages_of
from rules.statefile import read_state, write_state
from rules.webhook import Message, Outbox, Sender, WebhookError, place_of, retry_after_s
from tests.rules.test_alerts import BAD, GOOD, Run

SECRET_PATH = "/services/T0K3N-9f27"


@dataclass
class Sink:
    """A receiver on loopback that answers as scripted, then 200, and remembers what it got."""

    script: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    got: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    url: str = ""

    def taken(self) -> list[str]:
        return [body for status, _, body in self.got if status == 200]


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            status, headers = sink.script.pop(0) if sink.script else (200, {})
            sink.got.append((status, dict(self.headers), body))
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    sink.url = f"http://127.0.0.1:{server.server_port}{SECRET_PATH}"
    yield sink
    server.shutdown()
    server.server_close()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def sender(outbox: Outbox, url: str, **options: object) -> Sender:
    made = Sender(outbox, url, backoff_s=(0.01, 0.05), timeout_s=20.0, **options)  # type: ignore[arg-type]
    made.start()
    return made


def test_messages_arrive_in_order_and_leave_the_disk(tmp_path: Path, sink: Sink) -> None:
    outbox = Outbox(tmp_path)
    for i in range(5):
        outbox.put(Message(f"k{i}", f'{{"n":{i}}}'))
    running = sender(outbox, sink.url)
    until(lambda: not outbox.waiting())
    running.stop(60)
    assert [json.loads(body)["n"] for body in sink.taken()] == [0, 1, 2, 3, 4]
    assert [headers["Idempotency-Key"] for _, headers, _ in sink.got] == ["k0", "k1", "k2", "k3", "k4"]


def test_a_message_survives_the_process_and_a_second_outbox_delivers_it(tmp_path: Path, sink: Sink) -> None:
    Outbox(tmp_path).put(Message("k1", '{"n":1}'))
    (tmp_path / "000000000009-torn.new").write_text('{"n":')
    again = Outbox(tmp_path)
    again.put(Message("k2", '{"n":2}'))
    running = sender(again, sink.url)
    until(lambda: not again.waiting())
    running.stop(60)
    assert [json.loads(body)["n"] for body in sink.taken()] == [1, 2]
    assert not list(tmp_path.glob("*.new"))


def test_a_full_disk_leaves_no_half_message_and_no_half_state(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    write_state(tmp_path / "alerts.json", {"alerts": "old"})
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, size[1]))
    try:
        for number in range(3):
            with pytest.raises(OSError, match="too large"):
                outbox.put(Message(f"k{number}", "x" * 5000))
        with pytest.raises(OSError, match="too large"):
            write_state(tmp_path / "alerts.json", {"alerts": "y" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert {path.name for path in tmp_path.iterdir()} == {"dead", "alerts.json"}
    assert read_state(tmp_path / "alerts.json") == {"alerts": "old"}


def test_what_a_full_disk_does_not_take_is_told_all_the_same_and_kept_when_there_is_room(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path)

    def full(path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("rules.webhook.write_text", full)
        for i in range(2):
            with pytest.raises(OSError, match="No space"):
                outbox.put(Message(f"k{i}", f'{{"n":{i}}}'))
            outbox.put(Message(f"k{i}", "the same again"))
        running = sender(outbox, sink.url)
        until(lambda: not outbox.waiting())
        running.stop(60)
        with pytest.raises(OSError, match="No space"):
            outbox.put(Message("k2", '{"n":2}'))
        assert not outbox.save()
    assert outbox.save() and not list(tmp_path.glob("*k0*")) and not list(tmp_path.glob("*k1*"))
    again = Outbox(tmp_path)
    running = sender(again, sink.url)
    until(lambda: not again.waiting())
    running.stop(60)
    assert [json.loads(body)["n"] for body in sink.taken()] == [0, 1, 2]


def test_a_process_without_a_descriptor_left_loses_no_message_and_its_sender_goes_on(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(Message("k1", "{}"))
    trouble = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EMFILE, "Too many open files")]
    listed, read = outbox.waiting, outbox.read

    def troubled(answer: Callable[[], object]) -> object:
        if trouble and threading.current_thread() is not threading.main_thread():
            raise trouble.pop()
        return answer()

    monkeypatch.setattr(outbox, "waiting", lambda: troubled(listed) if len(trouble) == 2 else listed())
    monkeypatch.setattr(outbox, "read", lambda path: troubled(lambda: read(path)))
    running = sender(outbox, sink.url)
    until(lambda: not trouble and not listed())
    running.stop(60)
    assert len(sink.taken()) == 1 and not list(outbox.dead.iterdir())


def test_a_state_folder_that_can_not_be_written_any_more_makes_nothing_be_told_twice_and_holds_nothing_up(
    tmp_path: Path, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path)
    for i in range(4):
        outbox.put(Message(f"k{i}", f'{{"n":{i}}}'))
    files = outbox.waiting()
    sink.script += [(200, {}), (400, {})]

    def read_only(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", read_only)
        patched.setattr(Path, "replace", read_only)
        running = sender(outbox, sink.url)
        until(lambda: not outbox.waiting())
        running.stop(60)
    assert [json.loads(body)["n"] for _, _, body in sink.got] == [0, 1, 2, 3]
    assert all(path.exists() for path in files)
    outbox.put(Message("k4", "{}"))
    outbox.delivered(outbox.waiting()[0])
    assert not list(tmp_path.glob("*.json")) and [path.name for path in outbox.dead.iterdir()] == [files[1].name]


def test_a_receiver_that_drips_its_headers_holds_the_sender_no_longer_than_its_deadline(tmp_path: Path) -> None:
    drips, ended = threading.Event(), threading.Event()

    def drip(listener: socket.socket) -> None:
        taken, _ = listener.accept()
        drips.set()
        with contextlib.suppress(OSError):
            taken.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not ended.wait(0.05):
                taken.sendall(b"a")
        taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        outbox = Outbox(tmp_path)
        outbox.put(Message("k", "{}"))
        running = Sender(
            outbox, f"http://127.0.0.1:{listener.getsockname()[1]}/x", timeout_s=1.0, backoff_s=(60.0, 60.0)
        )
        running.start()
        until(drips.is_set)
        until(lambda: running.failures > 0, 60)
        assert len(outbox.waiting()) == 1
        ended.set()
        running.stop(60)


def test_the_dead_fill_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rules.webhook.KEPT", 3)
    outbox = Outbox(tmp_path)
    for i in range(12):
        outbox.put(Message(f"k{i}", "{}"))
    assert sorted(path.stem.partition("-")[2] for path in outbox.dead.iterdir()) == ["k6", "k7", "k8"]


def test_the_same_message_twice_waits_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", "{}"))
    outbox.put(Message("k", "{}"))
    assert len(outbox.waiting()) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_a_receiver_in_trouble_is_asked_again_under_the_same_key(tmp_path: Path, sink: Sink, status: int) -> None:
    sink.script = [(status, {}), (status, {})]
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", '{"n":1}'))
    running = sender(outbox, sink.url)
    until(lambda: not outbox.waiting())
    running.stop(60)
    assert [got for got, _, _ in sink.got] == [status, status, 200]
    assert len({(headers["Idempotency-Key"], body) for _, headers, body in sink.got}) == 1


def test_retry_after_is_waited_for(tmp_path: Path, sink: Sink) -> None:
    sink.script = [(429, {"Retry-After": "600"})]
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", "{}"))
    running = sender(outbox, sink.url)
    until(lambda: len(sink.got) == 1)
    time.sleep(0.3)  # thirty times the back-off: only the header can hold it
    assert len(sink.got) == 1 and len(outbox.waiting()) == 1
    running.stop(60)
    assert not running.is_alive()


def test_retry_after_is_read_as_seconds_or_date_and_rubbish_is_nothing() -> None:
    assert retry_after_s("120", 0) == 120
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 10) == 50
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 100) == 0
    for rubbish in (None, "", "soon", "-5", "１２", "1e3"):
        assert retry_after_s(rubbish, 0) is None


@pytest.mark.parametrize("status", [400, 401, 404, 410, 302])
def test_a_refused_message_is_put_among_the_dead_and_the_next_one_goes_out(
    tmp_path: Path, sink: Sink, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    sink.script = [(status, {"Location": sink.url + "/elsewhere"})]
    outbox = Outbox(tmp_path)
    outbox.put(Message("bad", '{"n":1}'))
    outbox.put(Message("good", '{"n":2}'))
    running = sender(outbox, sink.url)
    until(lambda: not outbox.waiting())
    running.stop(60)
    assert [json.loads(body)["n"] for body in sink.taken()] == [2]
    assert len(sink.got) == 2  # no redirect was followed
    assert [path.name.endswith("bad.json") for path in outbox.dead.iterdir()] == [True]
    assert str(status) in caplog.text


def test_a_receiver_that_is_not_there_keeps_the_message_and_a_stop_is_quick(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", "{}"))
    running = sender(outbox, f"http://127.0.0.1:{free_port()}/x")
    time.sleep(0.1)
    running.stop(60)
    assert not running.is_alive()
    assert len(outbox.waiting()) == 1


def test_a_signed_message_can_be_checked_by_its_receiver(tmp_path: Path, sink: Sink) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", '{"n":1,"zh":"过热"}'))
    running = sender(outbox, sink.url, secret="s3cr3t", now_s=lambda: 1_795_960_800.7)
    until(lambda: bool(sink.taken()))
    running.stop(60)
    _, headers, body = sink.got[0]
    stamp, digest = headers["X-PairScope-Signature"].split(",")
    assert stamp == "t=1795960800"
    expected = hmac.new(b"s3cr3t", f"1795960800.{body}".encode(), hashlib.sha256).hexdigest()
    assert digest == f"v1={expected}"


def test_no_secret_of_the_webhook_is_ever_logged(tmp_path: Path, sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sink.script = [(500, {}), (403, {})]
    outbox = Outbox(tmp_path)
    outbox.put(Message("k", "{}"))
    url = sink.url.replace("http://", "http://user:p4ssw0rd@") + "?token=qu3ry"
    running = sender(outbox, url, secret="s1gn")
    until(lambda: not outbox.waiting())
    running.stop(60)
    assert "127.0.0.1" in caplog.text
    for secret in ("T0K3N", "p4ssw0rd", "qu3ry", "s1gn"):
        assert secret not in caplog.text


def test_an_overfull_outbox_buries_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rules.webhook.KEPT", 3)
    outbox = Outbox(tmp_path)
    for i in range(5):
        outbox.put(Message(f"k{i}", "{}"))
    assert [outbox.read(path).key for path in outbox.waiting()] == ["k2", "k3", "k4"]
    assert len(list(outbox.dead.iterdir())) == 2


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x/y",
        "hook",
        "http://",
        "https:///path",
        "http://h:99999/",
        "file:///etc/passwd",
        "http://é..b/x",
        f"http://{'a' * 300}/",
        "http://h/\0x",
    ],
)
def test_an_address_that_can_not_be_a_webhook_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(WebhookError) as refused:
        place_of(url)
    assert len(url) < 8 or url not in str(refused.value)


def test_the_message_is_what_alertmanager_sends_with_the_pair_and_the_verdict_besides() -> None:
    run = Run(AlertMachine().settings)
    run.feed(BAD, times=20)
    run.feed(GOOD, times=60)
    firing, resolved = (json.loads(messages_of([t], Voice("en", "https://scope.example"))[0].body) for t in run.told)
    for payload, status in ((firing, "firing"), (resolved, "resolved")):
        assert payload["version"] == "4" and payload["status"] == status
        assert {"receiver", "groupKey", "groupLabels", "commonLabels", "commonAnnotations", "externalURL"} <= set(
            payload
        )
        assert payload["truncatedAlerts"] == 0 and payload["simulated"] is False
        (alert,) = payload["alerts"]
        assert alert["status"] == status
        assert alert["labels"]["alertname"] == "power" and alert["labels"]["node"] == "n1"
        assert alert["fingerprint"] == firing["alerts"][0]["fingerprint"]
        assert alert["startsAt"].startswith("2026-11-29T14:00:00")
        assert payload["links"]["pair"] == "https://scope.example/?node=n1"
    assert (firing["numFiring"], firing["numResolved"]) == (1, 0)
    assert (resolved["numFiring"], resolved["numResolved"]) == (0, 1)
    assert firing["alerts"][0]["endsAt"].startswith("0001-01-01")
    assert resolved["alerts"][0]["endsAt"] > resolved["alerts"][0]["startsAt"]
    assert firing["verdict"]["cause"] == "power" and firing["verdict"]["evidence"]
    assert "power brake" in firing["alerts"][0]["annotations"]["summary"]


def test_a_storm_is_one_message_that_counts_everyone() -> None:
    run = Run()
    from_many = [
        BAD.__class__(**{**_plain(BAD), "subject": {"node": f"n{i}"}, "verdicts": _moved(f"n{i}")}) for i in range(300)
    ]
    run.feed(*from_many, times=20)
    messages = messages_of(run.told, Voice())
    assert len(messages) == 1
    payload = json.loads(messages[0].body)
    assert payload["numFiring"] == 300
    assert len(payload["alerts"]) + payload["truncatedAlerts"] == 300
    assert len(messages[0].body) < 64_000


def _plain(diagnosis: object) -> dict[str, object]:
    return {name: getattr(diagnosis, name) for name in diagnosis.__slots__}  # type: ignore[attr-defined]


def _moved(node: str) -> tuple[object, ...]:
    verdict = BAD.verdicts[0]
    return (verdict.__class__(**{**_plain(verdict), "subject": {"node": node}}),)


def test_a_message_in_chinese_is_in_chinese_and_says_when_it_is_simulated() -> None:
    run = Run()
    run.feed(BAD, times=20)
    alert = run.told[0].alert
    alert.simulated = True
    body = messages_of(run.told, Voice("zh"))[0].body
    assert "电源制动" in body and "[模拟]" in body
    assert json.loads(body)["simulated"] is True
