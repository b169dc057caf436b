"""Engines whose tokens count when a request ends: TGI, llama.cpp, trtllm-serve, Triton."""

from __future__ import annotations

import json

import pytest

from agent.collectors.dialects.registry import detect
from agent.exposition import parse
from tests.agent.dialects.conftest import Read
from tests.doubles.engine_texts.llamacpp import llamacpp, llamacpp_old, quoted
from tests.doubles.engine_texts.nim import nim
from tests.doubles.engine_texts.text import MODEL
from tests.doubles.engine_texts.tgi import tgi
from tests.doubles.engine_texts.triton import triton
from tests.doubles.engine_texts.trtllm import ITERATIONS, trtllm, trtllm_unprefixed


def test_tgi(read: Read) -> None:
    texts = [
        tgi(
            generated=52_000.5 + 300 * i, prompts=410_000.25 + 900 * i, success=300.0 + 3 * i, decodes=9_000.0 + 450 * i
        )
        for i in range(8)
    ]
    kind, fields = read(*texts)
    assert kind == "tgi"
    assert fields == {
        "counter_style": "finish",
        "generation_tokens_total": 54_100,
        "prompt_tokens_total": 416_300,
        "requests_finished_total": 321,
        "requests_failed_total": 8,
        "requests_aborted_total": 5,
        "steps_total": 12_440,
        "requests_running": 7.0,
        "requests_waiting": 2.0,
        "kv_used_pct": 75.0,
        "kv_used_kind": "reserved",
        "tokens_per_s": 30.0,
        "prompt_tokens_per_s": 90.0,
        "step_mean_s": pytest.approx(10 / 450),
        "tpot_mean_s": pytest.approx(0.024),
        "e2e_mean_s": pytest.approx(6.0),
        "queue_mean_s": pytest.approx(0.07),
        "prompt_len_mean": pytest.approx(300.0),
        "prompt_len_p50": pytest.approx(1_500.0),
        "output_len_mean": pytest.approx(100.0),
        "stalled": 0,
    }


def test_llamacpp(read: Read) -> None:
    texts = [
        llamacpp(
            predicted=7_100 + 200 * i,
            predicted_seconds=250 + 8 * i,
            prompts=31_000 + 500 * i,
            cached=4_000 + 100 * i,
            decodes=6_900 + 80 * i,
        )
        for i in range(8)
    ]
    kind, fields = read(*texts)
    assert kind == "llamacpp"
    assert fields == {
        "counter_style": "finish",
        "generation_tokens_total": 8_500,
        "prompt_tokens_total": 34_500 + 4_700,
        "prompt_tokens_computed_total": 34_500,
        "prefix_queries_total": 39_200,
        "prefix_hits_total": 4_700,
        "steps_total": 7_460,
        "spec_drafts_total": 330,
        "spec_drafted_total": 900,
        "spec_accepted_total": 610,
        "requests_running": 3.0,
        "requests_waiting": 1.0,
        "tokens_per_s": 20.0,
        "prompt_tokens_per_s": 60.0,
        "step_mean_s": pytest.approx(10 / 80),
        "tpot_mean_s": pytest.approx(8 / 200),
        "stalled": 0,
    }


def test_llamacpp_before_mid_2025_tells_kv_with_what_idle_slots_keep(read: Read) -> None:
    fields = read(llamacpp_old())[1]
    assert (fields["kv_used_pct"], fields["kv_used_kind"]) == (37.5, "live_plus_cached")
    assert not {"prefix_hits_total", "spec_drafted_total", "context_mean", "kv_blocks_count"} & fields.keys()


def test_a_body_in_quotes_is_the_same_as_a_plain_one(read: Read) -> None:
    text = llamacpp()
    assert parse(quoted(text)).series == parse(text).series
    assert read(quoted(text)) == read(text)


def test_rate_gauges_since_anybodys_last_scrape_are_never_used(read: Read) -> None:
    fields = read(llamacpp())[1]
    assert not [value for value in fields.values() if value in (77.25, 28.5)]


def test_a_rate_of_rounded_numbers_waits_until_it_is_more_than_rounding(read: Read) -> None:
    # at 5e8 the last digit is worth 1,000 tokens; 50 tokens/s move it once in 20 s
    texts = [llamacpp(predicted=500_000_000 + 50 * second) for second in range(0, 600, 10)]
    assert "tokens_per_s" not in read(*texts[:30])[1]
    assert read(*texts)[1]["tokens_per_s"] == pytest.approx(50, rel=0.06)
    fast = [llamacpp(predicted=500_000_000 + 4_000 * second) for second in range(0, 80, 10)]
    assert read(*fast)[1]["tokens_per_s"] == pytest.approx(4_000, rel=0.06)


