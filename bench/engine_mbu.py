"""What share of the memory's bandwidth decoding one sequence uses (MBU), on a Llama-shaped model with random weights.

python bench/engine.py --decode-mbu --device cuda     (1.24 billion weights; the bar is 60 %)
python bench/engine.py --decode-mbu --device cpu --mbu-shape tiny     (whether it runs: no figure of a CUDA device)
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.accounting import Peaks
from engine.assembly import Share, choose_device, choose_dtype, load_share, make_scheduler
from engine.core import Engine, StepResult
from engine.graphs import capture_all, capturer_of
from engine.modelconfig import ModelConfig
from engine.probe import measure_peaks
from engine.request import Request, Sampling
from engine.rope import RopeScaling
from engine.runner import Runner, cost_of
from engine.scheduler import StepPlan
from engine.settings import EngineSettings
from engine.stats import EngineStats
from engine.threads import ThreadChooser
from engine.tokenizer import Tokenizer

BAR_PCT = 60.0
RESULTS = Path(__file__).parent / "results"
PROMPT = 128
SETTLING = 8
"""Steps that don't count: the first of their kind."""

SHAPES: Mapping[str, ModelConfig] = {
    # as Llama 3.2 1B (Meta 2024, its config.json)
    "1b": ModelConfig(
        "llama", 16, 2048, 32, 8, 64, 8192, 128_256, 4096, 1e-5, 5e5, RopeScaling(), True, dtype="bfloat16"
    ),
    "tiny": ModelConfig("llama", 2, 64, 4, 2, 16, 96, 300, 512, 1e-5, 1e4, RopeScaling(), True, dtype="bfloat16"),
}


class RandomCheckpoint:
    """A checkpoint of a shape's tensors, made when they are asked for."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self._generator = torch.Generator(device).manual_seed(0)
        c = config
        self._shapes = {
            "embed_tokens": (c.vocab, c.hidden),
            "q_proj": (c.q_width, c.hidden),
            "k_proj": (c.num_kv_heads * c.head_dim, c.hidden),
            "v_proj": (c.num_kv_heads * c.head_dim, c.hidden),
            "o_proj": (c.hidden, c.q_width),
            "gate_proj": (c.intermediate, c.hidden),
            "up_proj": (c.intermediate, c.hidden),
            "down_proj": (c.hidden, c.intermediate),
        }

    def has(self, name: str) -> bool:
        return name.endswith(".weight") and name != "lm_head.weight"

    def tensor(self, name: str) -> torch.Tensor:
        part = re.sub(r"\.weight$", "", name).rsplit(".", 1)[-1]
        device = self._generator.device
        if part not in self._shapes:  # a norm
            return torch.ones(self.config.hidden, device=device)
        return torch.empty(self._shapes[part], device=device).normal_(0.0, 0.02, generator=self._generator)

    def numbers(self, name: str) -> None:
        """All are in full precision."""

    def tokenizer(self) -> Tokenizer:
        raise NotImplementedError("random weights have no words")


@dataclass(frozen=True, slots=True)
class Decoding:
    """Steps of one sequence, one way."""

    way: str  # eager: launched one by one; captured: replayed
    step_ms: float  # median
    tokens_per_s: float
    mbu_pct: float  # of the card's own figure where it has one, else of what a probe reached
    mbu_of_probe_pct: float
    steps: int


class TimedSteps:
    """A runner that keeps seconds and counted bytes of its decoding steps."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.cost = cost_of(inner.decoder, inner.cache)
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        result = self.inner.run(plan)
        if plan.rows and all(row.decodes for row in plan.rows):
            self.seconds.append(result.seconds)
            self.bytes.append(self.cost.of(plan.rows).bytes)
        return result


