"""One process of the fleet bench, in the place of several hosts: each has a spool, a delivery and a connection of its own.

Started by `bench/fleet.py` with one JSON object as its argument; it answers in JSON lines on its output: "ready", what was acknowledged
("acked": node, time and samples and values by measurement) and, once a second, "stats". It obeys the words start, stop and quit.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3.connectionpool

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from agent.delivery import Delivery
from agent.simulator.fleet import NODES_PER_CIRCUIT, Fleet
from agent.simulator.settings import SimulatorSettings
from agent.spool import Spool
from telemetry.sample import Sample, Value
from telemetry.store import Store, open_store

S = 10**9
NODES_PER_RACK = 4
PAIR_EVERY_S = 5
EVENT_EVERY_S = 60
SPREAD_S = 0.7  # the ticks of the hosts are spread over so much of a second; the rest of it simulates the next

Tally = dict[str, list[int]]  # measurement -> samples, values


@dataclass(slots=True)
class Host:
    """A host's end of the way to the store, and what it has not yet told as acknowledged."""

    name: str
    rack: str
    circuit: str
    simulated: str  # whose figures it has, by the simulation's name
    phase_ns: int
    spool: Spool
    delivery: Delivery
    unacknowledged: list[tuple[int, int, Tally]] = field(default_factory=list)  # ticket, time, what
    tags: dict[int, dict[str, str]] = field(default_factory=dict)

    def renamed(self, tags: Any) -> dict[str, str]:
        found = self.tags.get(id(tags))  # a device keeps its tags; those made for one moment are of the same circuit
        if found is None:
            found = {name: value.replace(self.simulated, self.name) for name, value in tags.items()}
            found |= {"rack": self.rack, "circuit": self.circuit}
            self.tags[id(tags)] = found
        return found


class Requests:
    """HTTP requests to the store by the second in which they began, refused ones included; write calls where there is no HTTP."""

    def __init__(self, url: str) -> None:
        self.by_second: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._url = url
        self._is_http = not url.startswith("sqlite:")
        if self._is_http:
            usual = urllib3.connectionpool.HTTPConnectionPool.urlopen

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.count()
                return usual(*args, **kwargs)

            urllib3.connectionpool.HTTPConnectionPool.urlopen = counted  # type: ignore[method-assign]

    def count(self) -> None:
        with self._lock:
            self.by_second[int(time.time())] += 1

    def open(self) -> Store:
        store = open_store(self._url)
        if not self._is_http:
            usual = store.write

            def counted(samples: Any) -> Any:
                self.count()
                return usual(samples)

            store.write = counted  # type: ignore[method-assign]
        return store

    def take(self) -> dict[int, int]:
        with self._lock:
            found, self.by_second = self.by_second, Counter()
        return dict(found)


