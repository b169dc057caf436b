"""Tokens/s of this engine beside transformers' generate: same weights, same process, same cores, runs taken in turns.

python bench/engine.py
python bench/engine.py --streams 1,8 --tokens 64 --repeats 5 --json
python bench/engine.py --quantize none,int8,int4     (each scheme's speed beside what it costs the model)
python bench/engine.py --ab paged,batching,chunked,prefix,speculation
python bench/engine.py --rss 10     (whether the server's memory grows in ten minutes of 16 streams)
python bench/engine.py --abuse     (what rude, wrong and too many clients cost the others)
python bench/engine.py --stages     (where a step's time goes, and what timing it costs)
python bench/engine.py --decode-mbu --device cuda     (share of memory bandwidth that decoding one sequence uses, random weights)
python bench/engine.py --peers vllm,llama --vllm-python PATH --llama-python PATH     (beside other engines: bench/engine_peers.py)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import stopping
from engine.threads import calm_openmp, usable_cores

if __name__ == "__main__":
    stopping.while_imports_run()
calm_openmp()  # OpenMP reads its settings when torch is imported, so they come first
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from bench import engine_ab, engine_abuse, engine_mbu, engine_peers, engine_rss, engine_stages
from engine.assembly import Assembled, assemble
from engine.checkpoints.find import find_model
from engine.detokenizer import TextStream
from engine.progress import silent
from engine.quality import Quality
from engine.request import Request, Sampling
from engine.settings import DEFAULT_MODEL, EngineSettings

PROMPT = engine_peers.PROMPT


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Rates are output tokens/s over all streams, prefill included; median of the repeats."""

    scheme: str  # none: full weights
    streams: int
    engine: float
    transformers: float
    ratio: float  # median of the pairwise ratios
    to_first: float  # the same, to the first scheme of the run
    engine_spread: tuple[float, float]
    transformers_spread: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Conditions:
    cpu: str
    cores: int
    device: str
    torch: str
    transformers: str
    openmp_spin: str
    load_before: float
    load_after: float
    prompt_tokens: int
    output_tokens: int
    repeats: int


def main() -> int:
    wanted = _arguments()
    stopping.as_usual()
    with stopping.until_stopped(lambda: False):  # what has begun to measure tells it before this hears of it
        return _run(wanted)
    return stopping.CODE


def _run(wanted: argparse.Namespace) -> int:
    if wanted.ab:
        return engine_ab.report(wanted.ab, wanted.model, wanted.scale, wanted.repeats, wanted.json)
    if wanted.decode_mbu:
        return engine_mbu.report(
            wanted.device, wanted.mbu_shape, wanted.mbu_tokens, wanted.results, wanted.json, wanted.attention
        )
    if wanted.stages:
        return engine_stages.report(wanted.model, wanted.streams, wanted.tokens, wanted.repeats, wanted.json)
    if wanted.rss:
        return engine_rss.report(wanted.model, wanted.quantize[0], wanted.rss, wanted.rss_streams, wanted.json)
    if wanted.abuse:
        return engine_abuse.report(wanted.model, wanted.quantize[0], wanted.scale, wanted.json)
    if wanted.peers:
        return _beside_peers(wanted)
    path = find_model(wanted.model)
    load_before = os.getloadavg()[0]
    say = (lambda line: print(line, file=sys.stderr)) if wanted.json else print
    say(f"loading {wanted.model} twice ...")
    engines = {scheme: _assemble(scheme, wanted, say) for scheme in wanted.quantize}
    assembled = engines[wanted.quantize[0]]
    reference = _reference(path)
    prompt = assembled.tokenizer.encode(PROMPT)
    rows: list[Row] = []
    with stopping.until_stopped(lambda: rows) as stop:
        for n in wanted.streams:
            ours = {scheme: _engine_run(engine, prompt, n, wanted.tokens) for scheme, engine in engines.items()}
            theirs = _transformers_run(reference, prompt, n, wanted.tokens)
            rows += _measure(n, ours, theirs, wanted.repeats, wanted.tokens)
            say(f"  {n} streams done")
    if not rows:
        return stopping.CODE
    quality = {scheme: engine.quality for scheme, engine in engines.items() if engine.quality is not None}
    conditions = Conditions(
        cpu=_cpu_name(),
        cores=usable_cores(),
        device=str(assembled_device(assembled)),
        torch=torch.__version__,
        transformers=transformers.__version__,
        openmp_spin=os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY") or "default",
        load_before=load_before,
        load_after=os.getloadavg()[0],
        prompt_tokens=len(prompt),
        output_tokens=wanted.tokens,
        repeats=wanted.repeats,
    )
    if wanted.json:
        costs = {scheme: found.figures() for scheme, found in quality.items()}
        print(
            json.dumps(
                {"conditions": asdict(conditions), "rows": [asdict(r) for r in rows], "quality": costs}, indent=2
            )
        )
    else:
        _print_table(conditions, rows, quality)
    return stop.code(0 if all(row.ratio > 1 for row in rows) else 1)


