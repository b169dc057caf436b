"""Triton with the TensorRT-LLM backend, port 8002: requests and KV blocks; tokens and first-token times are not told."""

from __future__ import annotations

from dataclasses import replace

from agent.collectors.dialects.dialect import Dialect, Family, Join, KvPool
from agent.exposition import Exposition, Labels

ENSEMBLES = ("ensemble", "tensorrt_llm_bls")
"""Models that pass each request through the others, which count it again."""


def one_model(exposition: Exposition) -> Exposition:
    """Of an ensemble one model's requests, and of several engines the rows of the one that moves: the rest repeat it or are 0."""
    served = _models(exposition, "nv_inference_request_success")
    engines = _models(exposition, "nv_trt_llm_general_metrics")
    counted = next((name for name in ENSEMBLES if name in served), None) or max(
        served, key=served.__getitem__, default=""
    )
    moving = max(engines, key=engines.__getitem__, default="")
    series: dict[str, dict[Labels, float]] = {}
    for name, own in exposition.series.items():
        kept = moving if name.startswith("nv_trt_llm_") else counted if name.startswith("nv_inference_") else ""
        series[name] = {labels: value for labels, value in own.items() if not kept or dict(labels).get("model") == kept}
    return replace(exposition, series=series)


def _models(exposition: Exposition, family: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, value in exposition.series.get(family, {}).items():
        own = dict(labels)
        if own.get("general_type", "iteration_counter") == "iteration_counter":
            found[own.get("model", "")] = found.get(own.get("model", ""), 0.0) + value
    return found


def _requests(kind: str) -> Family:
    return Family("nv_trt_llm_request_metrics", where={"request_type": (kind,)})


def _blocks(kind: str, *, is_ratio: bool = False) -> Family:
    join: Join = "mean" if is_ratio else "sum"
    where = {"kv_cache_block_type": (kind,)}
    return Family("nv_trt_llm_kv_cache_block_metrics", where=where, join=join, is_ratio=is_ratio)


def kv_pool(exposition: Exposition) -> KvPool:
    used, block_tokens = _blocks("used").value(exposition), _blocks("tokens_per").value(exposition)
    return KvPool(held_tokens=used * block_tokens if used is not None and block_tokens else None)


_ITERATIONS = Family("nv_trt_llm_general_metrics", where={"general_type": ("iteration_counter",)})

TRITON = Dialect(
    kind="triton",
    prefixes=("nv_trt_llm_", "nv_inference_"),
    counter_style="finish",
    counters={
        "requests_finished_total": (Family("nv_inference_request_success"),),
        "requests_failed_total": (Family("nv_inference_request_failure"),),
        "steps_total": (_ITERATIONS,),
    },
    gauges={
        "requests_running": (_requests("scheduled"),),
        "requests_waiting": (
            _requests("waiting"),
            Family("nv_trt_llm_request_metrics", where={"request_type": ("active",)}, minus=_requests("scheduled")),
        ),
        "kv_used_pct": (_blocks("fraction", is_ratio=True),),
        "kv_blocks_count": (_blocks("max"),),
        "kv_blocks_free": (_blocks("free"),),
    },
    histograms={},
    tidy=one_model,
    iteration=(_ITERATIONS,),  # the rest holds what the last iteration left
    kv_used_kind="live",
    kv_pool=kv_pool,
    model_labels=("model",),
)
