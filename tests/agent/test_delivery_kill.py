"""What the agent acknowledged is in the store at the end, also where store and agent are killed together, or the power goes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.delivery import Delivery
from agent.spool import Spool
from telemetry.store import open_store
from tests.store_servers import Influxd, Victoria

ROOT = Path(__file__).parents[2]
MS = 10**6

CARRIER = """
    import sys, time
    from agent.delivery import Delivery
    from agent.spool import Spool
    from telemetry.sample import Sample
    from telemetry.store import open_store
    folder, url, start_ns, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0, segment_bytes=4096)
    delivery = Delivery(spool, lambda: open_store(url), jitter=lambda: 0.0)
    delivery.start()
    while True:
        time_ns = start_ns + number * 1_000_000
        spool.append([Sample("host", {"node": f"n{number % 7}"}, {"load1": number / 8}, time_ns)])
        if spool.commit():
            print(number, delivery.delivered, flush=True)
        number += 1
        time.sleep(0.002)
"""


class Carrier:
    """An agent's spool and delivery in a process of its own; it tells each number that it acknowledged."""

    def __init__(self, folder: Path, url: str, start_ns: int, first: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CARRIER), str(folder), url, str(start_ns), str(first)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.acknowledged: set[int] = set()

    def wait_delivered(self, count: int) -> None:
        """Until the store has taken `count` samples of this process."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, delivered = line.split()
            self.acknowledged.add(int(number))
            if int(delivered) >= count:
                return
        pytest.fail("the carrier ended")

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        assert self._process.stdout is not None
        whole = self._process.stdout.read().rpartition("\n")[0]
        self.acknowledged |= {int(line.split()[0]) for line in whole.splitlines()}
        self._process.wait()


def numbers_in(url: str, start_ns: int, highest: int) -> set[int]:
    store = open_store(url)
    try:
        found = store.samples("host", start_ns=start_ns, end_ns=start_ns + (highest + 1) * MS)
    finally:
        store.close()
    numbers = [(sample.time_ns - start_ns) // MS for sample in found]
    assert len(numbers) == len(set(numbers)), "a sample is there twice"
    assert all(s.fields["load1"] == number / 8 for s, number in zip(found, numbers, strict=True))
    return set(numbers)


def deliver_the_rest(folder: Path, url: str) -> None:
    spool = Spool(folder, commit_every_s=None, min_free_bytes=0)
    delivery = Delivery(spool, lambda: open_store(url))
    give_up_s = time.monotonic() + 60
    while spool.waiting_blocks:
        delivery.carry()
        assert time.monotonic() < give_up_s, delivery.last_error
    spool.close()


def kill_again_and_again(server: Victoria | Influxd, folder: Path, kills: int) -> tuple[int, int]:
    """(how many samples were acknowledged, how many of them are not in the store)."""
    rng = random.Random(kills)
    url = server.new_url()
    start_ns = (time.time_ns() // MS - 3_600_000) * MS
    acknowledged: set[int] = set()
    for kill in range(kills):
        victims = ("both", "server", "agent")[kill % 3]
        carrier = Carrier(folder, url, start_ns, max(acknowledged, default=-1) + 1000)
        carrier.wait_delivered(rng.randrange(1, 200))
        if victims == "both":
            carrier.pause()
        if victims != "agent":
            server.kill()
        if victims == "server":
            server.start()
            carrier.wait_delivered(400)
        carrier.kill()
        if victims == "both":
            server.start()
        acknowledged |= carrier.acknowledged
    deliver_the_rest(folder, url)
    server.kill()  # what it has not on disk by now, a spool that is opened again still has
    server.start()
    deliver_the_rest(folder, url)
    give_up_s = time.monotonic() + 20
    while lost := acknowledged - numbers_in(url, start_ns, max(acknowledged)):
        if time.monotonic() > give_up_s:  # a reader sees what others wrote after a while
            break
        time.sleep(0.2)
    return len(acknowledged), len(lost)


@pytest.mark.server
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_kills_of_a_victoriametrics_and_of_the_agent_lose_nothing_that_was_acknowledged(
    own_victoria: Callable[..., Victoria], tmp_path: Path, kills: int
) -> None:
    acknowledged, lost = kill_again_and_again(own_victoria("-dedup.minScrapeInterval=1ms"), tmp_path / "spool", kills)
    print(f"{kills} kills, {acknowledged} acknowledged, {lost} lost")
    assert acknowledged > 20 * kills
    assert lost == 0


@pytest.mark.server
@pytest.mark.long
def test_kills_of_an_influxd_and_of_the_agent_lose_nothing_that_was_acknowledged(
    own_influxd: Callable[..., Influxd], tmp_path: Path
) -> None:
    acknowledged, lost = kill_again_and_again(own_influxd(), tmp_path / "spool", 30)
    print(f"30 kills, {acknowledged} acknowledged, {lost} lost")
    assert acknowledged > 600
    assert lost == 0
