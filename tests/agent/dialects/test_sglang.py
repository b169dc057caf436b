"""SGLang: ranks of the same requests count once, data-parallel ranks are added, and the style of its counters is told."""

from __future__ import annotations

import pytest

from agent.collectors.dialects.registry import detect
from agent.exposition import parse
from tests.agent.dialects.conftest import Read
from tests.doubles.engine_texts.sglang import rank, sglang, sglang_0_4_6
from tests.doubles.engine_texts.text import MODEL


def test_release_0_5_23_with_two_data_parallel_ranks(read: Read) -> None:
    before = sglang()
    after = sglang(decoded=(41_000.0, 23_400.0), computed=55_300.0, cached=12_050.0, finished=720.0)
    kind, fields = read(before, after, ranks=2)
    assert kind == "sglang"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 64_400,
        "prompt_tokens_total": 2 * 55_300 + 100 + 2 * 12_050 + 10,
        "prompt_tokens_computed_total": 110_700,
        "prefix_queries_total": 134_810,
        "prefix_hits_total": 24_110,
        "preemptions_total": 11,
        "requests_finished_total": 720,
        "requests_aborted_total": 13,
        "requests_failed_total": 3,
        "steps_total": 3_320,
        "requests_running": 30.0,
        "requests_waiting": 4 + 5 + 2 * 1 + 2 * 2.0,
        "kv_used_pct": pytest.approx(40.0),
        "kv_used_kind": "live",
        "kv_blocks_count": 3_200.0,
        "kv_blocks_free": (10_240 + 51_200 + 2_560 + 5_120) / 64,
        "context_mean": 81_000 / 30,
        "tokens_per_s": 140.0,
        "prompt_tokens_per_s": 70.0,
        "step_mean_s": pytest.approx(20 / (1_400 / 20)),
        "itl_mean_s": pytest.approx(0.025),
        "itl_p50_s": pytest.approx(0.03),
        "itl_p99_s": pytest.approx(0.0398),
        "tpot_mean_s": pytest.approx(0.027),
        "queue_mean_s": pytest.approx(0.03),
        "reported_tokens_per_s": 411.0,
        "stalled": 0,
        "partial": 0,
    }
    assert detect(parse(before)).model(parse(before)) == MODEL  # type: ignore[union-attr]


def test_release_0_4_6_counts_when_a_request_ends(read: Read) -> None:
    texts = [
        sglang_0_4_6(generated=70_000.0 + 40 * i, prompts=310_000.0 + 70 * i, finished=812.0 + i) for i in range(8)
    ]
    kind, fields = read(*texts)
    assert kind == "sglang"
    assert fields == {
        "counter_style": "finish",
        "generation_tokens_total": 70_280,
        "prompt_tokens_total": 310_490,
        "prompt_tokens_computed_total": 220_490,
        "prefix_queries_total": 310_490,
        "prefix_hits_total": 90_000,
        "requests_finished_total": 819,
        "requests_running": 11.0,
        "requests_waiting": 6.0,
        "kv_used_pct": 44.0,
        "kv_used_kind": "live",
        "context_mean": 2_000.0,
        "tokens_per_s": 4.0,
        "prompt_tokens_per_s": 7.0,
        "ttft_mean_s": pytest.approx(0.31),
        "e2e_mean_s": pytest.approx(5.5),
        "reported_tokens_per_s": 512.5,
        "stalled": 0,
    }


def test_what_drafts_bring_is_told_only_where_it_guesses(read: Read) -> None:
    def guessing(length: float, rate: float, calls: float) -> str:
        return "".join(
            f'sglang:spec_accept_length{{dp_rank="{dp}",model_name="{MODEL}"}} {length * (1 - dp)}\n'
            f'sglang:spec_accept_rate{{dp_rank="{dp}",model_name="{MODEL}"}} {rate * (1 - dp)}\n'
            f'sglang:spec_verify_calls_total{{dp_rank="{dp}",model_name="{MODEL}"}} {calls}\n'
            for dp in (0, 1)
        )

    fields = read(sglang(extra=guessing(3.25, 0.75, 70.0)))[1]  # the second rank is idle
    told = {name: value for name, value in fields.items() if name.startswith("spec_")}
    assert told == {"spec_tokens_per_draft": 3.25, "spec_acceptance_pct": 75.0, "spec_drafts_total": 140}
    fields = read(sglang(extra=guessing(0.0, 0.0, 0.0)))[1]
    assert not [name for name in fields if name.startswith("spec_")]


def test_ranks_of_the_same_requests_count_once(read: Read) -> None:
    every_scheduler = [rank(dp, tp_rank=tp, pp_rank=pp, cp_rank=0) for dp in (0, 1) for tp in (0, 1) for pp in (0, 1)]
    _, alone = read(sglang(), sglang(decoded=(41_000.0, 23_400.0)))
    _, repeated = read(sglang(ranks=every_scheduler), sglang(ranks=every_scheduler, decoded=(41_000.0, 23_400.0)))
    assert repeated == alone


def test_the_row_of_all_priorities_is_the_only_one_that_counts(read: Read) -> None:
    labels = f'dp_rank="0",model_name="{MODEL}",tp_rank="0"'
    rows = "".join(
        f'sglang:num_running_reqs{{{labels},priority="{p}"}} {n}\n' for p, n in (("", 9), ("1", 6), ("5", 3))
    )
    counted = f'sglang:realtime_tokens_total{{{labels},mode="decode"}} 5\n'
    assert read(rows + counted)[1]["requests_running"] == 9.0


def test_fewer_ranks_than_the_server_has_are_partial(read: Read) -> None:
    one = sglang(ranks=[rank(0, tp_rank=0)])
    assert read(one, one, ranks=2)[1]["partial"] == 1
    assert "partial" not in read(one, one)[1]


def test_an_average_that_no_longer_changes_is_not_repeated(read: Read) -> None:
    still = [sglang(decoded=(40_000.0, 23_100.0))] * 4
    assert "reported_tokens_per_s" not in read(sglang(), *still, every_s=6.0)[1]
    assert "reported_tokens_per_s" not in read(sglang(), sglang(running=(0.0, 0.0), decoded=(41_000.0, 23_000.0)))[1]


def test_a_negative_use_of_the_prefill_role_is_no_number(read: Read) -> None:
    text = (
        sglang().replace("sglang:token_usage{", "sglang:token_usage_{")
        + f'sglang:token_usage{{dp_rank="0",model_name="{MODEL}"}} -1\n'
    )
    assert float(read(text)[1]["kv_used_pct"]) < 0  # and the collector leaves out what is below zero


@pytest.mark.parametrize("old", [False, True])
def test_a_gateways_underscores_are_the_same_engine(read: Read, old: bool) -> None:
    text = sglang_0_4_6() if old else sglang()
    assert read(text.replace("sglang:", "sglang_")) == read(text)


def test_pages_told_as_labels_are_the_same_pages(read: Read) -> None:
    labels = f'dp_rank="0",model_name="{MODEL}"'
    text = (
        f'sglang:realtime_tokens_total{{{labels},mode="decode"}} 5\n'
        f'sglang:cache_config_info{{{labels},page_size="32",num_pages="700"}} 1\n'
        f"sglang:token_usage{{{labels}}} 0.25\n"
    )
    fields = read(text)[1]
    assert (fields["kv_blocks_count"], fields["kv_blocks_free"]) == (700.0, 525.0)
