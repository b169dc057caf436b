"""What rude, wrong and too many clients cost the engine's others: one server, case after case, figures beside their bars.

python bench/engine.py --abuse                 (some four minutes)
python bench/engine.py --abuse --scale 0.25    (less of everything)

Clients are raw sockets in this process, on the same cores as the server: on a busy machine their own waiting is in the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench import stopping
from bench.engine_peers import free_port, serving

MAX_SEQS, MAX_WAITING = 8, 16
TOKENS = 24
"""Output tokens of a good request."""
PATIENCE_S = 120.0

HOSTILE: tuple[bytes, ...] = (
    json.dumps({"prompt": "x", "n": 10**6}).encode(),
    json.dumps({"prompt": "x", "logprobs": 10**9}).encode(),
    json.dumps({"prompt": "x", "prompt_logprobs": -1}).encode(),
    json.dumps({"prompt": "x", "stop": ["a"] * 50_000}).encode(),
    json.dumps({"prompt": "x", "logit_bias": {str(n): 1 for n in range(20_000)}}).encode(),
    json.dumps({"prompt": "x", "max_tokens": 10**12}).encode(),
    json.dumps({"prompt": [7] * 100_000}).encode(),
    json.dumps({"prompt": "x", "temperature": 1e999}).encode(),
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "' + b"\\u0000" * 1000 + b'", "seed": 1e400}',
    b"\xff\xfe" * 50_000,
    b"",
)
"""All of them are to be refused, and none may be tokenised."""


@dataclass(frozen=True, slots=True)
class Line:
    case: str
    what: str
    figure: float
    unit: str
    target: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    head: bytes
    body: bytes
    seconds: float  # to its last byte


class Server:
    """Where it listens, and what it says of itself."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.process = psutil.Process(pid)

    async def ask(self, body: bytes, path: str = "/v1/completions", method: str = "POST") -> Answer:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request(body, path, method))
            raw = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        finally:
            writer.close()
        head, _, content = raw.partition(b"\r\n\r\n")
        return Answer(int(head.split(b" ", 2)[1]) if head else 0, head.lower(), content, time.perf_counter() - began)

    async def metric(self, name: str) -> float:
        """The value of pairscope_<name>."""
        text = (await self.ask(b"", "/metrics", "GET")).body.decode()
        return float(
            next(line for line in text.splitlines() if line.startswith(f"pairscope_{name}{{")).rsplit(" ", 1)[1]
        )

    async def until(self, name: str, value: float) -> float:
        """Seconds until the metric is at least so much."""
        began = time.perf_counter()
        while await self.metric(name) < value:
            if time.perf_counter() - began > PATIENCE_S:
                return float("inf")
            await asyncio.sleep(0.005)
        return time.perf_counter() - began


def request(body: bytes, path: str = "/v1/completions", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def good(tokens: int = TOKENS, prompt: str = "The history of computing", **more: object) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}).encode()


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def gone_clients(server: Server, scale: float) -> AsyncIterator[Line]:
    """E1: a client that goes, in its prompt or its answer, streaming or not, leaves nothing after a quarter of a second."""
    free = await server.metric("kv_blocks_free")
    prompts = {"decode": "word", "prefill": "one of many words " * 300}
    for stage, prompt in prompts.items():
        for stream in (True, False):
            taken = []
            for number in range(max(3, int(12 * scale))):
                aborted = await server.metric("requests_aborted_total")
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(request(good(600, f"{number} {prompt}", stream=stream)))
                await server.until("requests_running", 1)
                await asyncio.sleep(0.1 if stage == "decode" else 0.02)
                writer.transport.abort()
                began = time.perf_counter()
                await server.until("requests_aborted_total", aborted + 1)
                await server.until("kv_blocks_free", free)
                taken.append(time.perf_counter() - began)
            steps = json.loads((await server.ask(b"", "/debug/steps?last=32", "GET")).body)["steps"]
            step_s = max(step["seconds"] for step in steps)  # nobody leaves in the midst of one
            went = f"{stage}, {'' if stream else 'not '}streaming"
            what = f"blocks free after a client went in its {went}, longest of {len(taken)}; a step up to {1000 * step_s:.0f}"
            yield Line("E1", what, 1000 * max(taken), "ms", "<= 250 + step", max(taken) <= 0.25 + step_s)


