"""What the dashboard's tests share: scenes in a real store, a served page, and a browser to look at it with."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dashboard.app import create_app, listen
from dashboard.app import serve as serve_until
from dashboard.settings import DashboardSettings
from telemetry import catalogue
from telemetry.sample import Sample
from telemetry.store import Store, open_store


def _load_scene() -> ModuleType:
    """tests/dashboard/scene.py under its own name: tests are no package."""
    spec = importlib.util.spec_from_file_location("scene", Path(__file__).with_name("scene.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["scene"] = module
    spec.loader.exec_module(module)
    return module


scene = _load_scene()
scene.know_sentences()


def write(store: Store, samples: list[Sample]) -> None:
    for sample in samples:
        catalogue.check(sample)
    assert store.write(samples) == []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(f"sqlite://{tmp_path / 'store.db'}")
    yield made
    made.close()


@dataclass
class Served:
    url: str
    store: Store
    settings: DashboardSettings


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """serve(samples, **settings) -> a page on a free loopback port over a store of its own."""
    stopping = threading.Event()
    running: list[tuple[threading.Thread, Store]] = []

    def start(samples: list[Sample], **options: Any) -> Served:
        store = open_store(f"sqlite://{tmp_path_factory.mktemp('store') / 'store.db'}")
        write(store, samples)
        settings = DashboardSettings(port=0, **options)
        server, sockets = listen(create_app(store, settings), settings)
        running.append((threading.Thread(target=serve_until, args=(server, sockets, stopping)), store))
        running[-1][0].start()
        return Served(f"http://127.0.0.1:{server.effective_port}", store, settings)

    yield start
    stopping.set()
    for thread, store in running:
        thread.join()
        store.close()


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[[Store, Callable[[int, int], list[Sample]]], None]]:
    """live(store, make): from now on, write make(start_ns, end_ns) each half second, as agents would."""
    stopping = threading.Event()
    threads: list[threading.Thread] = []

    def keep(store: Store, make: Callable[[int, int], list[Sample]]) -> None:
        def write_on() -> None:
            last = time.time_ns()
            while not stopping.wait(0.5):
                now = time.time_ns()
                write(store, make(last, now))
                last = now

        threads.append(threading.Thread(target=write_on))
        threads[-1].start()

    yield keep
    stopping.set()
    for thread in threads:
        thread.join()


class Browser:
    """A page as a person sees it: waits, reads and clicks."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait("document.documentElement.dataset.looks >= 1")
        self.wait("document.querySelector('#chart .main-svg, #empty section') !== null")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """The first true value of a JavaScript expression; fails naming it when none comes."""
        until = time.monotonic() + timeout_s
        while True:
            found = self.value(expression)
            if found:
                return found
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.1)

    def text(self, selector: str) -> str:
        return str(self.value(f"(document.querySelector({selector!r}) || {{}}).innerText || ''"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, control: str, value: str) -> None:
        self.click(f'#{control} input[value="{value}"]')

    def looks_on(self, count: int = 2) -> None:
        """Until the page has been filled `count` times more."""
        before = int(self.value("document.documentElement.dataset.looks"))
        self.wait(f"document.documentElement.dataset.looks >= {before + count}")

    def complaints(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING") and "favicon" not in entry["message"]
        ]


@pytest.fixture(scope="module")
def browser(need_program: Callable[[str], str]) -> Iterator[Browser]:
    chromium, driver_path = need_program("chromium"), need_program("chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (
            "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            f"--disable-component-update --disable-sync --window-size=1600,1250 --lang=en --user-data-dir={profile}"
        ).split():
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        driver.set_page_load_timeout(40)
        driver.set_script_timeout(20)
        yield Browser(driver)
        driver.quit()