def report(device_name: str, shape: str, tokens: int, results: Path, as_json: bool, attention: str = "auto") -> int:
    """Print the table, write it into `results`; 0 when the bar is reached, or where it does not apply."""
    config = SHAPES[shape]
    device = choose_device(device_name)
    settings = EngineSettings(
        device=str(device), max_seqs=1, max_context=min(config.context, PROMPT + tokens + 64), attention=attention
    )
    log: list[str] = []
    share = load_share(settings, RandomCheckpoint(config, device), Path(), device, lambda *told: None, log.append, None)
    with torch.inference_mode():
        peaks = measure_peaks(share.loaded.choice.kernel, choose_dtype("auto", config, device), device)
    nominal = nominal_bytes_per_s(device)
    ways = decoded(settings, share, device, tokens, peaks, nominal, log)
    best = max(ways, key=lambda way: way.mbu_pct)
    told = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "is_cuda": device.type == "cuda",
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "shape": shape,
        "weights": share.loaded.decoder.num_layer_weights + share.loaded.decoder.head.num_weights,
        "dtype": str(share.loaded.decoder.embedding.dtype).removeprefix("torch."),
        "attention": share.loaded.decoder.attention.name,
        "probe_bytes_per_s": peaks.bytes_per_s,
        "nominal_bytes_per_s": nominal,
        "bar_pct": BAR_PCT,
        "ways": [asdict(way) for way in ways],
        "log": log,
    }
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"decode_mbu_{device.type}_{shape}.json"
    path.write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _print(told, ways, path)
    return 0 if device.type != "cuda" or best.mbu_pct >= BAR_PCT else 1


def decoded(
    settings: EngineSettings,
    share: Share,
    device: torch.device,
    tokens: int,
    peaks: Peaks,
    nominal: float | None,
    log: list[str],
) -> list[Decoding]:
    """The same request launched one by one and, where steps can be captured, replayed."""
    runner = Runner(share.loaded.decoder, share.cache, ThreadChooser(share.threads))
    ways = [_decoding("eager", runner, settings, share, tokens, peaks, nominal)]
    if share.sizes and (capturer := capturer_of(settings, device)) is not None:
        runner.graphs = capture_all(runner.decoder, share.cache, share.num_blocks, share.sizes, capturer, log.append)
        ways.append(_decoding("captured", runner, settings, share, tokens, peaks, nominal))
    return ways


def _decoding(
    way: str,
    runner: Runner,
    settings: EngineSettings,
    share: Share,
    tokens: int,
    peaks: Peaks,
    nominal: float | None,
) -> Decoding:
    timed = TimedSteps(runner)
    scheduler = make_scheduler(settings, share.num_blocks, 0, share.context, PROMPT)
    stats = EngineStats(started_s=time.monotonic(), peaks=peaks)
    engine = Engine(scheduler, timed, timed.cost, stats, frozenset(), share.context)
    prompt = [(7 * number) % runner.decoder.config.vocab for number in range(PROMPT)]
    sampling = Sampling(temperature=0.0, max_tokens=tokens + SETTLING + 1, ignore_eos=True)
    engine.add(Request(way, prompt, sampling, time.monotonic()))
    while engine.has_work:
        engine.step()
    seconds = timed.seconds[SETTLING:]
    step_s, per_step = statistics.median(seconds), statistics.median(timed.bytes[SETTLING:])
    probe = 100.0 * per_step / (step_s * peaks.bytes_per_s)
    of_card = probe if nominal is None else 100.0 * per_step / (step_s * nominal)
    return Decoding(way, 1000 * step_s, 1 / step_s, of_card, probe, len(seconds))


def nominal_bytes_per_s(device: torch.device) -> float | None:
    """Bandwidth by the card's own figures: twice its memory clock times the width of its bus (double data rate). None where it
    doesn't tell them.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock_khz, bus_bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock_khz * 1000 * bus_bits / 8 or None


def _print(told: Mapping[str, object], ways: list[Decoding], path: Path) -> None:
    if not told["is_cuda"]:
        print("This is no figure of a CUDA device: it only shows that the measurement runs.")
    nominal, probe = told["nominal_bytes_per_s"], told["probe_bytes_per_s"]
    assert isinstance(probe, float)
    card = f"{nominal / 1e9:.0f} GB/s by the card" if isinstance(nominal, float) else "the card tells no bandwidth"
    print(
        f"{told['device']}, torch {told['torch']}, {told['date']}: {told['weights']:,} random weights in {told['dtype']}, "
        f"attention {told['attention']}; {probe / 1e9:.0f} GB/s by the probe, {card}\n"
    )
    print(f"{'steps':<10} {'ms a step':>10} {'tokens/s':>10} {'MBU':>8} {'of probe':>9}")
    for way in ways:
        print(
            f"{way.way:<10} {way.step_ms:>10.3f} {way.tokens_per_s:>10.1f} {way.mbu_pct:>6.1f} % {way.mbu_of_probe_pct:>7.1f} %"
        )
    reached = "" if not told["is_cuda"] else f"; bar {BAR_PCT:.0f} %"
    print(f"\nwritten to {path}{reached}")
