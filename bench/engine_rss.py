"""Whether the server's memory grows: many streams for minutes, and the slope of its RSS with its uncertainty.

python bench/engine.py --rss 10
python bench/engine.py --rss 10 --rss-streams 4 --model DIR
"""

from __future__ import annotations

import itertools
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from bench import stopping
from engine.settings import EngineSettings

WARM_SHARE = 0.4
"""So much of the run doesn't count: until every block of the cache has been touched and each kernel made."""
BLOCKS = 256
LEAST_SAMPLES = 30
"""Fewer of them, a second apart, tell no slope."""
GONE_SHARE = 0.1
"""Clients that go away in the midst of their stream."""


@dataclass(frozen=True, slots=True)
class Growth:
    mb_h: float
    plus_minus_mb_h: (
        float  # twice the standard error, with the samples' likeness to their neighbours taken into account
    )
    first_mb: float  # at the end of the warm-up
    last_mb: float
    peak_mb: float
    samples: int
    answers: int
    went_away: int
    failed: int


class Load:
    """Clients that ask one thing after another: other lengths, other samplings, streams read to the end or left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.answers = self.went_away = self.failed = 0

    def start(self, streams: int) -> None:
        for number in range(streams):
            threading.Thread(target=self._client, args=(random.Random(number),), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _client(self, source: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=600, trust_env=False) as http:
            while not self._over.is_set():
                try:
                    ended = self._one(http, source)
                except httpx.HTTPError:
                    ended = None
                with self._lock:
                    self.answers += ended is True
                    self.went_away += ended is False
                    self.failed += ended is None

    def _one(self, http: httpx.Client, source: random.Random) -> bool | None:
        words = source.choices(("the", "history", "of", "tokens", "asks", "for", "more"), k=source.randint(1, 80))
        body = {
            "prompt": " ".join(words),
            "max_tokens": source.randint(1, 60),
            "temperature": source.choice((0, 0.8)),
            "stop": source.choice((None, ["\n\n", "###"])),
            "ignore_eos": True,
            "stream": True,
        }
        leaves = source.random() < GONE_SHARE
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return None
            for _ in answer.iter_lines():
                if leaves or self._over.is_set():
                    return False
        return True


def report(model: str, quantize: str, minutes: float, streams: int, as_json: bool) -> int:
    """Exit code 1 when it grows for certain: when the slope is above twice its uncertainty."""
    growth, stopped_after_s = measure(model, quantize, minutes, streams)
    if growth is None:
        return stopping.CODE
    minutes = minutes if stopped_after_s is None else stopped_after_s / 60
    if as_json:
        print(json.dumps(asdict(growth), indent=2))
    else:
        print(
            f"{streams} streams, {minutes:g} min: RSS {growth.mb_h:+.1f} MB/h ± {growth.plus_minus_mb_h:.1f} after warm-up; "
            f"{growth.first_mb:.1f} MB then, {growth.last_mb:.1f} at the end, {growth.peak_mb:.1f} at most; "
            f"{growth.answers} answers, {growth.went_away} clients went away, {growth.failed} failed"
        )
    return int(growth.mb_h > 2 * growth.plus_minus_mb_h) if stopped_after_s is None else stopping.CODE


def measure(model: str, quantize: str, minutes: float, streams: int) -> tuple[Growth | None, float | None]:
    """The growth, and the seconds after which Ctrl-C came; no growth where it came too early to tell any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = EngineSettings(
        model=model,
        quantize=quantize,
        port=port,
        max_seqs=streams,
        max_context=512,
        kv_blocks=BLOCKS,
        stall_timeout_s=60.0,
    )
    given = {name: getattr(settings, name) for name in ("model", "quantize", "port", "max_seqs", "max_context")}
    given |= {"kv_blocks": settings.kv_blocks, "stall_timeout_s": settings.stall_timeout_s}
    code = "import sys; from engine.server import run; from engine.settings import EngineSettings; "
    code += f"sys.exit(run(EngineSettings(**{given!r})))"
    server = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1], start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, server)
        load = Load(url)
        load.start(streams)
        samples: list[tuple[float, float]] = []
        with stopping.until_stopped(lambda: len(samples) >= LEAST_SAMPLES) as stop:
            for sample in _sample(psutil.Process(server.pid), 60 * minutes):
                samples.append(sample)
        load.stop()
    finally:
        server.terminate()
        server.wait(60)
    if stop.came and len(samples) < LEAST_SAMPLES:
        return None, samples[-1][0] if samples else 0.0
    kept = samples[int(WARM_SHARE * len(samples)) :]
    slope, uncertain = trend(kept)
    growth = Growth(
        3600 * slope / 1e6,
        3600 * uncertain / 1e6,
        kept[0][1] / 1e6,
        kept[-1][1] / 1e6,
        max(rss for _, rss in samples) / 1e6,
        len(kept),
        load.answers,
        load.went_away,
        load.failed,
    )
    return growth, samples[-1][0] if stop.came else None


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    with httpx.Client(trust_env=False, timeout=10) as http:
        while server.poll() is None:
            try:
                if http.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise SystemExit(f"the engine ended with code {server.returncode}")


def _sample(process: psutil.Process, seconds: float) -> Iterator[tuple[float, float]]:
    """(seconds, bytes) once a second."""
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        yield now, float(process.memory_info().rss)
        time.sleep(1.0)


def trend(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the least-squares line and twice its standard error. Neighbouring samples are alike, so they count as fewer:
    as n (1 - r) / (1 + r) with the residuals' correlation r from one to the next.
    """
    times, values = zip(*samples, strict=True)
    line = statistics.linear_regression(times, values)
    rest = [value - line.slope * at - line.intercept for at, value in samples]
    spread = sum(part * part for part in rest)
    if spread == 0.0:
        return line.slope, 0.0
    alike = min(0.99, max(0.0, sum(a * b for a, b in itertools.pairwise(rest)) / spread))
    count = max(3.0, len(samples) * (1 - alike) / (1 + alike))
    mean = statistics.fmean(times)
    width = sum((at - mean) ** 2 for at in times) / len(times)
    return line.slope, 2 * math.sqrt(spread / len(samples) / width / (count - 2))
