"""Traffic: a small open-loop client, so that a machine that nobody uses yet shows charts that move.

Arrivals are Poisson with a slow wave; lengths are drawn like chat traffic (many short, a long tail). Open loop means that
a slow engine does not slow the arrivals down: a queue forms, as it does with real users. It steps aside while others use the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import httpx

from telemetry.process import notify

MEASURE_REQUESTS = 6  # sequential-ish requests from which the engine's pace is learned
WAVE_PERIOD_S = 600.0
WAVE_DEPTH = 0.35
STEP_ASIDE_S = 60.0
MAX_IN_FLIGHT = 24


def _is_http(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in ("http", "https") and bool(parts.host) and (parts.port is None or 0 < parts.port < 65536)


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """`rate_per_s` 0 means: measure the engine once, then hold the rate at which about `running` requests are in flight."""

    url: str = "http://127.0.0.1:8601"
    rate_per_s: float = 0.0
    running: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_http(self.url):
            raise ValueError(f"url {self.url!r} is not an http:// or https:// address")
        if not 0 <= self.rate_per_s <= 1000:
            raise ValueError(f"rate_per_s {self.rate_per_s}: use 0 to 1000")
        if not 0 < self.running <= MAX_IN_FLIGHT:
            raise ValueError(f"running {self.running}: use a number up to {MAX_IN_FLIGHT}")


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    max_tokens: int


@dataclass(slots=True)
class Ledger:
    """What we sent, to tell our own requests from those of others."""

    sent: int = 0
    finished: int = 0
    failed: int = 0
    in_flight: int = 0
    seconds: float = 0.0
    foreign_until_s: float = 0.0


@cache
def texts() -> tuple[Sequence[str], Sequence[str]]:
    """(questions, passages) that requests are made of."""
    table = tomllib.loads((files("pairscope") / "traffic.toml").read_text("utf-8"))
    return table["questions"], table["passages"]


def draw(random_source: random.Random) -> Request:
    """One request. About 3 in 10 carry one to three passages to read; output lengths are log-normal, median 48 tokens, 8 to 192."""
    questions, passages = texts()
    question = random_source.choice(questions)
    prompt = question
    if random_source.random() < 0.3:
        count = random_source.choice((1, 1, 2, 3))
        prompt = "\n\n".join(random_source.sample(passages, min(count, len(passages)))) + "\n\n" + question
    length = round(random_source.lognormvariate(math.log(48), 0.6))
    return Request(prompt, max(8, min(192, length)))


def rate_at(base_per_s: float, elapsed_s: float) -> float:
    """Requests per second after `elapsed_s`: a slow wave around the base rate."""
    return base_per_s * (1 + WAVE_DEPTH * math.sin(2 * math.pi * elapsed_s / WAVE_PERIOD_S))


async def send(client: httpx.AsyncClient, settings: TrafficSettings, request: Request, ledger: Ledger) -> None:
    loop = asyncio.get_running_loop()
    ledger.sent += 1
    ledger.in_flight += 1
    start_s = loop.time()
    try:
        body = {
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.max_tokens,
            "temperature": 0.7,
            "stream": True,
        }
        async with client.stream("POST", f"{settings.url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass
        ledger.finished += 1
        ledger.seconds += loop.time() - start_s
    except httpx.HTTPError:
        ledger.failed += 1
    finally:
        ledger.in_flight -= 1


async def requests_seen(client: httpx.AsyncClient, settings: TrafficSettings) -> float | None:
    """How many requests the engine has taken in all (ended, running and waiting); None when it doesn't answer."""
    try:
        response = await client.get(f"{settings.url}/metrics", timeout=3.0)
        response.raise_for_status()
    except httpx.HTTPError:
        return None
    wanted = (
        "requests_finished_total",
        "requests_failed_total",
        "requests_aborted_total",
        "requests_running",
        "requests_waiting",
    )
    total = 0.0
    for line in response.text.splitlines():
        if line.startswith(tuple(f"pairscope_{name}" for name in wanted)):
            with contextlib.suppress(ValueError):
                total += float(line.rsplit(" ", 1)[1])
    return total


