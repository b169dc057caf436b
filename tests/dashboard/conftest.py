"""What the dashboard's tests share: scenes in a real store, a served page, and a browser to look at it with."""

from __future__ import annotations

import importlib.util
import sys
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
        # a busy machine may show a page a minute after its samples were written
        settings = DashboardSettings(port=0, **{"stale_s": 600.0, **options})
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
