"""Every fault changes what its cause changes, on its node only; its null twin costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import pytest

from agent.simulator.faults import FAULTS
from agent.simulator.fleet import Fleet, Truth
from agent.simulator.settings import SimulatorSettings
from telemetry.catalogue import EVENT_KINDS, SIMULATED, check, problems
from telemetry.messages import LANGUAGES, say
from telemetry.sample import Sample

BEFORE_S, AFTER_S, JUDGED_S, STRIDE = 61, 150, 60, 2
STRUCK, OTHER = "sim-n02", "sim-n01"
E0, E1 = f"{STRUCK}-e0", f"{STRUCK}-e1"


@dataclass(frozen=True)
class Played:
    """One scenario, as far as it is looked at: what goes before the fault as a digest, the end as samples."""

    early: str
    late: list[Sample]
    events: list[Sample]
    wrong: list[str]  # problems of every STRIDE-th second's samples
    truth: list[Truth]


def played(name: str | None, null_twin: bool = False, after_s: int = 0) -> Played:
    """Two nodes in two racks, the fault on the second one after BEFORE_S; each scenario is played once, however it is asked for."""
    return _played(name, null_twin, after_s or (long_enough(name) if name else AFTER_S))


@cache
def _played(name: str | None, null_twin: bool, after_s: int) -> Played:
    settings = SimulatorSettings(
        nodes=2, gpus_per_node=4, nodes_per_rack=1, seed=5,
        history_s=BEFORE_S - 1, fault_after_s=1, fault=name, null_twin=null_twin,
    )  # fmt: skip
    fleet = Fleet(settings, start_ns=0)
    early = sha256()
    late: list[Sample] = []
    events: list[Sample] = []
    wrong: list[str] = []
    for second in range(BEFORE_S + after_s):
        samples = fleet.step(1.0)
        events += [s for s in samples if s.measurement == "event"]
        if second < BEFORE_S and second % 8 == 7:
            early.update(repr(samples).encode())
        elif second >= BEFORE_S and second % STRIDE:
            wrong += [problem for s in samples for problem in problems(s)]
            wrong += [f"{s.measurement}: origin" for s in samples if s.tags.get("origin") != SIMULATED]
            if second >= BEFORE_S + after_s - JUDGED_S:
                late += samples
    return Played(early.hexdigest(), late, events, wrong, fleet.truth)


def long_enough(name: str) -> int:
    return AFTER_S + round(FAULTS[name].onset_s * 0.75)


class Look:
    """The end of one node's scenario: with a fault, or as it would have been without one."""

    def __init__(self, name: str, *, well: bool = False, null_twin: bool = False, node: str = STRUCK) -> None:
        late = played(None if well else name, null_twin, long_enough(name)).late
        self.samples = [s for s in late if s.tags["node"] == node]

    def values(self, measurement: str, field: str, **tags: str) -> list[float]:
        return [
            float(s.fields[field])
            for s in self.samples
            if s.measurement == measurement and field in s.fields and tags.items() <= s.tags.items()
        ]

    def mean(self, measurement: str, field: str, **tags: str) -> float:
        values = self.values(measurement, field, **tags)
        return sum(values) / len(values)

    def rate(self, measurement: str, counter: str, **tags: str) -> float:
        values = self.values(measurement, counter, **tags)
        return (values[-1] - values[0]) / (len(values) - 1) / STRIDE

    def share_of_bit(self, bit: int, **tags: str) -> float:
        masks = [int(value) for value in self.values("gpu", "throttle_reasons", **tags)]
        return sum(bool(mask & bit) for mask in masks) / len(masks)

    @property
    def clean(self) -> bool:
        """No board is hot, braked or slow."""
        return (
            self.share_of_bit(0x20 | 0x40 | 0x80 | 0x08) == 0
            and self.mean("gpu", "sm_clock_mhz") > 1900
            and self.mean("gpu", "temp_margin_c") > 10
        )


def loss_pct(wrong: Look, well: Look, **tags: str) -> float:
    return 100 * (1 - wrong.mean("engine", "tokens_per_s", **tags) / well.mean("engine", "tokens_per_s", **tags))


