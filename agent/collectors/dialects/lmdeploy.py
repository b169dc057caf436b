"""LMDeploy, from 0.9.2: vLLM's ideas under its own prefix; outcomes are the names of its response types."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect, Family

_OUTCOMES = "lmdeploy:request_success_total"  # counts failures too
_GOOD = ("ResponseType.FINISH", "ResponseType.SUCCESS")
_CANCELLED = ("ResponseType.CANCEL",)

LMDEPLOY = Dialect(
    kind="lmdeploy",
    prefixes=("lmdeploy:",),
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("lmdeploy:generation_tokens_total"),),
        "prompt_tokens_total": (Family("lmdeploy:prompt_tokens_total"),),
        "prompt_tokens_computed_total": (
            Family("lmdeploy:prompt_tokens_total", minus=Family("lmdeploy:cached_tokens_total")),
        ),
        "prefix_queries_total": (Family("lmdeploy:prompt_tokens_total"),),
        "prefix_hits_total": (Family("lmdeploy:cached_tokens_total"),),
        "requests_finished_total": (Family(_OUTCOMES, where={"finished_reason": _GOOD}, none_yet=True),),
        "requests_failed_total": (Family(_OUTCOMES, unless={"finished_reason": (*_GOOD, *_CANCELLED)}, none_yet=True),),
        "requests_aborted_total": (Family(_OUTCOMES, where={"finished_reason": _CANCELLED}, none_yet=True),),
        "oom_total": (Family(_OUTCOMES, where={"finished_reason": ("ResponseType.OUT_OF_MEMORY",)}, none_yet=True),),
        "spec_drafts_total": (Family("lmdeploy:spec_decode_num_drafts_total"),),
        "spec_drafted_total": (Family("lmdeploy:spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("lmdeploy:spec_decode_num_accepted_tokens_total"),),
    },
    gauges={
        "requests_running": (Family("lmdeploy:num_requests_running"),),
        "requests_waiting": (
            Family("lmdeploy:num_requests_waiting", plus=(Family("lmdeploy:num_api_requests_waiting"),)),
        ),
        "kv_used_pct": (Family("lmdeploy:gpu_cache_usage_perc", join="mean", is_ratio=True),),
    },
    histograms={
        "ttft": ("lmdeploy:time_to_first_token_seconds",),
        "itl": ("lmdeploy:iter_token_latency", "lmdeploy:time_per_output_token_seconds"),  # both are between iterations
        "e2e": ("lmdeploy:e2e_request_latency_seconds",),
        "queue": ("lmdeploy:request_queue_time_seconds",),
        "prefill": ("lmdeploy:request_prefill_time_seconds",),
        "prompt_len": ("lmdeploy:request_prompt_tokens",),
        "output_len": ("lmdeploy:request_generation_tokens",),
    },
    step_tokens=("lmdeploy:iteration_tokens_total",),
    rank_labels=("engine",),
    info=("lmdeploy:backend_config_info",),
)
