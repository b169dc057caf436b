"""NVIDIA Dynamo in miniature: a frontend, and a worker that passes its engine's families on."""

from __future__ import annotations

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed

_PLACE = {"dynamo_namespace": "prod", "dynamo_component": "backend", "dynamo_endpoint": "generate"}


def frontend(*, delivered: float = 44_000.0) -> str:
    own = labelled({"model": MODEL})
    requests = labelled({"endpoint": "chat_completions", "model": MODEL, "request_type": "stream"})
    made = lines(
        {
            'dynamo_frontend_requests_total{status="success",error_type=""}': 350.0,
            'dynamo_frontend_requests_total{status="error",error_type="internal"}': 6.0,
            'dynamo_frontend_requests_total{status="error",error_type="validation"}': 11.0,
            'dynamo_frontend_requests_total{status="error",error_type="cancelled"}': 7.0,
        },
        requests,
    )
    values = {"queued_requests": 3.0, "inflight_requests": 28.0, "output_tokens_total": delivered}
    made += lines({f"dynamo_frontend_{name}": value for name, value in values.items()}, own)
    return made + timed("dynamo_frontend_time_to_first_token_seconds", own, (0.2, 0.4), 350.0, 105.0)


def worker(engine_text: str = "", *, renamed: bool = True, usage: float = 0.64) -> str:
    """`renamed`: the names of 1.x, not those of 0.7."""
    prefix = "dynamo_component_" if renamed else "dynamo_component_kvstats_"
    own = labelled(_PLACE)
    made = lines({f"{prefix}total_blocks": 2_500.0, f"{prefix}gpu_cache_usage_percent": usage}, f'{own},dp_rank="0"')
    made += lines(
        {
            "dynamo_component_inflight_requests": 26.0,
            "dynamo_component_requests_total": 360.0,
            'dynamo_component_errors_total{error_type="generate"}': 2.0,
            "dynamo_component_uptime_seconds": 5_400.0,
        },
        own,
    )
    return made + engine_text
