"""Engine metrics become the right fields: every release's names, ranks added once, no rate over a restart, absent is not zero."""

from __future__ import annotations

from typing import Any

import pytest

from agent.collectors.dialects.pairscope import PAIRSCOPE
from agent.collectors.dialects.registry import detect
from agent.collectors.dialects.vllm import VLLM
from agent.collectors.engine_readings import EngineReadings, configuration, version
from agent.exposition import parse
from telemetry.catalogue import ENGINE
from tests.doubles.engine_texts.pairscope import pairscope
from tests.doubles.engine_texts.text import MODEL, histogram
from tests.doubles.engine_texts.vllm import vllm

WALL_S = 1_796_000_000.0

RELEASES: dict[str, dict[str, Any]] = {
    "0.6 V0": {
        "ranks": (None,),
        "kv_names": ("gpu_cache_usage_perc",),
        "prefix_names": (),
        "itl_name": "time_per_output_token_seconds",
        "queue_name": "time_in_queue_requests",
    },
    "0.8.5 V1": {
        "kv_names": ("gpu_cache_usage_perc",),
        "prefix_names": ("gpu_prefix_cache",),
        "itl_name": "time_per_output_token_seconds",
    },
    "0.10 both": {
        "kv_names": ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        "prefix_names": ("gpu_prefix_cache", "prefix_cache"),
    },
    "0.32": {},
}


@pytest.mark.parametrize("release", RELEASES)
def test_every_vllm_release_gives_the_same_fields(release: str) -> None:
    readings = EngineReadings(VLLM)
    shape = RELEASES[release]
    readings.read(parse(vllm(**shape)), 100.0, WALL_S)
    fields = readings.read(
        parse(
            vllm(
                **shape,
                generated=(1500.0,),
                prompts=(5200.0,),
                steps=500.0,
                ttft={"0.2": 10.0, "0.5": 190.0, "+Inf": 200.0},
                itl=({"0.01": 100.0, "0.05": 2990.0, "+Inf": 3000.0}, 80.0),
            )
        ),
        102.0,
        WALL_S,
    )
    expected = {
        "generation_tokens_total": 1500,
        "prompt_tokens_total": 5200,
        "preemptions_total": 2,
        "requests_finished_total": 45,
        "requests_failed_total": 1,
        "requests_aborted_total": 7,
        "steps_total": 500,
        "tokens_per_s": 250.0,
        "prompt_tokens_per_s": 100.0,
        "requests_running": 3.0,
        "requests_waiting": 1.0,
        "kv_used_pct": 25.0,
        "kv_blocks_count": 800.0,
        "kv_blocks_free": 600.0,
        "context_mean": pytest.approx(800 * 16 * 0.25 / 3),
        "itl_mean_s": pytest.approx(60 / 2000),
        "tokens_per_step": 9.0,
        "step_mean_s": pytest.approx(2 / 100),
        "uptime_s": 10_000.0,
        "counter_style": "step",
        "ttft_p50_s": pytest.approx(0.2 + 0.3 * 50 / 100),
        "ttft_p95_s": pytest.approx(0.2 + 0.3 * 95 / 100),
    }
    if shape.get("prefix_names") != ():
        expected |= {"prefix_queries_total": 700, "prefix_hits_total": 300}
    assert {name: fields[name] for name in expected} == expected
    assert fields.keys() <= ENGINE.fields.keys()
    assert not {"deadline_missed_total", "oom_total", "kv_fragmentation_pct", "e2e_p99_s"} & fields.keys()
    if shape.get("prefix_names") == ():
        assert not {"prefix_queries_total", "prefix_hits_total"} & fields.keys()


def test_the_first_reading_has_no_rates_and_no_quantiles() -> None:
    fields = EngineReadings(VLLM).read(parse(vllm()), 100.0, WALL_S)
    derived = {name for name in fields if name.endswith(("_p50_s", "_p95_s", "_p99_s", "per_s", "mean_s"))}
    assert derived == set()


