"""What each way of the engine is worth: the same model and work with and without it, in one process, in turns.

python bench/engine_ab.py
python bench/engine_ab.py --ab paged,prefix --scale 0.5 --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import stopping
from engine.threads import calm_openmp

calm_openmp()  # OpenMP reads its settings when torch is imported, so they come first

import torch

from engine.assembly import Assembled, assemble, make_scheduler, make_speculation
from engine.core import Engine
from engine.kvstore import KVStore
from engine.progress import silent
from engine.request import Request, Sampling
from engine.runner import Runner, cost_of
from engine.settings import DEFAULT_MODEL, EngineSettings
from engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison: `ours` and `other` are in `unit`, `ratio` is the one by the other."""

    name: str
    what: str
    unit: str
    ours: float
    other: float
    ratio: float
    target: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """The loaded model, and how large the work is: 1 is full size."""

    assembled: Assembled
    scale: float
    repeats: int

    def engine(self, settings: EngineSettings, context: int) -> Engine:
        """A fresh engine on the loaded weights, with a cache of `settings.kv_blocks` of its own."""
        loaded = self.assembled.engine
        runner = loaded._runner
        assert isinstance(runner, Runner)
        assert settings.kv_blocks is not None
        decoder, size = runner.decoder, settings.block_size
        device, dtype = decoder.embedding.device, decoder.embedding.dtype
        cache = KVStore(decoder.config, settings.kv_blocks, size, dtype, device)
        scheduler = make_scheduler(settings, settings.kv_blocks, 0, context, 256 if device.type == "cpu" else 2048)
        stats = EngineStats(time.monotonic(), loaded.stats.peaks)
        engine = Engine(
            scheduler, Runner(decoder, cache, runner.threads), cost_of(decoder, cache), stats, frozenset(), context
        )
        engine.speculate(
            make_speculation(settings, settings.kv_blocks, context, decoder.config.vocab, None, lambda line: None)
        )
        return engine

    def size(self, tokens: int) -> int:
        return max(1, round(tokens * self.scale))

    def prompt(self, source: random.Random, tokens: int) -> list[int]:
        """Tokens that no other prompt begins with."""
        return [source.randrange(self.assembled.config.vocab) for _ in range(tokens)]


def ask(name: str, prompt: Sequence[int], tokens: int) -> Request:
    return Request(name, prompt, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True), time.monotonic())


@dataclass(frozen=True, slots=True)
class Load:
    """How one engine went through a heap of requests that came at once."""

    seconds: float
    tokens: int  # of output
    concurrency: float  # running sequences, mean over the steps in which others waited
    waste_pct: float  # slots reserved and not written, % of those reserved, mean over the same steps


def work_off(engine: Engine, requests: Sequence[Request]) -> Load:
    for request in requests:
        engine.add(request)
    running, waste = [], []
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
        if len(engine.scheduler.waiting):
            running.append(engine.stats.occupancy.running)
            waste.append(engine.stats.occupancy.kv_fragmentation_pct)
    seconds = time.perf_counter() - began
    tokens = sum(request.num_output for request in requests)
    return Load(seconds, tokens, statistics.fmean(running), statistics.fmean(waste))


