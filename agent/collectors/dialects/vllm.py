"""vLLM: its names from V0 (0.5) to 0.32; where two releases differ, the newer name first."""

from __future__ import annotations

from dataclasses import replace

from agent.collectors.dialects.dialect import Dialect, Family, KvPool, number, told_version
from agent.exposition import Exposition

INFO = "vllm:cache_config_info"
REPLICA_LABELS = ("ReplicaId", "WorkerId")


def kv_pool(exposition: Exposition) -> KvPool:
    """Pages from the labels of the configuration. Under data parallelism every engine repeats the sum over all engines, so
    it is never added; replicas behind one Ray agent each tell their own.
    """
    blocks: dict[tuple[str, ...], float] = {}
    block_tokens = None
    for labels in exposition.series.get(INFO, {}):
        own = dict(labels)
        told = number(own.get("num_gpu_blocks", ""))
        block_tokens = number(own.get("block_size", "")) or block_tokens
        if told is not None:
            replica = tuple(own.get(label, "") for label in REPLICA_LABELS)
            blocks[replica] = max(told, blocks.get(replica, 0.0))
    return KvPool(sum(blocks.values()) or None, block_tokens)


VLLM = Dialect(
    kind="vllm",
    prefixes=("vllm:",),
    needs=frozenset({INFO}),
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("vllm:generation_tokens_total"),),
        "prompt_tokens_total": (Family("vllm:prompt_tokens_total"),),
        "prompt_tokens_computed_total": (  # from 0.16
            Family("vllm:prompt_tokens_by_source_total", where={"source": ("local_compute",)}),
        ),
        "preemptions_total": (Family("vllm:num_preemptions_total"),),
        "requests_finished_total": (
            Family("vllm:request_success_total", where={"finished_reason": ("stop", "length", "repetition")}),
        ),
        "requests_failed_total": (
            Family("http_requests_total", where={"status": ("5xx",)}, none_yet=True),
            Family("vllm:request_success_total", where={"finished_reason": ("error",)}),
        ),
        "requests_aborted_total": (Family("vllm:request_success_total", where={"finished_reason": ("abort",)}),),
        "spec_drafts_total": (Family("vllm:spec_decode_num_drafts_total"),),
        "spec_drafted_total": (Family("vllm:spec_decode_num_draft_tokens_total"),),
        "spec_accepted_total": (Family("vllm:spec_decode_num_accepted_tokens_total"),),
        # both sets coexist in 0.9.2 to 0.10.2
        "prefix_queries_total": (
            Family("vllm:prefix_cache_queries_total"),
            Family("vllm:gpu_prefix_cache_queries_total"),
        ),
        "prefix_hits_total": (Family("vllm:prefix_cache_hits_total"), Family("vllm:gpu_prefix_cache_hits_total")),
    },
    largest=frozenset({"requests_failed_total"}),
    zero_is_unknown=frozenset({"requests_aborted_total"}),  # a client that hangs up is counted nowhere
    gauges={
        "requests_running": (Family("vllm:num_requests_running"),),
        "requests_waiting": (Family("vllm:num_requests_waiting"),),
        "kv_used_pct": (
            Family("vllm:kv_cache_usage_perc", join="mean", is_ratio=True),
            Family("vllm:gpu_cache_usage_perc", join="mean", is_ratio=True),  # to 0.10.2
        ),
        "reported_tokens_per_s": (Family("vllm:avg_generation_throughput_toks_per_s"),),  # V0, to 0.6.6
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        # the older name was the gap between steps as well; from 0.10.2 both may be there, with the same values
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
        "prefill": ("vllm:request_prefill_time_seconds",),
        "prompt_len": ("vllm:request_prompt_tokens",),
        "output_len": ("vllm:request_generation_tokens",),
    },
    step_tokens=("vllm:iteration_tokens_total",),
    kv_used_kind="live",
    kv_pool=kv_pool,
    rank_labels=(*REPLICA_LABELS, "engine"),
    info=(INFO,),
    info_ignored=frozenset(
        # profiled at each start, or the rank
        {"engine", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_memory_bytes"}
    ),
    ask=told_version,
)

VLLM_LIKE = replace(VLLM, kind="vllm-compatible", needs=frozenset())
"""Simulators and other engines that took over vLLM's names; vLLM itself always tells its cache configuration."""
