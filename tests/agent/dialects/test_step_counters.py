"""Engines whose tokens count with each step: LMDeploy, NIM, Dynamo, and vLLM behind Ray."""

from __future__ import annotations

import pytest

from agent.collectors.dialects.dynamo import counted_once
from telemetry.sample import Sample
from tests.agent.dialects.conftest import Read
from tests.doubles.engine_texts.dynamo import frontend, worker
from tests.doubles.engine_texts.lmdeploy import lmdeploy
from tests.doubles.engine_texts.nim import nim
from tests.doubles.engine_texts.ray import ray_vllm
from tests.doubles.engine_texts.sglang import sglang, sglang_0_4_6
from tests.doubles.engine_texts.trtllm import trtllm
from tests.doubles.engine_texts.vllm import vllm


def test_lmdeploy(read: Read) -> None:
    kind, fields = read(lmdeploy(), lmdeploy(generated=61_900.0, prompts=207_000.0, steps=4_250.0))
    assert kind == "lmdeploy"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 61_900,
        "prompt_tokens_total": 207_000,
        "prompt_tokens_computed_total": 162_000,
        "prefix_queries_total": 207_000,
        "prefix_hits_total": 45_000,
        "requests_finished_total": 410,
        "requests_failed_total": 8,
        "requests_aborted_total": 17,
        "oom_total": 6,
        "steps_total": 4_250,
        "requests_running": 14.0,
        "requests_waiting": 5.0,
        "kv_used_pct": pytest.approx(27.0),
        "tokens_per_s": 90.0,
        "prompt_tokens_per_s": 200.0,
        "tokens_per_step": 16.0,
        "step_mean_s": pytest.approx(10 / 250),
        "itl_mean_s": pytest.approx(0.018),
        "itl_p50_s": pytest.approx(0.015),
        "itl_p99_s": pytest.approx(0.0199),
        "ttft_mean_s": pytest.approx(0.5),
        "ttft_p50_s": pytest.approx(0.6),
        "stalled": 0,
    }


def test_nim(read: Read) -> None:
    kind, fields = read(nim(), nim(generated=15_400.0, prompts=65_000.0))
    assert kind == "nim"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 15_400,
        "prompt_tokens_total": 65_000,
        "requests_finished_total": 220,
        "requests_failed_total": 4,
        "requests_running": 5.0,
        "requests_waiting": 2.0,
        "kv_used_pct": 18.0,
        "kv_used_kind": "live",
        "tokens_per_s": 40.0,
        "prompt_tokens_per_s": 100.0,
        "stalled": 0,
    }


def test_a_dynamo_frontend(read: Read) -> None:
    kind, fields = read(frontend(), frontend(delivered=44_800.0))
    assert kind == "dynamo"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 44_800,
        "requests_finished_total": 350,
        "requests_failed_total": 6,
        "requests_aborted_total": 7,
        "requests_running": 28.0,
        "requests_waiting": 3.0,
        "tokens_per_s": 80.0,
        "stalled": 0,
    }


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (vllm(), "dynamo+vllm"),
        (sglang(), "dynamo+sglang"),
        (sglang_0_4_6(), "dynamo+sglang"),
        (trtllm(), "dynamo+trtllm"),
        (trtllm(prefix="trtllm:"), "dynamo+trtllm"),
    ],
    ids=["vllm", "sglang", "sglang 0.4.6", "trtllm", "trtllm of 0.7"],
)
def test_a_dynamo_worker_tells_its_engines_numbers(read: Read, engine: str, kind: str) -> None:
    own = read(engine.replace("trtllm:", "trtllm_"))[1]
    found, fields = read(worker(engine))
    assert found == kind
    assert {name: fields[name] for name in own if name != "uptime_s"} == {
        name: own[name] for name in own if name != "uptime_s"
    }
    assert fields["uptime_s"] == 5_400.0


@pytest.mark.parametrize("renamed", [True, False], ids=["1.x", "0.7"])
def test_a_dynamo_worker_with_a_silent_engine_tells_its_own(read: Read, renamed: bool) -> None:
    assert read(worker(renamed=renamed)) == (
        "dynamo",
        {
            "counter_style": "finish",
            "requests_finished_total": 360,
            "requests_failed_total": 2,
            "requests_running": 26.0,
            "kv_used_pct": 64.0,
            "kv_used_kind": "live",
            "kv_blocks_count": 2_500.0,
            "kv_blocks_free": pytest.approx(900.0),
            "uptime_s": 5_400.0,
        },
    )


def test_a_workers_load_of_zero_is_not_believed_beside_an_engine_that_does_not_tell_it(read: Read) -> None:
    engine = "\n".join(line for line in sglang().splitlines() if "token_usage" not in line) + "\n"
    assert "kv_used_pct" not in read(worker(engine, usage=0.0))[1]
    assert read(worker(engine, usage=0.64))[1]["kv_used_pct"] == 64.0


def test_tokens_of_a_frontend_and_its_worker_are_never_added() -> None:
    def of(name: str, kind: str, model: str, tokens: int) -> Sample:
        fields = {"generation_tokens_total": tokens, "tokens_per_s": 5.0, "requests_running": 2.0}
        return Sample("engine", {"engine": name, "kind": kind, "model": model}, fields, 1)

    worked, front, other = (
        of("w", "dynamo+vllm", "m", 90), of("f", "dynamo", "m", 88), of("g", "dynamo", "elsewhere", 70)
    )  # fmt: skip
    once = counted_once([front, worked, other])
    assert dict(once[0].fields) == {"delivered_tokens_total": 88, "requests_running": 2.0}
    assert once[1:] == [worked, other]


@pytest.mark.parametrize("shape", [{}, {"doubled": False}, {"colon": True}], ids=["twice", "once", "colon"])
def test_replicas_behind_a_ray_agent_are_added_once(read: Read, shape: dict[str, bool]) -> None:
    kind, fields = read(ray_vllm(**shape), ray_vllm(generated=(3_500.0, 1_300.0), **shape))  # type: ignore[arg-type]
    assert kind == "ray+vllm"
    assert fields == {
        "counter_style": "step",
        "generation_tokens_total": 4_800,
        "prompt_tokens_total": 14_400,
        "requests_running": 9.0,
        "requests_waiting": 3.0,
        "kv_used_pct": 40.0,
        "kv_used_kind": "live",
        "kv_blocks_count": 2_500.0,
        "kv_blocks_free": pytest.approx(1_500.0),
        "context_mean": pytest.approx(2_500 * 16 * 0.4 / 9),
        "tokens_per_s": 60.0,
        "prompt_tokens_per_s": 180.0,
        "stalled": 0,
    }


def test_a_ray_agent_that_exports_counters_as_gauges_only_is_read_alike(read: Read) -> None:
    assert read(ray_vllm(doubled=False).replace("_tokens_total{", "_tokens{")) == read(ray_vllm())


def test_sglang_behind_a_ray_agent_is_read_too(read: Read) -> None:
    kind, fields = read(sglang().replace("sglang:", "ray_sglang_"))
    assert kind == "ray+sglang"
    assert fields == read(sglang())[1]