def paged(bench: Bench) -> list[Line]:
    """Most requests are short and a few long; the cache holds four of the longest that may come. Blocks shrink with the
    requests, so that their tails are the same share at every scale.
    """
    context, size = bench.size(2048), bench.size(16)
    settings = EngineSettings(max_seqs=64, kv_blocks=4 * context // size, block_size=size, prefix_cache=False)

    def requests() -> list[Request]:
        source = random.Random(1)
        lengths = [bench.size(source.choice((160, 240, 320, 400, 1400))) for _ in range(32)]
        outputs = [max(4, length // 8) for length in lengths]
        return [
            ask(f"r{n}", bench.prompt(source, a - b), b) for n, (a, b) in enumerate(zip(lengths, outputs, strict=True))
        ]

    with_pages = work_off(bench.engine(settings, context), requests())
    contiguous = work_off(bench.engine(replace(settings, kv_layout="contiguous"), context), requests())
    more = with_pages.concurrency / contiguous.concurrency
    less = with_pages.waste_pct / contiguous.waste_pct
    faster = contiguous.seconds / with_pages.seconds
    return [
        Line("paged", "concurrency in the same memory, paged : contiguous", "sequences",
             with_pages.concurrency, contiguous.concurrency, more, ">= 2", more >= 2),
        Line("paged", "slots reserved and not written, paged : contiguous", "%",
             with_pages.waste_pct, contiguous.waste_pct, less, "paged < 5", with_pages.waste_pct < 5),
        Line("paged", "output, paged : contiguous", "tokens/s", with_pages.tokens / with_pages.seconds,
             contiguous.tokens / contiguous.seconds, faster, "none", True),
    ]  # fmt: skip


def batching(bench: Bench) -> list[Line]:
    """One output in eight is forty times as long as the others, and there is one in every batch."""
    short = max(2, bench.size(10))
    settings = EngineSettings(max_seqs=8, kv_blocks=2048, prefix_cache=False)

    def requests() -> list[Request]:
        source = random.Random(2)
        return [ask(f"r{n}", bench.prompt(source, 12), short * (1 if n % 8 else 40)) for n in range(64)]

    one, other = (
        work_off(bench.engine(replace(settings, batching=kind), 8192), requests()) for kind in ("continuous", "static")
    )
    rates = one.tokens / one.seconds, other.tokens / other.seconds
    ratio = rates[0] / rates[1]
    return [Line("batching", "output, continuous : static", "tokens/s", *rates, ratio, ">= 2", ratio >= 2)]


def chunked(bench: Bench) -> list[Line]:
    """Four streams decode when a long prompt comes; chunks of 128 tokens, or the whole prompt in one step."""
    length = bench.size(4096)
    settings = EngineSettings(max_seqs=8, kv_blocks=(length + 1024) // 16, prefix_cache=False)

    def p99(budget: int) -> float:
        source = random.Random(3)
        engine = bench.engine(replace(settings, token_budget=budget), length + 512)
        streams = [ask(f"s{n}", bench.prompt(source, 16), 32 + length // 128) for n in range(4)]
        for stream in streams:
            engine.add(stream)
        gaps: list[float] = []
        last: dict[str, float] = {}
        came = False
        while any(stream.finish is None for stream in streams):
            if not came and streams[0].num_output >= 16:
                engine.add(ask("long", bench.prompt(source, length), 1))
                came = True
            for output in engine.step():
                now = time.perf_counter()
                if output.request.id in last:
                    gaps.append(now - last[output.request.id])
                if output.request.id != "long":
                    last[output.request.id] = now
        return statistics.quantiles(gaps, n=100, method="inclusive")[98]

    whole, chunks = p99(length + 64), p99(128)
    ratio = chunks / whole
    return [
        Line("chunked", "inter-token p99 of others beside a long prompt, chunks : whole", "s",
             chunks, whole, ratio, "<= 0.2", ratio <= 0.2)
    ]  # fmt: skip


def prefix(bench: Bench) -> list[Line]:
    """The second request begins with the same 512 tokens as the first and goes on with 16 of its own."""
    settings = EngineSettings(max_seqs=4, kv_blocks=1024)
    source = random.Random(4)

    def first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
        request = ask(f"p{time.perf_counter_ns()}", prompt, 2)
        began = time.perf_counter()
        engine.add(request)
        while not request.num_output:
            engine.step()
        seconds = time.perf_counter() - began
        while engine.has_work:
            engine.step()
        return seconds

    engines = [bench.engine(replace(settings, prefix_cache=on), 8192) for on in (True, False)]
    times: list[tuple[float, ...]] = []
    for _ in range(bench.repeats):
        common = bench.prompt(source, 512)
        for engine in engines:
            first_token_s(engine, common + bench.prompt(source, 16))
        own = bench.prompt(source, 16)
        times.append(tuple(first_token_s(engine, common + own) for engine in engines))
    ours, other = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = ours / other
    return [Line("prefix", "time to first token, prefix cached : not", "s", ours, other, ratio, "<= 0.2", ratio <= 0.2)]


REPETITIVE = "".join(
    f"Item {n}: name = part-{n}, colour = blue, size = medium, price = 12 euro, in stock = yes\n" for n in range(1, 9)
)
VARIED = "Write a story about a fisherman who finds an old clock on the beach. Once upon a time"
SLICE = 16  # tokens


def speculation(bench: Bench) -> list[Line]:
    """One stream with and without guesses from its own text: a list that goes on by itself, greedy, and a story, drawn at
    temperature 1. Both ways give the same tokens, but for a tie that rounding may break differently.
    """
    tokens = bench.size(192)
    settings = EngineSettings(max_seqs=1, kv_blocks=128, speculate="ngram")
    cases = (
        ("a repetitive text", REPETITIVE, Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True), 1.3),
        ("a varied text", VARIED, Sampling(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True), 0.97),
    )
    lines = []
    for what, text, sampling, least in cases:
        prompt = bench.assembled.tokenizer.encode(text)
        rounds = []
        for number in range(bench.repeats + 1):  # in the first one kernels are made
            engines = [bench.engine(way, 2048) for way in (settings, replace(settings, speculate="off"))]
            requests = [Request(f"r{number}", prompt, sampling, time.monotonic()) for _ in engines]
            rounds.append(_in_turns(engines, requests))
        rates = [[(tokens - 1) / seconds for seconds in pair] for pair in rounds[1:]]
        ours, other = (statistics.median(side) for side in zip(*rates, strict=True))
        ratio = statistics.median(a / b for a, b in rates)
        lines.append(
            Line("speculation", f"output of {what}, guessed : not", "tokens/s",
                 ours, other, ratio, f">= {least:g}", ratio >= least)
        )  # fmt: skip
    return lines


def _in_turns(engines: Sequence[Engine], requests: Sequence[Request]) -> list[float]:
    """Seconds that each engine takes from the first token of its request to the last, a slice of tokens at a time, so that a
    neighbour's burst meets all of them.
    """
    seconds = [0.0] * len(engines)
    for engine, request in zip(engines, requests, strict=True):
        engine.add(request)
        while not request.num_output:
            engine.step()
    while any(engine.has_work for engine in engines):
        for at, (engine, request) in enumerate(zip(engines, requests, strict=True)):
            end = request.num_output + SLICE
            began = time.perf_counter()
            while engine.has_work and request.num_output < end:
                engine.step()
            seconds[at] += time.perf_counter() - began
    return seconds


COMPARISONS: Mapping[str, Callable[[Bench], list[Line]]] = {
    "paged": paged,
    "batching": batching,
    "chunked": chunked,
    "prefix": prefix,
    "speculation": speculation,
}


def compare(
    names: Sequence[str], model: str, scale: float, repeats: int, tell: Callable[[str], None]
) -> Iterator[list[Line]]:
    """The named comparisons, on `model`, each when it is done. KeyError for a name that there is not."""
    wanted = [COMPARISONS[name] for name in names]
    tell(f"loading {model} ...")
    assembled = assemble(EngineSettings(model=model, kv_blocks=64), silent, tell)
    bench = Bench(assembled, scale, repeats)
    for comparison in wanted:
        with torch.inference_mode():
            lines = comparison(bench)
        tell(f"  {comparison.__name__} done")
        yield lines


def table(lines: Sequence[Line]) -> str:
    rows = [f"{'what':<62}  {'ours':>9}  {'other':>9}  {'unit':<9}  {'ratio':>6}  {'target':<20}"]
    for line in lines:
        verdict = "" if line.target == "none" else "  holds" if line.holds else "  MISSED"
        rows.append(
            f"{line.what:<62}  {line.ours:>9.3g}  {line.other:>9.3g}  {line.unit:<9}  {line.ratio:>6.3g}  "
            f"{line.target:<20}{verdict}"
        )
    return "\n".join(rows)


def names(text: str) -> list[str]:
    """The comparisons in a list with commas. ArgumentTypeError for one that there is not."""
    wanted = text.split(",")
    for name in wanted:
        if name not in COMPARISONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(COMPARISONS)}")
    return wanted


def report(names: Sequence[str], model: str, scale: float, repeats: int, as_json: bool) -> int:
    """Compare and print; 0 when every target holds, else 1."""
    lines: list[Line] = []
    with stopping.until_stopped(lambda: lines) as stop:
        for found in compare(names, model, scale, repeats, lambda line: print(line, file=sys.stderr)):
            lines += found
    if not lines:
        return stopping.CODE
    print(json.dumps([asdict(line) for line in lines], indent=2) if as_json else table(lines))
    return stop.code(0 if all(line.holds for line in lines) else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="default: %(default)s")
    parser.add_argument("--ab", default=list(COMPARISONS), type=names, help=f"default: {','.join(COMPARISONS)}")
    parser.add_argument("--scale", default=1.0, type=float, help="size of the work, 1 is full (default: %(default)s)")
    parser.add_argument("--repeats", default=5, type=int, help="of the prefix comparison (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    wanted = parser.parse_args()
    with stopping.until_stopped(lambda: False):
        return report(wanted.ab, wanted.model, wanted.scale, wanted.repeats, wanted.json)
    return stopping.CODE


if __name__ == "__main__":
    raise SystemExit(main())
