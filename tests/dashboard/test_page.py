"""The page in a real browser: it draws, it moves, it keeps what a viewer chose, and nothing that a name says can run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from dashboard.app import create_app, listen
from dashboard.app import serve as serve_until
from dashboard.selection import SECOND_NS
from dashboard.settings import DashboardSettings
from telemetry.sample import Sample
from telemetry.store import StoreDown

scene = sys.modules["scene"]
pytestmark = pytest.mark.server

HOSTILE = "<img src=x onerror=document.title='owned'><b>node</b>"
RACK = "row-B"
PLOT = "document.getElementById('chart').querySelector('.js-plotly-plot')"


def fleet(start: int, end: int, incident: Any = scene.NONE) -> list[Sample]:
    """Three nodes, one of them simulated and one with a hostile name; heat on the first since the incident's start."""
    found: list[Sample] = []
    for node, hot, simulated in (("n1", incident, False), (HOSTILE, scene.NONE, False), ("sim1", scene.NONE, True)):
        found += scene.gpu_pair(node, "chat", (0, 1), start, end, hot, simulated=simulated, step_s=0.5)
        subject = scene.tags_of(node, RACK, simulated=simulated) | {"engine": "chat"}
        found += scene.verdicts(subject, start, end, hot)
    return found


@pytest.fixture(scope="module")
def page(serve: Callable[..., Any], live: Callable[..., None]) -> Any:
    """A fleet with ten minutes behind it, and more coming."""
    now = time.time_ns()
    incident = scene.Incident(now - 240 * SECOND_NS, now + 10**15)
    start = now - 600 * SECOND_NS
    past = [
        *scene.gpu_pair("n1", "chat", (0, 1), start, now, incident, step_s=2.0),
        *scene.verdicts(scene.tags_of("n1") | {"engine": "chat"}, start, now, incident),
        scene.event("n1", "deploy", "chat", "0.31 -> 0.32", now - 400 * SECOND_NS),
        *fleet(now - 4 * SECOND_NS, now, incident),
    ]
    served = serve(past, refresh_s=0.3)
    live(served.store, lambda start, end: fleet(start, end, incident))
    return served


def query(browser: Any) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(browser.driver.current_url).query).items()}


def test_the_pair_is_drawn_and_its_verdict_stands_on_top(page: Any, browser: Any) -> None:
    browser.open(page.url)
    assert "Output fell 31 % while GPU-Util stayed at 98 %" in browser.text("#strip")
    assert "Thermal throttling" in browser.text("#strip")
    assert browser.value(f"{PLOT}.querySelectorAll('.scatterlayer .trace path.js-line').length") > 10
    assert browser.value(f"{PLOT}.querySelectorAll('.hm image').length") == 1
    assert browser.value("document.querySelectorAll('.step').length") == 6
    assert "confirmed" in browser.text(".step-confirmed").lower()
    assert "Thermal throttling" in browser.value("document.getElementById('chart-frame').getAttribute('aria-label')")
    browser.wait("document.querySelectorAll('#table .ag-row').length === 3")
    assert browser.complaints() == []


def test_the_numbers_move_over_refreshes_and_the_console_stays_silent(page: Any, browser: Any) -> None:
    browser.open(page.url)
    last = f"{PLOT}.layout.xaxis.range.map(x => +new Date(x))[1]"
    before = browser.value(last)
    path = f"{PLOT}.querySelector('.scatterlayer .trace path.js-line').getAttribute('d')"
    drawn = browser.value(path)
    browser.looks_on(8)
    assert browser.value(last) > before
    assert browser.value(path) != drawn
    assert browser.complaints() == []


