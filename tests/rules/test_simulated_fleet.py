"""The simulated fleet's faults are named on the right node in time, its null twins are not, and each incident is told once."""

from __future__ import annotations

import pytest

from agent.simulator.faults import FAULTS
from agent.simulator.recording import START_NS, scenario
from agent.simulator.settings import SimulatorSettings
from rules.alerts import FIRING, AlertMachine, Transition
from rules.triage import Triage
from rules.verdict import Diagnosis

SECOND = 10**9
HISTORY_S, AFTER_S = 300.0, 60.0
NAMED = {
    # the fault, and within how many seconds of its strike it must be named; two of them grow over half a minute and more
    "hot-inlet": 90,
    "power-brake": 30,
    "power-cap": 30,
    "kv-full": 75,
    "long-prompts": 60,
    "hung-engine": 40,
    "slow-rank": 30,
    "bad-deploy": 75,
}


def run(
    fault: str | None, *, twin: bool = False, seed: int = 4
) -> tuple[list[tuple[float, Diagnosis]], list[Transition]]:
    """(seconds since the strike, diagnosis) of every judgement, and what would have been told."""
    settings = SimulatorSettings(
        nodes=3,
        gpus_per_node=2,
        fault=fault,
        fault_after_s=AFTER_S,
        null_twin=twin,
        seed=seed,
        history_s=HISTORY_S,
        interval_s=2.0,
    )
    triage, machine = Triage(), AlertMachine()
    judged: list[tuple[float, Diagnosis]] = []
    told: list[Transition] = []
    next_ns = START_NS
    for samples in scenario(settings, 220):
        triage.add(samples)
        now_ns = samples[-1].time_ns
        if now_ns >= next_ns:
            next_ns = now_ns + 6 * SECOND
            diagnoses = triage.evaluate(now_ns)
            told += machine.step(diagnoses, now_ns, 6.0)
            strike_s = (now_ns - START_NS) / SECOND - HISTORY_S - AFTER_S
            judged += [(strike_s, diagnosis) for diagnosis in diagnoses]
    return judged, told


@pytest.mark.parametrize("fault", NAMED)
def test_a_simulated_fault_is_named_on_its_node_in_time_and_told_once(fault: str) -> None:
    judged, told = run(fault)
    named = [(t, d.subject["node"], d.verdicts[0].cause) for t, d in judged if d.verdicts]
    assert {(node, str(cause)) for _, node, cause in named} == {("sim-n02", FAULTS[fault].cause)}
    assert 0 <= named[0][0] <= NAMED[fault]
    assert [(t.state, t.alert.place["node"]) for t in told] == [(FIRING, "sim-n02")]
    assert all(d.simulated for _, d in judged)


@pytest.mark.parametrize("fault", [*NAMED, None])
def test_its_null_twin_and_a_healthy_fleet_are_no_incident(fault: str | None) -> None:
    judged, told = run(fault, twin=fault is not None)
    assert [(t, d.subject["node"], d.headline.text()) for t, d in judged if d.verdicts] == []
    assert told == []
