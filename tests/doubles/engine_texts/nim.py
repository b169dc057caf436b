"""A NIM for LLMs 1.x in miniature: vLLM's words without a prefix."""

from __future__ import annotations

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed


def nim(*, generated: float = 15_000.0, prompts: float = 64_000.0) -> str:
    own = labelled({"model_name": MODEL})
    values = {
        "gpu_cache_usage_perc": 0.18,
        "num_requests_running": 5.0,
        "num_requests_waiting": 2.0,
        "num_request_max": 512.0,
        "prompt_tokens_total": prompts,
        "generation_tokens_total": generated,
        "request_success_total": 220.0,
        "request_failure_total": 4.0,
    }
    return lines(values, own) + timed("time_to_first_token_seconds", own, (0.1, 0.2), 220.0, 30.8)
