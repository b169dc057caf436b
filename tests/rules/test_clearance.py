"""What ends an alert and what doesn't: a field that is missing and an engine that nobody asks show nothing to be well."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from rules.alerts import FIRING, RESOLVED, AlertMachine, AlertSettings
from rules.clearance import OF_LOAD
from rules.notification import Voice, messages_of
from rules.triage import JudgeSettings, walk
from rules.verdict import Cause
from telemetry.sample import Sample
from tests.rules import plant
from tests.rules.plant import SECOND, Fault, Moment, Node, bend, event, scene

AT, MENDED, BACK, END = 140, 260, 560, 760
SOON = AlertSettings(idle_clear_s=200.0)


def told(
    samples: Iterable[Sample], settings: AlertSettings | None = None
) -> tuple[list[tuple[int, str, str]], AlertMachine]:
    """(second, state, cause) of every transition."""
    machine, found = AlertMachine(settings), []
    for _, diagnoses in walk(samples, None, JudgeSettings(step_s=10.0)):
        at_ns = diagnoses[0].at_ns
        found += [((at_ns - plant.T0) // SECOND, t.state, t.alert.cause) for t in machine.step(diagnoses, at_ns, 10.0)]
    return found, machine


def faulty(**changes: float) -> Fault:
    """The fault until it is mended."""

    def fault(moment: Moment) -> None:
        if moment.t < MENDED:
            for name, to in changes.items():
                setattr(moment, name, to)

    return fault


FAULTS = {
    "lost": (Cause.GPU_FAULT, faulty(gpu_state=1)),
    "brake": (Cause.POWER, faulty(mask=0x88, clock=870.0, power=330.0, work=1.5)),
    "cap": (Cause.POWER, faulty(mask=0x4, clock=1150.0, power=398.0, limit=400.0, work=1.4)),
    "heat": (Cause.THERMAL, faulty(mask=0x20, clock=1300.0, temp=86.5, power=430.0, work=1.35)),
    "stuck": (Cause.GPU_FAULT, faulty(clock=480.0, power=210.0, work=2.0)),
}


def resting(moment: Moment) -> None:
    """Nobody asks: the card rests, and every reading of it is fine."""
    moment.util, moment.clock, moment.power, moment.temp, moment.mask = 0.0, 345.0, 71.0, 41.0, 0x1


def with_rest(fault: Fault, until: int = BACK) -> tuple[Fault, Node]:
    def both(moment: Moment) -> None:
        fault(moment)
        if MENDED <= moment.t < until:
            resting(moment)

    node = Node("n1", 1, lambda t: 0.0 if MENDED <= t < until else 40.0, both, AT)
    return both, node


@pytest.mark.parametrize("name", FAULTS)
def test_a_mended_fault_under_load_ends_its_alert(name: str) -> None:
    cause, fault = FAULTS[name]
    found, _ = told(scene([Node("n1", 1, at=AT, fault=fault)], BACK))
    assert [(state, what) for _, state, what in found] == [(FIRING, cause), (RESOLVED, cause)]


@pytest.mark.parametrize("missing", ["ecc_uncorrected_total", "xid_total"])
def test_a_mended_fault_ends_on_a_card_of_which_another_fault_is_never_ruled_out(missing: str) -> None:
    samples = scene([Node("n1", 1, at=AT, fault=FAULTS["stuck"][1])], BACK)
    never = [replace(s, fields={name: kept for name, kept in s.fields.items() if name != missing}) for s in samples]
    found, _ = told(never)
    assert [(state, what) for _, state, what in found] == [(FIRING, Cause.GPU_FAULT), (RESOLVED, Cause.GPU_FAULT)]


@pytest.mark.parametrize("name", ["brake", "heat", "stuck"])
def test_a_card_that_rests_is_not_shown_to_be_well_and_one_that_works_again_is(name: str) -> None:
    cause, fault = FAULTS[name]
    found, _ = told(scene([with_rest(fault)[1]], END), SOON)
    assert [(state, what) for _, state, what in found] == [(FIRING, cause), (RESOLVED, cause)]
    assert found[1][0] > BACK


@pytest.mark.parametrize("name", ["lost", "cap"])
def test_what_a_card_says_of_itself_is_enough_while_it_rests(name: str) -> None:
    cause, fault = FAULTS[name]
    found, _ = told(scene([with_rest(fault)[1]], BACK))
    assert [(state, what) for _, state, what in found] == [(FIRING, cause), (RESOLVED, cause)]


def test_a_cap_that_stays_while_the_card_rests_has_not_ended() -> None:
    cause, fault = FAULTS["cap"]
    node = with_rest(fault, END)[1]
    rests = node.fault
    assert rests is not None

    def capped(moment: Moment) -> None:
        rests(moment)
        moment.limit = 400.0

    node.fault = capped
    found, _ = told(scene([node], END), SOON)
    assert [(state, what) for _, state, what in found] == [(FIRING, cause)]


@pytest.mark.parametrize("name", ["lost", "brake", "heat", "cap"])
def test_an_alert_outlives_each_single_field_that_it_rests_on(name: str) -> None:
    cause, fault = FAULTS[name]
    samples = scene([Node("n1", 1, at=AT, fault=fault)], BACK)
    _, machine = told([s for s in samples if s.time_ns < plant.T0 + MENDED * SECOND])
    (alert,) = [alert for alert in machine.open() if alert.cause == cause]
    lanes = {lane for basis in alert.rests_on.values() for lane in basis[0]}
    assert lanes & {"gpu.state", "gpu.throttle_reasons", "gpu.power_limit_w"}
    for lane in sorted(lane for lane in lanes if lane.startswith("gpu.") and lane != "gpu.power_limit_w"):
        found, _ = told(_without(samples, lane))
        assert [state for _, state, what in found if what == cause] == [FIRING], lane


def _without(samples: Iterable[Sample], lane: str) -> Iterable[Sample]:
    measurement, _, name = lane.partition(".")
    prefix = "throttle_" if name.startswith("throttle_") else name
    for sample in samples:
        if sample.measurement == measurement and sample.time_ns >= plant.T0 + MENDED * SECOND:
            left = {key: kept for key, kept in sample.fields.items() if not key.startswith(prefix)}
            sample = replace(sample, fields=left)
        yield sample


def taken_out(samples: Iterable[Sample], gpu: str = "") -> list[Sample]:
    """From MENDED on the node reports without the card (all of them without a name)."""
    cut = plant.T0 + MENDED * SECOND
    return [s for s in samples if s.time_ns < cut or s.measurement != "gpu" or gpu not in ("", s.tags["gpu"])]


LONG = 1400


def test_what_a_card_suffered_from_ends_with_it_in_half_an_hour_and_nobody_calls_it_well() -> None:
    samples = scene([Node("n1", 1, at=AT, gpus=1, fault=bend(gpu_state=1)), Node("n2", 2)], LONG)
    machine, ended = AlertMachine(AlertSettings(gone_clear_s=100.0)), []
    for _, diagnoses in walk(taken_out_of("n1", samples), None, JudgeSettings(step_s=10.0)):
        at_ns = diagnoses[0].at_ns
        second = (at_ns - plant.T0) // SECOND
        machine = AlertMachine.of(json.loads(json.dumps(machine.state())), machine.settings)  # and over a restart
        ended += [(second, t) for t in machine.step(diagnoses, at_ns, 10.0) if t.state == RESOLVED]
    assert {t.alert.cause for _, t in ended} == {Cause.GPU_FAULT, Cause.TELEMETRY}
    assert [(second, t.alert.cause) for second, t in ended if not MENDED + 980 <= second <= MENDED + 1030] == []
    for language, gone in (("en", "reports without GPU 0: the card is gone"), ("zh", "该卡已不在")):
        titles = [
            alert["annotations"]["summary"]
            for message in messages_of([t for _, t in ended], Voice(language))
            for alert in json.loads(message.body)["alerts"]
        ]
        assert len(titles) == 2 and all(gone in title for title in titles)
    assert machine.open() == []


def taken_out_of(node: str, samples: Iterable[Sample]) -> list[Sample]:
    there, left = [s for s in samples if s.tags["node"] != node], [s for s in samples if s.tags["node"] == node]
    return sorted([*there, *taken_out(left)], key=lambda sample: sample.time_ns)


@pytest.mark.parametrize("whole_node", [True, False], ids=["its node is silent", "it is silent for minutes only"])
def test_a_card_that_may_come_back_keeps_its_alert(whole_node: bool) -> None:
    samples = scene(
        [Node("n1", 1, at=AT, gpus=1, fault=bend(gpu_state=1)), Node("n2", 2)], LONG if whole_node else 1100
    )
    cut = plant.T0 + MENDED * SECOND
    left = taken_out_of("n1", samples)
    if whole_node:
        left = [s for s in left if s.time_ns < cut or s.tags["node"] != "n1"]
    found, _ = told(left, AlertSettings(gone_clear_s=100.0))
    assert [state for _, state, cause in found if cause == Cause.GPU_FAULT] == [FIRING]


def test_of_two_bad_cards_the_one_that_is_gone_does_not_hold_the_mended_ones_alert() -> None:
    samples = scene([Node("n1", 1, at=AT, gpus=2, fault=faulty(gpu_state=1))], LONG)
    found, machine = told(taken_out(samples, "1"), AlertSettings(gone_clear_s=100.0))
    assert [state for _, state, cause in found if cause == Cause.GPU_FAULT] == [FIRING, RESOLVED]
    assert machine.open() == []


def test_an_idle_engine_keeps_no_alert_of_its_own_for_ever() -> None:
    full = Node(
        "n1", 1, lambda t: 0.0 if t >= MENDED else 40.0, faulty(kv=99.0, waiting=30.0, preemptions=2.0, work=1.3), AT
    )
    found, _ = told(scene([full], BACK), SOON)
    assert [(state, what) for _, state, what in found] == [(FIRING, Cause.MEMORY_KV), (RESOLVED, Cause.MEMORY_KV)]
    assert found[1][0] < MENDED + SOON.idle_clear_s  # its pool and its queue are read, and empty


def test_a_slow_version_is_not_over_because_nobody_asks_and_is_no_alert_for_ever_either() -> None:
    deploy = [event("n1", "deploy", AT, "0.31 -> 0.32")]
    slow = Node("n1", 1, lambda t: 0.0 if t >= MENDED else 40.0, faulty(work=1.5), AT, events=deploy)
    found, _ = told(scene([slow], END), SOON)
    assert Cause.SOFTWARE in OF_LOAD
    assert [(state, what) for _, state, what in found] == [(FIRING, Cause.SOFTWARE), (RESOLVED, Cause.SOFTWARE)]
    assert found[1][0] >= MENDED + SOON.idle_clear_s
