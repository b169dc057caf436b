"""What the stage timers cost a step, and where its time goes: the same engine with and without them, in turns.

python bench/engine.py --stages
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from bench import stopping
from engine.assembly import Assembled, assemble
from engine.progress import silent
from engine.request import Request, Sampling
from engine.runner import Runner, stage_clock
from engine.settings import EngineSettings
from engine.stages import Stage, StageClock, Untimed, nothing
from engine.threads import usable_cores

WORDS = "The history of computing begins with a simple question"


@dataclass(frozen=True, slots=True)
class Line:
    """One number of streams. Steps are timed inside the engine."""

    streams: int
    on_ms: float  # a decoding step, median over all turns
    off_ms: float
    cost_pct: float  # of a step, by the ratio of paired turns: their median
    spread_pct: tuple[float, float]  # the middle half of the pairs
    marks_pct: float  # of a step, by timing its marks alone
    shares_pct: dict[str, float]


def report(model: str, streams: Sequence[int], tokens: int, repeats: int, as_json: bool) -> int:
    settings = EngineSettings(model=model, max_seqs=max(streams), kv_blocks=1024, stage_timers=True)
    assembled = assemble(settings, silent, lambda line: None)
    runner = assembled.engine._runner
    assert isinstance(runner, Runner)
    device = runner.decoder.embedding.device
    lines: list[Line] = []
    with stopping.until_stopped(lambda: lines) as stop:
        for n in streams:
            lines.append(_line(assembled, runner, device, n, tokens, repeats))
    if not lines:
        return stopping.CODE
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
        return stop.code(0)
    print(
        f"{usable_cores()} cores, {device}, load {os.getloadavg()[0]:.1f}; {repeats} pairs of {tokens} tokens a stream\n"
    )
    names = [stage.label for stage in Stage if stage is not Stage.TOKENISE]
    print(
        "streams  step on    off      cost (middle half)         marks alone  "
        + "  ".join(f"{name:>10}" for name in names)
    )
    for line in lines:
        cost = f"{line.cost_pct:+.2f} % ({line.spread_pct[0]:+.2f}..{line.spread_pct[1]:+.2f})"
        shares = "  ".join(f"{line.shares_pct[name]:>8.1f} %" for name in names)
        print(
            f"{line.streams:>7}  {line.on_ms:>6.2f}  {line.off_ms:>6.2f} ms  {cost:<26} {line.marks_pct:>9.3f} %  {shares}"
        )
    return stop.code(0)


def _line(assembled: Assembled, runner: Runner, device: torch.device, streams: int, tokens: int, repeats: int) -> Line:
    on, off = stage_clock(device), Untimed()
    for clock in (on, off):
        _steps_s(assembled, runner, clock, streams, tokens)
    assembled.engine.stats.stage_seconds = nothing()
    pairs = []
    for number in range(repeats):
        order = (on, off) if number % 2 else (off, on)
        found = {clock: _steps_s(assembled, runner, clock, streams, tokens) for clock in order}
        pairs.append((found[on], found[off]))
    ratios = sorted(100 * (a / b - 1) for a, b in pairs)
    step_s = statistics.median(b for _, b in pairs)
    seconds = assembled.engine.stats.stage_seconds
    whole = sum(seconds)
    return Line(
        streams,
        1000 * statistics.median(a for a, _ in pairs),
        1000 * step_s,
        statistics.median(ratios),
        (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        100 * _marks_s(on, 2 * len(runner.decoder.layers) + 3) / step_s,
        {stage.label: 100 * seconds[stage] / whole for stage in Stage},
    )


def _steps_s(assembled: Assembled, runner: Runner, clock: StageClock, streams: int, tokens: int) -> float:
    """The median seconds of a decoding step."""
    engine = assembled.engine
    runner.clock = runner.decoder.clock = clock
    prompt = assembled.tokenizer.encode(WORDS)
    for number in range(streams):
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.add(Request(f"bench-{number}", prompt, sampling, time.monotonic()))
    taken = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def _marks_s(clock: StageClock, marks: int) -> float:
    """Seconds of one step's marks, with nothing between them."""
    rounds = 500
    began = time.perf_counter()
    for _ in range(rounds):
        clock.begin(1)
        for _ in range(marks):
            clock.mark(Stage.MLP)
        clock.take(1.0)
    return (time.perf_counter() - began) / rounds
