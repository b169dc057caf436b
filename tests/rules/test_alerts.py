"""The life of an alert: told once when it fires and once when it ends, whatever flaps, stalls, restarts or falls silent."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rules.alerts import (
    FIRING,
    PENDING,
    RESOLVED,
    AlertMachine,
    AlertSettings,
    Transition,
    alert_sample,
    conditions_of,
    fingerprint_of,
)
from rules.finding import summary
from rules.notification import summary_text
from rules.triage import JudgeSettings, walk
from rules.verdict import Cause, Diagnosis, Line, Status, Step, StepReport, Verdict
from telemetry.catalogue import check
from telemetry.messages import LANGUAGES, say
from tests.rules import plant
from tests.rules.plant import SECOND, Node, bend, scene

T0 = 1_795_960_800_000_000_000
STEPS = tuple(StepReport(step, Status.RULED_OUT) for step in Step)


def diagnosis(
    node: str = "n1",
    cause: Cause | None = None,
    *,
    confidence: float = 0.9,
    scope: str = "node",
    known: bool = True,
    engine: str = "",
    rack: str = "r1",
    t: float = 0,
) -> Diagnosis:
    subject = {"node": node, "rack": rack} | ({"engine": engine} if engine else {})
    verdicts = ()
    if cause is not None:
        place = {"rack": rack} if scope == "rack" else subject
        line = summary("power_brake", loss_pct=30.0, util_pct=98.0, effort="GPU-Util")
        verdicts = (Verdict(cause, Step.PHYSICAL, confidence, 30.0, scope, place, T0, (line,), (), line),)
    headline = summary("healthy_gpu", output_pct=100.0, util_pct=98.0) if known else summary("gap", age_s=20.0)
    return Diagnosis(subject, T0 + int(t * 1e9), STEPS, verdicts, verdicts[0].summary if verdicts else headline)


class Run:
    """A machine fed every five seconds."""

    def __init__(self, settings: AlertSettings | None = None) -> None:
        self.machine = AlertMachine(settings)
        self.t = 0.0
        self.told: list[Transition] = []

    def feed(self, *diagnoses: Diagnosis, times: int = 1, every: float = 5.0) -> list[str]:
        before = len(self.told)
        for _ in range(times):
            self.t += every
            self.told += self.machine.step(diagnoses, T0 + int(self.t * 1e9), every)
        return [transition.state for transition in self.told[before:]]

    def restart(self) -> None:
        self.machine = AlertMachine.of(json.loads(json.dumps(self.machine.state())), self.machine.settings)


BAD = diagnosis(cause=Cause.POWER)
GOOD = diagnosis()
GAP = diagnosis(known=False)


def test_a_condition_fires_once_after_it_has_held_and_resolves_once_after_it_has_been_away() -> None:
    run = Run()
    assert run.feed(BAD, times=9) == []
    assert run.machine.open()[0].state == PENDING
    assert run.feed(BAD, times=200) == [FIRING]
    assert run.feed(GOOD, times=23) == []
    assert run.feed(GOOD, times=100) == [RESOLVED]
    fired, resolved = run.told
    assert fired.alert.incident == resolved.alert.incident
    assert fired.alert.began_ns == T0 and resolved.alert.resolved_ns > fired.alert.fired_ns  # type: ignore[operator]


def test_a_condition_shorter_than_the_pending_time_is_never_told() -> None:
    run = Run()
    assert run.feed(BAD, times=8) + run.feed(GOOD, times=100) == []
    assert run.machine.alerts == {}


def test_one_lapse_does_not_start_the_pending_time_anew() -> None:
    run = Run()
    assert run.feed(BAD, times=6) + run.feed(GOOD) + run.feed(BAD, times=5) == [FIRING]


def test_a_gap_neither_fires_nor_resolves() -> None:
    run = Run()
    run.feed(BAD, times=4)
    assert run.feed(GAP, times=1000) == []
    assert run.feed(BAD, times=8) == [FIRING]
    assert run.feed(GAP, times=5000) == []
    assert run.feed(times=5000) == []  # not even a diagnosis of the node
    assert run.machine.open()[0].state == FIRING
    assert run.feed(GOOD, times=30) == [RESOLVED]


def test_a_simulated_incident_ends_with_its_simulation_and_a_real_one_does_not_end_with_its_node() -> None:
    for simulated, expected in ((True, [RESOLVED]), (False, [])):
        run = Run()
        run.feed(replace(BAD, simulated=simulated), times=20)
        assert run.feed(diagnosis("n7"), times=100) == expected


def test_a_service_that_slept_for_an_hour_fires_and_resolves_nothing_by_it() -> None:
    run = Run()
    run.feed(BAD, times=2)
    assert run.feed(BAD, every=3600) == []
    run.feed(BAD, times=10)
    assert run.feed(GOOD, every=3600) == []


def test_confidence_enters_high_and_leaves_low() -> None:
    unsure = diagnosis(cause=Cause.POWER, confidence=0.5)
    run = Run()
    assert run.feed(unsure, times=100) == []
    assert run.feed(BAD, times=20) == [FIRING]
    assert run.feed(unsure, times=200) == []
    assert run.feed(diagnosis(cause=Cause.POWER, confidence=0.3), times=100) == [RESOLVED]


def test_a_flapping_condition_is_held_down_longer_each_time() -> None:
    run = Run()
    for _ in range(40):
        run.feed(BAD, times=12)
        run.feed(GOOD, times=30)
    states = Counter(transition.state for transition in run.told)
    assert states[FIRING] <= 3, states
    assert states[FIRING] - states[RESOLVED] in (0, 1)


def test_all_engines_of_a_node_are_one_incident() -> None:
    many = [diagnosis(cause=Cause.POWER, engine=f"e{i}") for i in range(4)]
    verdicts = [
        Diagnosis(
            d.subject,
            d.at_ns,
            d.steps,
            (
                Verdict(
                    Cause.POWER, Step.PHYSICAL, 0.9, 30.0, "node", {"node": "n1", "rack": "r1"}, T0, (), (), d.headline
                ),
            ),
            d.headline,
        )
        for d in many
    ]
    run = Run()
    assert run.feed(*verdicts, times=50) == [FIRING]
    assert len(run.told[0].condition.members) == 4  # type: ignore[union-attr]
    healed = [diagnosis(engine=f"e{i}") for i in range(4)]
    assert run.feed(*healed[:3], verdicts[3], times=50) == []
    assert run.feed(*healed, times=50) == [RESOLVED]


def test_a_rack_takes_over_what_its_nodes_have_pending() -> None:
    run = Run()
    nodes = [f"n{i}" for i in range(4)]
    run.feed(*(diagnosis(node, Cause.THERMAL) for node in nodes[:2]), *(diagnosis(node) for node in nodes[2:]), times=6)
    assert run.feed(*(diagnosis(node, Cause.THERMAL, scope="rack") for node in nodes), times=30) == [FIRING]
    alert = run.told[0].alert
    assert (alert.scope, alert.place, alert.nodes) == ("rack", {"rack": "r1"}, nodes)
    check(alert_sample(alert, "x", T0))
    assert run.feed(*(diagnosis(node) for node in nodes), times=60) == [RESOLVED]


def on_circuit(node: str) -> Diagnosis:
    told = diagnosis(node, Cause.POWER, scope="circuit")
    return replace(told, verdicts=tuple(replace(verdict, subject={"circuit": "c1"}) for verdict in told.verdicts))


@pytest.mark.parametrize("wider", [True, False])
def test_a_circuit_that_is_due_waits_a_turn_for_its_rack(wider: bool) -> None:
    run = Run()
    nodes = [f"n{i}" for i in range(4)]
    narrow = [*(on_circuit(node) for node in nodes[:2]), *(diagnosis(node) for node in nodes[2:])]
    rack = [diagnosis(node, Cause.POWER, scope="rack") for node in nodes]
    assert run.feed(*narrow, times=10) == []
    assert run.feed(*(rack if wider else narrow)) == [FIRING]
    assert run.told[0].alert.place == ({"rack": "r1"} if wider else {"circuit": "c1"})
    assert run.feed(*(rack if wider else narrow), times=50) == []


def test_fingerprints_tell_causes_and_places_apart_and_nothing_else() -> None:
    place = {"node": "n1", "rack": "r1"}
    one = fingerprint_of(Cause.POWER, "node", place)
    assert one == fingerprint_of(Cause.POWER, "node", dict(reversed(place.items())))
    assert (
        len({one, fingerprint_of(Cause.THERMAL, "node", place), fingerprint_of(Cause.POWER, "node", {"node": "n2"})})
        == 3
    )
    worse = diagnosis(cause=Cause.POWER, confidence=0.7)
    assert set(conditions_of([BAD], 0.4)) == set(conditions_of([worse], 0.4))


def test_a_state_that_another_version_made_is_refused() -> None:
    for state in (
        None,
        [],
        {"version": 2, "alerts": []},
        {"version": 1, "alerts": [{"fingerprint": "x"}]},
        {"version": 1},
    ):
        try:
            AlertMachine.of(state)
        except ValueError:
            continue
        raise AssertionError(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"nodes": None},
        {"nodes": [3]},
        {"nodes": []},
        {"place": "n1"},
        {"place": {"node": []}},
        {"flips": 10**9},
        {"flips": "2"},
        {"true_s": "x"},
        {"false_s": None},
        {"false_s": float("inf")},
        {"began_ns": 1e400},
        {"opened_ns": None},
        {"confidence": {}},
        {"simulated": []},
        {"summary_values": None},
        {"state": 1},
        {"cause": "nosuch"},
        {"place": {"node": "\ud800"}},
    ],
)
def test_a_damaged_alert_is_refused_when_it_is_read_and_not_in_every_turn_after(damage: dict[str, object]) -> None:
    run = Run()
    run.feed(BAD, times=20)
    state = json.loads(json.dumps(run.machine.state()))
    assert len(AlertMachine.of(state).open()) == 1
    state["alerts"][0].update(damage)
    with pytest.raises(ValueError):
        AlertMachine.of(state)


@pytest.mark.parametrize(
    "said",
    [
        {"summary_key": "rules.summary.of_another_version"},
        {"summary_key": "rules.summary.power_brake", "summary_values": {"loss_pct": "much"}},
        {"summary_key": "rules.summary.power_brake", "summary_values": {}},
    ],
)
def test_an_incident_whose_sentence_another_version_had_still_stands_and_is_said_by_its_cause(
    said: dict[str, object],
) -> None:
    run = Run()
    run.feed(BAD, times=20)
    state = json.loads(json.dumps(run.machine.state()))
    state["alerts"][0].update(said)
    (alert,) = AlertMachine.of(state).open()
    assert alert.state == FIRING
    assert [summary_text(alert, language) for language in LANGUAGES] == [
        say(f"rules.cause.{alert.cause}", language) for language in LANGUAGES
    ]


MOMENTS = {
    "bad": BAD,
    "unsure": diagnosis(cause=Cause.POWER, confidence=0.5),
    "good": GOOD,
    "gap": GAP,
    "other": diagnosis(cause=Cause.MEMORY_KV),
    "silent": None,
    "restart": None,
}
STORY = st.lists(st.tuples(st.sampled_from(sorted(MOMENTS)), st.integers(1, 40)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(STORY)
def test_whatever_happens_firing_and_resolved_alternate_and_a_restart_changes_nothing(
    story: list[tuple[str, int]],
) -> None:
    plain, restarted = Run(), Run()
    for name, times in story:
        moment = MOMENTS[name]
        if name == "restart":
            restarted.restart()
            continue
        for run in (plain, restarted):
            run.feed(*([moment] if moment is not None else []), times=times)
    assert [(t.state, t.alert) for t in plain.told] == [(t.state, t.alert) for t in restarted.told]
    by_mark: dict[str, list[Transition]] = {}
    for transition in plain.told:
        by_mark.setdefault(transition.alert.fingerprint, []).append(transition)
    for told in by_mark.values():
        assert [t.state for t in told] == [FIRING if i % 2 == 0 else RESOLVED for i in range(len(told))]
        assert len({t.alert.incident for t in told}) == (len(told) + 1) // 2
    open_marks = [alert.fingerprint for alert in plain.machine.open()]
    assert len(open_marks) == len(set(open_marks))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["bad", "gap", "silent"]), st.integers(1, 60)), min_size=1, max_size=20))
def test_without_a_healthy_judgement_nothing_is_ever_resolved(story: list[tuple[str, int]]) -> None:
    run = Run()
    for name, times in story:
        moment = MOMENTS[name]
        run.feed(*([moment] if moment is not None else []), times=times)
    assert RESOLVED not in [transition.state for transition in run.told]


def test_the_number_of_messages_is_bounded_under_the_worst_flapping() -> None:
    run = Run()
    day = 24 * 3600 / 5
    for _ in range(int(day / 40)):
        run.feed(BAD, times=10)
        run.feed(GOOD, times=30)
    assert len(run.told) <= 20


def test_summary_lines_carry_what_is_told() -> None:
    run = Run()
    run.feed(BAD, times=20)
    alert = run.told[0].alert
    assert "98 %" in Line(alert.summary_key, alert.summary_values).text("en")


def test_a_cause_without_data_is_not_resolved_on_the_pair_that_had_it_and_another_pair_holds_nothing_open() -> None:
    bad, good = (diagnosis(cause=cause, engine="chat") for cause in (Cause.POWER, None))
    blind = replace(good, unknown=frozenset((Cause.POWER,)))
    run = Run()
    run.feed(bad, times=20)
    assert run.feed(blind, times=400) == [] and len(run.machine.open()) == 1
    run.machine = AlertMachine.of(json.loads(json.dumps(run.machine.state())))
    assert run.feed(blind, times=400) == []
    other = diagnosis(engine="embed")
    assert run.feed(good, replace(other, unknown=frozenset((Cause.POWER,))), times=40) == [RESOLVED]


@pytest.mark.parametrize("cut", ["gpu", "host"])
def test_an_alert_outlives_the_data_that_it_rests_on(cut: str) -> None:
    fault = bend(mask=0x88, clock=870, power=330, work=1.4) if cut == "gpu" else bend(cpu=100, work=1.4, psi_cpu=60)
    samples = scene([Node("n1", 1, at=140, fault=fault)], 560)
    kept = [s for s in samples if s.measurement != cut or s.time_ns < plant.T0 + 300 * SECOND]
    machine, told = AlertMachine(), []
    for triage, found in walk(kept, None, JudgeSettings(step_s=10.0)):
        assert triage.last
        told += [(t.state, t.alert.cause) for t in machine.step(found, found[0].at_ns, 10.0)]
        assert found[0].output_pct is None or found[0].output_pct > 80 or "healthy" not in found[0].headline.key
    assert told[0] == (FIRING, "power" if cut == "gpu" else "host_cpu")
    assert all(state == FIRING for state, _ in told)
