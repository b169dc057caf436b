"""A real server is given known work, and what the agent reads of it is set beside what its clients counted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from agent.collectors.engine import EngineCollector
from agent.collectors.interface import Tick
from agent.settings import EngineTarget
from telemetry.catalogue import check
from telemetry.sample import Value
from tests.live.servers import Server, running

REQUESTS = 12
AT_ONCE = 4
TOKENS = 96
SETTLE_S = 45.0
WORK_S = {"vllm": 0.0, "llamacpp": 75.0}
"""For how long, at least, requests are sent: an engine that counts only finished requests has a rate after a minute."""


@dataclass(frozen=True, slots=True)
class Line:
    """One fact: what the clients know, what the agent read, and whether they agree."""

    what: str
    truth: str
    read: str
    agrees: bool


class Watch:
    """The engine collector at 1 Hz on a thread of its own; `newest` holds the last value of each field, `seen` all of them."""

    def __init__(self, url: str) -> None:
        self.newest: dict[str, Value] = {}
        self.tags: dict[str, str] = {}
        self.seen: list[dict[str, Value]] = []
        self._collector = EngineCollector({"node": "live"}, [EngineTarget("live", url)])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def until(self, holds: Callable[[dict[str, Value]], bool], at_most_s: float = SETTLE_S) -> bool:
        give_up_s = time.monotonic() + at_most_s
        while time.monotonic() < give_up_s:
            if holds(self.newest):
                return True
            time.sleep(0.2)
        return False

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._collector.close()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(1.0):
            number += 1
            tick = Tick(number, time.time_ns(), time.monotonic())
            for sample in self._collector.collect(tick):
                if sample.measurement == "engine":
                    check(sample)
                    self.newest = {**self.newest, **sample.fields}
                    self.tags = dict(sample.tags)
                    self.seen.append(dict(sample.fields))


def compare(made: Server, url: str, folder: Path) -> list[Line]:
    """Start the server, give it work, stop it short, kill it; RuntimeError when it does not come up."""
    with running(made, url, folder / f"{made.kind}.log") as process:
        watch = Watch(url)
        try:
            if not watch.until(lambda fields: fields.get("up") == 1 and "generation_tokens_total" in fields):
                raise RuntimeError(f"{made.kind}: the agent does not read it: {watch.newest}")
            before = dict(watch.newest)
            prompts, generated = _work(made, url, folder / f"{made.kind}.log")
            lines = _numbers(made, watch, before, prompts, generated)
            lines.append(_stopped(process.pid, made, watch, url))
            os.killpg(process.pid, signal.SIGKILL)
            gone = watch.until(lambda fields: fields.get("up") == 0)
            lines.append(Line("killed: up", "0", str(watch.newest.get("up")), gone))
            return lines
        finally:
            watch.close()


def _numbers(made: Server, watch: Watch, before: dict[str, Value], prompts: int, generated: int) -> list[Line]:
    def grown(name: str) -> int:
        return int(watch.newest.get(name, 0)) - int(before.get(name, 0))

    watch.until(lambda _: grown("generation_tokens_total") >= generated)
    watch.until(lambda fields: fields.get("requests_running") == 0)
    rates = [float(fields["tokens_per_s"]) for fields in watch.seen if "tokens_per_s" in fields]
    busiest = max((float(fields.get("requests_running", 0)) for fields in watch.seen), default=0.0)
    lines = [
        Line("kind", made.kind, watch.tags.get("kind", ""), watch.tags.get("kind") == made.kind),
        Line("version", "told", str(watch.newest.get("version", "")), bool(watch.newest.get("version"))),
        Line(
            "generated tokens",
            str(generated),
            str(grown("generation_tokens_total")),
            grown("generation_tokens_total") == generated,
        ),
        Line("prompt tokens", str(prompts), str(grown("prompt_tokens_total")), grown("prompt_tokens_total") == prompts),
        Line("most requests at once", f"<= {AT_ONCE}", f"{busiest:g}", 0 < busiest <= AT_ONCE),
        Line("tokens/s, highest", "> 0", f"{max(rates, default=0):.1f}", max(rates, default=0.0) > 0),
        Line("tokens/s, lowest", ">= 0", f"{min(rates, default=0):.1f}", min(rates, default=0.0) >= 0),
    ]
    if made.kind == "vllm":
        finished = grown("requests_finished_total")
        lines.append(Line("requests finished", str(REQUESTS), str(finished), finished == REQUESTS))
    return lines


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _work(made: Server, url: str, log: Path) -> tuple[int, int]:
    """(prompt tokens, generated tokens) as the answers count them."""

    def ask(number: int) -> tuple[int, int]:
        # no two prompts share a beginning, so that no cache answers for one
        body = {
            "model": made.model,
            "prompt": f"{number * 7919} the quick brown fox jumps over the lazy dog",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        if made.kind == "vllm":
            del body["cache_prompt"]
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        if answer.status_code != 200:
            raise RuntimeError(
                f"{made.kind} answered {answer.status_code}: {answer.text[:300]}; its log ends:\n{_end(log)}"
            )
        usage = answer.json()["usage"]
        return int(usage["prompt_tokens"]), int(usage["completion_tokens"])

    counts: list[tuple[int, int]] = []
    until_s = time.monotonic() + WORK_S[made.kind]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while not counts or time.monotonic() < until_s:
            counts += pool.map(ask, range(len(counts) + 1, len(counts) + REQUESTS + 1))
    return sum(prompt for prompt, _ in counts), sum(done for _, done in counts)


def _stopped(pid: int, made: Server, watch: Watch, url: str) -> Line:
    """The engine's core, or the whole server, is stopped in the middle of its work: it must be told from an idle one."""
    tree = psutil.Process(pid).children(recursive=True)
    cores = [process for process in tree if "EngineCor" in process.name()] or [psutil.Process(pid)]
    for number in range(AT_ONCE):  # enough of it that the stop comes in the middle, however fast the server is
        threading.Thread(target=_keep_asking, args=(made, url, number), daemon=True).start()
    watch.until(lambda fields: float(fields.get("requests_running", 0)) > 0)
    for core in cores:
        core.suspend()
    try:
        noticed = watch.until(lambda fields: fields.get("stalled") == 1 or fields.get("up") == 0, 60)
        word = f"up={watch.newest.get('up')} stalled={watch.newest.get('stalled')}"
        return Line("stopped in mid-work", "stalled or not up", word, noticed)
    finally:
        for core in cores:
            core.resume()


def _keep_asking(made: Server, url: str, number: int) -> None:
    prompt = f"{number} again and again"
    body = {"model": made.model, "prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    try:
        for _ in range(200):
            httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    except httpx.HTTPError:
        return  # it is killed under us, on purpose
