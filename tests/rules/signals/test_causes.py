"""A few signals are enough for the right cause, the obvious guess is not followed, and what is no fault stays none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rules.present import present
from rules.signals.evidence import evidence_of
from rules.signals.judging import judge_signals
from rules.signals.keys import FLAG_NAMES, KEYS
from rules.signals.reading import parse
from rules.steps.physical.link import pcie_link
from rules.thresholds import Bar
from rules.verdict import Cause, Diagnosis, verdict_json


def judged(**told: object) -> Diagnosis:
    return judge_signals(parse(told))


def named(**told: object) -> str:
    verdicts = judged(**told).verdicts
    return str(verdicts[0].cause) if verdicts else "none"


CAUSES: list[tuple[str, dict[str, object]]] = [
    ("thermal", {"tps_ratio": 0.71, "sm_ratio": 0.69, "temp_c": 90, "flags": ["sw_thermal"], "util_pct": 98}),
    ("thermal", {"prefill_ratio": 0.7, "tps_ratio": 1.0, "sm_ratio": 0.72, "temp_c": 92, "flags": ["temp_at_limit"]}),
    ("thermal", {"tps_ratio": 0.83, "thermal_violation_s": 240}),
    ("thermal", {"itl_ratio": 1.4, "temp_c": 61, "mem_temp_c": 97, "util_pct": 99, "flags": []}),
    ("thermal", {"tps_ratio": 0.8, "sm_ratio": 0.82, "peer_temp_delta_c": 13, "fan_pct": 0, "util_pct": 92}),
    ("thermal", {"temp_c": 109, "tps_ratio": 0.6}),
    ("power", {"tps_ratio": 0.4, "sm_ratio": 0.26, "flags": ["hw_slowdown", "hw_power_brake"], "temp_c": 47}),
    ("power", {"tps_ratio": 0.84, "limit_to_default": 0.55, "power_to_limit": 0.98, "flags": ["sw_power_cap"]}),
    ("power", {"tps_ratio": 0.9, "flags": ["sw_power_cap"], "power_to_limit": 0.55}),
    ("power", {"psu_w": 750, "sum_limits_w": 910, "host_gap": True}),
    ("power", {"clock_locked": True, "sm_ratio": 0.55, "tps_ratio": 0.6, "util_pct": 97}),
    ("power", {"tps_ratio": 0.81, "limit_to_default": 0.6}),
    ("power", {"work_ratio": 0.85, "sm_ratio": 0.83, "util_pct": 99}),
    ("power", {"work_ratio": 0.7, "clock_locked": True, "sm_ratio": 1.08}),
    ("power", {"host_gap": True, "prompt_tps_high": True}),
    ("gpu_fault", {"gpu_lost": True, "start_failed": True}),
    ("gpu_fault", {"xid": [63, 79]}),
    ("gpu_fault", {"row_remap_failure": 1}),
    ("gpu_fault", {"tps_ratio": 0.5, "sm_ratio": 0.3, "power_ratio": 0.25, "util_pct": 97, "flags": [], "temp_c": 48}),
    ("gpu_fault", {"tps_ratio": 0.5, "power_ratio": 0.3, "util_pct": 97, "flags": []}),
    ("gpu_fault", {"tps_ratio": 0.12, "mem_clock_ratio": 0.07, "util_pct": 99}),
    ("gpu_fault", {"tps_ratio": 0.6, "rank_util": [100, 99, 100, 100], "rank_power": [610, 330, 325, 340]}),
    ("pcie_link", {"tps_ratio": 0.6, "pcie_gen_load": 1, "pcie_width": 8, "util_pct": 91}),
    ("pcie_link", {"tps_ratio": 0.85, "p2p": False, "tp": 4}),
    ("pcie_link", {"bandwidth_ratio": 0.4, "pcie_gen_load": 5}),
    ("pcie_link", {"tps_ratio": 0.4, "pcie_gen_load": 4, "pcie_width": 8, "pcie_mbs": 12500}),
    ("memory_kv", {"kv_pct": 99, "waiting": 55, "preempt": True, "tps_ratio": 0.55, "itl_ratio": 3.4}),
    ("memory_kv", {"preempt": True, "itl_ratio": 2.2, "waiting": 12}),
    ("memory_kv", {"kv_pct": 100, "tokens_zero": True, "running": 9, "waiting": 31}),
    ("memory_kv", {"kv_blocks_ratio": 0.55, "deploy_event": "0.30 -> 0.31", "tps_ratio": 0.7}),
    ("memory_kv", {"vram_free_mib": 44, "mem_util_pct": 1, "util_pct": 100, "tps_ratio": 0.04}),
    ("memory_kv", {"gtt_gb": 9, "tps_ratio": 0.3}),
    ("memory_kv", {"swap_mbs": 220, "tps_ratio": 0.2}),
    ("request_mix", {"prompt_len_ratio": 5, "prompt_tps_high": True, "tps_ratio": 0.35, "ttft_ratio": 3}),
    ("request_mix", {"output_len_ratio": 7, "tps_ratio": 0.9, "waiting": 0, "running": 2}),
    ("request_mix", {"itl_max_s": 14}),
    ("scheduling", {"tokens_zero": True, "util_pct": 100, "running": 6, "health_ok": True}),
    ("scheduling", {"stalled": True, "running": 6, "kv_pct": 41}),
    ("scheduling", {"health_ok": True, "canary_ok": False}),
    ("scheduling", {"tps": 0, "waiting": 9, "kv_pct": 3}),
    ("scheduling", {"running": 4, "open_connections": 0, "util_pct": 93}),
    ("scheduling", {"health_ok": False}),
    ("scheduling", {"rank_util": [99, 0, 100, 100], "tp": 4}),
    ("scheduling", {"replica_share": [0.7, 0.1, 0.1, 0.1], "ttft_ratio": 6}),
    ("scheduling", {"rank_running": [48, 2, 3, 1], "waiting": 30}),
    ("scheduling", {"delivered_tokens_zero": True, "running": 14, "open_connections": 0, "util_pct": 96}),
    ("host_cpu", {"cgroup_throttled": True, "tps_ratio": 0.7}),
    ("host_cpu", {"itl_ratio": 1.8, "ttft_ratio": 1.0, "cpu_request": 1}),
    ("host_cpu", {"cpu_core_max_pct": 100, "util_pct": 38, "waiting": 12, "tps_ratio": 0.6}),
    ("host_cpu", {"structured": True, "cpu_core_max_pct": 99, "util_pct": 44, "itl_ratio": 2.2}),
    ("host_cpu", {"structured": True, "tps_ratio": 0.3}),
    ("host_cpu", {"structured": True, "tps_ratio": 0.3, "util_pct": 11, "kv_pct": 100}),
    ("request_mix", {"structured": True, "tps_ratio": 0.3, "util_pct": 97}),
    ("host_cpu", {"util_pct": 31, "running": 32}),
    ("gpu_fault", {"xid": [145], "tokens_zero": True, "tp": 2}),
    ("cold_start", {"prefix_hit_pct": 0, "restart": True}),
    ("software", {"prefix_hit_pct": 0, "restart": True, "deploy_event": "0.9 -> 0.10"}),
    ("power", {"flags": ["SW Power Cap"], "power_ratio": 0.25}),
    ("pcie_link", {"tps_ratio": 0.5, "util_pct": 30, "pcie_gen_load": 2, "pcie_width": 4}),
    ("network", {"ttft_ratio": 12.8, "itl_ratio": 0.3}),
    ("telemetry", {"util_pct": 95, "gpu_pids": 0, "persistence": False}),
    ("software", {"launch": "vllm serve model --enforce-eager"}),
    ("contention", {"orphan_gpu_pid": 2, "running": 0}),
    ("power", {"tps_ratio": 0.5, "limit_to_default": 0.65, "mixed_gpus": True, "rank_power": [74, 150]}),
    ("contention", {"gpu_pids": 3, "tps_ratio": 0.5, "util_pct": 100}),
    ("contention", {"orphan_gpu_pid": True, "start_failed": True}),
    ("network", {"client_minus_server_s": 12.5}),
    ("network", {"nccl_transport": "Socket", "tps_ratio": 0.6}),
    ("network", {"tokens_zero": True, "mem_used_mib": 610, "util_pct": 100, "tp": 8}),
    ("software", {"deploy_event": True, "tps_ratio": 0.55, "flags": [], "temp_c": 60}),
    ("software", {"prefix_hit_pct": 0, "ttft_flat": True}),
    ("software", {"accept_ratio": 0.31, "tps_ratio": 0.8}),
    ("software", {"useful_work_ratio": 0.97, "power_ratio": 1.3, "util_pct": 100}),
    ("software", {"tp": 8, "model_b": 7, "util_pct": 41}),
    ("software", {"tp": 8, "model_b": 13, "tps_ratio": 0.6}),
    ("cold_start", {"startup": True, "total_s": 510, "weights_s": 35}),
    ("cold_start", {"load_events": 14, "vram_sawtooth": True, "ttft_ratio": 12}),
    ("cold_start", {"uptime_s": 20, "ttft_ratio": 40}),
    ("storage", {"startup": True, "load_s": 400, "read_bound": True}),
    ("telemetry", {"client_tps": 41, "server_tps": 123}),
    ("telemetry", {"mig": True, "util_pct": "N/A", "gr_active": 70}),
    ("telemetry", {"mig": True, "util_pct": 0, "stalled": False}),
    ("telemetry", {"util_pct": 96, "gr_active": 0, "tps_ratio": 1.0}),
    ("telemetry", {"stats_stale_s": 400}),
    ("telemetry", {"remapped_rows_delta": 9223372036854775807}),
]


@pytest.mark.parametrize(("cause", "told"), CAUSES, ids=[f"{i}-{cause}" for i, (cause, _) in enumerate(CAUSES)])
def test_the_cause_is_named(cause: str, told: dict[str, object]) -> None:
    diagnosis = judged(**told)
    assert [str(verdict.cause) for verdict in diagnosis.verdicts][:1] == [cause]
    verdict = diagnosis.verdicts[0]
    assert verdict.evidence and verdict.fixes and verdict.since_ns is None
    for language in ("en", "zh"):
        assert all(entry["evidence"] and entry["fix"] for entry in verdict_json(diagnosis, language))


def test_every_cause_that_can_be_a_verdict_is_among_the_reports() -> None:
    assert {cause for cause, _ in CAUSES} == {str(cause) for cause in Cause} - {"none", "demand"}


TRAPS: list[tuple[str, dict[str, object]]] = [
    # the obvious guess would be another cause: heat, the deploy, the pool, the queue
    ("power", {"tps_ratio": 0.7, "sm_ratio": 0.6, "temp_c": 71, "limit_to_default": 0.5, "flags": ["sw_power_cap"]}),
    ("thermal", {"deploy_event": True, "tps_ratio": 0.7, "sm_ratio": 0.7, "temp_c": 93, "flags": ["hw_thermal"]}),
    ("scheduling", {"tokens_zero": True, "deploy_event": True, "util_pct": 100, "running": 3}),
    ("software", {"prefix_hit_drop": True, "prompt_len_ratio": 1.0, "deploy_event": True, "ttft_ratio": 2.5}),
    ("scheduling", {"rank_imbalance": True, "kv_pct": 98, "waiting": 70}),
    ("gpu_fault", {"xid": [48], "tps_ratio": 0.6, "deploy_event": True}),
    ("host_cpu", {"itl_ratio": 2.1, "ttft_ratio": 1.0, "cpu_request": 2, "flags": [], "temp_c": 74}),
    ("telemetry", {"client_tps": 60, "server_tps": 120, "util_pct": 97}),
]


@pytest.mark.parametrize(("cause", "told"), TRAPS, ids=[cause for cause, _ in TRAPS])
def test_the_obvious_guess_is_not_followed(cause: str, told: dict[str, object]) -> None:
    assert named(**told) == cause


HARMLESS: dict[str, dict[str, object]] = {
    "a capped card at its usual rate": {"tps_ratio": 1.0, "flags": ["sw_power_cap"], "power_to_limit": 1.0},
    "a lowered limit of which no loss is told": {"limit_to_default": 0.5, "power_limit_w": 175},
    "a lowered limit that is not reached": {"tps_ratio": 0.8, "limit_to_default": 0.6, "power_to_limit": 0.5},
    "a clock that is down because little is asked": {"tps_ratio": 0.8, "sm_ratio": 0.6, "util_pct": 12, "pstate": "P8"},
    "a small model that is split and loses nothing": {"tp": 8, "model_b": 7, "tps_ratio": 1.0},
    "a temperature on its limit that costs nothing": {"tps_ratio": 0.99, "flags": ["temp_at_limit"], "temp_c": 87},
    "a pool that is full of what can be had back": {"kv_pct": 98, "preempt": False, "waiting": 0, "tps_ratio": 1.0},
    "a reserved pool": {"kv_pct": 100, "kv_used_kind": "reserved", "tps_ratio": 0.98, "waiting": 2},
    "an idle link at its lowest": {"pcie_gen_idle": 1, "tps_ratio": 1.0},
    "a narrow link that carries little": {"pcie_gen_load": 3, "pcie_width": 1, "pcie_mbs": 20, "tps_ratio": 1.0},
    "no demand": {"util_pct": 1, "running": 0, "waiting": 0, "tps_ratio": 0.1},
    "noise": {"tps_ratio": 0.97},
    "the day's swing of a fleet": {"tps_ratio": 0.94, "period_h": 24, "peers_affected": "all", "flags": []},
    "boots that differ": {"tps_ratio": 0.93, "restart": True},
    "a core that waits for the GPU": {"cpu_core_max_pct": 100, "sync_wait": True, "tps_ratio": 1.0, "util_pct": 98},
    "a deploy that costs nothing": {"deploy_event": True, "tps_ratio": 1.01},
    "a remap that waits for its reset": {"xid": [63], "remap_pending": True, "tps_ratio": 1.0},
    "the first minutes": {"uptime_s": 80, "tps_ratio": 0.6},
    "a start": {"startup": True, "tokens_zero": True, "util_pct": 0},
    "lengths that drift": {"prompt_len_ratio": 1.65, "tps_ratio": 0.98},
    "a start that fails on one of several alike": {"start_failed": True, "peers_affected": "one"},
    "lengths that drift, and no loss is told": {"prompt_len_ratio": 1.7},
    "ranks that wait for a text": {"rank_util": [0, 100, 100], "running": 0},
    "no tokens and nobody who asks": {"tps": 0, "running": 0, "waiting": 0, "open_connections": 0},
    "more asked and more served": {"tps_ratio": 1.3, "power_ratio": 1.1, "util_pct": 100},
    "nothing at all": {},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_fault_is_no_incident(name: str) -> None:
    assert judged(**HARMLESS[name]).verdicts == ()


def test_a_pool_counts_as_pressure_only_if_it_counts_what_is_live() -> None:
    told = {"kv_pct": 99, "waiting": 20, "preempt": True, "tps_ratio": 0.6}
    assert named(**told) == named(**told, kv_used_kind="live") == "memory_kv"
    assert "memory_kv" not in [named(**told, kv_used_kind=kind) for kind in ("reserved", "live_plus_cached")]


def test_a_loss_without_a_cause_is_said_to_be_one() -> None:
    diagnosis = judged(tps_ratio=0.7)
    assert diagnosis.verdicts == () and diagnosis.headline.key == "rules.summary.told_unexplained"


def test_nothing_told_is_nothing_known() -> None:
    assert judged().headline.key == judge_signals(parse(None)).headline.key == "rules.summary.nothing_known"


def test_the_loss_is_told_where_it_can_be() -> None:
    thermal = {"flags": ["hw_thermal"], "sm_ratio": 0.7, "temp_c": 90}
    assert judged(tps_ratio=0.6, **thermal).verdicts[0].loss_pct == pytest.approx(40)
    assert judged(itl_ratio=2.0, **thermal).verdicts[0].loss_pct == pytest.approx(50)
    assert judged(**thermal).verdicts[0].loss_pct is None


@pytest.mark.parametrize(("affected", "scope"), [("all", "cluster"), ("one", "gpu"), ("some", "node"), (None, "node")])
def test_the_scope_is_what_the_peers_tell(affected: str | None, scope: str) -> None:
    verdict = judged(flags=["hw_power_brake"], tps_ratio=0.4, sm_ratio=0.3, peers_affected=affected).verdicts[0]
    assert verdict.scope == scope


def test_other_steps_are_ruled_out_with_what_is_told_of_them() -> None:
    diagnosis = judged(deploy_event=True, tps_ratio=0.5, flags=[], temp_c=58, kv_pct=40, waiting=0, running=8)
    (entry,) = verdict_json(diagnosis)
    assert entry["cause"] == "software"
    ruled = {step["step"]: " ".join(step["because"]) for step in entry["ruled_out"]}  # type: ignore[attr-defined]
    assert "58 °C" in ruled[1] and "40 %" in ruled[2]


told_values = {
    "number": st.one_of(st.floats(-10, 1e5), st.integers(-5, 2**70), st.booleans(), st.none(), st.just("N/A")),
    "flag": st.one_of(st.booleans(), st.integers(0, 3), st.none()),
    "event": st.one_of(st.booleans(), st.text(max_size=20)),
    "numbers": st.lists(st.floats(-1, 500), max_size=9),
    "names": st.lists(st.sampled_from([*FLAG_NAMES, "other"]), max_size=6),
}


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sets(st.sampled_from(sorted(KEYS)), max_size=14))
def test_any_combination_of_signals_can_be_judged_and_printed(data: st.DataObject, keys: set[str]) -> None:
    told: dict[str, object] = {}
    for key in sorted(keys):
        kind = KEYS[key]
        values = st.sampled_from(kind.choices) if kind.choices else told_values.get(kind.kind, st.text(max_size=30))
        told[key] = data.draw(values, label=key)
    diagnosis = judge_signals(parse(told))
    for language in ("en", "zh"):
        json.dumps(verdict_json(diagnosis, language))
    assert all(0 < verdict.confidence < 1 for verdict in diagnosis.verdicts)


def lines_of(language: str = "en", **told: object) -> str:
    return "\n".join(present(judged(**told), language))


@pytest.mark.parametrize(
    ("told", "en", "zh"),
    [
        (
            {"deploy_event": "vllm 0.8 -> 0.9"},
            "shortly before: vllm 0.8 -> 0.9",
            "此前不久有部署或升级:vllm 0.8 -> 0.9",
        ),
        ({"deploy_event": True}, "a deploy or an upgrade shortly before", "此前不久有部署或升级"),
        ({"restart": True}, "a restart shortly before", "此前不久有重启"),
        ({"driver_changed": "570 -> 580"}, "a change of the driver shortly before: 570 -> 580", "驱动:570 -> 580"),
        ({"config_changed": True}, "a change of the configuration shortly before", "此前不久有配置变更"),
    ],
)
def test_a_change_that_is_told_reads_whole_with_and_without_its_text(told: dict[str, object], en: str, zh: str) -> None:
    for language, words in (("en", en), ("zh", zh)):
        lines = [line.strip() for line in lines_of(language, tps_ratio=0.7, **told).splitlines()]
        assert any(line.endswith(words) for line in lines)


def test_a_gpu_that_nobody_named_is_a_gpu() -> None:
    hot: dict[str, object] = {"tps_ratio": 0.6, "temp_c": 91, "flags": ["hw_thermal"]}
    assert "a GPU at 91 °C" in lines_of(**hot) and "某块 GPU 温度 91 °C" in lines_of("zh", **hot)
    assert "Xid 79 on a GPU" in lines_of(xid=[79]) and "某块 GPU 报告 Xid 79" in lines_of("zh", xid=[79])
    assert "GPU ?" not in lines_of(**hot) + lines_of("zh", **hot) + lines_of(xid=[79])


def link_step(**told: object) -> tuple[str, str]:
    """(what became of the PCIe link, the lines that say so)"""
    finding = pcie_link(evidence_of(parse(told)), Bar())
    return str(finding.status), "; ".join(line.text() for line in finding.evidence)


def test_a_link_whose_best_is_not_told_is_neither_cleared_nor_blamed() -> None:
    status, why = link_step(tps_ratio=0.6, pcie_gen_load=3, pcie_width=8)
    assert status == "no_data" and "generation 3, x8" in why and "at its best is not told" in why
    assert link_step(pcie_gen_load=3, pcie_width=8)[0] == "no_data"
    assert link_step(tps_ratio=1.0, pcie_gen_load=3, pcie_width=8)[0] == "ruled_out"
    assert link_step(tps_ratio=0.6, pcie_gen_load=3, pcie_width=8, pcie_mbs=20)[0] == "ruled_out"
    assert link_step(tps_ratio=0.6, pcie_gen_load=1, pcie_width=8)[0] == "confirmed"
