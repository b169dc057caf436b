"""No data is not ruled out: what a cause is judged by is taken out of a healthy recording, and nobody may say that the cause is not it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from rules.evidence import Evidence
from rules.finding import Finding
from rules.steps import WALK
from rules.thresholds import Bar
from rules.triage import JudgeSettings, judge, walk
from rules.verdict import Cause, Status, Step
from telemetry.sample import Sample
from tests.rules.plant import Fault, Node, bend, event, scene

LAST_S = 240

MASK = "throttle_reasons throttle_sw_power_s throttle_sw_thermal_s throttle_hw_thermal_s throttle_hw_power_brake_s"


@cache
def healthy() -> tuple[Sample, ...]:
    return tuple(scene([Node("n1", 1), Node("n2", 2)], LAST_S))


def without(samples: Iterable[Sample], names: str, gpu: str = "", node: str = "n1") -> list[Sample]:
    """The samples without these fields (`gpu.state`), of one GPU if one is named, on the one node."""
    cut = set(names.split())
    found = []
    for sample in samples:
        if sample.tags["node"] == node and (not gpu or sample.tags.get("gpu") == gpu):
            left = {name: kept for name, kept in sample.fields.items() if f"{sample.measurement}.{name}" not in cut}
            sample = replace(sample, fields=left)
        if sample.fields:
            found.append(sample)
    return found


def seen_at_end(samples: Sequence[Sample]) -> Evidence:
    """What the judge saw of n1's pair at the last moment."""
    triage, _ = [*walk(samples, None, JudgeSettings(step_s=10.0))][-1]
    return next(evidence for key, evidence in triage.last.items() if key.startswith("n1"))


def findings(samples: Sequence[Sample]) -> dict[Cause, Finding]:
    evidence = seen_at_end(samples)
    return {found.cause: found for examine in WALK.values() for found in examine(evidence, Bar())}


def gpu(names: str) -> str:
    return " ".join(f"gpu.{name}" for name in names.split())


RESTS_ON = {
    Cause.THERMAL: [gpu(f"temp_c mem_temp_c {MASK}")],
    Cause.POWER: [
        gpu(f"{MASK} sm_clock_mhz"),
        gpu(f"{MASK} sm_clock_mhz power_w"),
        gpu(f"power_limit_w sm_clock_mhz {MASK}"),
    ],
    Cause.GPU_FAULT: [gpu("state"), gpu("sm_clock_mhz"), gpu("xid_total"), gpu("ecc_uncorrected_total")],
    Cause.PCIE_LINK: [gpu("pcie_gen"), gpu("pcie_width"), gpu("util_pct")],
    Cause.MEMORY_KV: ["engine.kv_used_pct"],
    Cause.REQUEST_MIX: [
        "engine.prompt_len_mean engine.prompt_tokens_per_s",
        "engine.output_len_mean engine.requests_waiting",
    ],
    Cause.SCHEDULING: [
        "engine.tokens_per_s engine.generation_tokens_total",
        "engine.tokens_per_s engine.requests_running",
    ],
    Cause.HOST_CPU: ["host.cpu_core_max_pct", "host.psi_cpu_pct host.load1"],
    Cause.CONTENTION: [gpu("processes")],
    Cause.SOFTWARE: ["engine.version"],
    Cause.COLD_START: ["engine.uptime_s"],
    Cause.STORAGE: ["host.psi_io_pct"],
    Cause.DEMAND: ["engine.requests_running"],
}
"""By cause, sets of fields without which it can't be ruled out."""


def test_a_healthy_recording_rules_out_what_the_other_tests_take_the_data_from() -> None:
    found = findings(healthy())
    assert {cause: found[cause].status for cause in RESTS_ON} == dict.fromkeys(RESTS_ON, Status.RULED_OUT)


