"""The whole product on this machine: `pairscope up` with its real engine, real traffic, real store and a real browser."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from telemetry.sample import Sample
from telemetry.store import open_store
from tests import loopback
from tests.browser import Browser
from tests.ports import free_port
from tests.processes import has_ended

ROOT = Path(__file__).parents[2]


@dataclass
class Up:
    process: subprocess.Popen[str]
    screen: Path
    state: Path
    dashboard: str
    engine: str
    agent: str

    def printed(self) -> str:
        return self.screen.read_text("utf-8")

    def samples(self, measurement: str, seconds: float = 600.0) -> list[Sample]:
        store = open_store(f"sqlite://{self.state / 'store.db'}")
        try:
            now_ns = time.time_ns()
            return list(store.samples(measurement, start_ns=now_ns - int(seconds * 1e9), end_ns=now_ns + 10**9))
        finally:
            store.close()

    def until(self, condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"up ended: {self.printed()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}; {self.printed()}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text('utf-8')[-1500:]}" for path in self.state.rglob("*.log"))


def children(pid: int) -> list[int]:
    """All living descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            after = stat.read_text().rsplit(")", 1)[1].split()
            if after[0] != "Z":
                parents.setdefault(int(after[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def engine_pid(up: Up) -> int:
    for pid in children(up.process.pid):
        with suppress(OSError):
            if b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0":
                return pid
    raise AssertionError("no engine process")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    ports = [free_port() for _ in range(3)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PAIRSCOPE_")}
    environment |= {"PAIRSCOPE_LANG": "en", "PYTHONUNBUFFERED": "1"}
    screen = folder / "screen.txt"
    with screen.open("w") as out:
        process = subprocess.Popen(
            [
                *[sys.executable, "-m", "pairscope", "up", "--state-dir", str(folder / "state")],
                *["--dashboard-port", str(ports[0]), "--engine-port", str(ports[1]), "--agent-port", str(ports[2])],
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            text=True,
        )
    made = Up(process, screen, folder / "state", *(f"http://127.0.0.1:{port}" for port in ports))
    try:
        made.until(lambda: "Open http" in made.printed(), "everything to be ready")
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
        if process.poll() is None:
            process.kill()


def test_each_part_says_that_it_is_ready(up: Up) -> None:
    for part in ("agent", "engine", "triage", "dashboard", "traffic"):
        assert re.search(rf"ready\s+{part}\b", up.printed()), part


def test_the_engine_speaks_sensible_english(up: Up) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = loopback.post(f"{up.engine}/v1/completions", json=body).json()
    assert answer["model"] == "smollm2-135m-instruct"
    assert answer["choices"][0]["text"].startswith(" Paris")
    assert answer["usage"]["completion_tokens"] <= 8


def test_a_question_is_answered_in_a_sentence_that_ends_by_itself(up: Up) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 0}
    (choice,) = loopback.post(f"{up.engine}/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "capital of France is Paris" in choice["message"]["content"]


def test_sampled_text_is_still_english(up: Up) -> None:
    messages = [{"role": "user", "content": "Write two sentences about the sea."}]
    body = {"messages": messages, "max_tokens": 60, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    answer = loopback.post(f"{up.engine}/v1/chat/completions", json=body).json()
    words = [word.strip(".,!?;:\"'()").lower() for word in answer["choices"][0]["message"]["content"].split()]
    assert len(words) > 10
    assert len({"the", "a", "of", "and", "is", "in", "to", "sea", "ocean", "water", "its", "with"} & set(words)) >= 4


def test_one_tick_carries_both_sides_of_the_pair_with_one_timestamp(up: Up) -> None:
    def paired() -> set[int]:
        engine = {s.time_ns for s in up.samples("engine") if float(s.fields.get("tokens_per_s", 0.0)) > 0}
        return engine & {s.time_ns for s in up.samples("host") if "cpu_pct" in s.fields}

    up.until(lambda: len(paired()) >= 5, "five ticks with real tokens/s beside CPU use")
    assert not any(s.tags.get("origin") for s in up.samples("engine"))


def test_the_agent_answers_prometheus_with_the_latest_samples(up: Up) -> None:
    text = loopback.get(f"{up.agent}/metrics").text
    assert re.search(r"^pairscope_host_cpu_pct\{.*\} \d", text, re.MULTILINE)
    assert "pairscope_engine_generation_tokens_total" in text


def test_a_browser_shows_real_tokens_per_second_that_move(up: Up, browser: Browser) -> None:
    plot = "document.getElementById('chart').querySelector('.js-plotly-plot')"
    rates = (
        f"({plot}.data.find(trace => trace.name && trace.name.startsWith('output tokens/s')) || {{y: []}})"
        ".y.filter(value => value !== null)"
    )
    browser.open(f"{up.dashboard}/?range=15m")
    assert "SIMULATED" not in browser.text("body")
    browser.wait(f"{rates}.some(value => value > 0)", 60)
    before = browser.value(f"{rates}.length")
    browser.wait(f"{rates}.length >= {before} + 3", 60)
    assert len({round(value, 3) for value in browser.value(rates)[-8:]}) > 1
    assert "no GPU reports on this host" in browser.text("body")
    assert browser.complaints() == []


def test_the_triage_walks_its_six_steps_over_this_host(up: Up) -> None:
    up.until(lambda: up.samples("verdict"), "a verdict sample")
    command = [sys.executable, "-m", "pairscope", "triage", "--json", "--state-dir", str(up.state)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert isinstance(json.loads(done.stdout), list)
    shown = subprocess.run(
        command[:-3] + command[-2:], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert "no data" in shown.stdout  # there is no GPU on this machine, and it says so


def test_a_killed_engine_comes_back_warm_while_telemetry_goes_on(up: Up) -> None:
    old = engine_pid(up)
    killed_ns = time.time_ns()
    os.kill(old, signal.SIGKILL)

    def told() -> bool:
        return any(s.time_ns >= killed_ns and s.tags["kind"] == "restart" for s in up.samples("event"))

    up.until(told, "an event that says how the engine died")

    def back() -> bool:
        with suppress(httpx.HTTPError):
            return loopback.get(f"{up.engine}/health", timeout=2).status_code == 200 and engine_pid(up) != old
        return False

    up.until(back, "the engine to be back and warm")
    host = sorted(s.time_ns for s in up.samples("host") if s.time_ns > killed_ns - 2 * 10**9)
    gaps = [b - a for a, b in itertools.pairwise(host)]
    assert max(gaps) < 10 * 10**9, "host telemetry stood still while the engine was away"
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert "Paris" in loopback.post(f"{up.engine}/v1/completions", json=body).text


def test_ctrl_c_ends_it_with_zero_and_leaves_nothing_running(up: Up) -> None:
    family = [up.process.pid, *children(up.process.pid)]
    assert len(family) >= 6
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(120) == 0
    assert up.printed().rstrip().endswith("stopped")
    deadline = time.monotonic() + 60
    while left := [pid for pid in family if not has_ended(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
