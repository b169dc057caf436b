"""Step 3: did the work change? Prompt and output lengths, prefix hits and the share of prefill, judged by what they cost.

Healthy traffic moves its own mean prompt by half within an hour, so a length alone is never a finding: the change must explain a loss
of output, or a queue that was not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rules.evidence import EngineEvidence, Evidence, Observation, ratio, value
from rules.finding import (
    Effect,
    Finding,
    Sign,
    against,
    cleared,
    confirmed,
    effect_of,
    fix,
    harmless,
    line,
    names_cause,
    no_data,
    pair_line,
    strongest,
    summary,
    unread,
)
from rules.priors import Strength
from rules.steps.host_cpu import full_core, masks_on_cpu
from rules.steps.memory import is_held_by_nobody, is_stalled
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


@dataclass(frozen=True, slots=True)
class Change:
    """What moved, beyond what healthy spans showed."""

    longer_prompts: bool
    more_prefill: bool
    fewer_hits: bool
    longer_outputs: bool

    @property
    def any(self) -> bool:
        return self.longer_prompts or self.more_prefill or self.longer_outputs

    @property
    def prefill(self) -> bool:
        return self.longer_prompts or self.more_prefill

    @property
    def signs(self) -> int:
        return self.longer_prompts + self.more_prefill + self.fewer_hits + self.longer_outputs


def request_mix(evidence: Evidence, bar: Bar) -> Finding:
    """R15: longer prompts, fewer prefix hits, more prefill for each output token, or longer answers, that explain what is lost."""
    engine = evidence.engine
    named = _named(evidence, effect_of(evidence, bar), bar)
    if named is not None:
        return named
    lengths = () if engine is None else (engine.prompt_len, engine.prompt_share, engine.output_len, engine.context)
    if engine is None or all(seen is None for seen in lengths):
        return no_data(Cause.REQUEST_MIX, line("no_lengths"))
    lines = [
        _against_usual("prompt_len", engine.prompt_len),
        _against_usual("prompt_share", engine.prompt_share),
        _against_usual("output_len", engine.output_len),
    ]
    change = change_of(evidence, bar)
    effect = effect_of(evidence, bar)
    explained = explained_share(evidence)
    queued = is_queued(evidence, bar)
    roomless = bar.reached("memory_kv.kv_used_pct", engine.live_kv_pct) and is_held_by_nobody(evidence, bar)
    costs = effect.slow_output and bar.reached("request_mix.explained", explained) and not roomless
    dear = (
        bar.reached("request_mix.loss_ratio", evidence.output.output_ratio)
        and change_of(evidence, bar, RARE).prefill
        and _is_felt(evidence, bar)
    )
    if change.prefill and costs and (queued or dear):
        return _longer_prefill(evidence, effect, change, lines, explained or 0.0)
    if change.longer_outputs and queued and bar.reached("request_mix.kept_ratio", evidence.output.output_ratio):
        return _longer_answers(evidence, effect, lines)
    why = None
    if change.any:
        why = line("mix_harmless", "engine.prompt_len_mean")
        if effect.slow_output and not bar.reached("request_mix.explained", explained):
            why = line("mix_not_the_loss", "engine.prompt_len_mean", explained_pct=100 * max(explained or 0.0, 0.0))
        if not effect.known:
            return harmless(Cause.REQUEST_MIX, effect, *lines)
    return cleared(Cause.REQUEST_MIX, [*lines, why], [] if evidence.told else _not_seen(engine, queued))


def _not_seen(engine: EngineEvidence, queued: bool) -> list[Line]:
    """Prompts by their length or their share of the work; answers only matter where a queue is, or may be."""
    found = []
    if engine.prompt_len is None and engine.prompt_share is None:
        found.append(unread("engine.prompt_len_mean"))
    if engine.output_len is None and (queued or engine.waiting is None):
        found.append(unread("engine.output_len_mean"))
    return found


def _is_felt(evidence: Evidence, bar: Bar) -> bool:
    """First or later tokens come later than usual, and later than healthy moments have them: without a queue, output that is missing
    while they don't was asked of nobody. A 95th percentile of few and long prompts doubles from minute to minute in health."""
    engine = evidence.engine
    latencies = [engine.ttft, engine.itl] if engine else []
    known = [seen for seen in latencies if seen is not None and ratio(seen) is not None]
    late = [seen for seen in known if bar.reached("request_mix.latency_ratio", ratio(seen))]
    return not known or any(_beyond(seen) for seen in late)