class Hosts:
    def __init__(self, given: dict[str, Any]) -> None:
        self.requests = Requests(given["url"])
        simulated = -(-given["nodes"] // given["alike"])
        self.fleet = Fleet(
            SimulatorSettings(nodes=simulated, gpus_per_node=given["gpus"], nodes_per_rack=NODES_PER_RACK)
        )
        self.hosts: list[Host] = []
        for place in range(given["nodes"]):
            number = given["first"] + place
            node = self.fleet.nodes[place % simulated]
            spool = Spool(Path(given["folder"]) / f"host{number:03}")
            host = Host(
                name=f"n{number:03}",
                rack=f"r{number // NODES_PER_RACK:02}",
                circuit=f"c{number // NODES_PER_CIRCUIT:02}",
                simulated=node.name,
                phase_ns=round(SPREAD_S * S * ((number * 0.618034) % 1)),
                spool=spool,
                delivery=Delivery(spool, self.requests.open, target=f"n{number:03}"),
            )
            self.hosts.append(host)
        self.hosts.sort(key=lambda host: host.phase_ns)
        self.simulating_s = 0.0  # CPU time
        self.ticks = self.missed = 0

    def run(self, words: queue.Queue[str]) -> None:
        tell({"kind": "ready"})
        if words.get() != "start":
            return
        for host in self.hosts:
            host.delivery.start()
        second = int(time.time()) + 1
        samples = self.simulate(second)
        while words.empty():
            self.tick(second, samples)
            self.missed += max(0, int(time.time()) - second - 1)  # as an agent does: it never makes up for lost ticks
            second = max(second + 1, int(time.time()))
            samples = self.simulate(second)
            self.report()
        words.get()
        while words.empty():
            time.sleep(0.5)
            self.report()
        for host in self.hosts:
            host.delivery.stop()
            host.spool.close()
        self.report()

    def simulate(self, second: int) -> dict[str, list[Sample]]:
        """The samples of each host of this second."""
        began_s = time.thread_time()
        fresh: dict[str, list[Sample]] = {}
        for sample in self.fleet.step(1.0):
            fresh.setdefault(sample.tags["node"], []).append(sample)
        found = {host.name: self.of_host(host, fresh[host.simulated], second) for host in self.hosts}
        self.simulating_s += time.thread_time() - began_s
        return found

    def of_host(self, host: Host, samples: list[Sample], second: int) -> list[Sample]:
        time_ns = second * S + host.phase_ns
        found = [Sample(s.measurement, host.renamed(s.tags), s.fields, time_ns) for s in samples]
        found += self.besides(host, found, second)
        return found

    def besides(self, host: Host, samples: list[Sample], second: int) -> Iterator[Sample]:
        """What triage writes of each pair, and an event now and then, so that all kinds of samples take the way."""
        time_ns = second * S + host.phase_ns
        if second % PAIR_EVERY_S == 0:
            for sample in samples:
                if sample.measurement == "engine":
                    tokens = float(sample.fields.get("tokens_per_s", 0.0))
                    fields: dict[str, Value] = {
                        "output_pct": round(tokens % 100, 1),
                        "util_pct": 97.5,
                        "tokens_per_s": tokens,
                        "expected_tokens_per_s": 1700.0,
                        "expected_spread_pct": 4.0,
                        "effort": "gpu",
                        "baseline": "history",
                    }
                    yield Sample("pair", sample.tags, fields, time_ns)
        if (second + host.phase_ns) % EVENT_EVERY_S == 0:
            tags = {"node": host.name, "rack": host.rack, "kind": "bmc", "subject": host.name}
            fields = {"text": f"fan {second % 7} of {host.name} was slow at {second}", "code": 0}
            yield Sample("event", tags, fields, time_ns)

    def tick(self, second: int, samples: dict[str, list[Sample]]) -> None:
        self.ticks += 1
        for host in self.hosts:
            wait_s = second + host.phase_ns / S - time.time()
            if wait_s > 0:
                time.sleep(wait_s)
            mine = samples[host.name]
            tally: Tally = {}
            for sample in mine:
                counts = tally.setdefault(sample.measurement, [0, 0])
                counts[0] += 1
                counts[1] += len(sample.fields)
            ticket = host.spool.append(mine)
            host.unacknowledged.append((ticket, second * S + host.phase_ns, tally))

    def report(self) -> None:
        for host in self.hosts:
            acknowledged = host.spool.acknowledged
            while host.unacknowledged and host.unacknowledged[0][0] <= acknowledged:
                _, time_ns, tally = host.unacknowledged.pop(0)
                tell({"kind": "acked", "node": host.name, "at": time_ns, "tally": tally})
        hosts = self.hosts
        tell(
            {
                "kind": "stats",
                "waiting": max(host.spool.waiting_blocks for host in hosts),
                "unacknowledged": sum(len(host.unacknowledged) for host in hosts),
                "spool_bytes": sum(host.spool.size_bytes for host in hosts),
                "delivered": sum(host.delivery.delivered for host in hosts),
                "given_up": sum(host.spool.dropped_total + host.delivery.rejected for host in hosts),
                "refused": sum(host.spool.refused_total for host in hosts),
                "errors": sum(host.delivery.errors for host in hosts),
                "requests": self.requests.take(),
                "cpu_s": {"simulation": self.simulating_s, **threads_s()},
                "ticks": self.ticks,
                "missed": self.missed,
            }
        )


def threads_s() -> dict[str, float]:
    """CPU seconds of all threads of one name so far."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        try:
            spent_ns = int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text("ascii").split()[0])
        except OSError:  # it has just ended
            continue
        name = thread.name if thread.name in ("spool", "delivery") else "rest"
        found[name] = found.get(name, 0.0) + spent_ns / S
    return found


def tell(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def main() -> None:
    words: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        os._exit(1)  # whoever started this is gone

    hosts = Hosts(json.loads(sys.argv[1]))
    threading.Thread(target=listen, daemon=True).start()
    try:
        hosts.run(words)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