def slowed(wrong: Look, well: Look, **tags: str) -> float:
    """Step time over what it would have been; the batch is larger too, since requests stay longer."""
    return wrong.mean("engine", "step_mean_s", **tags) / well.mean("engine", "step_mean_s", **tags)


def node_is_hot(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x20) > 0.9
    assert wrong.mean("gpu", "temp_margin_c") < 3
    assert wrong.mean("gpu", "power_w") < 0.8 * wrong.mean("gpu", "power_limit_w")
    assert slowed(wrong, well) > 1.3


def hot_inlet(wrong: Look, well: Look) -> None:
    node_is_hot(wrong, well)
    assert wrong.mean("thermal", "inlet_c") > well.mean("thermal", "inlet_c") + 12
    assert loss_pct(wrong, well) > 12


def fan_failure(wrong: Look, well: Look) -> None:
    node_is_hot(wrong, well)
    assert wrong.mean("thermal", "fan_min_rpm") == 0
    assert wrong.mean("thermal", "inlet_c") < well.mean("thermal", "inlet_c") + 5


def dust(wrong: Look, well: Look) -> None:
    node_is_hot(wrong, well)
    assert wrong.mean("thermal", "fan_pct") > 95
    assert wrong.mean("thermal", "exhaust_c") > well.mean("thermal", "exhaust_c") + 5


def hbm_thermal(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x20, gpu="1") > 0.9
    assert wrong.mean("gpu", "mem_temp_c", gpu="1") > wrong.mean("gpu", "mem_temp_limit_c", gpu="1") - 3
    assert wrong.mean("gpu", "temp_margin_c", gpu="1") > 10
    assert slowed(wrong, well, engine=E0) > 1.15


def bad_contact(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x20, gpu="1") > 0.9
    assert wrong.share_of_bit(0x20, gpu="0") == 0
    assert slowed(wrong, well, engine=E0) > 1.2
    assert slowed(wrong, well, engine=E1) == pytest.approx(1, abs=0.1)


def blocked_cards(wrong: Look, well: Look) -> None:
    for gpu in "012":
        assert wrong.share_of_bit(0x20, gpu=gpu) > 0.9
    assert wrong.share_of_bit(0x20, gpu="3") == 0
    assert slowed(wrong, well, engine=E1) > 1.2  # its other card is cool, and waits
    assert wrong.mean("gpu", "power_w", gpu="3") < 0.95 * well.mean("gpu", "power_w", gpu="3")


def power_brake(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x80) == 1.0
    assert wrong.mean("gpu", "sm_clock_mhz") == pytest.approx(990)
    assert wrong.mean("gpu", "temp_c") < well.mean("gpu", "temp_c") - 8
    assert wrong.mean("power", "redundancy") == 0
    assert min(wrong.values("psu", "ok")) == 0
    assert loss_pct(wrong, well) > 25


def power_cap(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x04) > 0.99
    assert wrong.mean("gpu", "power_limit_requested_w") == 700
    limit = wrong.mean("gpu", "power_limit_w")
    assert limit <= 350
    assert limit - 15 < wrong.mean("gpu", "power_w") <= limit + 1
    assert wrong.mean("gpu", "sm_clock_mhz") < 0.8 * well.mean("gpu", "sm_clock_mhz")
    assert loss_pct(wrong, well) > 15


def gpu_lost(wrong: Look, well: Look) -> None:
    assert set(wrong.values("gpu", "state", gpu="1")) == {1.0}
    assert wrong.values("gpu", "temp_c", gpu="1") == []
    assert set(wrong.values("engine", "up", engine=E0)) == {0}
    assert wrong.mean("gpu", "processes", gpu="0") == 0
    codes = {s.fields["code"] for s in played("gpu-lost").events}
    assert codes == {79}
    assert loss_pct(wrong, well, engine=E1) == pytest.approx(0, abs=1)


def clock_stuck(wrong: Look, well: Look) -> None:
    assert wrong.mean("gpu", "sm_clock_mhz", gpu="1") == 900
    assert wrong.share_of_bit(0xFF, gpu="1") == 0
    assert wrong.mean("gpu", "temp_margin_c", gpu="1") > 25
    assert wrong.mean("gpu", "power_w", gpu="0") < 0.85 * well.mean("gpu", "power_w", gpu="0")  # it waits
    assert wrong.mean("gpu", "util_pct", gpu="0") > 95
    assert loss_pct(wrong, well, engine=E0) > 20