def test_trtllm_serve(read: Read) -> None:
    texts = [
        trtllm(generated=81_000.0 + 120 * i, prompts=260_000.0 + 310 * i, finished=505.0 + i, latency=0.0215 + i / 1e4)
        for i in range(8)
    ]
    kind, fields = read(*texts)
    assert kind == "trtllm"
    assert fields == {
        "counter_style": "finish",
        "generation_tokens_total": 81_840,
        "prompt_tokens_total": 262_170,
        "prompt_tokens_computed_total": 192_170,
        "prefix_queries_total": 8_500,
        "prefix_hits_total": 2_000,
        "requests_finished_total": 542,
        "requests_failed_total": 3,
        "spec_drafted_total": 400,
        "spec_accepted_total": 250,
        "requests_running": 17.0,
        "requests_waiting": 5.0,
        "kv_used_pct": 35.0,
        "kv_used_kind": "live",
        "kv_blocks_count": 4_000.0,
        "kv_blocks_free": 2_600.0,
        "context_mean": 1_400 * 32 / 17,
        "tokens_per_s": 12.0,
        "prompt_tokens_per_s": 31.0,
        "ttft_mean_s": pytest.approx(0.2),
        "tpot_mean_s": pytest.approx(0.022),
        "queue_mean_s": pytest.approx(0.015),
        "e2e_mean_s": pytest.approx(7.5),
        "stalled": 0,
    }


def test_gauges_of_an_iteration_that_is_long_over_are_not_believed(read: Read) -> None:
    over = [trtllm()] * 4
    fields = read(*over)[1]
    gone = {"requests_running", "requests_waiting", "kv_used_pct", "kv_used_kind", "context_mean", "stalled"}
    assert not gone & fields.keys()
    assert fields["kv_blocks_count"] == 4_000.0
    assert read(*[trtllm(running=0.0)] * 4)[1]["requests_running"] == 0.0


def test_triton_requests_of_an_iteration_that_is_long_over_are_neither_believed_nor_a_stall(read: Read) -> None:
    fields = read(*[triton()] * 4)[1]
    gone = {"requests_running", "requests_waiting", "kv_used_pct", "kv_used_kind", "context_mean", "stalled"}
    assert not gone & fields.keys()
    assert fields["steps_total"] == 5_100


def test_a_request_time_per_token_is_not_the_time_between_tokens(read: Read) -> None:
    for text in (trtllm(), tgi(), trtllm_unprefixed()):
        assert not [name for name in read(text, text)[1] if name.startswith("itl_")]


@pytest.mark.parametrize("label", ["undefined", MODEL])
def test_the_unprefixed_trtllm_is_not_taken_for_a_nim(read: Read, label: str) -> None:
    kind, fields = read(*(trtllm_unprefixed(finished=62.0 + i, label=label) for i in range(3)))
    assert kind == "trtllm"
    assert fields == {
        "counter_style": "finish",
        "requests_finished_total": 64,
        "ttft_mean_s": pytest.approx(0.15),
        "tpot_mean_s": pytest.approx(0.03),
        "queue_mean_s": pytest.approx(0.011),
        "e2e_mean_s": pytest.approx(6.0),
    }
    dialect = detect(parse(trtllm_unprefixed(label=label)))
    assert dialect is not None
    assert dialect.model(parse(trtllm_unprefixed(label=label))) == (None if label == "undefined" else MODEL)
    assert detect(parse(nim())).kind == "nim"  # type: ignore[union-attr]


def test_a_list_of_iterations_is_known_for_what_it_is() -> None:
    found = parse(json.dumps(ITERATIONS))
    assert found.is_json_list
    assert detect(found) is None
    assert not parse(trtllm()).is_json_list


@pytest.mark.parametrize("with_waiting", [True, False])
def test_triton_counts_one_model_of_an_ensemble(read: Read, with_waiting: bool) -> None:
    kind, fields = read(
        triton(with_waiting=with_waiting), triton(with_waiting=with_waiting, served=733.0, iterations=5_350.0)
    )
    assert kind == "triton"
    assert fields == {
        "counter_style": "finish",
        "requests_finished_total": 733,
        "requests_failed_total": 8,
        "steps_total": 5_350,
        "step_mean_s": pytest.approx(10 / 250),
        "requests_running": 13.0,
        "requests_waiting": 4.0 if with_waiting else 6.0,
        "kv_used_pct": 48.0,
        "kv_used_kind": "live",
        "kv_blocks_count": 5_000.0,
        "kv_blocks_free": 2_600.0,
        "context_mean": pytest.approx(2_400 * 64 / 13),
        "stalled": 0,
    }
