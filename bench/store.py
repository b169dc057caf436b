"""How fast the stores are: `python bench/store.py [--gpus 1000] [--seconds 60] [--store sqlite]`.

A fleet's samples of 40 numeric fields a GPU are written once a second through `Store.write` while another thread rolls up, then asked
for as the pages do. One GPU has a week at 1 Hz and the others a day, a sample of all 40 fields every fifteen minutes each, some in every
minute. Prints one table with a column for each store: SQLite, a real influxd and a real VictoriaMetrics where they are installed (the
latter with -dedup.minScrapeInterval=1ms, as `pairscope store init` asks for). All times are of this machine, client and server
together; `cpu` counts this process only.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from telemetry import catalogue, lineprotocol
from telemetry.catalogue import Kind
from telemetry.sample import Sample, Value
from telemetry.store import Store, open_store

S = 10**9
ONE_GPU = ["util_pct", "temp_c", "power_w", "sm_clock_mhz", "mem_used_bytes", "throttle_reasons", "energy_j", "state"]
FLEET_FIELDS = [
    "util_pct",
    "mem_util_pct",
    "temp_c",
    "power_w",
    "sm_clock_mhz",
    "mem_used_bytes",
    "fan_pct",
    "mem_temp_c",
]
_NUMBERS = {field.name: field for field in catalogue.GPU.fields.values() if field.type is not str}
FIELDS = [_NUMBERS[name] for name in list(dict.fromkeys([*ONE_GPU, *FLEET_FIELDS, *_NUMBERS]))[:40]]
DAY_STEP_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=60, help="of live ingest at one write a second")
    parser.add_argument("--days", type=int, default=7, help="of one GPU at 1 Hz")
    parser.add_argument("--store", choices=["sqlite", "influxdb", "victoriametrics"], help="only this one")
    options = parser.parse_args()
    end_ns = time.time_ns() // S * S
    rows: dict[str, dict[str, str]] = {}
    names: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = {"sqlite": f"sqlite://{folder}/store.db"}
        program = shutil.which("influxd")
        if program is not None:
            stores["influxdb"] = stack.enter_context(influxd(program, folder))
        else:
            print("influxd is not installed: its column is left out", file=sys.stderr)
        program = shutil.which("victoria-metrics")
        if program is not None:
            stores["victoriametrics"] = stack.enter_context(victoria_metrics(program, folder))
        else:
            print("victoria-metrics is not installed: its column is left out", file=sys.stderr)
        for name, url in stores.items():
            if options.store not in (None, name):
                continue
            names.append(name)
            store = open_store(url)
            for row, value in measure(store, url, options.gpus, options.seconds, end_ns, options.days * 86_400):
                rows.setdefault(row, {})[name] = value
                print(f"{name}: {row}: {value}", file=sys.stderr)
            store.close()
        size = sum(path.stat().st_size for path in folder.glob("store.db*"))
        rows.setdefault("on disk", {})["sqlite"] = f"{size / 1e6:.0f} MB"
    rows = {"encoding": dict.fromkeys(names, encoding()), **rows}
    width = max(map(len, rows))
    print(f"{'':{width}}  " + "".join(f"{name:>26}" for name in names))
    for row, values in rows.items():
        print(f"{row:{width}}  " + "".join(f"{values.get(name, ''):>26}" for name in names))
    return 0


def measure(store: Store, url: str, gpus: int, seconds: int, end_ns: int, history: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(1)
    state = [fresh(rng) for _ in range(gpus)]

    store.prepare()
    store.rollup(end_ns - (history + 86_400) * S)  # a server's rollups begin with the first
    began = time.perf_counter()
    one = fresh(rng)
    batch = []
    for second in range(history):
        wander(one, rng)
        batch.append(sample(0, {name: one[name] for name in ONE_GPU}, end_ns - (history - second) * S))
        if len(batch) == 5000:
            store.write(batch)
            batch = []
    store.write(batch)
    yield (
        f"bulk load, one GPU, {history // 86_400} d at 1 Hz",
        f"{history * len(ONE_GPU) / (time.perf_counter() - began):,.0f} values/s",
    )

    began = time.perf_counter()
    for minute in range(24 * 60):
        at = end_ns - (24 * 60 - minute) * 60 * S
        some = range(1 + minute % (DAY_STEP_S // 60), gpus, DAY_STEP_S // 60)
        store.write([sample(index, state[index], at + index) for index in some])
    took_s = time.perf_counter() - began
    yield f"the fleet's day, {96 * gpus:,} samples of {len(FIELDS)} fields", f"{took_s:.0f} s"
    before = ask_all(store, gpus, end_ns, end_ns, history, repeat=1)
    began, cpu = time.perf_counter(), time.process_time()
    while store.rollup(end_ns, 60.0):
        pass
    took = f"{time.perf_counter() - began:.0f} s, {time.process_time() - cpu:.0f} s of cpu"
    yield f"rolling up {history // 60 + 96 * gpus:,} minutes of GPUs", took

    walls: list[float] = []
    stop = threading.Event()
    keeper = threading.Thread(target=keep, args=(url, stop))
    keeper.start()
    cpu = time.process_time()
    start, live_ns = time.monotonic(), time.time_ns() // S * S  # loading has taken its time, and what is live is of now
    late = 0
    for second in range(seconds):
        for fields in state:
            wander(fields, rng)
        tick = [sample(index, fields, live_ns + second * S) for index, fields in enumerate(state)]
        late += time.monotonic() - start > second + 1
        time.sleep(max(0.0, start + second - time.monotonic()))
        began = time.perf_counter()
        store.write(tick)
        walls.append(time.perf_counter() - began)
    cpu = time.process_time() - cpu
    stop.set()
    keeper.join()
    values = gpus * len(FIELDS)
    yield f"live, {values:,} values each second, rolled up", f"{quantiles(walls)}, {late} late"
    yield "cpu of writer, its load and rolling up", f"{cpu / max(1.0, time.monotonic() - start) * 100:.0f} % of a core"

    now = live_ns + seconds * S
    for (question, took), (_, raw) in zip(ask_all(store, gpus, end_ns, now, history, repeat=9), before, strict=True):
        yield question, took
        if "rolled up" in question:
            yield "  before rolling up", raw.split(" p95")[0].removeprefix("p50 ") + " ms"


def keep(url: str, stop: threading.Event) -> None:
    """What the agent does beside its delivery, with a connection of its own."""
    store = open_store(url)
    while not stop.wait(20.0):
        store.rollup(time.time_ns(), 0.4)
    store.close()


def ask_all(store: Store, gpus: int, end_ns: int, now_ns: int, history: int, *, repeat: int) -> list[tuple[str, str]]:
    """(question, how long it took); each is asked `repeat` times."""
    first = {"gpu": "0", "node": "n000"}
    six_hours = {"start_ns": end_ns - 6 * 3600 * S, "end_ns": end_ns, "step_ns": 30 * S}
    week = {"start_ns": end_ns - history * S, "end_ns": end_ns}
    day = {"start_ns": end_ns - 24 * 3600 * S, "end_ns": end_ns}
    questions: dict[str, Callable[[], int]] = {
        f"latest 5 fields of {gpus} GPUs": lambda: len(
            store.latest("gpu", since_ns=now_ns - 120 * S, fields=FLEET_FIELDS[:5])
        ),
        f"latest of {gpus} GPUs, all {len(FIELDS)} fields": lambda: len(store.latest("gpu", since_ns=now_ns - 120 * S)),
        "6 h of one GPU, 8 fields, 720 buckets": lambda: len(store.range("gpu", ONE_GPU, **six_hours, where=first)),
        "rate of one counter, 6 h, 720 buckets": lambda: len(
            store.range("gpu", ["energy_j"], **six_hours, aggregate="rate", where=first)
        ),
        f"{history // 86_400} d of one GPU, 8 fields, 3 min, rolled up": lambda: len(
            store.range("gpu", ONE_GPU, **week, step_ns=180 * S, where=first)
        ),
        f"{history // 86_400} d of one GPU, 8 fields, 15 min, rolled up": lambda: len(
            store.range("gpu", ONE_GPU, **week, step_ns=900 * S, where=first)
        ),
        "24 h fleet mean, min, max, 5 min, rolled up": lambda: len(
            store.spread("gpu", ["util_pct"], **day, step_ns=300 * S)
        ),
        "the same, up to now": lambda: len(
            store.spread("gpu", ["util_pct"], start_ns=now_ns - 86_400 * S, end_ns=now_ns, step_ns=300 * S)
        ),
        "24 h of every GPU, one field, 5 min, rolled up": lambda: len(
            store.range("gpu", ["util_pct"], **day, step_ns=300 * S)
        ),
    }
    answers = []
    for question, ask in questions.items():
        took = []
        for _ in range(repeat):
            began = time.perf_counter()
            assert ask() > 0, question
            took.append(time.perf_counter() - began)
        answers.append((question, quantiles(took)))
    return answers


def fresh(rng: random.Random) -> dict[str, Value]:
    return {f.name: round(rng.random() * 100, 1) if f.type is float else rng.randrange(8) for f in FIELDS}


def wander(fields: dict[str, Value], rng: random.Random) -> None:
    for f in FIELDS[::2]:
        value = fields[f.name]
        assert not isinstance(value, str)
        if f.kind is Kind.COUNTER:
            fields[f.name] = value + 1
        elif f.kind is Kind.GAUGE:
            fields[f.name] = round(min(100.0, max(0.0, value + rng.random() - 0.5)), 1)


def sample(index: int, fields: dict[str, Value], time_ns: int) -> Sample:
    tags = {
        "node": f"n{index // 8:03}",
        "rack": f"r{index // 64:02}",
        "gpu": str(index % 8),
        "uuid": f"GPU-{index:08x}",
    }
    return Sample("gpu", tags, dict(fields), time_ns)


def encoding() -> str:
    rng = random.Random(2)
    batch = [sample(index, fresh(rng), S) for index in range(1000)]
    best = min(timed(lambda: lineprotocol.encode_many(batch)) for _ in range(5))
    return f"{best * 1e6 / (len(batch) * len(FIELDS)):.2f} us a field"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"p50 {ordered[len(ordered) // 2] * 1e3:.0f} p95 {ordered[int(len(ordered) * 0.95)] * 1e3:.0f} ms"


@contextmanager
def influxd(program: str, folder: Path) -> Iterator[str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        http, rpc = one.getsockname()[1], two.getsockname()[1]
    home = folder / "influxdb"
    home.mkdir()
    (home / "conf").write_text(
        f'reporting-disabled = true\nbind-address = "127.0.0.1:{rpc}"\n[meta]\ndir = "{home}/meta"\n'
        f'[data]\ndir = "{home}/data"\nwal-dir = "{home}/wal"\nindex-version = "tsi1"\nquery-log-enabled = false\n'
        f'[monitor]\nstore-enabled = false\n[http]\nbind-address = "127.0.0.1:{http}"\nlog-enabled = false\n'
    )
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([program, "run", "-config", str(home / "conf")], stdout=log, stderr=log)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{http}/ping", timeout=1).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        yield f"influxdb://127.0.0.1:{http}/bench"
    finally:
        process.kill()
        process.wait()


@contextmanager
def victoria_metrics(program: str, folder: Path) -> Iterator[str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    home = folder / "victoriametrics"
    flags = [f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={home}", "-dedup.minScrapeInterval=1ms"]
    with (folder / "victoriametrics.log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        yield f"victoriametrics://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
