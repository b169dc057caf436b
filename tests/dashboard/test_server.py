"""The server: one look as JSON, guards and limits, and a start that says in one line why it can't."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboard.app import create_app, run
from dashboard.chart import CONFIG
from dashboard.page import skeleton
from dashboard.selection import SECOND_NS, Selection
from dashboard.settings import DashboardSettings
from dashboard.view import Viewer
from rules.verdict_record import without_text
from telemetry import messages
from telemetry.messages import say
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown

scene = sys.modules["scene"]


def client(store: Any, **options: Any) -> Any:
    return create_app(store, DashboardSettings(**options)).server.test_client()


def recent(store: Store, **options: Any) -> None:
    import time

    now = time.time_ns()
    store.write(list(scene.gpu_pair("n1", "chat", (0, 1), now - 60 * SECOND_NS, now, **options)))


def look(browser: Any, query: str = "", **headers: str) -> Any:
    answer = browser.get(f"/view?{query}", headers=headers)
    assert answer.status_code == 200
    body = answer.get_data()
    return json.loads(gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body)


def walk(value: Any) -> Any:
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from walk(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from walk(child)


NOT_SHOWN = {"type", "namespace", "className", "field", "cellRenderer", "customdata", "id", "value", "uirevision"}


def strings(value: Any) -> Any:
    """Every text that may be shown."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, child in value.items():
            if name not in NOT_SHOWN:
                yield from strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from strings(child)


def parts(found: Any) -> dict[str, Any]:
    return {name: properties for name, _, properties in found["parts"]}


def test_every_part_of_a_look_is_in_the_skeleton(store: Store) -> None:
    recent(store)
    known = {node.get("id") for node in walk(json.loads(json.dumps(skeleton(), default=lambda c: c.to_plotly_json())))}
    assert set(parts(look(client(store)))) <= known


def test_the_upload_button_is_off_on_every_graph() -> None:
    plain = json.loads(json.dumps(skeleton(), default=lambda component: component.to_plotly_json()))
    graphs = [node for node in walk(plain) if node.get("type") == "Graph"]
    assert len(graphs) == 2
    assert all(graph["props"]["config"]["showSendToCloud"] is False for graph in graphs)
    assert CONFIG["showSendToCloud"] is False


def test_a_look_names_the_pair_that_was_chosen_and_its_age(store: Store) -> None:
    recent(store)
    meta = look(client(store))["meta"]
    assert (meta["node"], meta["engine"]) == ("n1", "chat")
    assert 0 <= meta["age_s"] < 10


def test_an_unchanged_part_keeps_its_mark_and_a_changed_one_does_not(store: Store) -> None:
    recent(store)
    english, again, chinese = (look(client(store), query) for query in ("lang=en", "lang=en", "lang=zh"))
    marks = [{name: mark for name, mark, _ in found["parts"]} for found in (english, again, chinese)]
    assert marks[0]["range"] == marks[1]["range"] != marks[2]["range"]


def test_viewers_of_one_thing_get_the_same_bytes_and_the_store_is_asked_once(store: Store) -> None:
    recent(store)
    asked: list[str] = []

    class Counting:
        url = ""

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store, name)

    browser = client(Counting(), refresh_s=60.0)
    first = browser.get("/view?lang=en").get_data()
    count = len(asked)
    assert browser.get("/view?lang=en").get_data() == first
    browser.get("/view?lang=zh")
    assert len(asked) == count > 0


def test_simulated_data_is_badged_in_header_title_chart_and_rows(store: Store) -> None:
    recent(store, simulated=True)
    found = look(client(store))
    shown = parts(found)
    assert shown["simulated"]["hidden"] is False
    assert found["meta"]["title"].startswith("[SIMULATED]")
    for part in ("chart-head", "chart", "table"):
        assert "SIMULATED" in json.dumps(shown[part]), part


def test_real_data_has_no_badge(store: Store) -> None:
    recent(store)
    found = look(client(store))
    assert parts(found)["simulated"]["hidden"] is True
    rest = {name: part for name, part in parts(found).items() if name != "simulated"}
    assert "SIMULATED" not in json.dumps(rest) + found["meta"]["title"]


def test_a_chinese_page_has_no_english_sentence(store: Store) -> None:
    recent(store)
    shown = parts(look(client(store), "lang=zh"))
    text = "\n".join(strings(shown))
    for key, sentence in messages.catalogue().items():
        english = sentence["en"]
        if key.startswith("dashboard.") and len(english) > 5 and english != sentence["zh"] and "{" not in english:
            found = re.search(rf"(?<![a-zA-Z_\-]){re.escape(english)}(?![a-zA-Z_\-])", text)
            assert not found, key


