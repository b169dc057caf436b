"""vLLM: its names from V0 (0.5) to 0.32; where two releases differ, the newer name first."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect, Family

VLLM = Dialect(
    kind="vllm",
    prefix="vllm:",
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("vllm:generation_tokens_total"),),
        "prompt_tokens_total": (Family("vllm:prompt_tokens_total"),),
        "preemptions_total": (Family("vllm:num_preemptions_total"),),
        "requests_finished_total": (
            Family("vllm:request_success_total", where={"finished_reason": ("stop", "length", "repetition")}),
        ),
        "requests_failed_total": (Family("vllm:request_success_total", where={"finished_reason": ("error",)}),),
        "requests_aborted_total": (Family("vllm:request_success_total", where={"finished_reason": ("abort",)}),),
        "spec_drafted_total": (Family("vllm:spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("vllm:spec_decode_num_accepted_tokens_total"),),
        # both sets coexist in 0.9.2 to 0.10.2
        "prefix_queries_total": (
            Family("vllm:prefix_cache_queries_total"),
            Family("vllm:gpu_prefix_cache_queries_total"),
        ),
        "prefix_hits_total": (Family("vllm:prefix_cache_hits_total"), Family("vllm:gpu_prefix_cache_hits_total")),
    },
    gauges={
        "requests_running": (Family("vllm:num_requests_running"),),
        "requests_waiting": (Family("vllm:num_requests_waiting"),),
        "kv_used_pct": (
            Family("vllm:kv_cache_usage_perc", join="mean", is_ratio=True),
            Family("vllm:gpu_cache_usage_perc", join="mean", is_ratio=True),  # to 0.10.2
        ),
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        # the older name was the gap between steps as well, in V1
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
        "prompt_len": ("vllm:request_prompt_tokens",),
        "output_len": ("vllm:request_generation_tokens",),
    },
    step_tokens=("vllm:iteration_tokens_total",),
    info="vllm:cache_config_info",
    info_ignored=frozenset(
        # profiled at each start, or the rank
        {"engine", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_memory_bytes"}
    ),
    version_path="/version",
    kv_blocks_label="num_gpu_blocks",
    kv_block_tokens_label="block_size",
)