def _named(evidence: Evidence, effect: Effect, bar: Bar) -> Finding | None:
    """What changed where the loss can't be split into mix and slower work: by its own sign, beside harm."""
    engine = evidence.engine
    if engine is None or not effect.hurts or is_stalled(engine, bar) or explained_share(evidence) is not None:
        return None
    if evidence.host is not None and evidence.host.vanished and not effect.known:
        return None  # no request takes a host away
    signs: list[Sign] = []
    if engine.prefill_heavy:
        signs.append(Sign(Strength.STRONG, line("prefill_heavy", "engine.prompt_tokens_per_s")))
    if bar.reached("request_mix.stream_gap_s", value(engine.itl_max)):
        signs.append(Sign(Strength.FAIR, line("stream_gap", "engine.itl_p99_s", gap_s=value(engine.itl_max) or 0.0)))
    if engine.structured and not (full_core(evidence, bar) or masks_on_cpu(evidence, bar)):
        signs.append(Sign(Strength.FAIR, line("structured", "")))
    lengths = (
        ("prompt_ratio", engine.prompt_len),
        ("prompt_ratio", engine.context),
        ("output_ratio", engine.output_len),
    )
    for key, seen in lengths:
        felt = effect.known or bar.reached("request_mix.untold_ratio", ratio(seen))
        longer = against(seen) if felt and bar.reached(f"request_mix.{key}", ratio(seen)) else None
        if longer is not None:
            signs.append(Sign(Strength.FAIR, longer))
    if not signs:
        return None
    return confirmed(
        Cause.REQUEST_MIX,
        strongest(signs),
        (*(sign.line for sign in signs), pair_line(evidence)),
        names_cause(Cause.REQUEST_MIX, effect),
        (
            fix("chunked_prefill", Cost.SOFTWARE_CHEAP),
            fix("limit_output", Cost.SOFTWARE_CHEAP),
            fix("route_by_length", Cost.SOFTWARE_CHEAP),
        ),
        since_ns=evidence.output.since_ns,
    )


TWICE = 2.0
RARE = 3.7
"""Times the distance, as a ratio, of one in ten healthy half minutes from their median, which is 1.28 standard deviations: 4.75 of them are
one half minute in a million, about one in a year. A queue is a sign of its own; without one the change must be that rare."""


def change_of(evidence: Evidence, bar: Bar, times: float = TWICE) -> Change:
    """What moved so far as `times` says."""
    engine = evidence.engine
    if engine is None:
        return Change(False, False, False, False)
    return Change(
        bar.reached("request_mix.prompt_ratio", ratio(engine.prompt_len)) and _beyond(engine.prompt_len, times),
        bar.reached("request_mix.share_ratio", ratio(engine.prompt_share)) and _beyond(engine.prompt_share, times),
        bar.reached("request_mix.prefix_ratio", ratio(engine.prefix_hit)),
        bar.reached("request_mix.output_ratio", ratio(engine.output_len)) and _beyond(engine.output_len, times),
    )


def is_queued(evidence: Evidence, bar: Bar) -> bool:
    """More requests wait than usual, and more than chance makes."""
    waiting = evidence.engine.waiting if evidence.engine else None
    if waiting is None or not bar.reached("scheduling.peer_waiting", waiting.value):
        return False
    return waiting.value > 2 * max(waiting.usual_high or 0.0, 1.0)