def pcie_width(wrong: Look, well: Look) -> None:
    assert wrong.mean("gpu", "pcie_width", gpu="1") < wrong.mean("gpu", "pcie_width_max", gpu="1")
    assert wrong.rate("gpu", "pcie_replays_total", gpu="1") == pytest.approx(3, rel=0.05)
    assert slowed(wrong, well, engine=E0) > 1.25
    assert wrong.clean


def kv_full(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "kv_used_pct") > 95
    assert wrong.rate("engine", "preemptions_total", engine=E0) > 0.1
    assert wrong.mean("engine", "requests_running") < 0.6 * well.mean("engine", "requests_running")
    assert wrong.clean
    assert wrong.mean("gpu", "power_w") < well.mean("gpu", "power_w") - 30
    assert loss_pct(wrong, well) > 20


def kv_fragmentation(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "kv_fragmentation_pct") > 50
    assert well.mean("engine", "kv_fragmentation_pct") < 5
    assert wrong.mean("engine", "requests_running") < 0.75 * well.mean("engine", "requests_running")
    assert wrong.clean
    assert loss_pct(wrong, well) > 10


def oom_loop(wrong: Look, well: Look) -> None:
    assert 0.5 < wrong.mean("engine", "up", engine=E0) < 0.9
    assert max(wrong.values("engine", "uptime_s", engine=E0)) < 60
    kinds = [s.tags["kind"] for s in played("oom-loop").events]
    assert kinds.count("oom") >= 4
    assert kinds.count("restart") >= 4


def long_prompts(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "prompt_len_mean") > 3 * well.mean("engine", "prompt_len_mean")
    assert wrong.mean("engine", "prompt_tokens_per_s") > 1.2 * well.mean("engine", "prompt_tokens_per_s")
    assert wrong.clean
    assert loss_pct(wrong, well) > 40


def long_answers(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "output_len_mean") > 2 * well.mean("engine", "output_len_mean")
    assert wrong.mean("engine", "requests_waiting") > 100
    assert wrong.clean


def prefix_lost(wrong: Look, well: Look) -> None:
    assert wrong.rate("engine", "prefix_hits_total", engine=E0) == 0
    assert well.rate("engine", "prefix_hits_total", engine=E0) > 1000
    assert wrong.mean("engine", "prompt_len_mean") < 1.3 * well.mean("engine", "prompt_len_mean")
    assert loss_pct(wrong, well) > 10


def demand_fall(wrong: Look, well: Look) -> None:
    assert loss_pct(wrong, well) > 50
    assert wrong.mean("engine", "requests_waiting") < 1
    assert wrong.mean("engine", "ttft_p95_s") < 1.2 * well.mean("engine", "ttft_p95_s")
    assert slowed(wrong, well) < 1
    assert wrong.clean


def hung_engine(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "tokens_per_s", engine=E0) == 0
    assert wrong.mean("engine", "requests_running", engine=E0) > 10
    assert min(wrong.values("engine", "up")) == 1
    assert wrong.mean("gpu", "power_w", gpu="0") < 0.35 * well.mean("gpu", "power_w", gpu="0")
    assert wrong.mean("gpu", "util_pct", gpu="0") > 97
    assert loss_pct(wrong, well, engine=E1) == pytest.approx(0, abs=1)


def uneven_routing(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "requests_waiting", engine=E0) > 100
    assert wrong.mean("engine", "requests_waiting", engine=E1) == 0
    assert wrong.mean("engine", "requests_running", engine=E1) < 20
    assert loss_pct(wrong, well) > 15


def host_bound(wrong: Look, well: Look) -> None:
    assert wrong.mean("gpu", "sm_active_pct") < 0.75 * well.mean("gpu", "sm_active_pct")
    assert wrong.mean("gpu", "power_w") < 0.75 * well.mean("gpu", "power_w")
    assert wrong.clean
    assert loss_pct(wrong, well) > 20


