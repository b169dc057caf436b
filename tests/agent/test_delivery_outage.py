"""A day without the store at a host of 8 GPUs, its clock scaled: the agent is restarted and killed meanwhile, and nothing is lost.

The samples are as large as an agent's can be: every field of every measurement that it writes. The outage runs as fast as the spool
takes it; what comes after it runs in real time, against a real server that is started again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from agent.spool.disk import Disk
from telemetry import catalogue
from telemetry.catalogue import Kind
from telemetry.sample import Sample, Value
from telemetry.store import StoreDown, open_store
from tests.store_servers import Influxd

ROOT = Path(__file__).parents[2]
S = 10**9
T0 = 1_795_960_800 * S
PERIOD = 300
"""After so many seconds the values come again; the spool looks back over one minute at most."""
MOST_BYTES_A_DAY = 250e6
STEADY = ("_max", "_limit", "_total_bytes", "capacity", "_default", "_requested", "count")


class Unsynced(Disk):
    """A day of seconds in minutes: without this, the test would mostly wait for the medium. A kill loses nothing by it."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class Device:
    """Every field of its measurement, wandering as a busy device's do: the most that an agent could have to say."""

    def __init__(self, measurement: str, tags: dict[str, str], every_s: int, rng: random.Random) -> None:
        self.measurement, self.tags, self.every_s = measurement, tags, every_s
        fields = list(catalogue.MEASUREMENTS[measurement].fields.values())
        now: dict[str, Value] = {
            f.name: round(rng.random() * 100, 1)
            if f.type is float
            else rng.randrange(8)
            if f.type is int
            else f"v{f.name}"
            for f in fields
        }
        self._rows: list[dict[str, Value]] = []
        for _ in range(PERIOD):
            for f in fields:
                value = now[f.name]
                if isinstance(value, str):
                    continue
                if f.kind is Kind.COUNTER:
                    now[f.name] = value + (rng.randrange(2000) if f.type is int else rng.random())
                elif f.kind is Kind.GAUGE and not any(part in f.name for part in STEADY) and rng.random() < 0.6:
                    now[f.name] = round(min(100.0, max(0.0, value + rng.gauss(0, 2))), 1)
            self._rows.append(dict(now))

    def at(self, second: int) -> Sample:
        return Sample(self.measurement, self.tags, self._rows[second % PERIOD], T0 + second * S)


def host_of_8() -> list[Device]:
    rng = random.Random(8)
    tags = {"node": "n07", "rack": "r2"}
    gpus = [Device("gpu", {**tags, "gpu": str(i), "uuid": f"GPU-{i:08x}"}, 1, rng) for i in range(8)]
    engine = {**tags, "engine": "chat-a", "kind": "vllm", "model": "qwen2-7b", "gpus": "0+1+2+3+4+5+6+7"}
    return [
        *gpus,
        Device("engine", engine, 1, rng),
        Device("host", tags, 1, rng),
        Device("agent", tags, 1, rng),
        *(Device("psu", {**tags, "psu": f"PSU{i}"}, 30, rng) for i in range(4)),
        Device("power", tags, 30, rng),
        Device("thermal", tags, 30, rng),
        Device("circuit", {**tags, "circuit": "A7"}, 30, rng),
        Device("event", {**tags, "kind": "xid", "subject": "3"}, 600, rng),
    ]


def tick(devices: list[Device], second: int) -> list[Sample]:
    return [device.at(second) for device in devices if second % device.every_s == 0]


def live_through(folder: str, url: str, first: int, last: int, is_to_be_killed: bool) -> None:
    """An agent from second `first` to before `last`, in a process of its own; it tells each second that is acknowledged."""
    devices = host_of_8()
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0, disk=Unsynced())
    delivery = Delivery(spool, lambda: open_store(url))
    delivery.start()
    for second in range(first, last):
        spool.append(tick(devices, second))
        assert spool.commit(tidy=second % 5 == 0)
        sys.stdout.write(f"{second}\n")
    sys.stdout.flush()
    if is_to_be_killed:  # however late it comes
        time.sleep(600)
    assert delivery.delivered == 0 and spool.dropped_total == 0 and spool.refused_total == 0
    spool.close()
    os._exit(0)  # the thread is in its backoff


