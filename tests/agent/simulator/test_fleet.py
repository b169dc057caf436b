"""The fleet as a source of samples: valid, labelled, repeatable, conserving, and well loaded when healthy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

from agent.simulator.fleet import Fleet
from agent.simulator.settings import SimulatorError, SimulatorSettings
from telemetry.catalogue import MEASUREMENTS, SIMULATED, Kind, check
from telemetry.sample import Sample

SMALL = SimulatorSettings(nodes=2, gpus_per_node=4, history_s=0)


def run(settings: SimulatorSettings, seconds: float, step: float = 1.0) -> list[Sample]:
    fleet = Fleet(settings)
    found: list[Sample] = []
    for _ in range(round(seconds / step)):
        found += fleet.step(step)
    return found


def mean(samples: Iterable[Sample], measurement: str, field: str) -> float:
    values = [float(s.fields[field]) for s in samples if s.measurement == measurement and field in s.fields]
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def healthy() -> list[Sample]:
    return run(SMALL, 600)


def test_every_sample_is_in_the_catalogue(healthy: list[Sample]) -> None:
    for sample in healthy:
        check(sample)
    assert {s.measurement for s in healthy} == {
        "gpu", "engine", "rank", "host", "psu", "power", "thermal", "circuit", "agent",
    }  # fmt: skip


def test_everything_is_labelled_simulated(healthy: list[Sample]) -> None:
    for sample in healthy:
        assert sample.tags["origin"] == SIMULATED
        assert sample.tags["cluster"] == SIMULATED
        assert sample.tags["node"].startswith("sim-")
        for tag in ("rack", "circuit", "engine", "model"):
            assert sample.tags.get(tag, "sim-").startswith("sim-"), tag
        assert sample.tags.get("kind", SIMULATED) == SIMULATED


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    once = run(SMALL, 30)
    assert run(SMALL, 30) == once
    other = run(SimulatorSettings(nodes=2, gpus_per_node=4, history_s=0, seed=2), 30)
    assert other != once


def test_all_samples_of_a_step_carry_one_time() -> None:
    fleet = Fleet(SMALL, start_ns=1_000_000_000)
    assert {s.time_ns for s in fleet.step(1.0)} == {2_000_000_000}
    assert {s.time_ns for s in fleet.step(5.0)} == {7_000_000_000}


def test_counters_never_fall(healthy: list[Sample]) -> None:
    last: dict[tuple[object, ...], float] = defaultdict(float)
    seen = 0
    for sample in healthy:
        for name, value in sample.fields.items():
            if MEASUREMENTS[sample.measurement].fields[name].kind is Kind.COUNTER:
                key = (sample.measurement, *sorted(sample.tags.items()), name)
                assert float(value) >= last[key], key
                last[key] = float(value)
                seen += float(value) > 0
    assert seen > 1000


def grown(samples: list[Sample], measurement: str, tag: str, counter: str, rate: str) -> dict[str, tuple[float, float]]:
    """series -> (growth of `counter`, integral of `rate`) from its first sample on; steps of 1 s."""
    first: dict[str, float] = {}
    found: dict[str, tuple[float, float]] = {}
    for sample in samples:
        if sample.measurement == measurement:
            name = sample.tags[tag]
            start = first.setdefault(name, float(sample.fields[counter]) - float(sample.fields[rate]))
            integral = found.get(name, (0.0, 0.0))[1] + float(sample.fields[rate])
            found[name] = (float(sample.fields[counter]) - start, integral)
    return found


def test_energy_is_the_integral_of_the_reported_power(healthy: list[Sample]) -> None:
    found = grown(healthy, "gpu", "uuid", "energy_j", "power_w")
    assert len(found) == 8
    for growth, integral in found.values():
        assert growth == pytest.approx(integral, rel=1e-5)


@pytest.mark.parametrize(
    ("counter", "rate"), [("generation_tokens_total", "tokens_per_s"), ("prompt_tokens_total", "prompt_tokens_per_s")]
)
def test_token_rates_are_those_of_their_counters(healthy: list[Sample], counter: str, rate: str) -> None:
    found = grown(healthy, "engine", "engine", counter, rate)
    assert len(found) == 4
    for growth, integral in found.values():
        assert growth == pytest.approx(integral, rel=1e-4)


def test_generated_tokens_are_those_of_the_requests_that_ended_and_run(healthy: list[Sample]) -> None:
    fleet = Fleet(SMALL)
    for _ in range(300):
        fleet.step(1.0)
    for node in fleet.nodes:
        for engine in node.engines:
            batch = engine.batch
            held = sum(entry[2].base + batch.step - entry[2].prompt for entry in batch.running)
            finished = batch.generated - held  # by those that ended
            assert finished / batch.finished == pytest.approx(211, rel=0.15)  # the trace's mean answer


def test_nothing_exceeds_its_bounds(healthy: list[Sample]) -> None:
    for sample in healthy:
        for name, value in sample.fields.items():
            if name.endswith("_pct") and name not in ("headroom_pct", "headroom_redundant_pct", "load_pct"):
                assert 0 <= float(value) <= 100, (sample.measurement, name, value)
        if sample.measurement == "gpu":
            fields = sample.fields
            assert float(fields["power_w"]) <= float(fields["power_limit_w"]) * 1.01
            assert float(fields["sm_clock_mhz"]) <= float(fields["sm_clock_max_mhz"])
            assert float(fields["mem_used_bytes"]) < float(fields["mem_total_bytes"])
        if sample.measurement == "engine":
            assert float(sample.fields["kv_blocks_free"]) <= float(sample.fields["kv_blocks_count"])


def test_a_healthy_node_is_well_used_without_a_queue(healthy: list[Sample]) -> None:
    settled = [s for s in healthy if s.time_ns > healthy[0].time_ns + 120e9]
    assert 97 < mean(settled, "gpu", "util_pct") <= 100
    assert mean(settled, "engine", "requests_waiting") < 5
    assert 45 < mean(settled, "engine", "kv_used_pct") < 75
    assert 55 < mean(settled, "gpu", "temp_c") < 75
    assert mean(settled, "engine", "ttft_p95_s") < 2
    assert max(float(s.fields["preemptions_total"]) for s in settled if s.measurement == "engine") < 6
    assert 0 < mean(settled, "engine", "mfu_pct") < 60
    assert 20 < mean(settled, "engine", "mbu_pct") < 100
    thermal = {0x20, 0x40, 0x80, 0x08}
    assert not any(
        int(s.fields["throttle_reasons"]) & bit for s in settled if s.measurement == "gpu" for bit in thermal
    )


def test_power_adds_up_from_board_to_circuit() -> None:
    samples = Fleet(SMALL).step(5.0)
    gpus = sum(float(s.fields["power_w"]) for s in samples if s.measurement == "gpu")
    outputs = sum(float(s.fields["output_w"]) for s in samples if s.measurement == "psu")
    inputs = sum(float(s.fields["input_w"]) for s in samples if s.measurement == "psu")
    nodes = sum(float(s.fields["node_w"]) for s in samples if s.measurement == "power")
    circuit = next(s for s in samples if s.measurement == "circuit")
    amps, volts = float(circuit.fields["current_a"]), float(circuit.fields["voltage_v"])
    assert gpus < outputs < inputs
    assert inputs == pytest.approx(nodes, rel=0.02)
    assert amps * volts * 3**0.5 * 0.98 == pytest.approx(nodes, rel=0.001)


def test_a_longer_step_gives_the_same_fleet_with_fewer_samples() -> None:
    fine, coarse = run(SMALL, 300, 1.0), run(SMALL, 300, 5.0)
    assert len(coarse) < len(fine) / 2.5
    last = {(s.measurement, *sorted(s.tags.items())): s.fields for s in fine if s.measurement == "engine"}
    for sample in coarse[-20:]:
        if sample.measurement == "engine":
            key = ("engine", *sorted(sample.tags.items()))
            assert sample.fields["generation_tokens_total"] == last[key]["generation_tokens_total"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"fault": "gremlins"}, "gremlins.*hot-inlet"),
        ({"fault": "hot-inlet", "fault_node": "sim-n09"}, "sim-n09.*sim-n01"),
        ({"gpus_per_node": 4, "fault_gpu": 4}, "fault_gpu must be 0 to 3, not 4"),
        ({"sku": "voodoo"}, "voodoo.*h100-sxm"),
        ({"nodes": 0}, "nodes"),
        ({"gpus_per_node": 6, "group": 4}, "multiple of group"),
        ({"load": 0.0}, "load"),
        ({"history_s": -1.0}, "history_s"),
        ({"history_s": float("nan")}, "history_s"),
        ({"interval_s": 0.0}, "interval_s"),
    ],
)
def test_settings_that_make_no_sense_get_one_clear_line(change: dict[str, object], names: str) -> None:
    with pytest.raises(SimulatorError, match=names) as caught:
        SimulatorSettings(**change)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
