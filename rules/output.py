"""The output side of the pair: what came out beside what was to be expected, over the spans of the window."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rules.evidence import OutputEvidence
from rules.expected import Load, Point, StepModel, expect, point_of
from rules.observation.engines import prefix_hit
from rules.observation.reader import BACK_S, FINISH_S, NOW_S
from rules.thresholds import Bar
from rules.window import SECOND, Device

SPANS = 3


def span_s(engine: Device) -> float:
    """Length of one span, seconds; longer for engines that count tokens only when a request ends."""
    return FINISH_S if engine.texts.get("counter_style") == "finish" else NOW_S / SPANS


def load_of(engine: Device, start_ns: int, end_ns: int) -> Load | None:
    """What the engine did in the span; None when its requests or tokens are not known."""
    running = engine.values("requests_running", start_ns, end_ns)
    tokens = engine.values("tokens_per_s", start_ns, end_ns)
    if not tokens:
        counts = engine.points("generation_tokens_total", start_ns, end_ns)
        if len(counts) >= 2 and counts[-1][1] >= counts[0][1]:
            tokens = [(counts[-1][1] - counts[0][1]) / ((counts[-1][0] - counts[0][0]) / SECOND)]
    if not running or not tokens:
        return None
    waiting = engine.values("requests_waiting", start_ns, end_ns)
    prompts = engine.values("prompt_tokens_per_s", start_ns, end_ns)
    computed = 1 - (prefix_hit(engine, start_ns, end_ns) or 0.0)
    context = engine.values("context_mean", start_ns, end_ns)
    return Load(
        running=statistics.fmean(running),
        waiting=statistics.fmean(waiting) if waiting else 0.0,
        tokens_per_s=statistics.fmean(tokens),
        prompt_tokens_per_s=statistics.fmean(prompts) * computed if prompts else None,
        context=statistics.fmean(context) if context else None,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """One span against what was expected of it. Tokens/s; seconds; relative."""

    tokens_per_s: float
    expected_tokens_per_s: float
    output_ratio: float
    work_ratio: float
    spread: float  # of the expected output
    work_spread: float
    baseline: str


def measure(load: Load, own: StepModel, peers: Sequence[StepModel]) -> Span | None:
    """One span; None while nothing is expected or hardly anything ran."""
    if load.running < 0.3:
        return None
    guide = own if own.ready else (peers[0] if peers else own)
    done = point_of(load)
    at = done or guide.usual(Point(load.batch, 0.0, load.context or 0.0, 1.0))
    wanted = load.running
    if load.waiting >= 1 and load.running < guide.batch_max:  # sequences that wait for room count as asked for
        wanted = min(load.running + load.waiting, guide.batch_max)
    usual = expect(replace(guide.usual(at), batch=max(wanted, 1.0)), own, peers)
    as_is = expect(at, own, peers)
    if usual.step_s is None or as_is.step_s is None:
        return None
    expected = wanted / usual.step_s
    return Span(
        tokens_per_s=load.tokens_per_s,
        expected_tokens_per_s=expected,
        output_ratio=load.tokens_per_s / expected,
        work_ratio=as_is.step_s / done.step_s if done is not None else 0.0,
        spread=usual.spread,
        work_spread=as_is.spread,
        baseline=usual.baseline,
    )


def measure_output(
    engine: Device, at_ns: int, own: StepModel, peers: Sequence[StepModel], bar: Bar
) -> tuple[OutputEvidence, Point | None]:
    """The output evidence at `at_ns`, and the newest span as a point that may be learned if the moment is healthy."""
    length = int(span_s(engine) * SECOND)
    loads = [load_of(engine, at_ns - (k + 1) * length, at_ns - k * length) for k in range(SPANS)]
    newest = loads[0]
    point = point_of(newest) if newest is not None else None
    spans = [span for span in (measure(load, own, peers) for load in loads if load is not None) if span is not None]
    if not spans:
        known = [load.tokens_per_s for load in loads if load is not None]
        tokens = statistics.fmean(known) if known else None
        baseline = "history" if own.ready else "peers" if any(peer.ready for peer in peers) else "warming"
        return OutputEvidence(baseline, tokens), point
    tokens = statistics.fmean(span.tokens_per_s for span in spans)
    expected = statistics.fmean(span.expected_tokens_per_s for span in spans)
    work = statistics.median(span.work_ratio for span in spans)
    spread = statistics.median(span.spread for span in spans)
    slow = sum(is_slow(span.output_ratio, span.spread, bar) for span in spans) / len(spans)
    work_slow = sum(is_slow(span.work_ratio, span.work_spread, bar) for span in spans) / len(spans)
    ratio = tokens / expected
    since = _since(engine, at_ns, expected, ratio) if slow else None
    return (
        OutputEvidence(spans[0].baseline, tokens, expected, spread, ratio, work, slow, work_slow, since),
        point,
    )


def is_slow(ratio: float, spread: float, bar: Bar) -> bool:
    """Below the line, and further below one than the uncertainty of the expected value allows."""
    return bar.reached("loss.ratio", ratio) and bar.reached("loss.spreads", (1 - ratio) / max(spread, 1e-9))


def _since(engine: Device, at_ns: int, expected: float, ratio: float) -> int | None:
    """Since when tokens/s for each running sequence are nearer to now than to what was expected."""
    start = at_ns - int(BACK_S * SECOND)
    running = dict(engine.points("requests_running", start, at_ns))
    rates = [
        (time_ns, tokens / running[time_ns])
        for time_ns, tokens in engine.points("tokens_per_s", start, at_ns)
        if running.get(time_ns, 0) >= 1
    ]
    now = [rate for time_ns, rate in rates if time_ns > at_ns - int(NOW_S * SECOND)]
    if not now:
        return None
    line = statistics.fmean(now) * (1 + 1 / max(ratio, 0.05)) / 2
    since: int | None = None
    for time_ns, rate in reversed(rates):
        if rate < line:
            since = time_ns
        elif (since if since is not None else at_ns) - time_ns > 10 * SECOND:
            break
    return since