def host_cpu(wrong: Look, well: Look) -> None:
    host_bound(wrong, well)
    assert wrong.mean("host", "cpu_core_max_pct") == 100
    assert wrong.mean("host", "cpu_pct") < 40


def cpu_quota(wrong: Look, well: Look) -> None:
    host_bound(wrong, well)
    assert wrong.mean("host", "cgroup_throttled_pct") > 30


def slow_disk(wrong: Look, well: Look) -> None:
    host_bound(wrong, well)
    assert wrong.mean("host", "psi_io_pct") > 40
    assert wrong.mean("host", "disk_busy_pct") > 85


def noisy_neighbour(wrong: Look, well: Look) -> None:
    assert wrong.mean("gpu", "processes") == 2
    assert slowed(wrong, well) > 1.4
    assert wrong.mean("gpu", "power_w") > 0.9 * well.mean("gpu", "power_w")
    assert wrong.clean
    assert loss_pct(wrong, well) > 15


def bad_deploy(wrong: Look, well: Look) -> None:
    assert slowed(wrong, well) > 1.4
    assert wrong.mean("gpu", "power_w") < well.mean("gpu", "power_w") - 80
    assert wrong.clean
    kinds = {(s.tags["kind"], s.tags["subject"]) for s in played("bad-deploy").events}
    assert kinds == {(kind, engine) for kind in ("deploy", "restart") for engine in (E0, E1)}
    assert {s.fields.get("version") for s in wrong.samples if s.measurement == "engine"} == {"1.9.0"}
    assert loss_pct(wrong, well) > 12


def bad_config(wrong: Look, well: Look) -> None:
    assert max(wrong.values("engine", "requests_running")) <= 24
    told = {(s.fields["version"], s.fields["config_hash"]) for s in wrong.samples if s.measurement == "engine"}
    assert told == {("1.8.2", "sim-b")}
    assert wrong.mean("engine", "kv_used_pct") < 40
    assert wrong.clean
    assert loss_pct(wrong, well) > 20


def cold_start(wrong: Look, well: Look) -> None:
    assert slowed(wrong, well) > 1.4
    assert max(wrong.values("engine", "uptime_s")) < AFTER_S
    assert {s.tags["kind"] for s in played("cold-start").events} == {"restart"}
    assert wrong.clean


def stats_off(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "up") == 1
    assert wrong.values("engine", "tokens_per_s") == []
    assert wrong.values("gpu", "util_pct") == well.values("gpu", "util_pct")


def sink_off(wrong: Look, well: Look) -> None:
    assert wrong.share_of_bit(0x40, gpu="1") > 0.5
    assert wrong.share_of_bit(0x60, gpu="0") == 0
    assert wrong.mean("gpu", "sm_clock_mhz", gpu="1") < 0.6 * well.mean("gpu", "sm_clock_mhz", gpu="1")
    assert slowed(wrong, well, engine=E0) > 1.3


def card_cap(wrong: Look, well: Look) -> None:
    assert set(wrong.values("gpu", "power_limit_w", gpu="1")) == {350.0}
    assert set(wrong.values("gpu", "power_limit_requested_w", gpu="1")) == {350.0}
    assert set(wrong.values("gpu", "power_limit_default_w", gpu="1")) == {700.0}
    assert wrong.share_of_bit(0x04, gpu="1") > 0.99
    assert wrong.mean("gpu", "sm_clock_mhz", gpu="0") > 1900
    assert slowed(wrong, well, engine=E0) > 1.2


def pcie_generation(wrong: Look, well: Look) -> None:
    assert set(wrong.values("gpu", "pcie_gen", gpu="1")) == {1.0}
    assert wrong.mean("gpu", "pcie_width", gpu="1") == wrong.mean("gpu", "pcie_width_max", gpu="1")
    assert slowed(wrong, well, engine=E0) > 1.25
    assert wrong.clean


def slow_rank(wrong: Look, well: Look) -> None:
    compute, wait = (
        {rank: wrong.mean("rank", f"step_{name}_mean_s", engine=E0, rank=rank) for rank in "01"}
        for name in ("compute", "wait")
    )
    assert compute["1"] > 1.3 * compute["0"] and wait["0"] > 10 * wait["1"]
    assert compute["0"] + wait["0"] == pytest.approx(compute["1"] + wait["1"], rel=0.02)
    assert wrong.mean("gpu", "sm_clock_mhz", gpu="1") == wrong.mean("gpu", "sm_clock_mhz", gpu="0")
    assert slowed(wrong, well, engine=E0) > 1.3
    assert wrong.clean


