"""A recording, and the same incident told as signals, are judged alike: what was seen is told, and told again it is the same cause."""

from __future__ import annotations

from functools import cache

import pytest

from agent.simulator.faults import FAULTS
from agent.simulator.recording import START_NS, scenario
from agent.simulator.settings import SimulatorSettings
from rules.evidence import Evidence, ratio, value
from rules.signals.judging import judge_signals
from rules.signals.reading import parse
from rules.triage import Triage
from rules.verdict import Diagnosis

SECOND = 10**9
HISTORY_S, AFTER_S, LENGTH_S = 240.0, 30.0, 130.0
ALIKE = ("hot-inlet", "power-brake", "power-cap", "clock-stuck", "hung-engine", "cpu-quota", "gpu-lost", "bad-deploy")


@cache
def played(fault: str | None, null_twin: bool = False) -> tuple[Diagnosis, Evidence]:
    """The struck node's judgement at the end, and what was seen of it."""
    settings = SimulatorSettings(
        nodes=2, gpus_per_node=2, fault=fault, fault_after_s=AFTER_S, null_twin=null_twin,
        seed=8, history_s=HISTORY_S, interval_s=2.0,
    )  # fmt: skip
    triage, next_ns = Triage(), START_NS
    diagnoses: list[Diagnosis] = []
    for samples in scenario(settings, LENGTH_S):
        triage.add(samples)
        if samples[-1].time_ns >= next_ns:
            next_ns = samples[-1].time_ns + 6 * SECOND
            diagnoses = triage.evaluate(samples[-1].time_ns)
    diagnosis = next(d for d in diagnoses if d.subject["node"] == "sim-n02")
    evidence = next(seen for seen in triage.last.values() if seen.node == "sim-n02")
    return diagnosis, evidence


def tell(evidence: Evidence) -> dict[str, object]:
    """The evidence as somebody would tell it: the worst GPU, ratios against usual, and whether something is so."""
    told: dict[str, object] = {"tps_ratio": evidence.output.output_ratio, "work_ratio": evidence.output.work_ratio}
    gpus, engine, host = evidence.gpus, evidence.engine, evidence.host
    if gpus:
        worst = min(gpus, key=lambda gpu: ratio(gpu.sm_clock) or 1.0)
        names = {"hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown", "sw_power_cap"}
        told |= {
            "flags": sorted(name for name in names if any((value(gpu.duty.get(name)) or 0) > 0.5 for gpu in gpus)),
            "util_pct": value(worst.util),
            "temp_c": value(worst.temp),
            "sm_ratio": ratio(worst.sm_clock),
            "power_ratio": ratio(worst.power),
            "power_w": value(worst.power),
            "power_limit_w": value(worst.power_limit),
            "limit_to_default": (value(worst.power_limit) or 0) / (worst.power_limit_default or 1),
            "ecc_uncorrectable": value(worst.ecc_uncorrected_new),
        }
    if engine is not None:
        told |= {
            "running": value(engine.running),
            "waiting": value(engine.waiting),
            "kv_pct": value(engine.kv_used),
            "tokens_zero": (engine.frozen_s or 0) >= 20,
            "itl_ratio": ratio(engine.itl),
            "prompt_len_ratio": ratio(engine.prompt_len),
        }
    if host is not None:
        told |= {"cpu_core_max_pct": value(host.core_max), "cgroup_throttled": (value(host.throttled) or 0) > 5}
    told["xid"] = [event.code for event in evidence.events if event.kind == "xid"]
    told["deploy_event"] = any(event.kind == "deploy" for event in evidence.events)
    return told


@pytest.mark.parametrize("fault", ALIKE)
def test_what_a_recording_shows_is_judged_alike_when_it_is_told(fault: str) -> None:
    diagnosis, evidence = played(fault)
    assert [str(verdict.cause) for verdict in diagnosis.verdicts][:1] == [str(FAULTS[fault].cause)]
    again = judge_signals(parse(tell(evidence)))
    assert [verdict.cause for verdict in again.verdicts][:1] == [diagnosis.verdicts[0].cause], tell(evidence)


@pytest.mark.parametrize("fault", [None, "hot-inlet", "power-cap"])
def test_health_and_what_only_looks_like_a_fault_stay_none_when_told(fault: str | None) -> None:
    diagnosis, evidence = played(fault, null_twin=fault is not None)
    assert diagnosis.verdicts == ()
    assert judge_signals(parse(tell(evidence))).verdicts == (), tell(evidence)