def _beside_peers(wanted: argparse.Namespace) -> int:
    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    pythons = {name: getattr(wanted, f"{name}_python") for name in wanted.peers}
    for name in [name for name, python in pythons.items() if python is None]:
        print(f"{name} is not measured: name its interpreter with --{name}-python")
        del pythons[name]
    load = os.getloadavg()[0]
    engines = {scheme: _assemble(scheme, wanted, tell) for scheme in wanted.quantize}
    quality = {scheme: engine.quality for scheme, engine in engines.items() if engine.quality is not None}
    prompt = next(iter(engines.values())).tokenizer.encode(PROMPT)

    def in_process(scheme: str, engine: Assembled) -> engine_peers.Contender:
        def run(streams: int, tokens: int) -> engine_peers.Run:
            return engine_peers.Run(streams * tokens / _engine_run(engine, prompt, streams, tokens)())

        return engine_peers.Contender(scheme, "in process", "", run)

    heading = (
        f"{_cpu_name()}, {usable_cores()} cores, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}; "
        f"load {load:.1f} before; "
        f"{time.strftime('%Y-%m-%d')}; {len(prompt)} prompt and {wanted.tokens} output tokens, greedy; median of {wanted.repeats}"
    )
    with tempfile.TemporaryDirectory(prefix="pairscope-bench-") as folder:
        asked = engine_peers.Wanted(
            wanted.model,
            find_model(wanted.model),
            Path(folder),
            wanted.streams,
            wanted.tokens,
            wanted.repeats,
            wanted.quantize,
            {name: Path(python) for name, python in pythons.items()},
        )
        contenders = [in_process(scheme, engine) for scheme, engine in engines.items()]
        return engine_peers.report(asked, contenders, quality, heading, wanted.json, tell)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="built-in name, .gguf file or folder (default: %(default)s)"
    )
    parser.add_argument(
        "--streams", default="1,4,8,16", type=lambda text: [int(n) for n in text.split(",")], help="default: 1,4,8,16"
    )
    parser.add_argument("--tokens", default=64, type=int, help="output tokens of each stream (default: %(default)s)")
    parser.add_argument("--repeats", default=3, type=int, help="runs of each kind, in turns (default: %(default)s)")
    parser.add_argument("--kv-blocks", default=1024, type=int, help="KV blocks of the engine (default: %(default)s)")
    parser.add_argument(
        "--ab", type=engine_ab.names, help="compare ways of the engine instead: " + ",".join(engine_ab.COMPARISONS)
    )
    parser.add_argument("--stages", action="store_true", help="time the engine's stages, and what timing them costs")
    parser.add_argument(
        "--decode-mbu", action="store_true", help="bandwidth used by decoding one sequence (bar: 60 %% on CUDA)"
    )
    parser.add_argument("--device", default="auto", help="of --decode-mbu: cuda, cuda:N, cpu (default: %(default)s)")
    parser.add_argument("--mbu-shape", default="1b", choices=list(engine_mbu.SHAPES), help="default: %(default)s")
    parser.add_argument("--mbu-tokens", default=256, type=int, help="steps that count (default: %(default)s)")
    parser.add_argument("--attention", default="auto", help="of --decode-mbu (default: %(default)s)")
    parser.add_argument(
        "--results", default=engine_mbu.RESULTS, type=Path, help="where --decode-mbu writes (default: %(default)s)"
    )
    parser.add_argument("--abuse", action="store_true", help="what rude, wrong and too many clients cost the others")
    parser.add_argument("--rss", type=float, metavar="MINUTES", help="the slope of the server's memory under streams")
    parser.add_argument("--rss-streams", default=16, type=int, help="streams of --rss (default: %(default)s)")
    parser.add_argument(
        "--scale", default=1.0, type=float, help="size of the work of --ab and --abuse (default: %(default)s)"
    )
    parser.add_argument(
        "--quantize",
        default="none",
        type=lambda text: text.split(","),
        help="weights: none, int8, int4, several with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--peers", default=[], type=lambda text: text.split(","), help="compare with these instead: vllm, llama or both"
    )
    for name in engine_peers.PEERS:
        parser.add_argument(
            f"--{name}-python",
            default=os.environ.get(f"PAIRSCOPE_{name.upper()}_PYTHON"),
            metavar="PATH",
            help=f"interpreter of the environment that has {name} (default: $PAIRSCOPE_{name.upper()}_PYTHON)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args()


def _assemble(scheme: str, wanted: argparse.Namespace, say: Callable[[str], None]) -> Assembled:
    settings = EngineSettings(
        model=wanted.model, quantize=scheme, max_seqs=max(wanted.streams), kv_blocks=wanted.kv_blocks
    )
    return assemble(settings, silent, lambda line: say(f"  {line}"))


def _reference(path: Path) -> transformers.PreTrainedModel:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    where, extra = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    return transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **extra).eval()