def run_agent(folder: Path, url: str, first: int, last: int, killed_at: int | None) -> int:
    """The second at which the next agent begins."""
    arguments = (str(folder), url, first, last, killed_at is not None)
    call = f"from tests.agent.test_delivery_outage import live_through; live_through(*{arguments!r})"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", call],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    acknowledged = first - 1
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged == killed_at:
            process.kill()
    assert process.wait() == (-signal.SIGKILL if killed_at is not None else 0)
    return acknowledged + 1


def sit_out(folder: Path, url: str, seconds: int, restarts: int) -> None:
    """The outage: `restarts` restarts, every other one by SIGKILL."""
    rng = random.Random(seconds)
    second = 0
    for run in range(restarts + 1):
        last = seconds * (run + 1) // (restarts + 1)
        if run == restarts or second >= last - 2:
            second = run_agent(folder, url, second, last, None)
        else:
            second = run_agent(folder, url, second, last, rng.randrange(second, last - 1) if run % 2 else None)
    assert second == seconds


class CatchUp:
    """After the outage, in real time: an agent ticks each second until all is delivered."""

    def __init__(self, folder: Path, url: str, second: int) -> None:
        devices = host_of_8()
        spool = Spool(folder, min_free_bytes=0, commit_every_s=0.2)
        self.disk_bytes = spool.size_bytes
        delivery = Delivery(spool, lambda: open_store(url))
        reader = open_store(url)
        self.lags_s: list[float] = []
        self.behind_s: list[float] = []  # the newest GPU's sample in the store, behind the newest that was taken
        began_s = time.monotonic()
        delivery.start()
        while True:
            spool.append(tick(devices, second))
            appended_s = time.monotonic()
            time.sleep(max(0.0, began_s + len(self.lags_s) + 1 - appended_s))
            self.lags_s.append(delivery.lag_s)
            if len(self.lags_s) % 10 == 5:
                with contextlib.suppress(StoreDown):  # a server that takes in a day may be slow to answer
                    newest = reader.latest("gpu", since_ns=T0 + (second - 60) * S)
                    behind_ns = T0 + second * S - min((s.time_ns for s in newest), default=0)
                    self.behind_s.append(behind_ns / S if len(newest) == 8 else float("inf"))  # a minute or more
            second += 1
            if spool.waiting_blocks <= 1 or time.monotonic() - began_s > 3600:
                break
        self.drain_s = time.monotonic() - began_s
        give_up_s = time.monotonic() + 60
        while spool.waiting_blocks and time.monotonic() < give_up_s:
            time.sleep(0.1)
        assert delivery.stop(30) and spool.waiting_blocks == 0
        assert delivery.rejected == 0 and spool.dropped_total == 0
        self.seconds = second
        spool.close()
        reader.close()


def missing(url: str, seconds: int) -> int:
    """How many samples the store lacks; each is looked for by its own value."""
    store = open_store(url)
    lost = 0
    for device in host_of_8():
        field = next(f.name for f in catalogue.MEASUREMENTS[device.measurement].fields.values() if f.type is not str)
        for start in range(0, seconds, 7200):
            end = min(start + 7200, seconds)
            columns = store.range(
                device.measurement,
                [field],
                start_ns=T0 + start * S,
                end_ns=T0 + end * S,
                step_ns=S,
                aggregate="last",
                where=device.tags,
            )
            values = columns[0].values if columns else [None] * (end - start)
            for second in range(start, end):
                if second % device.every_s == 0:
                    lost += values[second - start] != pytest.approx(device.at(second).fields[field])
    store.close()
    return lost


def count_in(address: str, database: str, measurement: str, field: str) -> int:
    """How many samples an InfluxDB holds."""
    query = urllib.parse.urlencode({"db": database, "q": f'SELECT count("{field}") FROM "{measurement}"'})
    with urllib.request.urlopen(f"http://{address}/query?{query}") as answer:
        return int(json.load(answer)["results"][0]["series"][0]["values"][0][1])


