"""Every fault changes what its cause changes, on its node only; its null twin costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from agent.simulator.faults import FAULTS
from agent.simulator.fleet import Fleet, Truth
from agent.simulator.settings import SimulatorSettings
from telemetry.catalogue import EVENT_KINDS, SIMULATED, check
from telemetry.messages import LANGUAGES, say
from telemetry.sample import Sample

BEFORE_S, AFTER_S, JUDGED_S = 180, 300, 120
STRUCK, OTHER = "sim-n02", "sim-n01"


@cache
def played(name: str | None, null_twin: bool = False) -> tuple[list[Sample], list[Truth]]:
    settings = SimulatorSettings(
        nodes=2, gpus_per_node=4, history_s=BEFORE_S - 60, fault_after_s=60, fault=name, null_twin=null_twin, seed=5
    )
    fleet = Fleet(settings, start_ns=0)
    found: list[Sample] = []
    for _ in range(BEFORE_S + AFTER_S):
        found += fleet.step(1.0)
    return found, fleet.truth


class Look:
    """The last two minutes of one node, played with a fault."""

    def __init__(self, name: str | None, null_twin: bool = False, node: str = STRUCK) -> None:
        samples, _ = played(name, null_twin)
        start_ns = (BEFORE_S + AFTER_S - JUDGED_S) * 1e9
        self.samples = [s for s in samples if s.tags["node"] == node and s.time_ns > start_ns]

    def values(self, measurement: str, field: str, **tags: str) -> list[float]:
        return [
            float(s.fields[field])
            for s in self.samples
            if s.measurement == measurement and field in s.fields and tags.items() <= s.tags.items()
        ]

    def mean(self, measurement: str, field: str, **tags: str) -> float:
        values = self.values(measurement, field, **tags)
        return sum(values) / len(values)

    def share_of_bit(self, bit: int) -> float:
        masks = [int(value) for value in self.values("gpu", "throttle_reasons")]
        return sum(bool(mask & bit) for mask in masks) / len(masks)


def loss_pct(wrong: Look, well: Look) -> float:
    return 100 * (1 - wrong.mean("engine", "tokens_per_s") / well.mean("engine", "tokens_per_s"))


def hot_inlet(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x20) > 0.9
    assert wrong.mean("gpu", "temp_margin_c") < 2
    assert wrong.mean("thermal", "inlet_c") > well.mean("thermal", "inlet_c") + 12
    assert wrong.mean("gpu", "power_w") < 0.75 * wrong.mean("gpu", "power_limit_w")
    assert wrong.mean("engine", "step_mean_s") > 1.25 * well.mean("engine", "step_mean_s")


def power_brake(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x80) == 1.0
    assert wrong.mean("gpu", "sm_clock_mhz") == pytest.approx(990)
    assert wrong.mean("gpu", "temp_c") < well.mean("gpu", "temp_c") - 8
    assert wrong.mean("power", "redundancy") == 0
    assert min(wrong.values("psu", "ok")) == 0


def power_cap(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x04) > 0.99
    assert wrong.mean("gpu", "power_limit_w") == 350
    assert wrong.mean("gpu", "power_limit_requested_w") == 700
    assert 335 < wrong.mean("gpu", "power_w") <= 351
    assert wrong.mean("gpu", "sm_clock_mhz") < 0.8 * well.mean("gpu", "sm_clock_mhz")


def kv_full(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "kv_used_pct") > 95
    preempted = wrong.values("engine", "preemptions_total", engine=f"{STRUCK}-e0")
    assert (preempted[-1] - preempted[0]) / JUDGED_S > 0.1
    assert wrong.mean("engine", "requests_running") < 0.6 * well.mean("engine", "requests_running")
    assert clean_hardware(wrong)
    assert wrong.mean("gpu", "power_w") < well.mean("gpu", "power_w") - 30


def long_prompts(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "prompt_len_mean") > 3 * well.mean("engine", "prompt_len_mean")
    assert wrong.mean("engine", "prompt_tokens_per_s") > 1.2 * well.mean("engine", "prompt_tokens_per_s")
    assert clean_hardware(wrong)


def hung_engine(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "tokens_per_s", engine=f"{STRUCK}-e0") == 0
    assert wrong.mean("engine", "requests_running", engine=f"{STRUCK}-e0") > 10
    assert min(wrong.values("engine", "up")) == 1
    assert wrong.mean("gpu", "power_w", gpu="0") < 0.35 * well.mean("gpu", "power_w", gpu="0")
    assert wrong.mean("engine", "tokens_per_s", engine=f"{STRUCK}-e1") == pytest.approx(
        well.mean("engine", "tokens_per_s", engine=f"{STRUCK}-e1"), rel=0.1
    )


def bad_deploy(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "step_mean_s") > 1.4 * well.mean("engine", "step_mean_s")
    assert wrong.mean("gpu", "power_w") < well.mean("gpu", "power_w") - 80
    assert clean_hardware(wrong)
    kinds = {(s.tags["kind"], s.tags["subject"]) for s in played("bad-deploy")[0] if s.measurement == "event"}
    assert kinds == {(kind, f"{STRUCK}-e{i}") for kind in ("deploy", "restart") for i in (0, 1)}


def clean_hardware(look: Look) -> bool:
    return (
        look.share_of_bit(0x20 | 0x40 | 0x80 | 0x08) == 0
        and look.mean("gpu", "sm_clock_mhz") > 1900
        and look.mean("gpu", "temp_margin_c") > 10
    )


SIGNATURES: dict[str, tuple[Callable[[Look, Look], None], float]] = {
    # what must show, and the least loss of output in percent
    "hot-inlet": (hot_inlet, 12),
    "power-brake": (power_brake, 25),
    "power-cap": (power_cap, 12),
    "kv-full": (kv_full, 20),
    "long-prompts": (long_prompts, 40),
    "hung-engine": (hung_engine, 40),
    "bad-deploy": (bad_deploy, 15),
}
BUSY = {"util_pct": 95.0}


def test_every_fault_has_a_signature_here() -> None:
    assert set(SIGNATURES) == set(FAULTS)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_fault_shows_its_signature_and_costs_output(name: str) -> None:
    shows, least = SIGNATURES[name]
    wrong, well = Look(name), Look(None)
    shows(wrong, well)
    assert loss_pct(wrong, well) > least


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_gpu_util_stays_high_while_the_node_is_slow(name: str) -> None:
    assert Look(name).mean("gpu", "util_pct") > BUSY["util_pct"]


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_other_node_does_not_notice(name: str) -> None:
    other, well = Look(name, node=OTHER), Look(None, node=OTHER)
    assert (
        other.values("engine", "tokens_per_s") == well.values("engine", "tokens_per_s")
        or abs(loss_pct(other, well)) < 1
    )


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_null_twin_costs_nothing(name: str) -> None:
    twin, well = Look(name, null_twin=True), Look(None)
    assert twin.share_of_bit(0x20 | 0x40 | 0x80 | 0x08) == 0
    if name == "hung-engine":
        assert twin.mean("engine", "requests_running", engine=f"{STRUCK}-e0") == 0
        return
    assert max(twin.values("engine", "requests_waiting")) < max(
        60.0, 1.5 * max(well.values("engine", "requests_waiting"))
    )
    if name != "long-prompts":
        assert abs(loss_pct(twin, well)) < 4
        assert twin.mean("engine", "step_mean_s") == pytest.approx(well.mean("engine", "step_mean_s"), rel=0.05)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_truth_names_cause_place_and_time(name: str) -> None:
    (truth,) = played(name)[1]
    assert (truth.fault, truth.cause, truth.scope) == (name, FAULTS[name].cause, FAULTS[name].scope)
    assert truth.subject["node"] == STRUCK
    assert truth.since_ns == BEFORE_S * 10**9
    (twin,) = played(name, null_twin=True)[1]
    assert (twin.cause, twin.null_twin) == ("none", True)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_nothing_differs_before_the_fault_strikes(name: str) -> None:
    def early(samples: Sequence[Sample]) -> list[Sample]:
        return [s for s in samples if s.time_ns <= BEFORE_S * 10**9 and s.measurement != "event"]

    assert early(played(name)[0]) == early(played(None)[0])


@pytest.mark.parametrize("null_twin", [False, True])
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_samples_under_a_fault_are_valid_and_labelled(name: str, null_twin: bool) -> None:
    for sample in played(name, null_twin)[0]:
        check(sample)
        assert sample.tags["origin"] == SIMULATED
        if sample.measurement == "event":
            assert sample.tags["kind"] in EVENT_KINDS


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_described_in_both_languages(name: str, language: str) -> None:
    assert len(say(FAULTS[name].description, language)) > 5