def assembled_device(assembled: Assembled) -> torch.device:
    device: torch.device = assembled.engine._runner.decoder.embedding.device  # type: ignore[attr-defined]
    return device


def _engine_run(assembled: Assembled, prompt: list[int], streams: int, tokens: int) -> Callable[[], float]:
    """Through the scheduler and with text made, as the server would; greedy."""

    def run() -> float:
        engine = assembled.engine
        began = time.perf_counter()
        for number in range(streams):
            text = TextStream(assembled.tokenizer.inner, prompt)
            sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            engine.add(Request(f"bench-{number}", prompt, sampling, time.monotonic(), text))
        while engine.has_work:
            engine.step()
        return time.perf_counter() - began

    return run


def _transformers_run(
    model: transformers.PreTrainedModel, prompt: list[int], streams: int, tokens: int
) -> Callable[[], float]:
    """A static batch through generate, greedy, on all cores: its own best case, as every stream has the same length."""
    ids = torch.tensor([prompt] * streams)
    mask = torch.ones_like(ids)
    beyond = model.config.vocab_size + 1  # no end token: every stream runs its full length

    def run() -> float:
        torch.set_num_threads(usable_cores())
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, eos_token_id=beyond, pad_token_id=0
            )
        assert out.shape[1] == len(prompt) + tokens
        return time.perf_counter() - began

    return run


def _measure(
    streams: int, ours: Mapping[str, Callable[[], float]], theirs: Callable[[], float], repeats: int, tokens: int
) -> list[Row]:
    """A row for each scheme. All take turns, so that a busy neighbour meets all of them."""
    for run in (*ours.values(), theirs):
        run()  # first times don't count
    total = streams * tokens
    rounds = [({scheme: run() for scheme, run in ours.items()}, theirs()) for _ in range(repeats)]
    other = [total / its for _, its in rounds]
    first = next(iter(ours))
    rows = []
    for scheme in ours:
        engine = [total / mine[scheme] for mine, _ in rounds]
        rows.append(
            Row(
                scheme,
                streams,
                statistics.median(engine),
                statistics.median(other),
                statistics.median(its / mine[scheme] for mine, its in rounds),
                statistics.median(mine[first] / mine[scheme] for mine, _ in rounds),
                (min(engine), max(engine)),
                (min(other), max(other)),
            )
        )
    return rows


def _print_table(conditions: Conditions, rows: Sequence[Row], quality: Mapping[str, Quality]) -> None:
    c = conditions
    print(f"\n{c.cpu}, {c.cores} cores, {c.device}; torch {c.torch}, transformers {c.transformers}, float32")
    print(
        f"{c.prompt_tokens} prompt and {c.output_tokens} output tokens a stream; median of {c.repeats} (lowest..highest); "
        f"load {c.load_before:.1f} before, {c.load_after:.1f} after; OpenMP spin {c.openmp_spin}\n"
    )
    print(
        f"{'streams':>7}  {'weights':<7}  {'engine tok/s':>24}  {'transformers tok/s':>24}  {'ratio':>6}  "
        f"{f'to {rows[0].scheme}':>8}  perplexity, KL, equal likeliest token"
    )
    for row in rows:
        mine = f"{row.engine:.1f} ({row.engine_spread[0]:.0f}..{row.engine_spread[1]:.0f})"
        its = f"{row.transformers:.1f} ({row.transformers_spread[0]:.0f}..{row.transformers_spread[1]:.0f})"
        cost = quality.get(row.scheme)
        told = f"{cost.perplexity_pct:+.2f} %, {cost.kl:.4f}, {100 * cost.top1:.1f} %" if cost else "full"
        print(
            f"{row.streams:>7}  {row.scheme:<7}  {mine:>24}  {its:>24}  {row.ratio:>5.2f}x  {row.to_first:>7.2f}x  {told}"
        )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