async def hostile_bodies(server: Server, scale: float) -> AsyncIterator[Line]:
    """E3: what asks for too much is refused before it costs anything, and who asks well hardly notices."""

    async def good_ones() -> list[float]:
        return [(await server.ask(good())).seconds for _ in range(max(6, int(24 * scale)))]

    await server.ask(good())
    alone = await good_ones()
    taken: list[float] = []
    codes = set[int]()

    async def hostile() -> None:
        for number in range(10**9):
            answer = await server.ask(HOSTILE[number % len(HOSTILE)])
            codes.add(answer.code)
            await asyncio.sleep(0.05)

    async def alone_hostile() -> None:
        for number in range(max(24, int(120 * scale))):
            answer = await server.ask(HOSTILE[number % len(HOSTILE)])
            codes.add(answer.code)
            taken.append(answer.seconds)

    await alone_hostile()
    beside = asyncio.ensure_future(hostile())
    with_them = await good_ones()
    beside.cancel()
    yield Line("E3", "refusals that are no 4xx", float(len(codes - {400, 413})), "", "0", codes <= {400, 413})
    median = statistics.median(taken)
    yield Line("E3", f"a hostile body is refused, median of {len(taken)}", 1000 * median, "ms", "<= 5", median <= 0.005)
    yield Line("E3", "the same, 99th percentile", 1000 * p99(taken), "ms", "none", True)
    moved = 100 * (statistics.median(with_them) / statistics.median(alone) - 1)
    yield Line(
        "E3", "a good request takes longer beside 20 hostile bodies a second, median", moved, "%", "< 10", moved < 10
    )


async def half_heads(server: Server, scale: float) -> AsyncIterator[Line]:
    """E4: connections that never end their head are closed after 10 s, and newcomers are served meanwhile."""
    count = max(50, int(1000 * scale))
    closed: list[float] = []

    async def hold() -> None:
        began = time.perf_counter()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        closed.append(time.perf_counter() - began)

    holding = [asyncio.ensure_future(hold()) for _ in range(count)]
    await asyncio.sleep(1.0)
    answers = [await server.ask(b"", "/health", "GET") for _ in range(100)]
    await asyncio.gather(*holding)
    longest = p99([answer.seconds for answer in answers])
    yield Line(
        "E4", f"/health beside {count} half heads, 99th percentile", 1000 * longest, "ms", "< 100", longest < 0.1
    )
    yield Line("E4", "all of them are closed after", max(closed), "s", "<= 12", max(closed) <= 12)


async def slow_readers(server: Server, scale: float) -> AsyncIterator[Line]:
    """E5: who takes nothing of its stream is paused, then given up; memory stays."""
    count = max(8, int(200 * scale))
    aborted, made = [await server.metric(n) for n in ("requests_aborted_total", "generation_tokens_total")]
    finished = await server.metric("requests_finished_total")
    before = server.process.memory_info().rss
    most = before
    clients: list[socket.socket] = []
    try:
        for number in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(request(good(1800, f"{number}", stream=True)))
            clients.append(client)
            await asyncio.sleep(0)
            most = max(most, server.process.memory_info().rss)
        await server.until("requests_running", 1)
        began = time.perf_counter()
        while await server.metric("requests_running") + await server.metric("requests_waiting") > 0:
            most = max(most, server.process.memory_info().rss)
            if time.perf_counter() - began > 2 * PATIENCE_S:
                break
            await asyncio.sleep(0.1)
    finally:
        for client in clients:
            client.close()
    given_up = await server.metric("requests_aborted_total") - aborted
    ended = await server.metric("requests_finished_total") - finished
    refused = count - int(given_up + ended)
    tokens = await server.metric("generation_tokens_total") - made
    cache = tokens * json.loads((await server.ask(b"", "/kv/requests", "GET")).body)["bytes_per_token"]
    grown = (most - before - cache) / 1e6  # blocks of the cache are memory from their first use on
    what = f"{count} streams that nobody reads: memory beside {cache / 1e6:.0f} MB of cache that they fill"
    yield Line("E5", what, max(0.0, grown), "MB", "< 100", grown < 100)
    told = f"{given_up:.0f} given up, {refused} refused (queue full), {ended:.0f} ended; tokens of each"
    yield Line("E5", told, tokens / max(1.0, given_up + ended), "", "none", ended == 0)


