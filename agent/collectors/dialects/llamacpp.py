"""llama.cpp's server. Its rate gauges are averages since anybody's last scrape and are never used."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect, Family, Get, Told, scalars, text

SCRAPE_EVERY_S = 10.0
"""A scrape runs on the loop that computes; asked every second it can hold up the server (llama.cpp issue 29104)."""


def ask(get: Get) -> Told:
    body = get("/props")
    props = body if isinstance(body, dict) else {}
    path = text(props, "model_path")
    config = scalars(props, ("model_path", "model_alias", "total_slots"))
    config |= scalars(props.get("default_generation_settings"), ("n_ctx",))
    name = text(props, "model_alias") or path.replace("\\", "/").rsplit("/", 1)[-1]
    return Told(text(props, "build_info"), name, config)


LLAMACPP = Dialect(
    kind="llamacpp",
    prefixes=("llamacpp:",),
    counter_style="finish",
    counters={
        "generation_tokens_total": (Family("llamacpp:tokens_predicted_total"),),
        # its own total leaves the cached ones out; builds before 2026 don't count those at all
        "prompt_tokens_total": (
            Family("llamacpp:prompt_tokens_total", plus=(Family("llamacpp:prompt_tokens_cached_total"),)),
        ),
        "prompt_tokens_computed_total": (Family("llamacpp:prompt_tokens_total"),),
        "prefix_queries_total": (
            Family("llamacpp:prompt_tokens_cached_total", plus=(Family("llamacpp:prompt_tokens_total"),)),
        ),
        "prefix_hits_total": (Family("llamacpp:prompt_tokens_cached_total"),),
        "steps_total": (Family("llamacpp:n_decode_total"),),
        "spec_drafts_total": (Family("llamacpp:spec_decode_num_drafts_total"),),
        "spec_drafted_total": (Family("llamacpp:spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("llamacpp:spec_decode_num_accepted_tokens_total"),),
    },
    gauges={
        "requests_running": (Family("llamacpp:requests_processing"),),
        "requests_waiting": (Family("llamacpp:requests_deferred"),),
        "kv_used_pct": (Family("llamacpp:kv_cache_usage_ratio", is_ratio=True),),  # to mid-2025
    },
    histograms={},
    means={
        # seconds are added up over the slots, so this is how fast one slot writes
        "tpot": (Family("llamacpp:tokens_predicted_seconds_total"), Family("llamacpp:tokens_predicted_total"))
    },
    kv_used_kind="live_plus_cached",
    significant_digits=6,
    scrape_every_s=SCRAPE_EVERY_S,
    ask=ask,
)
