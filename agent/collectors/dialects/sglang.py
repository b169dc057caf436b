"""SGLang: its names from 0.4.1 to 0.5.23. Every scheduler rank may export the same requests, so ranks are joined first.

From 0.5.10 `realtime_tokens_total` grows with every step; before, and for the totals by request still, only a finished request
adds to a counter.
"""

from __future__ import annotations

from dataclasses import replace

from agent.collectors.dialects.dialect import Dialect, Family, Get, KvPool, Told, scalars, text
from agent.exposition import Exposition, Labels

SAME_REQUESTS = frozenset(
    ("tp_rank", "pp_rank", "moe_ep_rank", "moe_dp_rank", "cp_rank", "attn_cp_rank", "attn_tp_rank", "ep_rank")
)
"""Ranks that work on the same requests, unlike `dp_rank`."""

REALTIME = "sglang:realtime_tokens_total"
CONFIG = (
    *("model_path", "tokenizer_path", "served_model_name", "revision", "dtype", "quantization", "kv_cache_dtype"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "enable_dp_attention", "context_length", "page_size"),
    *("mem_fraction_static", "max_running_requests", "max_total_tokens", "max_prefill_tokens", "chunked_prefill_size"),
    *("schedule_policy", "schedule_conservativeness", "attention_backend", "sampling_backend", "grammar_backend"),
    *("disable_radix_cache", "disable_cuda_graph", "cuda_graph_max_bs", "disable_overlap_schedule"),
    *("enable_mixed_chunk", "enable_torch_compile", "disaggregation_mode", "load_format", "lora_backend"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk"),
    "speculative_num_draft_tokens",
)
"""Launch arguments that make one configuration; what is profiled at the start, and every key or address, is not among them."""


def joined_ranks(exposition: Exposition) -> Exposition:
    """Series that differ only in ranks of the same requests become one, the largest; of priorities the row of all stays."""
    series: dict[str, dict[Labels, float]] = {}
    for name, own in exposition.series.items():
        if not name.startswith("sglang:"):
            series[name] = own
            continue
        totals = {labels: value for labels, value in own.items() if not dict(labels).get("priority")}
        made: dict[Labels, float] = {}
        for labels, value in (totals or own).items():
            kept = tuple(pair for pair in labels if pair[0] not in SAME_REQUESTS)
            made[kept] = max(value, made.get(kept, value))
        series[name] = made
    return replace(exposition, series=series)


def kv_pool(exposition: Exposition) -> KvPool:
    """Pages, from 0.5.10; what can be evicted at once is free, as the usage counts it. All ranks together."""

    def total(*names: str) -> float | None:
        return next((value for name in names if (value := Family(name).value(exposition)) is not None), None)

    blocks = total("sglang:num_pages")
    page_tokens = Family("sglang:page_size", join="max").value(exposition)
    if blocks is None:  # 0.5.10 to 0.5.16 told both as labels
        info = [dict(labels) for labels in exposition.series.get("sglang:cache_config_info", {})]
        blocks = sum(float(own["num_pages"]) for own in info if own.get("num_pages", "").isdigit()) or None
        page_tokens = max((float(own["page_size"]) for own in info if own.get("page_size", "").isdigit()), default=None)
    available, evictable = total("sglang:kv_available_tokens"), total("sglang:kv_evictable_tokens")
    free = (
        (available + evictable) / page_tokens
        if available is not None and evictable is not None and page_tokens
        else None
    )
    return KvPool(blocks, page_tokens, free, total("sglang:kv_used_tokens", "sglang:num_used_tokens"))


def ask(get: Get) -> Told:
    body = get("/server_info") or get("/get_server_info")  # the older name
    sizes = body if isinstance(body, dict) else {}
    ranks = sizes.get("dp_size")
    return Told(
        text(body, "version", "sglang_version"),
        text(body, "served_model_name", "model_path"),
        scalars(body, CONFIG),
        ranks if isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks <= 4096 else None,
    )


def _modes(*modes: str) -> Family:
    return Family(REALTIME, where={"mode": modes})


SGLANG_BEFORE_REALTIME = Dialect(
    kind="sglang",
    prefixes=("sglang:",),
    counter_style="finish",
    counters={
        "generation_tokens_total": (Family("sglang:generation_tokens_total"),),
        "prompt_tokens_total": (Family("sglang:prompt_tokens_total"),),
        "prompt_tokens_computed_total": (
            Family("sglang:prompt_tokens_total", minus=Family("sglang:cached_tokens_total")),
        ),
        "prefix_queries_total": (Family("sglang:prompt_tokens_total"),),
        "prefix_hits_total": (Family("sglang:cached_tokens_total"),),
        "preemptions_total": (Family("sglang:num_retracted_requests_total"),),
        "requests_finished_total": (Family("sglang:num_requests_total"),),
        "requests_aborted_total": (
            Family("sglang:num_aborted_requests_total"),
            Family("sglang:num_aborted_requests"),  # to 0.5.2
        ),
        "requests_failed_total": (
            Family(
                "sglang:http_responses_total",
                where={"status_code": ("500", "501", "502", "503", "504")},
                none_yet=True,
            ),
        ),
        "steps_total": (Family("sglang:cuda_graph_passes_total"),),
        "spec_drafts_total": (Family("sglang:spec_verify_calls_total"),),
    },
    gauges={
        "requests_running": (Family("sglang:num_running_reqs"),),
        "requests_waiting": (
            Family(
                "sglang:num_queue_reqs",
                plus=tuple(
                    Family(f"sglang:{name}")
                    for name in (
                        *(
                            "num_grammar_queue_reqs",
                            "num_prefill_bootstrap_queue_reqs",
                            "num_prefill_prealloc_queue_reqs",
                        ),
                        *("num_prefill_inflight_queue_reqs", "num_prefill_infight_queue_reqs"),  # misspelt in 0.5.2
                        *("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
                    )
                ),
            ),
        ),
        "kv_used_pct": (Family("sglang:token_usage", join="mean", is_ratio=True),),
        "reported_tokens_per_s": (Family("sglang:gen_throughput"),),
        # an idle rank tells 0, which is no mean's business
        "spec_tokens_per_draft": (Family("sglang:spec_accept_length", join="max"),),
        "spec_acceptance_pct": (Family("sglang:spec_accept_rate", join="max", is_ratio=True),),
    },
    zero_is_unknown=frozenset(
        {"spec_drafts_total", "spec_tokens_per_draft", "spec_acceptance_pct"}
    ),  # it guesses nothing
    histograms={
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "tpot": ("sglang:request_time_per_output_token_seconds",),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "queue": ("sglang:queue_time_seconds", "sglang:queue_time_s"),
        "prompt_len": ("sglang:prompt_tokens_histogram",),
        "output_len": ("sglang:generation_tokens_histogram",),
    },
    lacks=frozenset({REALTIME}),
    tidy=joined_ranks,
    kv_used_kind="live",
    kv_pool=kv_pool,
    rank_labels=("dp_rank",),
    refresh_s=30.0,
    ask=ask,
    model_labels=("model_name", "name"),
)

SGLANG = replace(
    SGLANG_BEFORE_REALTIME,
    counter_style="step",
    lacks=frozenset(),
    needs=frozenset({REALTIME}),
    counters={
        **SGLANG_BEFORE_REALTIME.counters,
        "generation_tokens_total": (_modes("decode"),),
        "prompt_tokens_total": (_modes("prefill_compute", "prefill_cache"),),
        "prompt_tokens_computed_total": (_modes("prefill_compute"),),
        "prefix_queries_total": (_modes("prefill_compute", "prefill_cache"),),
        "prefix_hits_total": (replace(_modes("prefill_cache"), none_yet=True),),
    },
)

_GATEWAY = {"sglang_": "sglang:"}  # a gateway's names have no colon
SGLANG_VIA_GATEWAY = replace(SGLANG, passed_as=_GATEWAY)
SGLANG_BEFORE_REALTIME_VIA_GATEWAY = replace(SGLANG_BEFORE_REALTIME, passed_as=_GATEWAY)
