"""Text Generation Inference 3.x in miniature."""

from __future__ import annotations

from tests.doubles.engine_texts.text import lines, timed


def tgi(
    *,
    generated: float = 52_000.5,
    prompts: float = 410_000.25,
    success: float = 300.0,
    decodes: float = 9_000.0,
    running: float = 7.0,
    waiting: float = 2.0,
    reserved: float = 30_000.0,
    took: float = 6.0,
) -> str:
    made = lines(
        {
            "tgi_request_count": success + 21,
            "tgi_request_success": success,
            'tgi_request_failure{err="overloaded"}': 4,
            'tgi_request_failure{err="validation"}': 9,
            'tgi_request_failure{err="generation"}': 3,
            'tgi_request_failure{err="incomplete"}': 1,
            'tgi_request_failure{err="dropped"}': 5,
            'tgi_batch_inference_count{method="prefill"}': 290,
            'tgi_batch_inference_count{method="decode"}': decodes,
            "tgi_queue_size": waiting,
            "tgi_batch_current_size": running,
            "tgi_batch_current_max_tokens": reserved,
            "tgi_batch_max_total_tokens": 40_000,
            'tgi_request_skipped_tokens{quantile="0.5"}': 1,
            "tgi_request_skipped_tokens_sum": 71,
            "tgi_request_skipped_tokens_count": 70,
        }
    )
    made += timed("tgi_request_duration", "", (5.0, 7.5), success, success * took)
    made += timed("tgi_request_queue_duration", "", (0.06, 0.09), success, success * 0.07)
    made += timed("tgi_request_mean_time_per_token_duration", "", (0.02, 0.03), success, success * 0.024)
    made += timed("tgi_request_input_length", "", (1000.0, 2000.0), success, prompts)
    return made + timed("tgi_request_generated_tokens", "", (150.0, 250.0), success, generated)
