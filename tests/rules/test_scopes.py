"""One in a group is itself; many at once are one shared cause at the narrowest place that holds them all, told once with everyone named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rules.alerts import FIRING, AlertMachine, conditions_of
from rules.finding import line, summary
from rules.priors import STEP_OF
from rules.scopes import widen
from rules.triage import JudgeSettings, judge
from rules.verdict import Cause, Diagnosis, Line, Status, Step, StepReport, Verdict, from_sample, to_sample
from tests.rules.plant import Node, bend, scene

SECOND = 10**9
T0 = 1_795_960_800 * SECOND


def node(
    name: str,
    cause: Cause | None = None,
    *,
    rack: str = "r1",
    circuit: str = "c1",
    cluster: str = "k1",
    since_s: float = 0.0,
    gpus: tuple[str, ...] = (),
    evidence: tuple[Line, ...] = (),
    said: Line | None = None,
    scope: str = "node",
    changed: str = "",
) -> Diagnosis:
    subject = {"node": name, "rack": rack, "circuit": circuit, "cluster": cluster, "engine": f"{name}-e"}
    subject = {tag: value for tag, value in subject.items() if value}
    seen = (line("changed_deploy", text=changed, minutes=1.0),) if changed else ()
    steps = tuple(StepReport(step, Status.RULED_OUT, seen if step is Step.SOFTWARE else ()) for step in Step)
    told = said or summary("speaks_for", cause=str(cause))
    verdicts = ()
    if cause is not None:
        since_ns = T0 + int(since_s * SECOND)
        place = {tag: value for tag, value in subject.items() if tag != "engine" or scope == "engine"}
        verdicts = (
            Verdict(cause, STEP_OF[cause], 0.8, 21.0, scope, place, since_ns, (*evidence, *seen), (), told, None, gpus),
        )
    return Diagnosis(subject, T0 + 60 * SECOND, steps, verdicts, told)


def places(diagnoses: list[Diagnosis]) -> dict[str, tuple[str, Mapping[str, str]]]:
    return {d.subject["node"]: (v.scope, dict(sorted(v.subject.items()))) for d in widen(diagnoses) for v in d.verdicts}


def fleet(hit: Mapping[str, Cause], racks: int = 2, nodes: int = 4) -> list[Diagnosis]:
    """Racks of so many nodes, two nodes a circuit; node `n12` is the second of the first rack."""
    return [
        node(f"n{r}{n}", hit.get(f"n{r}{n}"), rack=f"r{r}", circuit=f"c{r}{(n + 1) // 2}")
        for r in range(1, racks + 1)
        for n in range(1, nodes + 1)
    ]


@pytest.mark.parametrize("cause", [Cause.POWER, Cause.THERMAL])
def test_a_rack_whose_every_node_is_hit_is_one_rack_and_not_two_circuits(cause: Cause) -> None:
    found = places(fleet({f"n1{n}": cause for n in (1, 2, 3, 4)}))
    assert found == {f"n1{n}": ("rack", {"cluster": "k1", "rack": "r1"}) for n in (1, 2, 3, 4)}


def test_both_nodes_of_a_circuit_without_power_are_the_circuits_and_both_hot_are_two_nodes() -> None:
    lost = places(fleet({"n13": Cause.POWER, "n14": Cause.POWER}))
    assert set(map(str, lost.values())) == {str(("circuit", {"circuit": "c12", "cluster": "k1", "rack": "r1"}))}
    hot = places(fleet({"n13": Cause.THERMAL, "n14": Cause.THERMAL}))
    assert {scope for scope, _ in hot.values()} == {"node"}


def test_all_racks_at_once_are_the_cluster_and_one_node_is_itself() -> None:
    everyone = {f"n{r}{n}": Cause.SCHEDULING for r in (1, 2) for n in (1, 2, 3, 4)}
    assert set(map(str, places(fleet(everyone)).values())) == {str(("cluster", {"cluster": "k1"}))}
    assert places(fleet({"n12": Cause.SCHEDULING}))["n12"][0] == "node"


def test_what_did_not_begin_together_is_not_shared() -> None:
    hit = [node(f"n{i}", Cause.THERMAL, since_s=400 * i) for i in range(4)]
    assert {scope for scope, _ in places(hit).values()} == {"node"}


def test_a_rolling_deploy_is_one_cause_among_the_nodes_that_it_came_to() -> None:
    rolled = [node(f"n{i}", Cause.SOFTWARE, since_s=300 * i, changed="1.8 -> 1.9") for i in range(3)]
    spared = [node(f"n{i}", None, changed="1.8 -> 1.9") for i in (3,)]
    old = [node(f"n{i}") for i in range(4, 12)]
    found = places([*rolled, *spared, *old])
    assert found == {f"n{i}": ("cluster", {"cluster": "k1"}) for i in range(3)}
    widened = widen([*rolled, *spared, *old])
    assert widened[0].verdicts[0].evidence[0].values == {"nodes": 3, "of": 4, "name": "k1", "where": "n0, n1, n2"}


def test_different_changes_and_a_change_that_most_bear_well_are_not_shared() -> None:
    several = [node(f"n{i}", Cause.SOFTWARE, since_s=300 * i, changed=f"build {i}") for i in range(4)]
    assert {scope for scope, _ in places(several).values()} == {"node"}
    few = [node(f"n{i}", Cause.SOFTWARE if i < 3 else None, since_s=300 * i, changed="1.9") for i in range(8)]
    assert {scope for scope, _ in places(few).values()} == {"node"}


def test_an_uneven_load_on_two_nodes_is_the_routers_and_on_one_its_engines() -> None:
    uneven = summary("uneven", ratio=4.2)
    two = [node(f"n{i}", Cause.SCHEDULING if i < 2 else None, said=uneven, scope="engine") for i in range(6)]
    assert {scope for scope, _ in places(two).values()} == {"cluster"}
    one = [node(f"n{i}", Cause.SCHEDULING if i < 1 else None, said=uneven, scope="engine") for i in range(6)]
    assert {scope for scope, _ in places(one).values()} == {"engine"}
    hung = [node(f"n{i}", Cause.SCHEDULING if i < 2 else None, scope="engine") for i in range(6)]
    assert {scope for scope, _ in places(hung).values()} == {"engine"}


def test_a_shared_cause_names_every_card_and_the_air_that_they_share() -> None:
    air = (line("inlet_up", "thermal.inlet_c", inlet_c=36.0, usual_c=24.0),)
    hit = [
        node(f"n{i}", Cause.THERMAL, gpus=("1", "5"), evidence=air if i == 2 else (), since_s=i, cluster="")
        for i in (1, 2, 3)
    ]
    widened = widen([*hit, node("n4", cluster="")])
    for diagnosis in widened[:3]:
        (verdict,) = diagnosis.verdicts
        assert verdict.gpus == ("1", "5")
        where, inlet, *_ = verdict.evidence
        assert where.values["where"] == "n1/1, n1/5, n2/1, n2/5, n3/1, n3/5"
        assert (where.values["nodes"], where.values["of"], where.values["name"]) == (3, 4, "r1")
        assert inlet == air[0]
        assert verdict.evidence.count(air[0]) == 1
        assert from_sample(to_sample(diagnosis)).verdicts[0].gpus == ("1", "5")
        for language in ("en", "zh"):
            assert "n3/5" in where.text(language)


def test_a_shared_cause_is_one_alert_with_all_of_its_nodes() -> None:
    hit = fleet({f"n2{n}": Cause.THERMAL for n in (1, 2, 3, 4)})
    (condition,) = conditions_of(widen(hit), 0.3).values()
    assert condition.nodes == {"n21", "n22", "n23", "n24"}
    machine, fired = AlertMachine(), 0
    for turn in range(20):
        fired += sum(t.state == FIRING for t in machine.step(widen(hit), T0 + turn * 5 * SECOND, 5.0))
    assert fired == 1


def test_a_fleet_without_tags_shares_as_one_and_what_is_simulated_apart() -> None:
    real = [node(f"n{i}", Cause.NETWORK, rack="", circuit="", cluster="") for i in range(4)]
    assert places(real) == {f"n{i}": ("cluster", {}) for i in range(4)}
    tagged = [
        Diagnosis({**d.subject, "origin": "simulated"}, d.at_ns, d.steps, d.verdicts, d.headline)
        for d in [node(f"s{i}", Cause.NETWORK, rack="", circuit="", cluster="") for i in range(2)]
    ]
    assert places([*real[:2], *tagged]) == {name: ("node", {"node": name}) for name in ("n0", "n1", "s0", "s1")}


def test_a_deploy_that_rolls_over_the_fleet_and_slows_it_is_one_cause_of_the_cluster_by_samples() -> None:
    nodes = [Node(f"n{i}", seed=i, rack=f"r{i % 2}") for i in range(1, 6)]
    for place, each in enumerate(nodes[:4]):
        each.fault, each.at = bend(version="0.32.0", work=1.4), 180 + 40 * place
    judged = judge(scene(nodes, 370), settings=JudgeSettings(step_s=10.0))
    found = {d.subject["node"]: d for d in judged}
    assert not found["n5"].verdicts
    for name in ("n1", "n2", "n3", "n4"):
        verdict = found[name].verdicts[0]
        assert (verdict.cause, verdict.scope) == (Cause.SOFTWARE, "cluster"), name
        where = verdict.evidence[0].values
        assert (where["nodes"], where["of"], where["where"]) == (4, 4, "n1, n2, n3, n4")
    assert len(conditions_of(judged, 0.3)) == 1
