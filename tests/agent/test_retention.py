"""Retention removes what is old from the embedded store, keeps what is rare for longer, and survives a store that is away."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from agent import retention as chores
from agent.retention import DAY_NS, Keep, Retention, keeps_itself
from telemetry.sample import Sample
from telemetry.store import Store, StoreDown, open_store

NOW = 1_800_000_000 * 10**9


def ages(store: Store, measurement: str) -> list[int]:
    found = store.samples(measurement, start_ns=0, end_ns=NOW + 1)
    return sorted((NOW - sample.time_ns) // DAY_NS for sample in found)


def test_old_samples_leave_and_events_stay_for_ninety_days(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'store.db'}"
    store = open_store(url)
    days = (0, 1, 6, 8, 40, 95)
    store.write([Sample("host", {"node": "n"}, {"cpu_pct": 1.0}, NOW - day * DAY_NS) for day in days])
    event = {"node": "n", "kind": "xid", "subject": "0"}
    store.write([Sample("event", event, {"text": "x", "code": 1}, NOW - day * DAY_NS) for day in days])
    assert Retention(lambda: open_store(url), Keep(), lambda: NOW).prune() == 4
    assert ages(store, "host") == [0, 1, 6]
    assert ages(store, "event") == [0, 1, 6, 8, 40]
    store.close()


def test_minutes_stay_ninety_days_and_quarters_two_years(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'store.db'}"
    store = open_store(url)
    days = (1, 8, 89, 91, 729, 731)
    store.write([Sample("host", {"node": "n"}, {"cpu_pct": float(day)}, NOW - day * DAY_NS) for day in days])
    retention = Retention(lambda: open_store(url), Keep(), lambda: NOW)
    retention.rollup()
    retention.prune()

    def told(step_ns: int) -> list[float]:
        found = store.range("host", ["cpu_pct"], start_ns=NOW - 800 * DAY_NS, end_ns=NOW, step_ns=step_ns)
        return [value for value in found[0].values if value is not None]

    assert ages(store, "host") == [1]
    assert told(300 * 10**9) == [89.0, 8.0, 1.0]
    assert told(3600 * 10**9) == [729.0, 91.0, 89.0, 8.0, 1.0]
    retention.stop()
    store.close()


def test_a_store_that_is_away_costs_nothing_but_a_line() -> None:
    def away() -> Store:
        raise StoreDown("sqlite:///x: busy")

    assert Retention(away, Keep()).prune() == 0


def test_only_the_embedded_store_is_pruned_by_the_agent() -> None:
    assert not keeps_itself("sqlite:///var/lib/pairscope/store.db")
    assert keeps_itself("influxdb://influx.example:8086/pairscope")


def test_agents_that_start_at_once_roll_up_at_different_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chores, "ROLLUP_EVERY_S", 3600.0)
    soon, late = threading.Event(), threading.Event()

    def opening(asked: threading.Event) -> Store:
        asked.set()
        raise StoreDown("away")

    started_s = time.monotonic()
    early = Retention(lambda: opening(soon), Keep(), jitter=lambda: 0.0)
    later = Retention(lambda: opening(late), Keep(), jitter=lambda: 0.9)
    for agent in (later, early):
        agent.start()
    assert soon.wait(30.0)
    if time.monotonic() - started_s < 60.0:
        assert not late.is_set()
    for agent in (later, early):
        agent.stop()