def _longer_prefill(
    evidence: Evidence, effect: Effect, change: Change, lines: list[Line | None], explained: float
) -> Finding:
    engine = evidence.engine
    ratios = [ratio(engine.prompt_len), ratio(engine.prompt_share)] if engine else []
    prompt_rate, hit = (engine.prompt_tokens_per_s, engine.prefix_hit) if engine else (None, None)
    only_hits = change.fewer_hits and not change.longer_prompts
    hit_line = None
    if change.fewer_hits and hit is not None:
        hit_line = line("prefix_hit", hit.lane, now_pct=100 * hit.value, usual_pct=100 * (hit.usual or 0.0))
    return confirmed(
        Cause.REQUEST_MIX,
        Strength.STRONG if change.signs > 1 else Strength.FAIR,
        (
            *lines,
            hit_line,
            line("mix_explains", "engine.prompt_tokens_per_s", explained_pct=100 * min(explained, 1.0)),
            line("prefill_rate", prompt_rate.lane, tokens_s=prompt_rate.value) if prompt_rate else None,
            pair_line(evidence),
        ),
        summary(
            "prefix_lost" if only_hits else "long_prompts",
            ratio=max(r for r in (*ratios, 0.0) if r is not None),
            loss_pct=effect.loss_pct or 0.0,
        ),
        (
            fix("prefix_routing", Cost.SOFTWARE_CHEAP)
            if change.fewer_hits
            else fix("chunked_prefill", Cost.SOFTWARE_CHEAP),
            fix("route_by_length", Cost.SOFTWARE_CHEAP),
            fix("more_replicas", Cost.HARDWARE_COSTLY),
        ),
        since_ns=evidence.output.since_ns,
    )


def _longer_answers(evidence: Evidence, effect: Effect, lines: list[Line | None]) -> Finding:
    """Longer answers cost no tokens/s: they hold their places longer, and others wait. Lengths are known late, at a request's end."""
    engine = evidence.engine
    seen = (engine.waiting, engine.kv_used, engine.output_len) if engine else ()
    sinces = [entry.since_ns for entry in seen if entry is not None and entry.since_ns is not None]
    waiting = value(engine.waiting) if engine else None
    running = value(engine.running) if engine else None
    return confirmed(
        Cause.REQUEST_MIX,
        Strength.STRONG,
        (*lines, line("queue", "engine.requests_waiting", waiting=waiting or 0.0, running=running or 0.0)),
        summary("long_outputs", ratio=ratio(engine.output_len if engine else None) or 0.0, waiting=waiting or 0.0),
        (
            fix("limit_output", Cost.SOFTWARE_CHEAP),
            fix("route_by_length", Cost.SOFTWARE_CHEAP),
            fix("more_replicas", Cost.HARDWARE_COSTLY),
        ),
        since_ns=min(sinces) if sinces else None,
        alone=True,
    )


def explained_share(evidence: Evidence) -> float | None:
    """The share of the lost output that the change of mix explains: 1 when each unit of work takes as long as ever."""
    output = evidence.output
    if output.output_ratio is None or output.work_ratio is None or not 0 < output.output_ratio < 1:
        return None
    lost = 1 / output.output_ratio - 1
    slower = max(1 / max(output.work_ratio, 1e-3) - 1, 0.0)
    return 1 - slower / lost


def _beyond(seen: Observation | None, times: float = TWICE) -> bool:
    """Outside what healthy spans showed: so many times as far from their median, as a ratio, as one in ten of them is. With few requests
    in a window a single long prompt moves the mean."""
    if seen is None or not seen.usual_high or not seen.usual:
        return False
    return seen.value > max(1.1 * seen.usual_high, seen.usual * math.pow(seen.usual_high / seen.usual, times))


def _against_usual(key: str, seen: Observation | None) -> Line | None:
    if seen is None or seen.relative:
        return against(seen)
    if seen.usual is None:
        return line(key, seen.lane, now=seen.value)
    return line(f"{key}_usual", seen.lane, now=seen.value, usual=seen.usual)


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [request_mix(evidence, bar)]