async def overload(server: Server, scale: float) -> AsyncIterator[Line]:
    """E6: at three times what it can do, what is too much is refused at once and the rest goes as fast as ever."""
    seconds = max(6.0, 30.0 * scale)

    async def rate(load: Callable[[float], Awaitable[None]]) -> float:
        before = await server.metric("generation_tokens_total")
        began = time.perf_counter()
        await load(began + seconds)
        return (await server.metric("generation_tokens_total") - before) / (time.perf_counter() - began)

    async def closed(end: float) -> None:
        async def client(number: int) -> None:
            while time.perf_counter() < end:
                await server.ask(good(prompt=f"{number} {random.random()}"))

        await asyncio.gather(*(client(number) for number in range(MAX_SEQS)))

    answers: list[Answer] = []

    async def arrivals(end: float) -> None:
        under_way = set[asyncio.Task[None]]()

        async def one() -> None:
            answers.append(await server.ask(good(prompt=f"{random.random()}")))

        while time.perf_counter() < end:
            task = asyncio.ensure_future(one())
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            await asyncio.sleep(random.expovariate(3 * peak / TOKENS))
        await asyncio.gather(*under_way)

    peak = await rate(closed)
    under = await rate(arrivals)
    refusals = [answer for answer in answers if answer.code in (429, 503)]
    served = [answer for answer in answers if answer.code == 200]
    yield Line(
        "E6",
        f"tokens/s at 3x ({peak:.0f} at peak), share of the peak",
        100 * under / peak,
        "%",
        ">= 90",
        under >= 0.9 * peak,
    )
    unexplained = len([answer for answer in refusals if b"retry-after:" not in answer.head])
    wrong = float(unexplained + len(answers) - len(refusals) - len(served))
    what = f"{len(refusals)} refused, {len(served)} served; neither, or no Retry-After"
    yield Line("E6", what, wrong, "", "0", not wrong)
    if refusals:
        median, late = statistics.median(a.seconds for a in refusals), p99([a.seconds for a in refusals])
        yield Line("E6", "a refusal takes, median", 1000 * median, "ms", "<= 20", median <= 0.02)
        yield Line("E6", "the same, 99th percentile", 1000 * late, "ms", "none", True)


async def killed(server: Server, _scale: float) -> AsyncIterator[Line]:
    """E2: a client of an engine that is killed notices within a second. The last case: nobody is there after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request(good(1500, stream=True)))
    await reader.read(1000)
    os.killpg(server.process.pid, signal.SIGKILL)
    began = time.perf_counter()
    with contextlib.suppress(OSError):
        await reader.read()
    took = time.perf_counter() - began
    writer.close()
    yield Line("E2", "a client of a killed engine is told after", 1000 * took, "ms", "<= 1000", took <= 1.0)


CASES = (gone_clients, hostile_bodies, half_heads, slow_readers, overload, killed)


def report(model: str, quantize: str, scale: float, as_json: bool) -> int:
    """Run all cases and print; 0 when every bar holds, else 1."""
    port = free_port()
    settings = {
        "model": model,
        "quantize": quantize,
        "max_seqs": MAX_SEQS,
        "max_waiting": MAX_WAITING,
        "max_context": 2048,
    }
    code = (
        "import sys; from engine.server import run; from engine.settings import EngineSettings;"
        f"sys.exit(run(EngineSettings(**{settings!r}, port=int(sys.argv[1]))))"
    )
    lines: list[Line] = []

    async def measure(pid: int) -> None:
        server = Server(port, pid)
        for case in CASES:
            async for line in case(server, scale):
                lines.append(line)
                if not as_json:
                    print(told(line), flush=True)

    with (
        stopping.until_stopped(lambda: lines) as stop,
        tempfile.TemporaryDirectory(prefix="pairscope-bench-") as folder,
        serving((sys.executable, "-c", code, str(port)), {}, port, Path(folder) / "engine.log") as pid,
    ):
        asyncio.run(measure(pid))
    if as_json and lines:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    return stop.code(0 if all(line.holds for line in lines) else 1)


def told(line: Line) -> str:
    verdict = "" if line.target == "none" else "  holds" if line.holds else "  MISSED"
    return f"{line.case}  {line.what:<96}  {line.figure:>9.4g} {line.unit:<3} {line.target:<13}{verdict}"