@dataclass(slots=True)
class Others:
    """Tells requests of others from ours by counts alone: the engine has seen more than we can have sent.

    The engine's count may lag behind what we sent, never run ahead of it; so `seen - sent` never overstates the others, and
    a rise of it above what is known proves that somebody else came. After a restart of the engine the counts start anew and
    its lag is unknown, so for a while the base follows the highest difference without concluding anything.
    """

    known: float
    last_seen: float
    settling_until_s: float = 0.0

    def look(self, seen: float, sent: int, now_s: float) -> bool:
        """True when requests of others have come since the last look. `sent` is read after `seen`."""
        restarted = seen < self.last_seen
        self.last_seen = seen
        foreign = seen - sent
        if restarted:
            self.known = foreign
            self.settling_until_s = now_s + STEP_ASIDE_S
            return False
        if foreign <= self.known:
            return False
        self.known = foreign
        return now_s >= self.settling_until_s


async def watch_others(client: httpx.AsyncClient, settings: TrafficSettings, ledger: Ledger, others: Others) -> None:
    """Look every two seconds; step aside for a while when somebody else uses the engine."""
    loop = asyncio.get_running_loop()
    while True:
        seen = await requests_seen(client, settings)
        if seen is not None and others.look(seen, ledger.sent, loop.time()):
            ledger.foreign_until_s = loop.time() + STEP_ASIDE_S
        await asyncio.sleep(2.0)


async def healthy(client: httpx.AsyncClient, settings: TrafficSettings) -> bool:
    try:
        return (await client.get(f"{settings.url}/health", timeout=3.0)).status_code == 200
    except httpx.HTTPError:
        return False


async def measure(client: httpx.AsyncClient, settings: TrafficSettings, ledger: Ledger, source: random.Random) -> float:
    """The base rate per second: a few requests at the wanted concurrency tell how long one takes there (Little's law)."""
    if settings.rate_per_s > 0:
        return settings.rate_per_s
    width = max(1, round(settings.running))
    for _ in range(max(1, MEASURE_REQUESTS // width)):
        await asyncio.gather(*(send(client, settings, draw(source), ledger) for _ in range(width)))
    mean_s = ledger.seconds / ledger.finished if ledger.finished else 10.0
    return settings.running / max(mean_s, 0.05)


async def generate(settings: TrafficSettings) -> None:
    """Send requests for ever."""
    source = random.Random(settings.seed)
    ledger = Ledger()
    limits = httpx.Limits(max_connections=MAX_IN_FLIGHT + 4)
    async with httpx.AsyncClient(timeout=httpx.Timeout(120.0, connect=5.0), limits=limits, trust_env=False) as client:
        while not await healthy(client, settings):
            await asyncio.sleep(0.5)
        notify(READY="1", STATUS="sending")
        seen = await requests_seen(client, settings) or 0.0  # before our first request: all of it is others'
        watcher = asyncio.create_task(watch_others(client, settings, ledger, Others(seen, seen)))
        base_per_s = await measure(client, settings, ledger, source)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        pending: set[asyncio.Task[None]] = set()
        try:
            while True:
                now_s = loop.time()
                aside = now_s < ledger.foreign_until_s
                notify(STATUS="stepped aside: others use the engine" if aside else f"{base_per_s:.2f} requests/s")
                if not aside and ledger.in_flight < MAX_IN_FLIGHT:
                    task = asyncio.create_task(send(client, settings, draw(source), ledger))
                    pending.add(task)
                    task.add_done_callback(pending.discard)
                await asyncio.sleep(source.expovariate(max(rate_at(base_per_s, now_s - start_s), 0.01)))
        finally:
            watcher.cancel()
            for task in pending:
                task.cancel()


async def _until_stopped(settings: TrafficSettings, stop: asyncio.Event) -> None:
    work = asyncio.create_task(generate(settings))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


def run(settings: TrafficSettings) -> int:
    """Send until SIGTERM or SIGINT; 0."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await _until_stopped(settings, stop)

    asyncio.run(main())
    return 0