@pytest.mark.parametrize("one", [False, True], ids=["all", "one of two"])
@pytest.mark.parametrize(("cause", "names"), [(cause, names) for cause, sets in RESTS_ON.items() for names in sets])
def test_a_cause_is_not_ruled_out_without_what_it_is_judged_by(cause: Cause, names: str, one: bool) -> None:
    samples = without(healthy(), names, "1" if one and names.startswith("gpu.") else "")
    found = findings(samples)[cause]
    assert found.status is Status.NO_DATA
    said = " ".join(entry.text("en") for entry in found.evidence)
    assert said and all(entry.text("zh") for entry in found.evidence)
    if one and names.startswith("gpu."):
        assert "GPU 1" in said


@pytest.mark.parametrize(
    "name", ["state", *MASK.split(), "xid_total", "ecc_uncorrected_total", "temp_c", "power_w", "processes"]
)
def test_no_evidence_tells_of_a_field_that_nobody_reads(name: str) -> None:
    names = gpu(MASK if name in MASK else name)
    for found in findings(without(healthy(), names)).values():
        lanes = {entry.lane for entry in found.evidence}
        assert lanes.isdisjoint(names.split()), found


def test_a_step_that_rules_out_one_cause_names_the_other_that_had_no_data() -> None:
    pair, _ = judge(without(healthy(), "gpu.state"), None, JudgeSettings(step_s=10.0))
    physical = pair.steps[int(Step.PHYSICAL)]
    assert physical.status is Status.RULED_OUT
    said = [entry.text("en") for entry in physical.evidence]
    assert any("not read of GPU 0, 1" in text for text in said[said.index("not known: GPU fault") :])
    ruled_out, unknown = (
        [entry.text("en") for entry in physical.told_as(status)] for status in (Status.RULED_OUT, Status.NO_DATA)
    )
    assert ruled_out + unknown == said and unknown[0] == "not known: GPU fault" and len(ruled_out) > 3


def test_a_host_without_a_gpu_rules_out_no_fault_of_one_because_something_was_deployed_on_it() -> None:
    node = Node("n1", 1, cpu_only=True, events=[event("n1", "deploy", 200, "a -> b")])
    found = findings([*scene([node], LAST_S)])
    assert found[Cause.GPU_FAULT].status is Status.NO_DATA


def test_a_hot_card_is_not_called_harmless_where_neither_its_clock_nor_the_output_can_be_compared() -> None:
    node = Node("n1", 1, at=0, fault=bend(temp=86.5, mask=0x20), engine=False)
    samples = [*scene([node], 60)]
    assert findings(without(samples, "gpu.sm_clock_mhz"))[Cause.THERMAL].status is Status.NO_DATA


@pytest.mark.parametrize(
    ("fault", "cut", "cause"),
    [
        (bend(kv=99.0), "engine.requests_waiting engine.preemptions_total", Cause.MEMORY_KV),
        (
            bend(psi_cpu=70.0),
            "engine.tokens_per_s engine.generation_tokens_total engine.requests_running",
            Cause.HOST_CPU,
        ),
        (
            bend(processes=2),
            "engine.tokens_per_s engine.generation_tokens_total engine.requests_running",
            Cause.CONTENTION,
        ),
    ],
)
def test_a_sign_whose_harm_nobody_can_see_is_not_ruled_out(fault: Fault, cut: str, cause: Cause) -> None:
    samples = scene([Node("n1", 1, at=150, fault=fault)], LAST_S)
    assert findings(samples)[cause].status is Status.RULED_OUT
    assert findings(without(samples, cut))[cause].status is Status.NO_DATA


def test_nobody_says_that_none_waits_where_the_queue_is_not_read() -> None:
    found = findings(without(healthy(), "engine.requests_waiting"))
    assert "wait" not in " ".join(entry.text("en") for entry in found[Cause.DEMAND].evidence)
    assert "not read" in " ".join(entry.text("en") for entry in found[Cause.SCHEDULING].evidence)
