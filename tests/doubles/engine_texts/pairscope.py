"""Our own engine in miniature, by the contract of its /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from tests.doubles.engine_texts.text import MODEL, histogram


def pairscope(
    *,
    generated: float = 100.0,
    running: float = 2.0,
    waiting: float = 0.0,
    kv_used_pct: float = 40.0,
    version: str = "0.1.0",
    config_hash: str = "ab12",
    step_buckets: Mapping[str, float] | None = None,
    step_sum: float = 4.0,
    uptime_s: float | None = None,
) -> str:
    """Our own engine, by the contract of its /metrics."""
    own = f'model_name="{MODEL}"'
    values = {
        "generation_tokens_total": generated,
        "delivered_tokens_total": generated - 1,
        "prompt_tokens_total": 3 * generated,
        "steps_total": 80,
        "oom_total": 0,
        "requests_running": running,
        "requests_waiting": waiting,
        "kv_used_pct": kv_used_pct,
        "kv_fragmentation_pct": 3.5,
        "kv_blocks_count": 512,
        "kv_blocks_free": 307,
        "tokens_per_s": 123456.0,
    }
    if uptime_s is not None:
        values["uptime_s"] = uptime_s
    text = "".join(f"pairscope_{name}{{{own}}} {value}\n" for name, value in values.items())
    text += f'pairscope_engine_info{{{own},version="{version}",config_hash="{config_hash}"}} 1\n'
    return text + histogram("pairscope_step_time_seconds", own, step_buckets or {"0.05": 70.0, "+Inf": 80.0}, step_sum)