def test_an_empty_store_teaches_what_to_start(store: Store) -> None:
    shown = parts(look(client(store)))
    assert "pairscope agent" in json.dumps(shown["empty"])
    assert shown["pair-view"]["hidden"] is True


def test_a_host_without_an_engine_teaches_how_to_watch_one(store: Store) -> None:
    import time

    now = time.time_ns()
    samples = [Sample("host", {"node": "n1"}, {"cpu_pct": 5.0}, now - i * SECOND_NS) for i in range(60)]
    store.write(samples)
    shown = parts(look(client(store)))
    assert "[[agent.engines]]" in json.dumps(shown["empty"])
    assert shown["pair-view"]["hidden"] is False


def test_a_link_to_an_unknown_pair_says_so(store: Store) -> None:
    recent(store)
    assert "nowhere is not known here" in json.dumps(parts(look(client(store), "node=nowhere"))["empty"])


def test_a_store_that_goes_away_leaves_what_was_read_and_says_why(store: Store) -> None:
    recent(store)
    broken: list[bool] = []

    class Breaking:
        url = ""

        def __getattr__(self, name: str) -> Any:
            if broken:
                raise StoreDown("store influx://x: does not answer; start it")
            return getattr(store, name)

    browser = client(Breaking(), refresh_s=0.0)
    look(browser)
    broken.append(True)
    shown = parts(look(browser))
    assert "does not answer; start it" in json.dumps(shown["trouble"])
    assert shown["pair-view"]["hidden"] is False
    assert any(y is not None for y in shown["chart"]["figure"]["data"][0]["y"])


def test_a_store_that_was_never_there_is_said_in_words(store: Store) -> None:
    class Down:
        url = ""

        def __getattr__(self, name: str) -> Any:
            raise StoreDown("store influx://x: does not answer; start it")

    shown = parts(look(client(Down())))
    assert "does not answer; start it" in json.dumps(shown["empty"])


def test_a_store_that_is_away_is_told_in_each_viewers_language_and_the_browser_knows_of_it(store: Store) -> None:
    class Down:
        url = ""

        def __getattr__(self, name: str) -> Any:
            raise StoreDown.of("store.failure.down", store="influxdb://x", base="http://x", reason="y")

    browser = client(Down())
    english, chinese = (look(browser, f"lang={language}") for language in ("en", "zh"))
    for found, language in ((english, "en"), (chinese, "zh")):
        sentence = say("store.failure.down", language, store="influxdb://x", base="http://x", reason="y")
        assert sentence in json.dumps(parts(found)["empty"], ensure_ascii=False)
        assert found["meta"]["trouble"] is True
    recent(store)
    assert look(client(store))["meta"]["trouble"] is False


def test_the_fleets_title_counts_gpus_and_hosts_without_any(store: Store) -> None:
    import time

    now = time.time_ns()
    recent(store)
    titles = []
    for node in ("c1", "c2"):
        store.write(list(scene.cpu_pair(node, "e", now - 6 * SECOND_NS, now)))
        titles.append(json.dumps(parts(look(client(store)))["fleet-title"], ensure_ascii=False))
    assert "2 GPUs · 1 CPU host · output" in titles[0]
    assert "2 GPUs · 2 CPU hosts · output" in titles[1]


def test_a_verdict_that_cannot_be_read_breaks_nothing(store: Store) -> None:
    import time

    recent(store)
    tags = scene.tags_of("n1") | {"engine": "chat", "scope": "engine", "cause": "thermal"}
    fields: dict[str, float | int | str] = {"confidence": 0.5, "summary": "x", "evidence": '{"steps": 7}'}
    store.write([Sample("verdict", tags, fields, time.time_ns())])
    assert "Verdict unreadable" in json.dumps(parts(look(client(store)))["strip"])


def test_hostile_names_break_nothing(store: Store) -> None:
    import time

    now = time.time_ns()
    for node in ("</script><script>alert(1)</script>", '"; DROP TABLE x; --', "n" * 5000, "\u202e\x00x", "🦊/..%2f"):
        store.write(list(scene.gpu_pair(node, '<img src=x onerror="1">', (0,), now - 5 * SECOND_NS, now)))
    shown = parts(look(client(store)))
    drawn = "\n".join(strings([shown["chart"], shown["fleet"]]))
    assert "&lt;script&gt;" in drawn
    assert "<script>" not in drawn and "<img" not in drawn


