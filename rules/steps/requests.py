"""Step 3: did the work change? Prompt and output lengths, and the share of prefill, against usual; judged by what they cost.

Healthy traffic moves its own mean prompt by half within an hour, so a length alone is never a finding: the change must explain a loss.
"""

from __future__ import annotations

from rules.evidence import Evidence, Observation, ratio, value
from rules.finding import Finding, confirmed, effect_of, fix, line, no_data, pair_line, ruled_out, summary
from rules.priors import Strength
from rules.thresholds import Bar
from rules.verdict import Cause, Cost, Line


def request_mix(evidence: Evidence, bar: Bar) -> Finding:
    """R15: longer prompts, more prefill for each output token, or longer answers, that explain at least half of the loss."""
    engine = evidence.engine
    if engine is None or (engine.prompt_len is None and engine.prompt_share is None):
        return no_data(Cause.REQUEST_MIX, line("no_lengths"))
    lines = [
        _against_usual("prompt_len", engine.prompt_len),
        _against_usual("prompt_share", engine.prompt_share),
        _against_usual("output_len", engine.output_len),
    ]
    longer_prompts = bar.reached("request_mix.prompt_ratio", ratio(engine.prompt_len)) and _beyond(engine.prompt_len)
    more_prefill = bar.reached("request_mix.share_ratio", ratio(engine.prompt_share)) and _beyond(engine.prompt_share)
    longer_output = bar.reached("request_mix.output_ratio", ratio(engine.output_len)) and _beyond(engine.output_len)
    effect = effect_of(evidence, bar)
    explained = explained_share(evidence)
    changed = longer_prompts or more_prefill or longer_output
    if not changed or not effect.slow_output or not bar.reached("request_mix.explained", explained):
        return ruled_out(
            Cause.REQUEST_MIX,
            *lines,
            line("mix_not_the_loss", "engine.prompt_len_mean", explained_pct=100 * max(explained or 0.0, 0.0))
            if changed and effect.slow_output
            else line("mix_harmless", "engine.prompt_len_mean")
            if changed
            else None,
        )
    prompts = longer_prompts or more_prefill
    return confirmed(
        Cause.REQUEST_MIX,
        Strength.STRONG if (longer_prompts and more_prefill) else Strength.FAIR,
        (
            *lines,
            line("mix_explains", "engine.prompt_tokens_per_s", explained_pct=100 * min(explained or 0.0, 1.0)),
            line("prefill_rate", "engine.prompt_tokens_per_s", tokens_s=value(engine.prompt_tokens_per_s) or 0.0)
            if engine.prompt_tokens_per_s
            else None,
            pair_line(evidence),
        ),
        summary(
            "long_prompts" if prompts else "long_outputs",
            ratio=(ratio(engine.prompt_len) or ratio(engine.prompt_share) or 0.0)
            if prompts
            else ratio(engine.output_len) or 0.0,
            loss_pct=effect.loss_pct or 0.0,
        ),
        (
            fix("chunked_prefill", Cost.SOFTWARE_CHEAP),
            fix("route_by_length", Cost.SOFTWARE_CHEAP),
            fix("more_replicas", Cost.HARDWARE_COSTLY),
        ),
        since_ns=evidence.output.since_ns,
    )


def explained_share(evidence: Evidence) -> float | None:
    """The share of the lost output that the change of mix explains, in logs: 1 when each unit of work takes as long as ever."""
    output = evidence.output
    if output.output_ratio is None or output.work_ratio is None or not 0 < output.output_ratio < 1:
        return None
    lost = 1 / output.output_ratio - 1
    slower = max(1 / max(output.work_ratio, 1e-3) - 1, 0.0)
    return 1 - slower / lost


def _beyond(seen: Observation | None) -> bool:
    """Outside what healthy spans showed, not only away from their median."""
    return seen is not None and seen.usual_high is not None and seen.value > 1.1 * seen.usual_high


def _against_usual(key: str, seen: Observation | None) -> Line | None:
    if seen is None:
        return None
    if seen.usual is None:
        return line(key, seen.lane, now=seen.value)
    return line(f"{key}_usual", seen.lane, now=seen.value, usual=seen.usual)


def examine(evidence: Evidence, bar: Bar) -> list[Finding]:
    return [request_mix(evidence, bar)]
