"""Text Generation Inference: names without labels of the model, counters without `_total`, all counted when a request ends."""

from __future__ import annotations

from dataclasses import replace

from agent.collectors.dialects.dialect import Dialect, Family, Get, Told, scalars, text
from agent.exposition import Exposition, Labels

CONFIG = (
    *("model_id", "model_sha", "model_dtype", "model_device_type", "max_concurrent_requests", "max_best_of"),
    *("max_stop_sequences", "max_input_tokens", "max_input_length", "max_total_tokens", "waiting_served_ratio"),
    *("max_waiting_tokens", "max_batch_size", "max_client_batch_size", "validation_workers"),
)
RESERVED = "tgi_batch_reserved_share"


def with_reserved_share(exposition: Exposition) -> Exposition:
    """The only thing that is told of KV memory: how many tokens the running batch may grow to, of how many there is room for."""
    reserved, room = exposition.value("tgi_batch_current_max_tokens"), exposition.value("tgi_batch_max_total_tokens")
    made: dict[Labels, float] = {(): min(1.0, reserved / room)} if reserved is not None and room else {}
    return replace(exposition, series={**exposition.series, RESERVED: made}) if made else exposition


def ask(get: Get) -> Told:
    body = get("/info")
    return Told(text(body, "version"), text(body, "model_id"), scalars(body, CONFIG))


TGI = Dialect(
    kind="tgi",
    prefixes=("tgi_",),
    counter_style="finish",
    counters={
        "generation_tokens_total": (Family("tgi_request_generated_tokens_sum"),),
        "prompt_tokens_total": (Family("tgi_request_input_length_sum"),),  # before the queue
        "requests_finished_total": (Family("tgi_request_success"),),
        # a request that is not valid is its sender's failure
        "requests_failed_total": (
            Family("tgi_request_failure", where={"err": ("overloaded", "generation", "incomplete")}, none_yet=True),
        ),
        "requests_aborted_total": (Family("tgi_request_failure", where={"err": ("dropped",)}, none_yet=True),),
        "steps_total": (Family("tgi_batch_inference_count"),),
    },
    gauges={
        "requests_running": (Family("tgi_batch_current_size"),),
        "requests_waiting": (Family("tgi_queue_size"),),
        "kv_used_pct": (Family(RESERVED, is_ratio=True),),
    },
    histograms={
        "tpot": ("tgi_request_mean_time_per_token_duration",),
        "e2e": ("tgi_request_duration",),
        "queue": ("tgi_request_queue_duration",),
        "prompt_len": ("tgi_request_input_length",),
        "output_len": ("tgi_request_generated_tokens",),
    },
    tidy=with_reserved_share,
    kv_used_kind="reserved",
    listens_when_ready=True,  # 503 when its queue is full
    ask=ask,
)
