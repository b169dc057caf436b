"""NVIDIA Dynamo. A frontend sees what clients get; a worker passes its engine's families on beside its own. Both count the same
tokens, so theirs are never added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from agent.collectors.dialects.dialect import Dialect, Family, KvPool
from agent.collectors.dialects.sglang import SGLANG, SGLANG_BEFORE_REALTIME
from agent.collectors.dialects.trtllm import TRTLLM
from agent.collectors.dialects.vllm import VLLM_LIKE
from agent.exposition import Exposition
from telemetry.sample import Sample

_COMPONENT = "dynamo_component_"

DYNAMO_FRONTEND = Dialect(
    kind="dynamo",
    prefixes=("dynamo_frontend_",),
    counter_style="step",
    counters={
        "generation_tokens_total": (Family("dynamo_frontend_output_tokens_total"),),
        "requests_finished_total": (
            Family("dynamo_frontend_requests_total", where={"status": ("success",)}, none_yet=True),
        ),
        "requests_failed_total": (
            Family(
                "dynamo_frontend_requests_total",
                where={"status": ("error",)},
                unless={"error_type": ("validation", "not_found", "cancelled")},  # the client's doing
                none_yet=True,
            ),
        ),
        "requests_aborted_total": (
            Family("dynamo_frontend_requests_total", where={"error_type": ("cancelled",)}, none_yet=True),
        ),
    },
    gauges={
        "requests_running": (Family("dynamo_frontend_inflight_requests"),),
        "requests_waiting": (Family("dynamo_frontend_queued_requests"),),
    },
    histograms={
        "ttft": ("dynamo_frontend_time_to_first_token_seconds",),
        "itl": ("dynamo_frontend_inter_token_latency_seconds",),
        "e2e": ("dynamo_frontend_request_duration_seconds",),
        "prompt_len": ("dynamo_frontend_input_sequence_tokens",),
        "output_len": ("dynamo_frontend_output_sequence_tokens",),
    },
    model_labels=("model",),
)


def _pool(exposition: Exposition) -> KvPool:
    """From 1.x, or under the names of 0.7."""
    found = (Family(_COMPONENT + name).value(exposition) for name in ("total_blocks", "kvstats_total_blocks"))
    return KvPool(next((blocks for blocks in found if blocks), None))


_OWN_KV = tuple(
    Family(_COMPONENT + name, join="mean", is_ratio=True)
    for name in ("gpu_cache_usage_percent", "kvstats_gpu_cache_usage_percent")
)

DYNAMO_WORKER = Dialect(
    kind="dynamo",
    prefixes=(_COMPONENT,),
    counter_style="finish",
    counters={
        "requests_finished_total": (Family(_COMPONENT + "requests_total"),),
        "requests_failed_total": (Family(_COMPONENT + "errors_total"),),
    },
    gauges={
        "requests_running": (Family(_COMPONENT + "inflight_requests"),),
        "kv_used_pct": _OWN_KV,
        "uptime_s": (Family(_COMPONENT + "uptime_seconds", join="max"),),
    },
    histograms={"e2e": (_COMPONENT + "request_duration_seconds",)},
    kv_used_kind="live",
    kv_pool=_pool,
    rank_labels=("dp_rank",),
    model_labels=("model",),
)


def _without_zero_load(exposition: Exposition) -> Exposition:
    """Workers of some engines have their KV load at 0 for ever: a 0 there is no reading."""
    doubted = {family.name for family in _OWN_KV}
    series = {
        name: {labels: value for labels, value in own.items() if value} if name in doubted else own
        for name, own in exposition.series.items()
    }
    return replace(exposition, series=series)


def _with(engine: Dialect, passed_as: Mapping[str, str] | None = None) -> Dialect:
    """The engine's own families first; the worker's where the engine does not say."""

    def pool(exposition: Exposition) -> KvPool:
        own = engine.kv_pool(exposition)
        return own if own.blocks is not None else replace(own, blocks=_pool(exposition).blocks)

    names = {**engine.gauges, **DYNAMO_WORKER.gauges}
    return replace(
        engine,
        kind=f"dynamo+{engine.kind.removesuffix('-compatible')}",
        beside=(_COMPONENT,),
        passed_as=passed_as or {},
        tidy=lambda exposition: engine.tidy(_without_zero_load(exposition)),
        counters={**DYNAMO_WORKER.counters, **engine.counters},
        gauges={name: (*engine.gauges.get(name, ()), *DYNAMO_WORKER.gauges.get(name, ())) for name in names},
        kv_pool=pool,
        paths=(),
        ask=None,
    )


DYNAMO_WORKERS = (
    _with(SGLANG),
    _with(SGLANG_BEFORE_REALTIME),
    _with(VLLM_LIKE),
    _with(TRTLLM),
    _with(TRTLLM, passed_as={"trtllm:": "trtllm_"}),  # 0.7
    DYNAMO_WORKER,
)


def counted_once(samples: Sequence[Sample]) -> list[Sample]:
    """Where a frontend and a worker of the same model are both watched, the frontend's tokens are those delivered, not more."""
    worked = {sample.tags.get("model") for sample in samples if sample.tags.get("kind", "").startswith("dynamo+")}
    return [_as_delivered(sample) if _is_frontend_of(worked, sample) else sample for sample in samples]


def _is_frontend_of(models: Set[str | None], sample: Sample) -> bool:
    return sample.tags.get("kind") == DYNAMO_FRONTEND.kind and sample.tags.get("model") in models


def _as_delivered(sample: Sample) -> Sample:
    fields = {
        name: value for name, value in sample.fields.items() if name not in ("generation_tokens_total", "tokens_per_s")
    }
    if "generation_tokens_total" in sample.fields:
        fields["delivered_tokens_total"] = sample.fields["generation_tokens_total"]
    return replace(sample, fields=fields)
