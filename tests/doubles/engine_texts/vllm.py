"""vLLM in miniature, every value set by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.doubles.engine_texts.text import MODEL, histogram


def vllm(
    *,
    ranks: Sequence[str | None] = ("0",),
    generated: Sequence[float] = (1000.0,),
    prompts: Sequence[float] = (5000.0,),
    running: Sequence[float] = (3.0,),
    waiting: Sequence[float] = (1.0,),
    kv: Sequence[float] = (0.25,),
    steps: float = 400.0,
    start_s: float | None = 1_795_990_000.0,
    blocks: int = 800,
    kv_names: Sequence[str] = ("kv_cache_usage_perc",),
    prefix_names: Sequence[str] = ("prefix_cache",),
    itl_name: str = "inter_token_latency_seconds",
    queue_name: str = "request_queue_time_seconds",
    ttft: Mapping[str, float] | None = None,
    ttft_sum: float = 25.0,
    itl: tuple[Mapping[str, float], float] | None = None,
    cache_dtype: str = "auto",
) -> str:
    """vLLM; one rank an entry (None: no engine label, as before 0.8). 0.9.2 to 0.10.2 have both kv and both prefix names."""
    made = [] if start_s is None else [f"process_start_time_seconds {start_s}"]
    ttft = ttft or {"0.2": 10.0, "0.5": 90.0, "+Inf": 100.0}
    buckets, itl_sum = itl or ({"0.01": 100.0, "0.05": 990.0, "+Inf": 1000.0}, 20.0)
    for index, rank in enumerate(ranks):
        own = f'model_name="{MODEL}"' + ("" if rank is None else f',engine="{rank}"')
        values = {
            "num_requests_running": running[index],
            "num_requests_waiting": waiting[index],
            **dict.fromkeys(kv_names, kv[index]),
            "generation_tokens_total": generated[index],
            "prompt_tokens_total": prompts[index],
            "num_preemptions_total": 2 + index,
            **{f"{name}_queries_total": 700.0 for name in prefix_names},
            **{f"{name}_hits_total": 300.0 for name in prefix_names},
            "generation_tokens_created": 1_795_990_012.3 if start_s is None else start_s + 12,
        }
        made += [f"vllm:{name}{{{own}}} {value}" for name, value in values.items()]
        for reason, count in {"stop": 40, "length": 5, "abort": 7, "error": 1}.items():
            made.append(f'vllm:request_success_total{{{own},finished_reason="{reason}"}} {count}')
        made.append(histogram("vllm:time_to_first_token_seconds", own, ttft, ttft_sum))
        made.append(histogram(f"vllm:{itl_name}", own, buckets, itl_sum))
        made.append(histogram(f"vllm:{queue_name}", own, {"0.3": 100.0, "+Inf": 100.0}, 2.0))
        made.append(histogram("vllm:iteration_tokens_total", own, {"8.0": steps / 2, "+Inf": steps}, steps * 9))
        info = own if rank is not None else f'gpu_memory_utilization="0.9",{own}'
        made.append(
            f'vllm:cache_config_info{{{info},block_size="16",cache_dtype="{cache_dtype}",num_gpu_blocks="{blocks}"}} 1.0'
        )
    return "\n".join(made) + "\n"
