"""vLLM from V0 to 0.32, its imitators, and what must not be counted twice."""

from __future__ import annotations

import pytest

from agent.collectors.dialects.registry import detect
from agent.exposition import parse
from tests.agent.dialects.conftest import Read
from tests.doubles.engine_texts.text import MODEL, lines
from tests.doubles.engine_texts.vllm import vllm

OWN = f'model_name="{MODEL}",engine="0"'
NEW = lines(
    {
        'vllm:prompt_tokens_by_source_total{source="local_compute"}': 3_100.0,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': 1_900.0,
        'vllm:num_requests_waiting_by_reason{reason="capacity"}': 77.0,
        "vllm:spec_decode_num_drafts_total": 220.0,
        "vllm:spec_decode_num_draft_tokens_total": 600.0,
        "vllm:spec_decode_num_accepted_tokens_total": 410.0,
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 300.0,
    },
    OWN,
) + lines({'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}': 60.0})


def test_what_later_releases_tell_besides(read: Read) -> None:
    fields = read(vllm() + NEW)[1]
    told = ("prompt_tokens_computed_total", "spec_drafted_total", "spec_accepted_total", "requests_waiting")
    assert [fields[name] for name in told] == [3_100, 600, 410, 1.0]


def test_release_0_32_whole(read: Read) -> None:
    after = vllm(
        waiting=(8.0,),
        generated=(1_500.0,),
        prompts=(5_200.0,),
        steps=500.0,
        ttft={"0.2": 10.0, "0.5": 400.0, "+Inf": 410.0},
        ttft_sum=118.0,
        itl=({"0.01": 100.0, "0.05": 2_990.0, "+Inf": 3_000.0}, 50.0),
    )
    kind, fields = read(vllm() + NEW, after + NEW)
    assert kind == "vllm"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 1_500,
        "prompt_tokens_total": 5_200,
        "prompt_tokens_computed_total": 3_100,
        "preemptions_total": 2,
        "requests_finished_total": 45,
        "requests_failed_total": 1,
        "requests_aborted_total": 7,
        "spec_drafts_total": 220,
        "spec_drafted_total": 600,
        "spec_accepted_total": 410,
        "prefix_queries_total": 700,
        "prefix_hits_total": 300,
        "steps_total": 500,
        "requests_running": 3.0,
        "requests_waiting": 8.0,
        "kv_used_pct": 25.0,
        "kv_used_kind": "live",
        "kv_blocks_count": 800.0,
        "kv_blocks_free": 600.0,
        "context_mean": pytest.approx(200 * 16 / 3),
        "uptime_s": 10_000.0,
        "tokens_per_s": 50.0,
        "prompt_tokens_per_s": 20.0,
        "tokens_per_step": 9.0,
        "step_mean_s": pytest.approx(0.1),
        "itl_mean_s": pytest.approx(30 / 2_000),
        "itl_p50_s": 0.05,
        "itl_p99_s": 0.05,
        "quantile_bounds": "itl_p50_s<= itl_p99_s<=",
        "ttft_mean_s": pytest.approx(93 / 310),
        "ttft_p50_s": pytest.approx(0.2 + 0.3 * 155 / 310),
        "ttft_p95_s": pytest.approx(0.2 + 0.3 * 294.5 / 310),
        "ttft_p99_s": pytest.approx(0.2 + 0.3 * 306.9 / 310),
        "stalled": 0,
    }


def test_no_aborted_request_is_not_claimed_since_none_is_ever_counted(read: Read) -> None:
    text = "\n".join(line for line in vllm().splitlines() if 'reason="abort"' not in line)
    labels = f'{OWN},finished_reason="abort"'
    assert "requests_aborted_total" not in read(f"{text}\nvllm:request_success_total{{{labels}}} 0\n")[1]


def test_what_a_release_lacks_is_absent_and_not_zero(read: Read) -> None:
    fields = read(vllm())[1]
    assert (
        not {"prompt_tokens_computed_total", "spec_drafted_total", "oom_total", "kv_fragmentation_pct"} & fields.keys()
    )


@pytest.mark.parametrize(("status", "failed"), [("2xx", 1), ("4xx", 1), ("5xx", 12)])
def test_failures_are_the_servers_and_each_counts_once(read: Read, status: str, failed: int) -> None:
    served = lines({f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}}': 12.0})
    assert read(vllm() + served)[1]["requests_failed_total"] == failed  # 1 by its finish reason


def test_no_failure_yet_is_zero_where_failures_are_counted(read: Read) -> None:
    assert read(vllm().replace('finished_reason="error"', 'finished_reason="x"') + NEW)[1]["requests_failed_total"] == 0


