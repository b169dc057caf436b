"""A long outage of the store at a host of 8 GPUs, its clock scaled: nothing lost, little disk, live data first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from agent.spool.disk import Disk
from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Sample, Value
from telemetry.store import Store, StoreDown, open_store

S = 10**9
T0 = 1_795_960_800 * S
RESTARTS = 20
STEADY = ("_max", "_limit", "_total_bytes", "capacity", "_default", "_requested", "count")


class Unsynced(Disk):
    """A day of seconds in minutes: without this, the test would mostly wait for the medium."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Device:
    """Every numeric field of its measurement, wandering as a busy device's do: the most that an agent could have to say."""

    def __init__(self, measurement: str, tags: dict[str, str], rng: random.Random) -> None:
        self._measurement, self._tags, self._rng = measurement, tags, rng
        self._fields = [f for f in catalogue.MEASUREMENTS[measurement].fields.values() if f.type is not str]
        self._now: dict[str, Value] = {
            f.name: round(rng.random() * 100, 1) if f.type is float else rng.randrange(8) for f in self._fields
        }

    def at(self, time_ns: int) -> Sample:
        for f in self._fields:
            value = self._now[f.name]
            assert not isinstance(value, str)
            if f.kind is Kind.COUNTER:
                self._now[f.name] = value + (self._rng.randrange(2000) if f.type is int else self._rng.random())
            elif f.kind is Kind.GAUGE and not any(part in f.name for part in STEADY) and self._rng.random() < 0.6:
                self._now[f.name] = round(min(100.0, max(0.0, value + self._rng.gauss(0, 2))), 1)
        return Sample(self._measurement, self._tags, dict(self._now), time_ns)


def host_of_8(rng: random.Random) -> list[Device]:
    tags = {"node": "n07", "rack": "r2"}
    gpus = [Device("gpu", {**tags, "gpu": str(i), "uuid": f"GPU-{i:08x}"}, rng) for i in range(8)]
    engine = {**tags, "engine": "chat-a", "kind": "vllm", "model": "qwen2-7b", "gpus": "0+1+2+3+4+5+6+7"}
    return [*gpus, Device("engine", engine, rng), Device("host", tags, rng)]


def refuse() -> Store:
    raise StoreDown("the outage")


def open_spool(folder: Path, now_s: list[float]) -> Spool:
    return Spool(folder, commit_every_s=None, min_free_bytes=0, disk=Unsynced(), monotonic=lambda: now_s[0])


@pytest.mark.parametrize("seconds", [1200, pytest.param(86_400, marks=pytest.mark.long)])
def test_an_outage_loses_nothing_and_live_data_comes_first_after_it(tmp_path: Path, seconds: int) -> None:
    rng = random.Random(seconds)
    devices = host_of_8(rng)
    total = 0
    now_s = [0.0]
    for run in range(RESTARTS + 1):
        spool = open_spool(tmp_path / "spool", now_s)
        delivery = Delivery(spool, refuse)
        for second in range(seconds * run // (RESTARTS + 1), seconds * (run + 1) // (RESTARTS + 1)):
            spool.append([device.at(T0 + second * S) for device in devices])
            spool.commit()
            total += len(devices)
        delivery.carry()
        assert spool.dropped_total == 0
        if run < RESTARTS:
            spool.close()
    day_bytes = spool.size_bytes * 86_400 / seconds
    assert day_bytes <= 250e6

    url = f"sqlite://{tmp_path}/store.db"
    delivery = Delivery(spool, lambda: open_store(url))
    reader = open_store(url)
    second = seconds
    while spool.waiting_blocks:
        spool.append([device.at(T0 + second * S) for device in devices])
        spool.commit()
        total += len(devices)
        delivery.carry()
        newest = reader.latest("gpu", since_ns=T0 + second * S)
        assert len(newest) == 8, "the live second waits behind the backlog"
        second += 1
    assert delivery.delivered == total and delivery.rejected == 0
    step = 3600 * S
    seen = 0
    for measurement in ("gpu", "engine", "host"):
        for start in range(T0, T0 + second * S, step):
            seen += len(reader.samples(measurement, start_ns=start, end_ns=start + step))
    assert seen == total
    now_s[0] += 60.0  # what the store may still lose stays so long
    spool.commit()
    spool.close()
    assert list((tmp_path / "spool").glob("*.seg")) == []
    reader.close()
