"""trtllm-serve in miniature: the prefixed families of 1.2, and the five unprefixed ones of 1.0."""

from __future__ import annotations

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed

ITERATIONS = [{"iter": 77, "iterLatencyMS": 21.5, "numActiveRequests": 4}]
"""What /metrics answers, once for all who read it."""


def trtllm(
    *,
    generated: float = 81_000.0,
    prompts: float = 260_000.0,
    finished: float = 505.0,
    latency: float = 0.0215,
    running: float = 17.0,
    prefix: str = "trtllm_",
) -> str:
    own = labelled({"engine_type": "trtllm", "model_name": MODEL})
    values = {
        'request_success_total{finished_reason="stop"}': finished,
        'request_success_total{finished_reason="length"}': 30.0,
        'request_error_total{http_code="400"}': 8.0,
        'request_error_total{http_code="500"}': 3.0,
        "prompt_tokens_total": prompts,
        "generation_tokens_total": generated,
        "prompt_cached_tokens_total": 70_000.0,
        "num_requests_completed_total": 999.0,
        "kv_cache_reused_blocks_total": 2_000.0,
        "kv_cache_missed_blocks_total": 6_500.0,
        "spec_decode_num_draft_tokens_total": 400.0,
        "spec_decode_num_accepted_tokens_total": 250.0,
        'spec_decode_num_drafted_tokens_total{token_position="0"}': 41.0,
        "kv_cache_utilization": 0.35,
        "num_requests_running": running,
        "num_requests_waiting": 5.0,
        "max_num_active_requests": 128.0,
        "iteration_latency_seconds": latency,
        "kv_cache_max_blocks": 4_000.0,
        "kv_cache_free_blocks": 2_600.0,
        "kv_cache_used_blocks": 1_400.0,
        "kv_cache_tokens_per_block": 32.0,
        "num_paused_requests": 1.0,
    }
    made = lines({f"{prefix}{name}": value for name, value in values.items()}, own)
    parallel = labelled({"engine_type": "trtllm", "model_name": MODEL, "pp_size": 1, "tp_size": 4})
    made += lines({f"{prefix}parallel_config_info": 1.0}, parallel)
    made += timed(f"{prefix}time_to_first_token_seconds", own, (0.1, 0.25), finished, finished * 0.2)
    made += timed(f"{prefix}time_per_output_token_seconds", own, (0.02, 0.04), finished, finished * 0.022)
    made += timed(f"{prefix}request_queue_time_seconds", own, (0.01, 0.02), finished, finished * 0.015)
    return made + timed(f"{prefix}e2e_request_latency_seconds", own, (5.0, 10.0), finished, finished * 7.5)


def trtllm_unprefixed(*, finished: float = 62.0, label: str = "undefined") -> str:
    """1.0 and 1.1."""
    own = labelled({"engine_type": label, "model_name": label})
    made = lines({'request_success_total{finished_reason="stop"}': finished}, own)
    made += timed("e2e_request_latency_seconds", own, (5.0, 10.0), finished, finished * 6.0)
    made += timed("time_to_first_token_seconds", own, (0.1, 0.25), finished, finished * 0.15)
    made += timed("time_per_output_token_seconds", own, (0.02, 0.04), finished, finished * 0.03)
    return made + timed("request_queue_time_seconds", own, (0.01, 0.02), finished, finished * 0.011)