def test_data_parallel_ranks_are_added_once_and_blocks_not_at_all() -> None:
    shape = {"ranks": ("0", "1"), "blocks": 1600, "start_s": None}
    readings = EngineReadings(VLLM)
    first = vllm(
        **shape, generated=(1000.0, 300.0), prompts=(1.0, 2.0), running=(6.0, 2.0), waiting=(4.0, 0.0), kv=(0.9, 0.3)
    )
    second = first.replace("} 1000.0", "} 1100.0").replace("} 300.0\n", "} 340.0\n")
    readings.read(parse(first), 10.0, WALL_S)
    fields = readings.read(parse(second), 11.0, WALL_S)
    assert fields["generation_tokens_total"] == 1440
    assert fields["tokens_per_s"] == 140.0
    assert fields["requests_running"] == 8.0
    assert fields["requests_waiting"] == 4.0
    assert fields["kv_used_pct"] == pytest.approx(60.0)
    assert fields["kv_blocks_count"] == 1600.0


def test_a_restart_gives_no_rate_even_when_the_new_counter_has_overtaken_the_old() -> None:
    readings = EngineReadings(VLLM)
    readings.read(parse(vllm(generated=(1000.0,))), 10.0, WALL_S)
    fields = readings.read(parse(vllm(generated=(90_000.0,), start_s=1_795_999_000.0)), 40.0, WALL_S)
    assert "tokens_per_s" not in fields
    assert readings.restarts == 1
    after = readings.read(parse(vllm(generated=(90_050.0,), start_s=1_795_999_000.0)), 41.0, WALL_S)
    assert after["tokens_per_s"] == 50.0


@pytest.mark.parametrize(("uptime_s", "restarted"), [(9.0, True), (81.0, False), (79.0, False), (70.0, True)])
def test_a_restart_is_known_from_the_uptime(uptime_s: float, restarted: bool) -> None:
    readings = EngineReadings(PAIRSCOPE)
    readings.read(parse(pairscope(uptime_s=71.0)), 10.0, WALL_S)
    fields = readings.read(parse(pairscope(uptime_s=uptime_s, generated=190.0)), 20.0, WALL_S)
    assert readings.restarts == int(restarted)
    assert ("tokens_per_s" in fields) is not restarted


def test_a_restart_that_has_lived_longer_than_the_first_is_known_after_a_gap() -> None:
    readings = EngineReadings(PAIRSCOPE)
    readings.read(parse(pairscope(uptime_s=20.0)), 10.0, WALL_S)
    readings.read(parse(pairscope(uptime_s=40.0)), 100.0, WALL_S)
    assert readings.restarts == 1


def test_a_counter_that_fell_gives_no_rate_where_no_start_time_is_told() -> None:
    readings = EngineReadings(VLLM)
    readings.read(parse(vllm(generated=(1000.0,), start_s=None)), 10.0, WALL_S)
    fields = readings.read(parse(vllm(generated=(20.0,), start_s=None)), 11.0, WALL_S)
    assert "tokens_per_s" not in fields
    assert fields["generation_tokens_total"] == 20


def test_a_gap_is_averaged_and_makes_no_spike() -> None:
    readings = EngineReadings(VLLM)
    readings.read(parse(vllm(generated=(1000.0,))), 10.0, WALL_S)
    fields = readings.read(parse(vllm(generated=(1000.0 + 50 * 8,))), 18.0, WALL_S)
    assert fields["tokens_per_s"] == 50.0


def test_a_ratio_that_is_sent_as_percent_is_taken_as_percent() -> None:
    fields = EngineReadings(VLLM).read(parse(vllm(kv=(71.0,))), 10.0, WALL_S)
    assert fields["kv_used_pct"] == 71.0


