"""A page as a person sees it, in Debian's headless Chromium; registered for every test in conftest."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service


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

    def wait(self, expression: str, timeout_s: float = 90.0) -> Any:
        """The first true value of a JavaScript expression; fails naming it when none comes."""
        until = time.monotonic() + timeout_s
        while True:
            found = self.value(expression)
            if found:
                return found
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.03)

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
        driver.set_page_load_timeout(120)
        driver.set_script_timeout(60)
        yield Browser(driver)
        driver.quit()
