"""NVIDIA NIM for LLMs 1.x: /v1/metrics (older: /metrics), vLLM's words without any prefix."""

from __future__ import annotations

from agent.collectors.dialects.dialect import Dialect, Family, Get, Told, text

PATH = "/v1/metrics"


def ask(get: Get) -> Told:
    return Told(version=text(get("/v1/version"), "release", "version"))


NIM = Dialect(
    kind="nim",
    prefixes=(),
    needs=frozenset({"gpu_cache_usage_perc", "num_request_max"}),
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("generation_tokens_total"),),
        "prompt_tokens_total": (Family("prompt_tokens_total"),),
        "requests_finished_total": (
            Family("request_success_total"),
            Family("request_finish_total", where={"finished_reason": ("stop", "length")}),
        ),
        "requests_failed_total": (Family("request_failure_total"),),
        "requests_aborted_total": (Family("request_finish_total", where={"finished_reason": ("abort",)}),),
    },
    gauges={
        "requests_running": (Family("num_requests_running"),),
        "requests_waiting": (Family("num_requests_waiting"),),
        "kv_used_pct": (Family("gpu_cache_usage_perc", join="mean", is_ratio=True),),
    },
    histograms={
        "ttft": ("time_to_first_token_seconds",),
        "itl": ("time_per_output_token_seconds",),
        "e2e": ("e2e_request_latency_seconds",),
        "prompt_len": ("request_prompt_tokens",),
        "output_len": ("request_generation_tokens",),
    },
    kv_used_kind="live",
    paths=(PATH,),
    ask=ask,
)
