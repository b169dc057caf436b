"""PairScope: our own engine, which says every field by its own name."""

from __future__ import annotations

from collections.abc import Iterator

from agent.collectors.dialects.dialect import Alternatives, Dialect, Family
from telemetry.catalogue import ENGINE, Kind

DERIVED = frozenset(
    (
        *("tokens_per_s", "prompt_tokens_per_s", "reported_tokens_per_s", "step_mean_s", "stats_age_s", "probe_s"),
        *("tpot_mean_s", "gpus_confidence", "proc_cpu_pct", "proc_cpu_max_pct", "proc_rss_bytes"),
        *("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "itl_mean_s", "itl_p50_s", "itl_p99_s", "e2e_p99_s", "queue_p99_s"),
        *("prompt_len_mean", "prompt_len_p50", "prompt_len_p95", "output_len_mean", "output_len_p95"),
    )
)
"""What the agent works out itself for every kind of engine, so that it means the same everywhere; never taken from an engine."""


def _own(kind: Kind) -> Iterator[tuple[str, Alternatives]]:
    """Our own engine says every field by its own name."""
    for name, entry in ENGINE.fields.items():
        if entry.kind is kind and name not in DERIVED:
            mean = kind is Kind.GAUGE and not name.startswith(("requests_", "kv_blocks_", "kv_slots_"))
            # every counter is exposed with this ending
            exposed = f"{name.removesuffix('_total')}_total" if kind is Kind.COUNTER else name
            yield name, (Family(f"pairscope_{exposed}", join="mean" if mean else "sum"),)


def _counters() -> Iterator[tuple[str, Alternatives]]:
    """Of the stages one family with a label; everything else has a family of its own."""
    for name, alternatives in _own(Kind.COUNTER):
        stage = name.removeprefix("stage_").removesuffix("_s")
        labelled = Family("pairscope_stage_seconds_total", where={"stage": (stage,)})
        yield name, (labelled,) if name.startswith("stage_") else alternatives


PAIRSCOPE = Dialect(
    kind="pairscope",
    prefixes=("pairscope_",),
    counter_style="step",
    counters=dict(_counters()),
    gauges=dict(_own(Kind.GAUGE)),
    histograms={
        "ttft": ("pairscope_time_to_first_token_seconds",),
        "itl": ("pairscope_inter_token_latency_seconds",),
        "tpot": ("pairscope_time_per_output_token_seconds",),
        "e2e": ("pairscope_request_latency_seconds",),
        "queue": ("pairscope_queue_time_seconds",),
        "step": ("pairscope_step_time_seconds",),
        "prompt_len": ("pairscope_prompt_length_tokens",),
        "output_len": ("pairscope_output_length_tokens",),
    },
    kv_used_kind="live",
    info=("pairscope_engine_info",),
    version_label="version",
    config_label="config_hash",
    age="pairscope_stats_age_s",
)