class Full(Unsynced):
    """A disk on which nothing can be written any more."""

    is_full = True

    def write(self, descriptor: int, data: bytes) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "told to be full")
        return super().write(descriptor, data)


def test_five_minutes_of_a_full_disk_stay_in_memory_and_are_on_disk_when_there_is_room_again(tmp_path: Path) -> None:
    devices, disk = host_of_8(), Full()
    spool = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0, disk=disk)
    expected = 0
    for second in range(300):
        samples = tick(devices, second)
        expected += len(samples)
        spool.append(samples)
        assert not spool.commit()
    disk.is_full = False
    spool.append(tick(devices, 300))
    assert spool.commit() and spool.dropped_total == 0
    spool.close()
    again = Spool(tmp_path / "spool", commit_every_s=None, min_free_bytes=0, disk=disk)
    found = 0
    while blocks := again.backlog(2000):
        found += sum(block.count for block in blocks)
        again.delivered(blocks)
    assert found == expected + len(tick(devices, 300))
    again.close()


@pytest.mark.server
@pytest.mark.parametrize(
    "seconds", [pytest.param(3_600, marks=pytest.mark.long), pytest.param(86_400, marks=pytest.mark.long)]
)
def test_an_outage_of_a_server_loses_nothing_and_live_data_comes_first_after_it(
    own_influxd: Callable[..., Influxd], tmp_path: Path, seconds: int
) -> None:
    server = own_influxd()
    url = server.new_url()
    server.kill()
    sit_out(tmp_path / "spool", url, seconds, restarts=20)
    server.start()
    after = CatchUp(tmp_path / "spool", url, seconds)
    lost = missing(url, after.seconds)
    live = after.lags_s[5:]
    print(
        f"{seconds} s: {after.disk_bytes / 1e6:.1f} MB, drained in {after.drain_s:.0f} s, lag {max(live, default=0):.1f} s, "
        f"in the store {max(after.behind_s, default=0):.1f} s behind, {lost} lost"
    )
    assert lost == 0
    assert after.disk_bytes <= MOST_BYTES_A_DAY * seconds / 86_400
    database = url.rpartition("/")[2]
    for measurement, each in (("gpu", 8), ("host", 1), ("agent", 1), ("engine", 1)):
        field = next(f.name for f in catalogue.MEASUREMENTS[measurement].fields.values() if f.type is not str)
        assert count_in(server.address, database, measurement, field) == each * after.seconds


def test_an_outage_of_the_embedded_store_loses_nothing_and_live_data_comes_first_after_it(tmp_path: Path) -> None:
    place = tmp_path / "store.db"
    place.mkdir()  # a folder in the file's place: nothing can be written until it is gone
    url = f"sqlite://{place}"
    seconds = 400
    sit_out(tmp_path / "spool", url, seconds, restarts=3)
    place.rmdir()
    now_s = [0.0]
    spool = Spool(
        tmp_path / "spool", commit_every_s=None, min_free_bytes=0, disk=Unsynced(), monotonic=lambda: now_s[0]
    )
    assert spool.size_bytes <= MOST_BYTES_A_DAY * seconds / 86_400
    delivery = Delivery(spool, lambda: open_store(url))
    reader = open_store(url)
    devices = host_of_8()
    while spool.waiting_blocks:
        spool.append(tick(devices, seconds))
        spool.commit()
        delivery.carry()
        newest = reader.latest("gpu", since_ns=T0 + seconds * S)
        assert len(newest) == 8, "the live second waits behind the backlog"
        seconds += 1
    reader.close()
    assert delivery.rejected == 0 and spool.dropped_total == 0
    assert missing(url, seconds) == 0
    now_s[0] += 60.0  # what the store may still lose stays so long
    spool.commit()
    spool.close()
    assert list((tmp_path / "spool").glob("*.seg")) == []
