"""LMDeploy in miniature."""

from __future__ import annotations

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed


def lmdeploy(*, generated: float = 61_000.0, prompts: float = 205_000.0, steps: float = 4_000.0) -> str:
    own = labelled({"engine": 0, "model_name": MODEL})
    values = {
        "num_requests_running": 14.0,
        "num_requests_waiting": 3.0,
        "num_api_requests_waiting": 2.0,
        "num_api_requests_routed": 19.0,
        "gpu_cache_usage_perc": 0.27,
        "prefix_cache_hit_rate": 0.9,
        "prompt_tokens_total": prompts,
        "generation_tokens_total": generated,
        "cached_tokens_total": 45_000.0,
        'request_success_total{finished_reason="ResponseType.FINISH"}': 410.0,
        'request_success_total{finished_reason="ResponseType.CANCEL"}': 17.0,
        'request_success_total{finished_reason="ResponseType.OUT_OF_MEMORY"}': 6.0,
        'request_success_total{finished_reason="ResponseType.INTERNAL_ENGINE_ERROR"}': 2.0,
    }
    made = lines({"lmdeploy:backend_config_info": 1.0}, labelled({"session_len": 16384, "tp": 2}))
    made += lines({f"lmdeploy:{name}": value for name, value in values.items()}, own)
    made += timed("lmdeploy:iteration_tokens_total", own, (10.0, 25.0), steps, steps * 16)
    made += timed("lmdeploy:iter_token_latency", own, (0.01, 0.02), steps * 10, steps * 10 * 0.018)
    return made + timed("lmdeploy:time_to_first_token_seconds", own, (0.4, 0.8), steps / 10, steps / 10 * 0.5)