def test_the_window_is_also_a_table(store: Store) -> None:
    recent(store)
    answer = client(store).get("/window.csv?node=n1&engine=chat")
    lines = answer.get_data(as_text=True).splitlines()
    assert lines[0].startswith("time_utc,pair.output_pct,pair.util_pct")
    assert len(lines) == 451
    assert lines[10].endswith(",,")
    assert "attachment" in answer.headers["Content-Disposition"]


@pytest.mark.parametrize("path", ["/", "/view", "/healthz", "/assets/page.js", "/_dash-layout"])
def test_every_answer_has_the_security_headers(store: Store, path: str) -> None:
    answer = client(store).get(path)
    assert answer.status_code == 200
    policy = answer.headers["Content-Security-Policy"]
    scripts = re.search(r"script-src ([^;]*)", policy)
    assert scripts and "unsafe" not in scripts[1]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"


def test_posts_from_other_sites_and_foreign_host_names_are_refused(store: Store) -> None:
    browser = client(store)
    body = {"json": {}}
    assert (
        browser.post("/_dash-update-component", headers={"Origin": "https://evil.example"}, **body).status_code == 403
    )
    assert browser.get("/view", headers={"Host": "evil.example"}).status_code == 403
    assert browser.get("/view", headers={"Host": "[::1]:8600"}).status_code == 200
    named = client(store, allowed_hosts=("pairs.example",))
    assert named.get("/view", headers={"Host": "pairs.example"}).status_code == 200


def test_a_large_body_is_refused(store: Store) -> None:
    answer = client(store).post("/_dash-update-component", data=b"x" * 100_000, content_type="application/json")
    assert answer.status_code == 413


def test_health_says_whether_the_store_can_be_read(store: Store) -> None:
    assert client(store).get("/healthz").get_json() == {"status": "ok", "store": "ok"}


def test_large_scripts_travel_as_gzip(store: Store) -> None:
    answer = client(store).get("/assets/page.js", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert b"dash_clientside" in gzip.decompress(answer.get_data())


def test_a_bind_that_others_can_reach_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DashboardSettings(store_url="sqlite:///nowhere", host="0.0.0.0")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "insecure" in error


def test_an_unusable_store_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DashboardSettings(store_url="oracle://x")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_taken_port_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(DashboardSettings(store_url=f"sqlite://{tmp_path}/s.db", port=port)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(port) in error


def test_it_says_ready_serves_and_stops_when_told(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(240)
        code = (
            "import sys; from dashboard.app import run; from dashboard.settings import DashboardSettings;"
            f"sys.exit(run(DashboardSettings(store_url='sqlite://{tmp_path}/s.db', port={port})))"
        )
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert "READY=1" in listener.recv(4096).decode()
            with socket.create_connection(("127.0.0.1", port), 120) as connection:
                connection.sendall(b"GET /healthz HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                assert b"200" in connection.recv(4096)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        process.stderr.close()


def test_a_verdict_that_stands_keeps_the_words_of_its_last_text_and_says_when_they_were_written(store: Store) -> None:
    import time

    now = time.time_ns()
    recent(store)
    subject = scene.tags_of("n1") | {"engine": "chat"}
    written = now - 300 * SECOND_NS
    hot = scene.Incident(written - 60 * SECOND_NS, now)
    store.write([next(scene.verdicts(subject, written, now, hot))])
    at = [now - seconds * SECOND_NS for seconds in (40, 10)]
    store.write([without_text(next(scene.verdicts(subject, time_ns, now, hot))) for time_ns in at])
    shown = parts(look(client(store)))
    strip = json.dumps(shown["strip"])
    assert "Thermal throttling" in strip and "Verdict outdated" not in strip
    assert "figures of" in strip and "figures of" in json.dumps(shown["steps-title"])


def test_the_words_of_a_verdict_stay_while_the_store_is_away(store: Store) -> None:
    import time

    class Leaving:
        url = ""
        gone = False

        def __getattr__(self, name: str) -> Any:
            if self.gone:
                raise StoreDown("store influx://x: does not answer; start it")
            return getattr(store, name)

    now = time.time_ns()
    recent(store)
    subject = scene.tags_of("n1") | {"engine": "chat"}
    store.write([next(scene.verdicts(subject, now - 20 * SECOND_NS, now))])
    store.write([without_text(next(scene.verdicts(subject, now - 10 * SECOND_NS, now)))])
    leaving = Leaving()
    viewer = Viewer(leaving, DashboardSettings(refresh_s=0.001))  # type: ignore[arg-type]
    first = viewer.look(Selection())
    leaving.gone = True
    time.sleep(0.01)
    second = viewer.look(Selection())
    assert "does not answer" in second.problem and first.problem == ""
    assert first.diagnosis is not None and second.diagnosis == first.diagnosis
