"""Triton with the TensorRT-LLM backend in miniature: an ensemble whose models all count the same requests."""

from __future__ import annotations

from tests.doubles.engine_texts.text import labelled, lines


def triton(*, served: float = 720.0, iterations: float = 5_100.0, with_waiting: bool = True) -> str:
    requests = {"context": 2, "scheduled": 13, "max": 256, "active": 19}
    if with_waiting:
        requests["waiting"] = 4
    blocks = {"fraction": 0.48, "tokens_per": 64, "used": 2_400, "free": 2_600, "max": 5_000}
    made = ""
    for model, factor in (("draft", 0), ("tensorrt_llm", 1)):
        own = labelled({"model": model, "version": 1})
        made += lines(
            {f'nv_trt_llm_request_metrics{{request_type="{kind}"}}': factor * n for kind, n in requests.items()}, own
        )
        made += lines(
            {f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{k}"}}': factor * v for k, v in blocks.items()},
            own,
        )
        made += lines(
            {
                'nv_trt_llm_general_metrics{general_type="iteration_counter"}': factor * iterations,
                'nv_trt_llm_general_metrics{general_type="timestamp"}': 1_796_000_000,
            },
            own,
        )
    for model, failed in (("preprocessing", 0), ("tensorrt_llm", 0), ("postprocessing", 0), ("ensemble", 8)):
        own = labelled({"model": model, "version": 1})
        made += lines(
            {
                "nv_inference_request_success": served,
                "nv_inference_request_failure": failed,
                "nv_inference_queue_duration_us": 5_000_000,
            },
            own,
        )
    return made + lines({"nv_gpu_power_usage": 333.0}, labelled({"gpu_uuid": "GPU-1"}))