def memory_clock(wrong: Look, well: Look) -> None:
    assert wrong.mean("gpu", "mem_clock_mhz", gpu="1") == pytest.approx(2619 / 2, abs=1)
    assert wrong.mean("gpu", "mem_clock_mhz", gpu="0") == 2619
    assert slowed(wrong, well, engine=E0) > 1.3
    assert wrong.clean


def memory_error(wrong: Look, well: Look) -> None:
    assert wrong.values("gpu", "ecc_uncorrected_total", gpu="1")[-1] == 1
    assert wrong.values("gpu", "remap_pending", gpu="1")[-1] == 1
    assert {s.fields["code"] for s in played("memory-error").events if s.tags["kind"] == "xid"} == {94}
    assert loss_pct(wrong, well, engine=E1) == pytest.approx(0, abs=1)


def driver_hang(wrong: Look, well: Look) -> None:
    assert set(wrong.values("gpu", "state", gpu="1")) == {4.0}
    assert wrong.values("gpu", "power_w", gpu="1") == []
    assert wrong.mean("engine", "tokens_per_s", engine=E0) == 0
    assert {s.fields["code"] for s in played("driver-hang").events} == {119}


def swap_storm(wrong: Look, well: Look) -> None:
    host_bound(wrong, well)
    assert wrong.mean("host", "swap_in_bytes_s") > 10e6
    assert wrong.mean("host", "mem_used_pct") > 95


def engine_gone(wrong: Look, well: Look) -> None:
    assert set(wrong.values("engine", "up", engine=E0)) == {0}
    assert wrong.mean("gpu", "mem_used_bytes", gpu="0") < 2**30
    assert played("engine-gone").events == []
    assert loss_pct(wrong, well, engine=E1) == pytest.approx(0, abs=1)


def demand_rise(wrong: Look, well: Look) -> None:
    assert wrong.mean("engine", "requests_waiting") > 10
    assert wrong.mean("engine", "tokens_per_s") > well.mean("engine", "tokens_per_s")
    assert wrong.clean


def cpu_crowded(wrong: Look, well: Look) -> None:
    host_bound(wrong, well)
    assert wrong.mean("host", "cpu_pct") > 85
    assert wrong.mean("host", "psi_cpu_pct") > 25


def group_apart(wrong: Look, well: Look) -> None:
    assert set(wrong.values("engine", "up", engine=E0)) == {0}
    assert set(wrong.values("engine", "starting", engine=E0)) == {1}
    assert wrong.mean("gpu", "mem_used_bytes", gpu="0") < 2**30
    assert wrong.mean("gpu", "util_pct", gpu="0") > 97


def node_silent(wrong: Look, well: Look) -> None:
    assert wrong.samples == []
    assert well.samples


def clock_skew(wrong: Look, well: Look) -> None:
    assert wrong.mean("host", "clock_offset_s") > 3
    assert wrong.values("engine", "tokens_per_s") == well.values("engine", "tokens_per_s")


