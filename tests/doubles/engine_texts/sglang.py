"""SGLang in miniature: from 0.4.6, where only finished requests count, to 0.5.23 with its ranks and priorities."""

from __future__ import annotations

from collections.abc import Sequence

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed

OLD = {
    "num_running_reqs": 11.0,
    "num_used_tokens": 22_000.0,
    "token_usage": 0.44,
    "gen_throughput": 512.5,
    "num_queue_reqs": 6.0,
    "cache_hit_rate": 0.77,
}


def sglang_0_4_6(
    *, generated: float = 70_000.0, prompts: float = 310_000.0, cached: float = 90_000.0, finished: float = 812.0
) -> str:
    gauges = labelled({"engine_type": "unified", "model_name": MODEL})
    own = labelled({"model_name": MODEL})
    totals = {
        "prompt_tokens_total": prompts,
        "generation_tokens_total": generated,
        "cached_tokens_total": cached,
        "num_requests_total": finished,
    }
    return (
        lines({f"sglang:{name}": value for name, value in OLD.items()}, gauges)
        + lines({f"sglang:{name}": value for name, value in totals.items()}, own)
        + timed("sglang:time_to_first_token_seconds", own, (0.2, 0.4), finished, finished * 0.31)
        + timed("sglang:e2e_request_latency_seconds", own, (4.0, 8.0), finished, finished * 5.5)
    )


def rank(dp: int, **same_requests: int) -> dict[str, object]:
    """The labels of one scheduler rank."""
    return {"dp_rank": dp, "engine_type": "unified", "model_name": MODEL, **same_requests}


ONE_SCHEDULER_A_RANK = (rank(0, tp_rank=0, pp_rank=0, moe_ep_rank=0), rank(1, tp_rank=1, pp_rank=0, moe_ep_rank=0))


def sglang(
    *,
    ranks: Sequence[dict[str, object]] = ONE_SCHEDULER_A_RANK,
    running: tuple[float, ...] = (21.0, 9.0),
    decoded: tuple[float, ...] = (40_000.0, 23_000.0),
    computed: float = 55_000.0,
    cached: float = 12_000.0,
    waiting: float = 4.0,
    finished: float = 640.0,
    throughput: tuple[float, ...] = (300.0, 111.0),
    extra: str = "",
) -> str:
    """0.5.23. Values go by data-parallel rank; ranks of the same requests repeat them."""
    made = ""
    for own in ranks:
        dp = int(str(own["dp_rank"]))
        made += lines(
            {
                "sglang:num_running_reqs": running[dp],
                "sglang:num_queue_reqs": waiting + dp,
                "sglang:num_grammar_queue_reqs": 1.0,
                "sglang:num_prefill_inflight_queue_reqs": 2.0,
                "sglang:token_usage": (0.6, 0.2)[dp],
                "sglang:kv_used_tokens": (60_000.0, 21_000.0)[dp],
                "sglang:kv_available_tokens": (10_240.0, 51_200.0)[dp],
                "sglang:kv_evictable_tokens": (2_560.0, 5_120.0)[dp],
                "sglang:page_size": 64.0,
                "sglang:num_pages": 1_600.0,
                "sglang:gen_throughput": throughput[dp],
                "sglang:utilization": -1.0,
                "sglang:fwd_occupancy": "NaN",
                'sglang:realtime_tokens_total{mode="prefill_compute"}': computed + 100 * dp,
                'sglang:realtime_tokens_total{mode="prefill_cache"}': cached + 10 * dp,
                'sglang:realtime_tokens_total{mode="decode"}': decoded[dp],
                'sglang:cuda_graph_passes_total{mode="decode"}': decoded[dp] / 20,
                'sglang:cuda_graph_passes_total{mode="prefill"}': 50.0,
                "sglang:num_retracted_requests_total": 5.0 + dp,
            },
            labelled(own),
        )
        made += timed("sglang:queue_time_seconds", labelled(own), (0.02, 0.05), finished, finished * 0.03)
    for streaming, share in (("true", 0.75), ("false", 0.25)):
        made += lines(
            {
                "sglang:prompt_tokens_total": 999_999.0 * share,
                "sglang:generation_tokens_total": 888_888.0 * share,
                "sglang:num_requests_total": finished * share,
            },
            labelled({"is_streaming": streaming, "model_name": MODEL}),
        )
    own = labelled({"model_name": MODEL})
    made += lines(
        {
            "sglang:num_aborted_requests_total": 13.0,
            'sglang:http_responses_total{status_code="200"}': 700.0,
            'sglang:http_responses_total{status_code="503"}': 3.0,
        },
        own,
    )
    made += timed("sglang:inter_token_latency_seconds", own, (0.02, 0.04), finished * 50, finished * 50 * 0.025)
    made += timed("sglang:request_time_per_output_token_seconds", own, (0.02, 0.04), finished, finished * 0.027)
    return made + extra
