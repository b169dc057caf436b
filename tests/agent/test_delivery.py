"""Delivery loses nothing in an outage, shows live data first after it, and lets no sample hold up the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from agent.spool.rejected import RejectedFile
from telemetry.lineprotocol import read
from telemetry.sample import Sample
from telemetry.store import Rejected, Store, StoreDown, StoreError, open_store
from telemetry.store.sqlite import SqliteStore

S = 10**9
T0 = 1_795_960_800 * S


def host(second: int) -> Sample:
    return Sample("host", {"node": "n1"}, {"load1": float(second)}, T0 + second * S)


class Ledger:
    """A store in a list, that fails as told. It stands in for a network; SQLite stands in the tests that need a real store."""

    url = "ledger://"
    durable_after_s = 0.0

    def __init__(self) -> None:
        self.batches: list[list[Sample]] = []
        self.down: Exception | None = None
        self.poison: Callable[[Sample], bool] = lambda sample: False
        self.opened = 0
        self.arrived = threading.Event()

    def open(self) -> Store:
        self.opened += 1
        return self  # type: ignore[return-value]

    def write(self, samples: Sequence[Sample]) -> list[Rejected]:
        if self.down is not None:
            raise self.down
        if any(self.poison(sample) for sample in samples):
            raise TypeError("a defect")
        self.batches.append(list(samples))
        self.arrived.set()
        return []

    def close(self) -> None:
        pass

    @property
    def times(self) -> list[int]:
        return [(sample.time_ns - T0) // S for batch in self.batches for sample in batch]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(spool: Spool, seconds: Sequence[int], clock: Clock | None = None) -> None:
    for second in seconds:
        if clock is not None:
            clock.now = float(second)
        spool.append([host(second)])
        spool.commit()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)


def test_live_samples_come_first_after_an_outage_and_the_rest_newest_first(tmp_path: Path) -> None:
    fill_spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    fill(fill_spool, range(100))
    fill_spool.close()
    spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    ledger = Ledger()
    delivery = Delivery(spool, ledger.open, batch_samples=30)
    ledger.down = StoreDown("gone")
    fill(spool, range(100, 103))
    assert delivery.carry() >= 1.0
    ledger.down = None
    second = 103
    while spool.waiting_blocks:
        fill(spool, [second])
        delivery.carry()
        assert second in ledger.times
        second += 1
    assert [(b[0].time_ns - T0) // S for b in ledger.batches] == [100, 70, 104, 40, 105, 10, 106, 0]
    assert sorted(ledger.times) == list(range(second))
    assert delivery.delivered == second and delivery.errors == 1
    spool.close()


def test_backoff_doubles_from_one_second_to_ten_with_jitter(spool: Spool) -> None:
    ledger = Ledger()
    ledger.down = StoreDown("gone")
    fill(spool, [0])
    full = Delivery(spool, ledger.open, jitter=lambda: 1.0)
    assert [full.carry() for _ in range(9)] == [1, 2, 4, 8, 10, 10, 10, 10, 10]
    half = Delivery(spool, ledger.open, jitter=lambda: 0.0)
    assert [half.carry() for _ in range(8)] == [1, 1, 2, 4, 5, 5, 5, 5]
    ledger.down = None
    assert full.carry() == 0.0 and full.connected and full.last_error == ""
    ledger.down = StoreDown("gone")
    fill(spool, [1])
    assert full.carry() == 1.0
    spool.close()


@pytest.mark.parametrize(
    ("header", "at_least", "at_most"),
    [
        ("7", 7, 7),
        ("0", 1, 1),
        ("9999999999", 600, 600),
        ("soon", 1, 1),
        ("-5", 1, 1),
        (None, 1, 1),
        ("in five minutes", 200, 300),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1, 1),
    ],
)
def test_a_store_that_asks_to_be_left_alone_is_left_alone_within_reason(
    spool: Spool, header: str | None, at_least: int, at_most: int
) -> None:
    if header == "in five minutes":  # of this moment, not of the one in which the tests were gathered
        header = format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    ledger = Ledger()
    ledger.down = StoreDown("too fast", header)
    fill(spool, [0])
    assert at_least <= Delivery(spool, ledger.open, jitter=lambda: 0.0).carry() <= at_most
    assert spool.waiting_blocks == 1
    spool.close()


def test_a_store_that_may_lose_what_it_took_goes_on_after_it_was_down_and_is_sent_it_again_after_an_error(
    spool: Spool,
) -> None:
    ledger = Ledger()
    ledger.durable_after_s = 60.0
    delivery = Delivery(spool, ledger.open)
    fill(spool, [0])
    delivery.carry()
    fill(spool, [1])
    ledger.down = StoreDown("gone for a moment")
    delivery.carry()
    ledger.down = None
    delivery.carry()
    assert (ledger.opened, ledger.times) == (1, [0, 1])
    fill(spool, [2])
    ledger.down = StoreError("its token was changed")
    delivery.carry()
    ledger.down = None
    while spool.waiting_blocks:
        delivery.carry()
    assert ledger.opened == 2
    assert ledger.times[2:] == [2, 0, 1]
    spool.close()


@pytest.mark.parametrize(("waited_s", "rest_s"), [(1.0, 0.25), (99.0, 0.25), (100.0, 0.0)])
def test_while_it_catches_up_it_rests_as_long_as_it_computed_unless_more_than_five_minutes_are_left(
    tmp_path: Path, waited_s: float, rest_s: float
) -> None:
    before = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    fill(before, range(40))
    before.close()
    spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    computed = iter([3.0, 3.25])
    now = iter([10.0, 10.0 + waited_s])
    delivery = Delivery(
        spool, Ledger().open, batch_samples=10, monotonic=lambda: next(now), computed_s=lambda: next(computed)
    )
    assert delivery.carry() == rest_s  # three more such rounds
    assert delivery.delivered == 10
    spool.close()


def test_an_hour_of_outage_is_at_most_one_log_line_a_minute(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ledger = Ledger()
    ledger.down = StoreDown("influxdb://db:8086: refused")
    delivery = Delivery(spool, ledger.open, monotonic=clock, jitter=lambda: 0.0, target="influxdb://db:8086")
    fill(spool, [0])
    attempts = 0
    with caplog.at_level(logging.INFO):
        while clock.now < 3600:
            clock.now += delivery.carry()
            attempts += 1
    assert 360 <= attempts <= 730
    assert 30 <= len(caplog.records) <= 61
    assert all("influxdb://db:8086" in record.getMessage() for record in caplog.records)
    assert delivery.errors == attempts
    spool.close()


def test_a_sample_that_breaks_the_store_is_counted_and_the_other_4999_arrive(spool: Spool, tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.poison = lambda sample: sample.tags["node"] == "n1234"
    delivery = Delivery(spool, ledger.open)
    spool.append([Sample("host", {"node": f"n{i}"}, {"load1": 1.0}, T0) for i in range(5000)])
    spool.commit()
    while spool.waiting_blocks:
        delivery.carry()
        assert delivery.errors == 0
    assert len({s.tags["node"] for batch in ledger.batches for s in batch}) == 4999
    assert delivery.rejected == 1 and delivery.delivered == 4999 and delivery.connected
    spool.close()


def test_a_store_that_fails_on_everything_loses_nothing_and_is_told_of_once_a_minute(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    ledger = Ledger()
    delivery = Delivery(spool, ledger.open, monotonic=clock, jitter=lambda: 1.0)
    fill(spool, [0])
    assert delivery.carry() == 0.0
    ledger.poison = lambda sample: True
    spool.append([Sample("host", {"node": f"n{i}"}, {"load1": 1.0}, T0 + S) for i in range(500)])
    spool.commit()
    with caplog.at_level(logging.WARNING, logger="agent.delivery"):
        assert [delivery.carry() for _ in range(4)] == [1, 2, 4, 8]
        assert len(caplog.records) == 1 and "a defect" in caplog.text
        clock.now += 61.0
        delivery.carry()
        assert len(caplog.records) == 2
    assert delivery.rejected == 0 and delivery.errors == 5 and spool.waiting_blocks == 1
    ledger.poison = lambda sample: False
    while spool.waiting_blocks:
        delivery.carry()
    assert len({s.tags["node"] for batch in ledger.batches for s in batch}) == 500
    assert delivery.rejected == 0 and delivery.delivered == 501
    spool.close()


def test_a_defect_of_the_store_is_not_looked_for_in_each_sample_of_a_large_batch(spool: Spool) -> None:
    asked: list[int] = []

    class Broken(Ledger):
        def write(self, samples: Sequence[Sample]) -> list[Rejected]:
            asked.append(len(samples))
            raise TypeError("a defect")

    delivery = Delivery(spool, Broken().open)
    spool.append([Sample("host", {"node": f"n{i}"}, {"load1": 1.0}, T0) for i in range(2000)])
    spool.commit()
    delivery.carry()
    assert len(asked) < 100 and 1 in asked
    spool.close()


def test_a_bad_sample_that_comes_alone_is_refused_in_a_good_stream_and_kept_where_nothing_passed(spool: Spool) -> None:
    ledger = Ledger()
    ledger.poison = lambda sample: sample.time_ns in (T0, T0 + 2 * S, T0 + 3 * S)
    delivery = Delivery(spool, ledger.open)
    fill(spool, [0])  # nothing has passed yet
    assert delivery.carry() >= 1.0
    assert delivery.rejected == 0 and spool.waiting_blocks == 1
    fill(spool, [1])
    while spool.waiting_blocks:
        delivery.carry()
    assert ledger.times[-1] == 1 and delivery.rejected == 1
    fill(spool, [2])
    delivery.carry()
    assert delivery.rejected == 2 and spool.waiting_blocks == 0
    fill(spool, [3])  # two in a row may be the store's fault
    delivery.carry()
    assert delivery.rejected == 2 and spool.waiting_blocks == 1
    fill(spool, [4])
    while spool.waiting_blocks:
        delivery.carry()
    assert ledger.times[-1] == 4 and delivery.rejected == 3
    spool.close()


def test_a_refused_sample_is_counted_and_not_sent_again(spool: Spool) -> None:
    class Picky(Ledger):
        def write(self, samples: Sequence[Sample]) -> list[Rejected]:
            super().write(samples)
            return [Rejected(sample, "field type conflict") for sample in samples if sample.time_ns == T0 + S]

    ledger = Picky()
    delivery = Delivery(spool, ledger.open)
    fill(spool, range(3))
    delivery.carry()
    assert spool.waiting_blocks == 0
    assert (delivery.delivered, delivery.rejected) == (2, 1)
    kept = spool.rejected_file.path
    assert "field type conflict" in kept.read_text()
    assert list(read(kept)) == [host(1)]
    spool.close()


def test_the_file_of_refused_samples_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.spool.rejected.MOST_BYTES", 2000)
    kept = RejectedFile(tmp_path)
    for second in range(100):
        kept.add([Rejected(host(second), "a reason\nof two lines"), Rejected(Sample("\n", {}, {}, 0), "no sample")])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5000
    recording = read(kept.path)
    assert host(99) in list(recording) and recording.bad_lines == 0


def test_a_store_that_cannot_be_opened_is_tried_again(spool: Spool, tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.mkdir()  # a folder where the file should be
    delivery = Delivery(spool, lambda: open_store(f"sqlite://{place}"))
    fill(spool, range(3))
    assert delivery.carry() >= 1.0
    assert "is a folder" in delivery.last_error and not delivery.connected
    place.rmdir()
    assert delivery.carry() == 0.0
    store = open_store(f"sqlite://{place}")
    assert store.samples("host", start_ns=T0, end_ns=T0 + 9 * S) == [host(0), host(1), host(2)]
    store.close()
    spool.close()


def test_the_thread_delivers_what_is_appended_and_stops_in_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", commit_every_s=0.05, min_free_bytes=0)
    delivery = Delivery(spool, lambda: open_store(f"sqlite://{tmp_path}/store.db"))
    delivery.start()
    for second in range(50):
        spool.append([host(second)])
    spool.append([host(50)])
    assert delivery.stop(timeout_s=20.0)
    store: Store = SqliteStore(f"sqlite://{tmp_path}/store.db")
    assert store.samples("host", start_ns=T0, end_ns=T0 + 100 * S) == [host(second) for second in range(51)]
    assert delivery.lag_s == 0.0 and spool.waiting_blocks == 0
    store.close()
    spool.close()


def test_stop_does_not_wait_for_a_store_that_hangs(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    class Hanging(Ledger):
        def write(self, samples: Sequence[Sample]) -> list[Rejected]:
            entered.set()
            release.wait(120)
            return super().write(samples)

    spool = Spool(tmp_path / "spool", commit_every_s=0.02, min_free_bytes=0)
    delivery = Delivery(spool, Hanging().open)
    delivery.start()
    spool.append([host(0)])
    assert entered.wait(120)
    assert not delivery.stop(timeout_s=0.1)
    release.set()
    spool.close()


def test_stop_during_backoff_ends_at_once_and_keeps_the_samples(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.down = StoreError("no permission")
    spool = Spool(tmp_path / "spool", commit_every_s=0.02, min_free_bytes=0)
    delivery = Delivery(spool, ledger.open)
    delivery.start()
    spool.append([host(0)])
    while not delivery.errors:
        time.sleep(0.01)
    assert delivery.stop(timeout_s=20.0)
    spool.close()
    again = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    assert [b.samples() for b in again.backlog(10)] == [[host(0)]]
    again.close()


def test_restarts_in_an_outage_lose_nothing(tmp_path: Path) -> None:
    down = Ledger()
    down.down = StoreDown("gone")
    second = 0
    for _ in range(20):
        spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
        delivery = Delivery(spool, down.open)
        for _ in range(7):
            fill(spool, [second])
            second += 1
        delivery.carry()
        spool.close()
    spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
    delivery = Delivery(spool, lambda: open_store(f"sqlite://{tmp_path}/store.db"), batch_samples=13)
    while spool.waiting_blocks:
        delivery.carry()
    store = open_store(f"sqlite://{tmp_path}/store.db")
    assert store.samples("host", start_ns=T0, end_ns=T0 + 1000 * S) == [host(s) for s in range(140)]
    store.close()
    spool.close()


def test_a_second_delivery_of_the_same_changes_nothing(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    answers: list[Mapping[str, object]] = []
    for _ in range(2):
        spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0)
        fill(spool, range(20))
        Delivery(spool, lambda: open_store(url)).carry()
        spool.close()
        store = open_store(url)
        columns = store.range("host", ["load1"], start_ns=T0, end_ns=T0 + 20 * S, step_ns=5 * S)
        answers.append({"rows": store.samples("host", start_ns=T0, end_ns=T0 + 99 * S), "columns": columns})
        store.close()
    assert answers[0] == answers[1]


def test_an_outage_names_the_store_once_and_its_end_is_told_as_loudly(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, ledger = Clock(), Ledger()
    url = "influxdb://127.0.0.1:1/fleet"
    ledger.down = StoreDown(f"store {url}: no answer; is the server running?")
    delivery = Delivery(spool, ledger.open, monotonic=clock, jitter=lambda: 1.0, target=url)
    fill(spool, [0])
    with caplog.at_level(logging.WARNING):
        clock.now += 41 * delivery.carry()
        ledger.down = None
        delivery.carry()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"store {url}: no answer; is the server running? Next attempt in 1 s"),
        ("WARNING", f"{url}: delivering again after 41 s"),
    ]
