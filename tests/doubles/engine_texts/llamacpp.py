"""llama.cpp's server in miniature: numbers with six significant digits, and builds that quote the whole body."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.doubles.engine_texts.text import lines


def six(value: float) -> str:
    """As C++ streams print it."""
    return f"{value:.6g}"


def llamacpp(
    *,
    predicted: float = 7_100.0,
    predicted_seconds: float = 250.0,
    prompts: float = 31_000.0,
    cached: float | None = 4_000.0,
    decodes: float = 6_900.0,
    processing: float = 3.0,
    deferred: float = 1.0,
    more: Mapping[str, object] | None = None,
) -> str:
    values: dict[str, object] = {
        "prompt_tokens_total": six(prompts),
        "prompt_seconds_total": six(401.5),
        "tokens_predicted_total": six(predicted),
        "tokens_predicted_seconds_total": six(predicted_seconds),
        "n_decode_total": six(decodes),
        "n_busy_slots_per_decode": "-nan",
        "prompt_tokens_seconds": 77.25,
        "predicted_tokens_seconds": 28.5,
        "requests_processing": processing,
        "requests_deferred": deferred,
    }
    if cached is not None:  # from 2026, with speculation
        values["prompt_tokens_cached_total"] = six(cached)
        values["spec_decode_num_drafts_total"] = 330
        values["spec_decode_num_draft_tokens_total"] = 900
        values["spec_decode_num_accepted_tokens_total"] = 610
    return lines({f"llamacpp:{name}": value for name, value in {**values, **(more or {})}.items()})


def llamacpp_old() -> str:
    """Before mid-2025: with the KV gauges, whose count includes what idle slots keep."""
    return llamacpp(cached=None, more={"kv_cache_usage_ratio": 0.375, "kv_cache_tokens": 3072})


def quoted(text: str) -> bytes:
    """The body as a JSON string, as builds 7010 to 7100 send it."""
    return json.dumps(text).encode()
