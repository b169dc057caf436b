"""A whole fleet on one store: `python bench/fleet.py [--nodes 125] [--gpus 8] [--seconds 120] [--store victoriametrics]`.

Simulated hosts take the way that real ones take: every host has its spool (a folder, synced once a second), its delivery and its
connection, at 1 Hz, with all that an agent writes. Several hosts share a process, so that two cores suffice; the table says how many, and
what the simulation itself costs. Then two bad moments: the server is killed with -9 and is back after 30 s (with SQLite: another program
holds the file for as long), and ten agents are killed with -9 and started again. Meanwhile a reader looks at what has arrived, and the
wall asks its questions. At the end everything that was acknowledged into the spools is looked for in the store, and triage reads and
judges the fleet. Prints a table, or with --json an object; exits 1 when a sample was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.fleet_server import Server
from dashboard.fleet import read_fleet
from dashboard.heard import Heard
from telemetry.sample import Sample
from telemetry.store import Store, StoreError, open_store

S = 10**9
KILLED_HOSTS = 10
LIVE_S = 5.0  # what is younger is live
LOOK_EVERY_S = 0.4
CHUNK_NS = 20 * S  # of samples that are read at once to be counted
DAY_STEP_S = 300
DRAWN = ("util_pct", "temp_c", "power_w", "sm_clock_mhz", "mem_used_bytes", "throttle_reasons", "energy_j", "state")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=125)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the quiet time that is measured first")
    parser.add_argument("--outage", type=float, default=30.0, help="seconds without the server")
    parser.add_argument("--store", choices=["victoriametrics", "influxdb", "sqlite"], default="victoriametrics")
    parser.add_argument("--processes", type=int, default=3, help="that stand for the hosts which aren't killed")
    parser.add_argument("--history", type=float, default=24.0, help="hours of it that the wall's questions find")
    parser.add_argument("--window", type=float, default=300.0, help="seconds of full samples before triage judges")
    parser.add_argument("--turns", type=int, default=8, help="of triage; 0: none")
    parser.add_argument("--alike", type=int, default=4, help="hosts that share the figures of a simulated one")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before that are not measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.turns == 1:
        parser.error("--turns: 0, or at least 2; the first reads the past")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet")))
        server = Server(options.store, folder)
        stack.callback(server.stop)
        bench = Bench(options, folder, server, stack)
        bench.run()
    if options.json:
        print(json.dumps({"lost": bench.lost, **bench.rows}, indent=1))
    else:
        width = max(map(len, bench.rows))
        for row, value in bench.rows.items():
            print(f"{row:{width}}  {value}")
    return int(bench.lost > 0)


class Group:
    """A process in the place of some hosts, and what it told."""

    def __init__(self, given: dict[str, Any], told: Callable[[Any], None]) -> None:
        """`given` is what `bench/fleet_hosts.py` takes."""
        self.nodes = given["nodes"]
        self.ready = threading.Event()
        self.stats: dict[str, Any] = {}
        self._given = given
        self._told = told
        self._start()

    def _start(self) -> None:
        self.ready.clear()
        command = [sys.executable, str(ROOT / "bench" / "fleet_hosts.py"), json.dumps(self._given)]
        self.process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self.listener.start()

    def _listen(self, process: psutil.Popen) -> None:
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # cut off by the kill
            what = json.loads(line)
            if what["kind"] == "ready":
                self.ready.set()
            elif what["kind"] == "stats":
                self.stats = what
                self._told(what)
            else:
                self._told(what)

    def begin(self) -> None:
        while not self.ready.wait(1.0):
            if self.process.poll() is not None:
                raise SystemExit("a process of hosts ended at its start")
        self.say("start")

    def say(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """With -9; what it had told before is still read."""
        self.process.kill()
        self.process.wait()
        self.listener.join(30)

    def restart(self) -> None:
        self._start()
        self.begin()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Reader:
    """Looks at the newest sample of every host, as a page would, and notes how old each was when it was first seen."""

    def __init__(self, url: str, nodes: int) -> None:
        self.lags_s: list[float] = []
        self.nodes = nodes
        self._newest: dict[str, int] = {}
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)

    def oldest_s(self) -> float:
        """The age of what a reader sees of the host that is furthest behind."""
        seen = list(self._newest.values())
        return time.time() - min(seen) / S if len(seen) == self.nodes else float("inf")

    def take(self) -> list[float]:
        found, self.lags_s = self.lags_s, []
        return found

    def _run(self) -> None:
        store = open_store(self._url)
        while not self._stopping.wait(LOOK_EVERY_S):
            try:
                found = store.latest("host", since_ns=time.time_ns() - 120 * S)
            except StoreError:
                continue
            now_ns = time.time_ns()
            for sample in found:
                node = sample.tags["node"]
                if sample.time_ns > self._newest.get(node, 0):
                    self._newest[node] = sample.time_ns
                    self.lags_s.append((now_ns - sample.time_ns) / S)
        store.close()


class Wall:
    """Asks what the pages ask, again and again, beside everything else."""

    def __init__(self, url: str, day_ns: int) -> None:
        self.took_s: dict[str, list[float]] = {}
        self.cpu_s: dict[str, list[float]] = {}  # of the asking side
        self._url = url
        self._end_ns = day_ns
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(120)

    def _run(self) -> None:
        store = open_store(self._url)
        self._heard = Heard(store)
        while not self._stopping.wait(1.0):
            for question, ask in self._questions(store).items():
                began_s, cpu_s = time.perf_counter(), time.thread_time()
                ask()
                self.took_s.setdefault(question, []).append(time.perf_counter() - began_s)
                self.cpu_s.setdefault(question, []).append(time.thread_time() - cpu_s)
        store.close()

    def _questions(self, store: Store) -> dict[str, Callable[[], object]]:
        now_ns, end_ns, heard = time.time_ns(), self._end_ns, self._heard
        day = {"start_ns": end_ns - 24 * 3600 * S, "end_ns": end_ns, "step_ns": 300 * S}
        six_hours = {"start_ns": end_ns - 6 * 3600 * S, "end_ns": end_ns, "step_ns": 30 * S}
        one: dict[str, str] = {"node": "n000", "gpu": "0"}
        return {
            "newest of all GPUs, 5 fields": lambda: store.latest("gpu", since_ns=now_ns - 60 * S, fields=DRAWN[:5]),
            "the whole wall (engines, GPUs, hosts, pairs)": lambda: read_fleet(
                store, now_ns, forget_s=86_400, stale_s=15, heard=heard
            ),
            "24 h fleet spread of one field": lambda: store.spread("gpu", ["util_pct"], **day),
            "one GPU, 6 h, 8 fields": lambda: store.range("gpu", list(DRAWN), **six_hours, where=one),
        }


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path, server: Server, stack: ExitStack) -> None:
        self.options, self.folder, self.server, self.stack = options, folder, server, stack
        self.rows: dict[str, str] = {}
        self.lost = 0
        self.acknowledged: dict[tuple[str, str, int], tuple[int, int]] = {}  # measurement, node, time: samples, values
        self.requests: Counter[int] = Counter()
        self.groups: list[Group] = []
        self.killed: Group | None = None

    def run(self) -> None:
        self.server.start()
        day_ns = time.time_ns() // (300 * S) * 300 * S
        self.fill_history(day_ns)
        self.start_hosts()
        reader = Reader(self.server.url, self.options.nodes)
        wall = Wall(self.server.url, day_ns)
        self.began_ns = time.time_ns()
        reader.start()
        self.until(lambda: reader.oldest_s() < LIVE_S, 120, "all hosts are live")
        time.sleep(self.options.settle)
        self.quiet(reader, wall)
        self.without_server(reader)
        self.agents_killed(reader)
        if self.options.turns:
            left_s = self.options.window - (time.time_ns() - self.began_ns) / S
            if left_s > 0:
                self.say(f"{left_s:.0f} s until triage has its window")
                time.sleep(left_s)
            self.judge()
        self.finish(reader)
        self.count()

    def say(self, text: str) -> None:
        load = os.getloadavg()[0]
        print(f"{time.strftime('%H:%M:%S')}  {text}  (load {load:.1f})", file=sys.stderr, flush=True)

    def note(self, row: str, value: str) -> None:
        self.rows[row] = value
        self.say(f"{row}: {value}")

    def until(self, met: Callable[[], bool], within_s: float, what: str) -> float | None:
        """The seconds until it is so; None when it is not within `within_s`."""
        began_s = time.monotonic()
        while not met():
            for group in self.groups:
                if group.process.poll() is not None and group is not self.killed:
                    raise SystemExit("a process of hosts has ended")
            if time.monotonic() - began_s > within_s:
                self.say(f"not within {within_s:.0f} s: {what}")
                return None
            time.sleep(0.1)
        return time.monotonic() - began_s

    # --- before

    def fill_history(self, end_ns: int) -> None:
        """A day of two fields of every GPU, every five minutes, and six hours of one GPU at 1 Hz."""
        hours, gpus = self.options.history, self.options.gpus
        store = open_store(self.server.url)
        seconds = round(hours * 3600)
        began_s = time.perf_counter()
        for back in range(seconds, 0, -DAY_STEP_S):
            at_ns = end_ns - back * S
            if back % 3600 == 0:
                store.rollup(at_ns, 5.0)
            store.write(
                [
                    Sample("gpu", _gpu_tags(node, gpu), {"util_pct": float(back % 97), "temp_c": 60.0 + gpu}, at_ns)
                    for node in range(self.options.nodes)
                    for gpu in range(gpus)
                ]
            )
        one = [
            Sample("gpu", _gpu_tags(0, 0), {name: float(back % 89) for name in DRAWN[:5]}, end_ns - back * S + S // 2)
            for back in range(round(min(6.0, hours) * 3600), 0, -1)
        ]
        store.write(one)
        while store.rollup(end_ns, 5.0):
            pass
        store.close()
        took_s = time.perf_counter() - began_s
        self.say(f"{hours:g} h of history written in {took_s:.0f} s")

    def start_hosts(self) -> None:
        options = self.options
        apart = min(KILLED_HOSTS, options.nodes - 1)
        rest = options.nodes - apart
        processes = max(1, min(options.processes, rest))
        sizes = [rest // processes + (place < rest % processes) for place in range(processes)] + [apart]
        first = 0
        for nodes in sizes:
            if nodes:
                shared = {"gpus": options.gpus, "alike": options.alike, "url": self.server.url}
                spools = str(self.folder / "spools")
                group = Group({**shared, "first": first, "nodes": nodes, "folder": spools}, self.told)
                self.groups.append(group)
                self.stack.callback(group.end)
            first += nodes
        self.killed = self.groups[-1] if apart else None
        for group in self.groups:
            group.begin()
        self.note(
            "hosts",
            f"{options.nodes} of {options.gpus} GPUs, each with its spool, delivery and connection, in {len(self.groups)} processes"
            f" ({', '.join(map(str, sizes))}); {options.alike} hosts share the figures of a simulated one; {os.cpu_count()} cores",
        )

    def told(self, what: Any) -> None:
        if what["kind"] == "acked":
            for measurement, (samples, values) in what["tally"].items():
                self.acknowledged[(measurement, what["node"], what["at"])] = (samples, values)
        else:
            for second, count in what["requests"].items():
                self.requests[int(second)] += count

    # --- the quiet time

    def cpu_s(self) -> dict[str, float]:
        found = {"server": self.server.cpu_s()}
        for group in self.groups:
            for name, spent_s in group.stats.get("cpu_s", {}).items():
                found[name] = found.get(name, 0.0) + spent_s
        return found

    def quiet(self, reader: Reader, wall: Wall) -> None:
        """Twice: first with the reader alone, so that the server's cost is that of writing, then with the wall's questions."""
        self.say(f"{self.options.seconds:.0f} s of quiet begin")
        reader.take()
        before, began_ns, began_s = self.cpu_s(), time.time_ns(), time.monotonic()
        time.sleep(self.options.seconds)
        after, took_s = self.cpu_s(), time.monotonic() - began_s
        lags = reader.take()
        load = os.getloadavg()
        self.note_offered(began_ns, took_s)
        self.note("seen by a reader after", _quantiles(lags, "s"))
        self.note_cost({name: (after[name] - before.get(name, 0.0)) / took_s for name in after})
        self.note("load average", f"{load[0]:.1f} (1 min), {load[1]:.1f} (5 min)")
        wall.start()
        time.sleep(self.options.seconds / 2)
        self.note("seen while the wall asks after", _quantiles(reader.take(), "s"))
        wall.stop()
        for question, took in wall.took_s.items():
            mean_s = sum(wall.cpu_s[question]) / len(took)
            self.note(question, f"{_quantiles(took, 'ms')}, {mean_s * 1e3:.0f} ms of CPU of the asking side")

    def note_offered(self, began_ns: int, took_s: float) -> None:
        end_ns = began_ns + round(took_s * S)
        counts = [n for (_, _, at), n in list(self.acknowledged.items()) if began_ns <= at < end_ns]
        samples, values = (sum(column) / took_s for column in zip(*counts, strict=True))
        asked = sum(n for second, n in list(self.requests.items()) if began_ns <= second * S < end_ns)
        self.note(
            "offered", f"{samples:,.0f} samples/s, {values:,.0f} values/s; {asked / took_s:.0f} requests a second"
        )

    def note_cost(self, share: dict[str, float]) -> None:
        """`share`: of a core, by who used it."""
        nodes = self.options.nodes
        self.note("CPU of the server", f"{100 * share['server']:.0f} % of a core")
        self.note(
            "CPU of a host's delivery and spool",
            f"{100 * share['delivery'] / nodes:.2f} + {100 * share['spool'] / nodes:.2f} % of a core",
        )
        self.note("CPU of the simulation", f"{100 * share['simulation']:.0f} % of a core, all hosts together")
        hosts_mb = sum(group.process.memory_info().rss for group in self.groups) / 1e6
        self.note("RSS", f"server {self.server.rss_mb():.0f} MB, processes of hosts {hosts_mb:.0f} MB together")
        self.note("ticks that came too late and were left out", str(sum(g.stats["missed"] for g in self.groups)))

    # --- bad moments

    def waiting(self) -> int:
        """Commits that wait in the spool which is fullest."""
        return max((group.stats.get("waiting", 0) for group in self.groups), default=0)

    def without_server(self, reader: Reader) -> None:
        self.say("the server is killed with -9")
        self.server.kill()
        time.sleep(self.options.outage)
        full = sum(group.stats["spool_bytes"] for group in self.groups)
        reader.take()
        came_back = int(time.time())
        self.server.start()
        live = self.until(lambda: reader.oldest_s() < LIVE_S, 180, "live again")
        drained = self.until(lambda: self.waiting() <= 4, 300, "drained")
        time.sleep(2.0)  # until the last seconds were told of
        per_second = {second: n for second, n in list(self.requests.items()) if second >= came_back}
        self.note("outage", f"{self.options.outage:.0f} s; {full / 1e6:.1f} MB in the spools at its end")
        self.note("back: live (< 5 s) on all hosts", _after(live))
        self.note("back: all drained", _after(None if live is None or drained is None else live + drained))
        self.note("back: requests in the worst second", str(max(per_second.values(), default=0)))

    def agents_killed(self, reader: Reader) -> None:
        if self.killed is None:
            return
        self.say(f"{self.killed.nodes} agents are killed with -9")
        self.killed.kill()
        time.sleep(2.0)
        self.killed.restart()
        live = self.until(lambda: reader.oldest_s() < LIVE_S, 180, "live again")
        self.note(f"{self.killed.nodes} agents killed and started again: live", _after(live))

    # --- at the end

    def judge(self) -> None:
        """Triage as a service of its own, while the agents go on."""
        command = [
            sys.executable,
            str(ROOT / "bench" / "fleet_triage.py"),
            "service",
            self.server.url,
            str(self.folder / "triage"),
            str(self.options.turns),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout)
        self.note(
            "triage", f"{told['pairs']} pairs judged, {told['named']} with a cause; RSS {max(told['rss_mb']):.0f} MB"
        )
        for part, title in (("turn", "a turn"), ("read", "of it reading"), ("judge", "judging"), ("write", "writing")):
            wall_s, cpu_s = told[part]
            walls, cpus = sorted(wall_s[1:]), sorted(cpu_s[1:])
            middle = len(walls) // 2
            self.note(
                f"triage, {title}",
                f"p50 {walls[middle]:.2f}, most {walls[-1]:.2f} s, CPU p50 {cpus[middle]:.2f} s; the first {wall_s[0]:.1f} s",
            )

    def finish(self, reader: Reader) -> None:
        for group in self.groups:
            group.say("stop")
        time.sleep(3.0)
        self.until(lambda: self.waiting() == 0, 120, "delivered")
        reader.stop()
        stats = [group.stats for group in self.groups]
        self.note("spools at the end", f"{sum(s['spool_bytes'] for s in stats):,} bytes on {self.options.nodes} hosts")
        for group in self.groups:
            group.say("quit")
        for group in self.groups:
            group.process.wait(60)
            group.listener.join(30)
        stats = [group.stats for group in self.groups]
        given_up, refused = sum(s["given_up"] for s in stats), sum(s["refused"] for s in stats)
        self.note("given up by spools or refused", f"{given_up} + {refused} samples")
        self.note("store", f"{self.server.disk_mb():.0f} MB on disk, RSS {self.server.rss_mb():.0f} MB")

    def count(self) -> None:
        """What was acknowledged, against what a reader finds: of each measurement every sample once, with all its values."""
        store = open_store(self.server.url)
        time.sleep(2.0)
        for measurement in sorted({key[0] for key in self.acknowledged}):
            mine = {(node, at): n for (name, node, at), n in self.acknowledged.items() if name == measurement}
            found: dict[tuple[str, int], list[int]] = {}
            first, last = min(at for _, at in mine), max(at for _, at in mine)
            for start_ns in range(first, last + 1, CHUNK_NS):
                for sample in store.samples(measurement, start_ns=start_ns, end_ns=min(last + 1, start_ns + CHUNK_NS)):
                    counts = found.setdefault((sample.tags["node"], sample.time_ns), [0, 0])
                    counts[0] += 1
                    counts[1] += len(sample.fields)
            lost = sum(max(0, n - found.get(key, [0, 0])[0]) for key, (n, _) in mine.items())
            twice = sum(max(0, found.get(key, [0, 0])[0] - n) for key, (n, _) in mine.items())
            thin = sum(max(0, v - found.get(key, [0, 0])[1]) for key, (_, v) in mine.items())
            unknown = sum(n for key, (n, _) in found.items() if key not in mine)
            self.lost += lost + twice + thin
            self.note(
                f"acknowledged {measurement}",
                f"{sum(n for n, _ in mine.values()):,} samples: {lost} lost, {twice} more than once, {thin} values missing"
                + (f"; {unknown} besides, of triage or of agents before they were killed" if unknown else ""),
            )
        store.close()


def _gpu_tags(node: int, gpu: int) -> dict[str, str]:
    return {
        "node": f"n{node:03}",
        "rack": f"r{node // 4:02}",
        "circuit": f"c{node // 2:02}",
        "cluster": "simulated",
        "origin": "simulated",
        "gpu": str(gpu),
        "uuid": f"GPU-n{node:03}-{gpu}",
    }


def _quantiles(seconds: Sequence[float], unit: str) -> str:
    if not seconds:
        return "nothing was seen"
    ordered = sorted(seconds)
    at = {share: ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))] for share in (50, 95, 99)}
    times, digits = (1000, 0) if unit == "ms" else (1, 2)
    told = ", ".join(f"p{share} {value * times:.{digits}f}" for share, value in at.items())
    return f"{told} {unit} ({len(ordered):,} looks)"


def _after(seconds: float | None) -> str:
    return "not in the time that was waited" if seconds is None else f"after {seconds:.1f} s"


if __name__ == "__main__":
    raise SystemExit(main())