def test_step_time_is_not_claimed_for_a_time_in_which_nothing_ran() -> None:
    readings = EngineReadings(VLLM)
    for second, running in enumerate((3.0, 0.0, 3.0)):
        fields = readings.read(parse(vllm(running=(running,), steps=400.0 + second)), float(second), WALL_S)
    assert "step_mean_s" not in fields
    assert "context_mean" in fields
    assert "context_mean" not in EngineReadings(VLLM).read(parse(vllm(running=(0.0,))), 1.0, WALL_S)


def test_our_own_engine_is_read_by_its_field_names() -> None:
    readings = EngineReadings(PAIRSCOPE)
    readings.read(parse(pairscope(uptime_s=75.0)), 10.0, WALL_S)
    fields = readings.read(
        parse(pairscope(uptime_s=77.0, generated=160.0, step_buckets={"0.05": 90.0, "+Inf": 110.0}, step_sum=7.0)),
        12.0,
        WALL_S,
    )
    expected = {
        "generation_tokens_total": 160,
        "delivered_tokens_total": 159,
        "steps_total": 80,
        "oom_total": 0,
        "requests_running": 2.0,
        "kv_used_pct": 40.0,
        "kv_fragmentation_pct": 3.5,
        "kv_blocks_count": 512.0,
        "kv_blocks_free": 307.0,
        "uptime_s": 77.0,
        "tokens_per_s": 30.0,
        "prompt_tokens_per_s": 90.0,
        "step_mean_s": pytest.approx(3 / 30),
    }
    assert {name: fields[name] for name in expected} == expected
    assert {name: type(value) for name, value in fields.items()} == {name: ENGINE.fields[name].type for name in fields}


def test_an_engines_own_average_is_never_taken_for_our_rate() -> None:
    assert "tokens_per_s" not in EngineReadings(PAIRSCOPE).read(parse(pairscope()), 10.0, WALL_S)


def test_kinds_are_told_apart_by_their_names() -> None:
    assert detect(parse(vllm())) is VLLM
    assert detect(parse(pairscope())) is PAIRSCOPE
    assert detect(parse("process_start_time_seconds 1\nhttp_requests_total 5\n")) is None
    assert detect(parse(vllm()), "pairscope") is None
    assert VLLM.model(parse(vllm())) == PAIRSCOPE.model(parse(pairscope())) == MODEL


def test_the_configuration_hash_changes_with_the_configuration_and_not_with_the_rank_or_the_profiled_blocks() -> None:
    plain = configuration(VLLM, parse(vllm()))
    assert plain is not None
    assert configuration(VLLM, parse(vllm(blocks=801, ranks=("3",)))) == plain
    assert configuration(VLLM, parse(vllm(cache_dtype="fp8"))) != plain
    assert configuration(VLLM, parse("vllm:num_requests_running 1\n")) is None
    assert configuration(PAIRSCOPE, parse(pairscope(config_hash="cd34"))) == "cd34"
    assert version(PAIRSCOPE, parse(pairscope(version="0.2.0"))) == "0.2.0"


def test_absent_families_are_absent_fields() -> None:
    fields = EngineReadings(VLLM).read(parse(f'vllm:num_requests_running{{model_name="{MODEL}"}} 2\n'), 1.0, WALL_S)
    assert fields == {"requests_running": 2.0, "counter_style": "step"}


def test_a_histogram_that_vanishes_and_returns_is_a_first_reading() -> None:
    readings = EngineReadings(VLLM)
    own = f'model_name="{MODEL}"'
    one = histogram("vllm:inter_token_latency_seconds", own, {"0.1": 50.0, "+Inf": 50.0}, 1.0)
    two = histogram("vllm:inter_token_latency_seconds", own, {"0.1": 90.0, "+Inf": 90.0}, 5.0)
    readings.read(parse(one), 1.0, WALL_S)
    readings.read(parse("vllm:x 1\n"), 2.0, WALL_S)
    assert "itl_mean_s" not in readings.read(parse(two), 3.0, WALL_S)