SIGNATURES: dict[str, Callable[[Look, Look], None]] = {
    "hot-inlet": hot_inlet,
    "hot-aisle": hot_inlet,
    "fan-failure": fan_failure,
    "dust": dust,
    "hbm-thermal": hbm_thermal,
    "bad-contact": bad_contact,
    "blocked-cards": blocked_cards,
    "power-brake": power_brake,
    "power-cap": power_cap,
    "rack-power-cap": power_cap,
    "gpu-lost": gpu_lost,
    "clock-stuck": clock_stuck,
    "pcie-width": pcie_width,
    "kv-full": kv_full,
    "kv-fragmentation": kv_fragmentation,
    "oom-loop": oom_loop,
    "long-prompts": long_prompts,
    "long-answers": long_answers,
    "prefix-lost": prefix_lost,
    "demand-fall": demand_fall,
    "hung-engine": hung_engine,
    "uneven-routing": uneven_routing,
    "host-cpu": host_cpu,
    "cpu-quota": cpu_quota,
    "noisy-neighbour": noisy_neighbour,
    "slow-disk": slow_disk,
    "bad-deploy": bad_deploy,
    "bad-config": bad_config,
    "cold-start": cold_start,
    "stats-off": stats_off,
    "sink-off": sink_off,
    "card-cap": card_cap,
    "pcie-generation": pcie_generation,
    "slow-rank": slow_rank,
    "memory-clock": memory_clock,
    "memory-error": memory_error,
    "driver-hang": driver_hang,
    "swap-storm": swap_storm,
    "engine-gone": engine_gone,
    "demand-rise": demand_rise,
    "cpu-crowded": cpu_crowded,
    "group-apart": group_apart,
    "node-silent": node_silent,
    "clock-skew": clock_skew,
}
STOPPED = {"gpu-lost", "oom-loop", "engine-gone", "node-silent"}  # boards whose engine is gone do rest
LIGHTER = {
    "hung-engine",
    "long-prompts",
    "long-answers",
    "demand-fall",
    "uneven-routing",
    "demand-rise",
}  # twins that get other requests


def test_every_fault_has_a_signature_here() -> None:
    assert set(SIGNATURES) == set(FAULTS)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_fault_shows_its_signature(name: str) -> None:
    SIGNATURES[name](Look(name), Look(name, well=True))


@pytest.mark.parametrize("name", sorted(set(FAULTS) - STOPPED))
def test_gpu_util_stays_high_while_the_node_is_slow(name: str) -> None:
    assert Look(name).mean("gpu", "util_pct") > 95


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_other_node_does_not_notice(name: str) -> None:
    other, well = Look(name, node=OTHER), Look(name, well=True, node=OTHER)
    assert other.values("engine", "tokens_per_s") == well.values("engine", "tokens_per_s")
    assert other.values("gpu", "throttle_reasons") == well.values("gpu", "throttle_reasons")


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_null_twin_costs_nothing(name: str) -> None:
    twin, well = Look(name, null_twin=True), Look(name, well=True)
    assert twin.share_of_bit(0x20 | 0x40 | 0x80 | 0x08) == 0
    assert max(twin.values("engine", "requests_waiting")) < max(well.values("engine", "requests_waiting")) + 60
    if name not in LIGHTER:
        assert abs(loss_pct(twin, well)) < 4
        assert slowed(twin, well) == pytest.approx(1, abs=0.05)


def test_the_null_twin_of_a_hung_engine_has_nothing_to_do() -> None:
    twin = Look("hung-engine", null_twin=True)
    assert twin.mean("engine", "requests_running", engine=E0) == 0
    assert twin.mean("gpu", "util_pct", gpu="0") == 0


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_truth_names_cause_place_and_time(name: str) -> None:
    fault = FAULTS[name]
    (truth,) = played(name).truth
    assert (truth.fault, truth.cause, truth.scope) == (name, fault.cause, fault.scope)
    assert (
        truth.subject
        == {
            "rack": {"rack": "sim-r2"},
            "node": {"node": STRUCK},
            "engine": {"node": STRUCK, "engine": E0},
            "gpu": {"node": STRUCK, "engine": E0, "gpu": "1"},
        }[fault.scope]
    )
    assert truth.since_ns == BEFORE_S * 10**9
    (twin,) = played(name, null_twin=True).truth
    assert (twin.cause, twin.null_twin) == ("none", True)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_nothing_differs_before_the_fault_strikes(name: str) -> None:
    healthy = played(None)
    scenario = played(name)
    assert scenario.early == healthy.early
    assert all(event.time_ns >= BEFORE_S * 10**9 for event in scenario.events)
    assert healthy.events == []


@pytest.mark.parametrize("null_twin", [False, True])
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_samples_under_a_fault_are_valid_and_labelled(name: str, null_twin: bool) -> None:
    scenario = played(name, null_twin)
    assert scenario.wrong == []
    for event in scenario.events:
        check(event)
        assert event.tags["kind"] in EVENT_KINDS
        assert event.tags["origin"] == SIMULATED


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_described_in_both_languages(name: str, language: str) -> None:
    assert len(say(FAULTS[name].description, language)) > 5
