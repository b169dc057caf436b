"""The newest samples from a real InfluxDB, however many series there are, whoever wrote them, and while they are being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from telemetry.sample import Sample
from telemetry.store import influxdb_samples
from telemetry.store.influxdb import InfluxStore

if TYPE_CHECKING:
    from tests.store_servers import Influxd

S = 10**9
pytestmark = pytest.mark.server


@pytest.fixture
def store(influxd: Influxd) -> Iterator[InfluxStore]:
    opened = InfluxStore(influxd.new_url())
    yield opened
    opened.close()


def gpu(index: int, time_ns: int, **fields: float | int) -> Sample:
    return Sample("gpu", {"node": f"n{index // 2}", "gpu": str(index)}, fields, time_ns)


def by_another_writer(store: InfluxStore, *lines: str) -> None:
    store.server.write("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("few", [0, 1000])
def test_the_newest_of_each_series_is_found_however_long_it_was_silent(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(influxdb_samples, "_FEW", few)
    now = time.time_ns() // S * S
    ages = {0: 0, 1: 1, 2: 7, 3: 70, 4: 700, 5: 0}
    newest = {i: gpu(i, now - age * S, util_pct=float(i), temp_c=50.0 + i) for i, age in ages.items()}
    newest[5] = gpu(5, now, state=4)  # hung: nothing else is known of it any more
    earlier = [gpu(i, now - (age + 2) * S, util_pct=99.0, temp_c=1.0, power_w=400.0) for i, age in ages.items()]
    store.write([*newest.values(), *earlier])
    for _ in range(3):  # how far it looks back depends on what was found before
        assert store.latest("gpu", since_ns=now - 3600 * S) == list(newest.values())
        assert store.latest("gpu", since_ns=now - 3600 * S, fields=["util_pct"]) == [
            gpu(i, now - age * S, util_pct=float(i)) for i, age in ages.items() if i != 5
        ]
        assert store.latest("gpu", since_ns=now - 3600 * S, fields=["power_w"]) == []
        assert [s.tags["gpu"] for s in store.latest("gpu", since_ns=now - 60 * S, fields=["temp_c"])] == ["0", "1", "2"]
        among = {"node": ["n1", "n2"], "gpu": ["3", "5"]}
        assert store.latest("gpu", since_ns=now - 3600 * S, where=among, fields=["state", "temp_c"]) == [
            gpu(3, now - 70 * S, temp_c=53.0),
            newest[5],
        ]


@pytest.mark.parametrize("few", [0, 1000])
def test_a_sample_that_another_wrote_is_the_newest_too(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(influxdb_samples, "_FEW", few)
    now = time.time_ns() // S * S
    store.write([gpu(0, now - S, util_pct=1.0, temp_c=2.0)])
    by_another_writer(
        store, f"gpu,node=n0,gpu=1 util_pct=3,temp_c=4 {now - 2 * S}", f"gpu,node=n0,gpu=1 temp_c=5 {now - S}"
    )
    assert store.latest("gpu", since_ns=0, fields=["util_pct"]) == [gpu(0, now - S, util_pct=1.0)]
    assert store.latest("gpu", since_ns=0) == [gpu(0, now - S, util_pct=1.0, temp_c=2.0), gpu(1, now - S, temp_c=5.0)]


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("fields", [None, ["util_pct", "temp_c"]])
def test_a_sample_that_does_not_show_all_of_its_fields_yet_is_waited_for(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch, few: int, fields: list[str] | None
) -> None:
    monkeypatch.setattr(influxdb_samples, "_FEW", few)
    monkeypatch.setattr(influxdb_samples, "_PAUSES_S", (0.05,) * 200)
    now = time.time_ns() // S * S
    store.write([gpu(0, now - S, util_pct=1.0, temp_c=2.0), gpu(1, now, util_pct=1.0, temp_c=2.0)])
    by_another_writer(store, f"gpu,node=n0,gpu=0 util_pct=8,sample_fields=2i {now}")
    rest = threading.Timer(0.3, by_another_writer, (store, f"gpu,node=n0,gpu=0 temp_c=9 {now}"))
    rest.start()
    found = store.latest("gpu", since_ns=now - 60 * S, fields=fields)
    rest.join()
    assert found == [gpu(0, now, util_pct=8.0, temp_c=9.0), gpu(1, now, util_pct=1.0, temp_c=2.0)]


def test_samples_of_a_time_are_waited_for_as_well_and_the_limit_holds(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influxdb_samples, "_PAUSES_S", (0.05,) * 200)
    now = time.time_ns() // S * S
    store.write([gpu(0, now - t * S, util_pct=float(t), temp_c=2.0) for t in range(1, 5)])
    by_another_writer(store, f"gpu,node=n0,gpu=0 temp_c=3,sample_fields=2i {now}")
    rest = threading.Timer(0.3, by_another_writer, (store, f"gpu,node=n0,gpu=0 util_pct=0 {now}"))
    rest.start()
    found = store.samples("gpu", start_ns=now - 60 * S, end_ns=now + S, limit=3)
    rest.join()
    assert [(s.time_ns, s.fields["util_pct"]) for s in found] == [(now - t * S, float(t)) for t in (2, 1, 0)]


def test_a_field_that_is_gone_is_gone_and_nobody_waits_for_it(
    store: InfluxStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influxdb_samples.time, "sleep", lambda _: pytest.fail("waited"))
    now = time.time_ns() // S * S
    store.write([gpu(0, now - S, util_pct=1.0, temp_c=2.0, power_w=3.0), gpu(0, now, util_pct=4.0)])
    assert store.latest("gpu", since_ns=0, fields=["util_pct", "temp_c"]) == [gpu(0, now, util_pct=4.0)]
    assert store.latest("gpu", since_ns=0) == [gpu(0, now, util_pct=4.0)]
    store.write([gpu(0, now, mem_temp_c=5.0)])  # two writes of one time
    assert store.latest("gpu", since_ns=0) == [gpu(0, now, util_pct=4.0, mem_temp_c=5.0)]


def test_half_a_character_asked_for_matches_nothing(store: InfluxStore) -> None:
    store.write([gpu(0, S, util_pct=1.0)])
    assert store.latest("gpu", since_ns=0, where={"node": "\ud800"}) == []
    assert len(store.latest("gpu", since_ns=0, where={"node": ["n0", "\ud800"]})) == 1
