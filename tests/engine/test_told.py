"""Every field of the catalogue that this engine can know reaches the agent, through the agent's own reading of /metrics."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent.collectors.dialects.pairscope import PAIRSCOPE
from agent.collectors.engine_readings import EngineReadings
from agent.exposition import parse
from engine.settings import EngineSettings
from telemetry.catalogue import ENGINE
from telemetry.sample import Value
from tests.engine.checkpoints import write_checkpoint
from tests.engine.running import ThreadServer, until

GREEDY = {"temperature": 0, "ignore_eos": True}

NOT_THE_ENGINES = {
    "the agent asks, times and watches": {"up", "starting", "probe_ok", "probe_s", "partial"},
    "the agent sees its processes from outside": {"procs", "proc_cpu_pct", "proc_cpu_max_pct", "proc_rss_bytes"},
    "the agent finds its GPUs": {"gpus_confidence", "gpus_mapping"},
    "counters say it better than a rate of the engine's own": {"reported_tokens_per_s"},
    "only said of a quantile that lies beyond the buckets": {"quantile_bounds"},
    "the agent reads it apart from the numbers": {"version", "config_hash"},
    "the agent adds the time since it has read them": {"stats_age_s"},
}
ONLY_WHEN_SPECULATING = {name for name in ENGINE.fields if name.startswith("spec_")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


def read(server: ThreadServer, readings: EngineReadings) -> dict[str, Value]:
    return readings.read(PAIRSCOPE.plain(parse(server.http.get("/metrics").text)), time.monotonic(), time.time())


def test_the_agent_reads_every_field_that_the_engine_can_know(folder: Path) -> None:
    settings = EngineSettings(model=str(folder), kv_blocks=512, max_seqs=16, threads=1, preemption="swap")
    readings = EngineReadings(PAIRSCOPE)
    with ThreadServer(settings) as server:
        before = read(server, readings)
        for number in range(5):  # 320 answers: enough for a 99th percentile, or the agent tells none
            body = {"prompt": [f"{number} and {n}" for n in range(8)], "n": 8, "max_tokens": 3, **GREEDY}
            assert server.http.post("/v1/completions", json=body).status_code == 200
        long = {"prompt": "x" * 600, "max_tokens": 3000, "stream": True, **GREEDY}
        with server.http.stream("POST", "/v1/completions", json=long):
            until(lambda: server.metric("requests_running") == 1, "it runs")
            fields = read(server, readings)
    assert {name: type(value) for name, value in fields.items()} == {n: ENGINE.fields[n].type for n in fields}
    missing = ENGINE.fields.keys() - fields.keys() - ONLY_WHEN_SPECULATING
    assert missing == set().union(*NOT_THE_ENGINES.values())
    assert before["generation_tokens_total"] == 0
    assert fields["requests_finished_total"] == 320
    assert fields["output_len_mean"] == 3.0
    stages = [fields[name] for name in ENGINE.fields if name.startswith("stage_")]
    assert len(stages) == len(set(stages)) == 7  # each its own
    for name in ("mfu_pct", "mbu_pct", "mfu_prefill_pct", "mbu_decode_pct"):
        assert 0 < fields[name] <= 100, name  # type: ignore[operator]


def test_an_idle_engine_tells_no_means_and_no_utilisation(folder: Path) -> None:
    with ThreadServer(EngineSettings(model=str(folder), kv_blocks=64, threads=1)) as server:
        fields = read(server, EngineReadings(PAIRSCOPE))
    unknown = {"mfu_pct", "mbu_pct", "mfu_prefill_pct", "mbu_decode_pct", "context_mean", "prompt_len_max"}
    unknown |= {"step_mean_s", "tokens_per_step", "ttft_mean_s", "tpot_mean_s", "tokens_per_s"}
    assert unknown.isdisjoint(fields)
    assert fields["requests_running"] == fields["kv_used_pct"] == 0.0