def test_old_and_new_names_at_once_count_once(read: Read) -> None:
    both = {
        "kv_names": ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        "prefix_names": ("gpu_prefix_cache", "prefix_cache"),
    }
    assert read(vllm(**both), vllm(**both)) == read(vllm(), vllm())  # type: ignore[arg-type]


def test_blocks_of_data_parallel_engines_are_told_by_each_and_never_added(read: Read) -> None:
    two = {"ranks": ("0", "1"), "generated": (1.0, 2.0), "prompts": (3.0, 4.0), "running": (6.0, 2.0)}
    text = vllm(**two, waiting=(0.0, 5.0), kv=(0.75, 0.25), blocks=3_000, start_s=None)  # type: ignore[arg-type]
    fields = read(text)[1]
    assert (fields["kv_blocks_count"], fields["kv_blocks_free"]) == (3_000.0, 1_500.0)


def test_a_step_lasts_as_long_with_two_engines_side_by_side_as_with_one(read: Read) -> None:
    two = {"ranks": ("0", "1"), "generated": (1.0, 2.0), "prompts": (3.0, 4.0), "running": (6.0, 2.0)}
    shape = {**two, "waiting": (0.0, 5.0), "kv": (0.75, 0.25), "start_s": None}
    fields = read(vllm(**shape, steps=400.0), vllm(**shape, steps=600.0))[1]  # type: ignore[arg-type]
    assert fields["steps_total"] == 1_200
    assert fields["step_mean_s"] == pytest.approx(10 / 200)
    idle = read(
        vllm(**{**shape, "running": (6.0, 0.0)}, steps=400.0), vllm(**{**shape, "running": (6.0, 0.0)}, steps=500.0)
    )[1]  # type: ignore[arg-type]
    assert idle["step_mean_s"] == pytest.approx(10 / 100)


def test_milliseconds_of_v0_are_not_taken_for_seconds(read: Read) -> None:
    own = f'model_name="{MODEL}"'
    v0 = {
        "ranks": (None,),
        "kv_names": ("gpu_cache_usage_perc",),
        "prefix_names": (),
        "itl_name": "time_per_output_token_seconds",
        "queue_name": "time_in_queue_requests",
    }
    more = lines(
        {
            "vllm:model_forward_time_milliseconds_sum": 71_000.0,
            "vllm:model_forward_time_milliseconds_count": 100.0,
            "vllm:num_requests_swapped": 8.0,
            "vllm:gpu_prefix_cache_hit_rate": -1.0,
            "vllm:avg_generation_throughput_toks_per_s": 88.5,
        },
        own,
    )
    plain = read(vllm(**v0), vllm(**v0, generated=(1_700.0,)))[1]  # type: ignore[arg-type]
    fields = read(vllm(**v0) + more, vllm(**v0, generated=(1_700.0,)) + more)[1]  # type: ignore[arg-type]
    assert fields == {**plain, "reported_tokens_per_s": 88.5}


def test_names_of_vllm_without_its_cache_configuration_are_an_imitators() -> None:
    text = "\n".join(line for line in vllm().splitlines() if "cache_config_info" not in line)
    found = detect(parse(text))
    assert found is not None
    assert found.kind == "vllm-compatible"
    assert detect(parse(text), "vllm") is found
    assert detect(parse(text), "sglang") is None


def test_first_token_counts_are_no_finished_requests(read: Read) -> None:
    assert read(vllm(ttft={"0.2": 10.0, "0.5": 90.0, "+Inf": 200.0}))[1]["requests_finished_total"] == 45


def test_counters_that_fell_together_are_a_restart_where_no_start_is_told(read: Read) -> None:
    before = vllm(generated=(9_000.0,), prompts=(9_000.0,), start_s=None).replace("_created", "_made")
    after = vllm(generated=(50.0,), prompts=(80.0,), start_s=None).replace("_created", "_made")
    fields = read(before, before, after)[1]
    assert not {"tokens_per_s", "prompt_tokens_per_s", "itl_mean_s", "step_mean_s"} & fields.keys()
    assert fields["generation_tokens_total"] == 50


def test_servers_that_take_turns_at_one_address_are_partial_and_give_no_rate(read: Read) -> None:
    one, two = vllm(generated=(5_000.0,)), vllm(generated=(300.0,), start_s=1_795_991_111.0)
    fields = read(one, two, one, two)[1]
    assert fields["partial"] == 1
    assert "tokens_per_s" not in fields