def test_a_zoom_is_kept_over_refreshes_and_stands_in_the_address(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=n1&engine=chat")
    start, end = browser.value(f"{PLOT}.layout.xaxis.range.map(x => +new Date(x))")
    left, right = int(start + 0.4 * (end - start)), int(start + 0.6 * (end - start))
    browser.run(f"window.Plotly.relayout({PLOT}, {{'xaxis.range': [{left}, {right}]}})")
    browser.wait("new URLSearchParams(location.search).get('from') !== null")
    browser.looks_on(4)
    kept = browser.value(f"{PLOT}.layout.xaxis.range.map(x => +new Date(x))")
    assert abs(kept[0] - left) <= 2000 and abs(kept[1] - right) <= 2000
    assert abs(int(query(browser)["from"]) - left) <= 1
    assert browser.value("document.getElementById('zoomed').hidden") is False
    browser.click("#zoomed")
    browser.wait("new URLSearchParams(location.search).get('from') === null")
    browser.wait(f"+new Date({PLOT}.layout.xaxis.range[1]) > {end}")


def test_everything_chosen_survives_a_copied_link(page: Any, browser: Any) -> None:
    browser.open(page.url)
    browser.choose("range", "1h")
    browser.wait("location.search.includes('range=1h')")
    browser.choose("zone", "local")
    browser.choose("language", "zh")
    browser.wait("document.documentElement.lang === 'zh-CN'")
    browser.click("#theme")
    browser.wait("location.search.includes('theme=')")
    theme = query(browser)["theme"]
    browser.click("#copy")
    link = browser.wait("document.documentElement.dataset.copied")
    browser.run("localStorage.clear()")
    browser.driver.get("about:blank")
    browser.open(link)
    wanted = {"node": "n1", "engine": "chat", "range": "1h", "tz": "local", "lang": "zh", "theme": theme}
    assert wanted.items() <= query(browser).items()
    assert "1 小时" in browser.text("#range label[data-active]")
    assert browser.value("document.documentElement.dataset.mantineColorScheme") == theme
    assert "按顺序排查" in browser.text("#steps-title")


def test_language_and_theme_switch_without_a_reload(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=n1&engine=chat&theme=light&lang=en")
    browser.run("window.stayed = true")
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    assert "Triage, in order" in browser.text("#steps-title")
    browser.choose("language", "zh")
    browser.wait("document.getElementById('steps-title').innerText === '按顺序排查'")
    assert "置信度" in browser.text("#strip")
    assert "节点" in browser.text("#table .ag-header")
    browser.click("#theme")
    browser.wait("document.documentElement.dataset.agThemeMode === 'dark'")
    browser.wait(f"{PLOT}.layout.font.color === '#e9ecef'")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != light
    assert browser.value("window.stayed") is True
    assert browser.complaints() == []


def test_a_dark_link_is_dark_before_anything_is_drawn(page: Any, browser: Any) -> None:
    browser.driver.execute_cdp_cmd("Network.enable", {})
    browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*_dash-component-suites*"]})
    browser.driver.get(f"{page.url}/?theme=dark")
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    browser.driver.get_log("browser")
    assert ground == "rgb(20, 22, 24)"


def test_a_click_in_the_table_or_on_the_map_selects_the_pair(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=n1&engine=chat&lang=en&theme=light")
    browser.wait("document.querySelectorAll('#table .ag-row').length === 3")
    browser.run("[...document.querySelectorAll('#table .ag-cell')].find(c => c.innerText.includes('sim1')).click()")
    browser.wait("location.search.includes('node=sim1')")
    browser.wait("document.querySelector('.strip-who').innerText.includes('sim1')")
    browser.driver.back()
    browser.wait("document.querySelector('.strip-who').innerText.includes('n1')")


def test_simulated_data_is_badged_wherever_it_shows(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=sim1&engine=chat&lang=en")
    assert browser.driver.title.startswith("[SIMULATED]")
    assert browser.text("#simulated") == "SIMULATED"
    assert "SIMULATED" in browser.text("#chart-head")
    assert "SIMULATED" in browser.value(f"{PLOT}.querySelector('.infolayer').textContent")
    browser.wait("document.querySelectorAll('#table .ag-row').length === 3")
    assert browser.text("#table").count("SIMULATED") == 1
    browser.open(f"{page.url}/?node=n1&engine=chat&lang=en")
    assert browser.value("document.getElementById('simulated').hidden") is True
    assert "SIMULATED" not in browser.driver.title + browser.text("#chart-card")


def test_hostile_names_are_text_everywhere(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node={quote(HOSTILE)}&engine=chat&lang=en")
    browser.wait("document.querySelectorAll('#table .ag-row').length === 3")
    browser.looks_on(2)
    assert "owned" not in browser.driver.title.replace(HOSTILE, "")
    assert HOSTILE in browser.text(".strip-who")
    assert browser.value("document.querySelectorAll('img[src=x], #strip b b, #table b').length") == 0
    assert HOSTILE in browser.text("#table")


def test_evidence_lights_up_the_lane_that_it_speaks_of(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=n1&engine=chat&lang=en")
    browser.run("document.querySelector('.step-confirmed [data-lane=\"gpu.temp_c\"]').focus()")
    browser.wait("document.getElementById('glow').classList.contains('lit')")
    glow = browser.value("document.getElementById('glow').getBoundingClientRect().toJSON()")
    ys = browser.value(f"{PLOT}.querySelector('.subplot.xy3 .js-line').getBoundingClientRect().toJSON()")
    assert glow["top"] < ys["top"] and ys["bottom"] < glow["bottom"]
    browser.run("document.activeElement.blur()")
    browser.wait("!document.getElementById('glow').classList.contains('lit')")


def stands_still(browser: Any) -> bool:
    """Whether the page is filled no more, once what was under way has come."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        looks = browser.value("document.documentElement.dataset.looks")
        time.sleep(1.5)
        if browser.value("document.documentElement.dataset.looks") == looks:
            return True
    return False


def test_refreshing_stops_while_paused_and_while_the_tab_is_hidden(page: Any, browser: Any) -> None:
    browser.open(f"{page.url}/?node=n1&engine=chat&lang=en")
    browser.click("#live")
    browser.wait("document.getElementById('age').innerText.startsWith('Paused')")
    assert stands_still(browser)
    browser.click("#live")
    browser.looks_on(2)
    browser.run("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    assert stands_still(browser)
    browser.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    browser.looks_on(2)


def test_an_engine_that_was_killed_is_said_in_words(serve: Callable[..., Any], browser: Any) -> None:
    now = time.time_ns()
    samples = list(scene.gpu_pair("n1", "chat", (0, 1), now - 60 * SECOND_NS, now))
    tags = {**scene.tags_of("n1"), "engine": "chat", "kind": "vllm", "model": "qwen2-7b", "gpus": "0+1"}
    samples += [
        Sample("engine", tags, {"up": 0}, now),
        scene.event("n1", "restart", "chat", "died", now - 3 * SECOND_NS, -9),
    ]
    browser.open(serve(samples).url + "/?lang=en")
    assert "Engine chat is restarting: killed by signal 9 (SIGKILL) at " in browser.text("#strip")


def test_an_empty_installation_teaches_what_to_do(serve: Callable[..., Any], browser: Any) -> None:
    browser.open(serve([]).url + "/?lang=en")
    assert "pairscope agent" in browser.text("#empty")
    assert browser.value("document.getElementById('pair-view').offsetParent") is None
    assert browser.complaints() == []


def test_a_store_that_is_away_at_the_first_look_is_no_green_light(browser: Any) -> None:
    class Down:
        url = ""

        def __getattr__(self, name: str) -> Any:
            raise StoreDown("store influxdb://x: does not answer; start it")

    settings = DashboardSettings(port=0)
    stopping = threading.Event()
    server, sockets = listen(create_app(Down(), settings), settings)  # type: ignore[arg-type]
    serving = threading.Thread(target=serve_until, args=(server, sockets, stopping))
    serving.start()
    try:
        browser.open(f"http://127.0.0.1:{server.effective_port}/?lang=en")
        browser.wait("document.getElementById('live').className.includes('live-no_store')")
        assert "No store" in browser.text("#live")
    finally:
        stopping.set()
        serving.join()
