"""trtllm-serve of TensorRT-LLM: Prometheus at /prometheus/metrics; its /metrics is a JSON list that is emptied by reading."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect, Family, KvPool, told_version
from agent.exposition import Exposition

PATH = "/prometheus/metrics"


def kv_pool(exposition: Exposition) -> KvPool:
    used = Family("trtllm_kv_cache_used_blocks").value(exposition)
    block_tokens = Family("trtllm_kv_cache_tokens_per_block", join="max").value(exposition)
    return KvPool(held_tokens=used * block_tokens if used is not None and block_tokens else None)


TRTLLM = Dialect(
    kind="trtllm",
    prefixes=("trtllm_",),
    counter_style="finish",
    counters={
        "generation_tokens_total": (Family("trtllm_generation_tokens_total"),),
        "prompt_tokens_total": (Family("trtllm_prompt_tokens_total"),),
        "prompt_tokens_computed_total": (
            Family("trtllm_prompt_tokens_total", minus=Family("trtllm_prompt_cached_tokens_total")),
        ),
        # counted in blocks, and of use as a share only
        "prefix_queries_total": (
            Family("trtllm_kv_cache_reused_blocks_total", plus=(Family("trtllm_kv_cache_missed_blocks_total"),)),
        ),
        "prefix_hits_total": (Family("trtllm_kv_cache_reused_blocks_total"),),
        "requests_finished_total": (
            Family("trtllm_request_success_total"),
            Family("trtllm_num_requests_completed_total"),
        ),
        "requests_failed_total": (
            Family(
                "trtllm_request_error_total", where={"http_code": ("500", "501", "502", "503", "504")}, none_yet=True
            ),
        ),
        "spec_drafted_total": (Family("trtllm_spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("trtllm_spec_decode_num_accepted_tokens_total"),),
    },
    gauges={
        "requests_running": (Family("trtllm_num_requests_running"),),
        "requests_waiting": (Family("trtllm_num_requests_waiting"),),
        "kv_used_pct": (Family("trtllm_kv_cache_utilization", join="mean", is_ratio=True),),
        "kv_blocks_count": (Family("trtllm_kv_cache_max_blocks"),),
        "kv_blocks_free": (Family("trtllm_kv_cache_free_blocks"),),
    },
    histograms={
        "ttft": ("trtllm_time_to_first_token_seconds",),
        "tpot": ("trtllm_time_per_output_token_seconds",),
        "e2e": ("trtllm_e2e_request_latency_seconds",),
        "queue": ("trtllm_request_queue_time_seconds",),
        "prefill": ("trtllm_request_prefill_time_seconds",),
    },
    kv_used_kind="live",
    kv_pool=kv_pool,
    # they hold what the last iteration left
    iteration=(Family("trtllm_iteration_latency_seconds", join="max"),),
    paths=(PATH,),
    info=("trtllm_parallel_config_info", "trtllm_kv_cache_config_info"),
    info_ignored=frozenset({"engine_type"}),
    ask=told_version,
)

TRTLLM_UNPREFIXED = Dialect(
    kind="trtllm",
    prefixes=(),
    needs=frozenset({"e2e_request_latency_seconds_count", "request_success_total"}),
    lacks=frozenset({"num_request_max", "gpu_cache_usage_perc"}),  # a NIM's
    counter_style="finish",
    counters={"requests_finished_total": (Family("request_success_total"),)},
    gauges={},
    histograms={
        "ttft": ("time_to_first_token_seconds",),
        "tpot": ("time_per_output_token_seconds",),
        "e2e": ("e2e_request_latency_seconds",),
        "queue": ("request_queue_time_seconds",),
    },
    paths=(PATH,),
    ask=told_version,
)
"""Releases 1.0 and 1.1: five families without a prefix, whose labels may read "undefined"."""
