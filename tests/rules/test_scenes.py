"""Each fault is named on its node within a minute and a half, and its null twin, which looks alike and costs nothing, is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rules.pair import Pair
from rules.triage import Triage, judge
from rules.verdict import Cause, Cost, Diagnosis, Status, Step, from_sample, to_sample
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0, Fault, Moment, Node, bend, event, fleet, scene

AT = 180
NAMED_WITHIN_S = 60


def walk(samples: Sequence[Sample], until: int, step: int = 5, start: int = 0) -> list[tuple[int, list[Diagnosis]]]:
    """The judgement every five seconds, as the service makes it; every ten before anything happens."""
    triage, position, found = Triage(), 0, []
    for t in [*range(start, min(AT, until), 2 * step), *range(AT, until, step)]:
        begin = position
        while position < len(samples) and samples[position].time_ns <= T0 + t * SECOND:
            position += 1
        triage.add(samples[begin:position])
        found.append((t, triage.evaluate(T0 + t * SECOND)))
    return found


def verdicts(walked: Sequence[tuple[int, list[Diagnosis]]]) -> list[tuple[int, str, Cause]]:
    """(second, node, cause) of every first verdict."""
    return [(t, d.subject["node"], d.verdicts[0].cause) for t, ds in walked for d in ds if d.verdicts]


def long_prompts(moment: Moment) -> None:
    moment.prompt_share *= 5
    moment.prompt_len, moment.context = 2900.0, 2500.0


def longer_prompts_fewer_tokens(moment: Moment) -> None:
    moment.prompt_len = 880.0
    moment.prompt_share *= 1.25


def kv_full(moment: Moment) -> None:
    moment.kv, moment.running, moment.preemptions = 99.0, 22.0, 0.4
    moment.waiting = min(60.0, (moment.t - AT) * 0.6)


FAULTS: dict[str, tuple[Cause, Fault]] = {
    "hot inlet": (Cause.THERMAL, bend(mask=0x20, temp=86, clock=1215, power=430, work=1.22, inlet=34)),
    "hardware slowdown": (Cause.THERMAL, bend(mask=0x48, temp=90, clock=870, power=300, work=1.5)),
    "power brake": (Cause.POWER, bend(mask=0x88, clock=870, power=330, work=1.4, temp=52)),
    "power cap": (Cause.POWER, bend(mask=0x4, limit=400, clock=1320, power=396, work=1.14, temp=55)),
    "stuck clock": (Cause.GPU_FAULT, bend(clock=600, power=190, work=1.7, temp=44)),
    "lost gpu": (Cause.GPU_FAULT, bend(gpu_state=1, work=1.5)),
    "link": (Cause.PCIE_LINK, bend(pcie_gen=1, work=1.3)),
    "kv full": (Cause.MEMORY_KV, kv_full),
    "long prompts": (Cause.REQUEST_MIX, long_prompts),
    "hung engine": (Cause.SCHEDULING, bend(frozen=True, power=120)),
    "engine does not answer": (Cause.SCHEDULING, bend(up=0, util=0)),
    "second process": (Cause.CONTENTION, bend(processes=2, work=1.4)),
    "cpu hog": (Cause.HOST_CPU, bend(cpu=99, psi_cpu=48, load1=30, work=1.4)),
}
TWINS: dict[str, Fault | None] = {
    "nothing": None,
    "warm inlet": bend(temp=80, inlet=31),
    "touching the temperature limit": bend(mask=0x20, temp=84, clock=1740, work=1.003),
    "full boost at the default cap": bend(mask=0x4, power=698, clock=1695, work=1.01),
    "cap above the need": bend(limit=650),
    "a flash of the brake bit": lambda m: setattr(m, "mask", 0x88 if m.t % 60 == 0 else 0),
    "kv pool nearly full and nobody waits": bend(kv=97),
    "longer prompts and nothing lost": longer_prompts_fewer_tokens,
    "half the demand": bend(running=18),
    "no demand": bend(running=0, util=0, power=90),
    "a link that rests with its card": bend(running=0, util=0, power=90, pcie_gen=1),
    "double the demand": bend(running=78),
    "a hiccup of eight seconds": lambda m: setattr(m, "frozen", m.t < AT + 8),
    "a busy host": bend(cpu=75, load1=20),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_within_a_minute_and_nowhere_else(name: str) -> None:
    cause, fault = FAULTS[name]
    walked = walk(scene(fleet(fault, AT), AT + 120), AT + 120)
    named = verdicts(walked)
    assert {node for _, node, _ in named} == {"n2"}
    assert {found for _, _, found in named} == {cause}
    assert AT <= named[0][0] <= AT + NAMED_WITHIN_S
    last = next(d for d in walked[-1][1] if d.subject["node"] == "n2")
    verdict = last.verdicts[0]
    assert verdict.cause is cause and verdict.confidence > 0.6
    assert verdict.since_ns is not None and abs(verdict.since_ns - (T0 + AT * SECOND)) <= 15 * SECOND
    assert verdict.evidence and verdict.fixes
    assert [list(Cost).index(fix.cost) for fix in verdict.fixes] == sorted(
        list(Cost).index(fix.cost) for fix in verdict.fixes
    )
    report = next(step for step in last.steps if step.step is verdict.step)
    assert report.status is Status.CONFIRMED and report.posterior > 0.6


def test_an_engine_that_loads_is_starting_and_only_a_start_of_many_minutes_is_named() -> None:
    def loading(seconds: int) -> list[Sample]:
        tags = {"node": "n1", "engine": "chat", "kind": "vllm", "model": "m"}
        samples = []
        for t in range(seconds):
            samples.append(Sample("engine", tags, {"up": 0, "starting": 1}, T0 + t * SECOND))
            samples.append(Sample("host", {"node": "n1"}, {"cpu_pct": 40.0}, T0 + t * SECOND))
        return samples

    ready = Sample(
        "engine", {"node": "n1", "engine": "chat", "kind": "vllm", "model": "m"}, {"up": 1}, T0 + 121 * SECOND
    )
    (answering,) = judge([*loading(120), ready])
    assert "is starting" not in answering.headline.text("en")
    (young,) = judge(loading(120))
    assert young.verdicts == ()
    assert "is starting" in young.headline.text("en")
    (old,) = judge(loading(330))
    assert old.verdicts[0].cause is Cause.COLD_START


def test_what_only_a_living_engine_can_exonerate_is_not_ruled_out_the_moment_it_is_away() -> None:
    samples = scene(fleet(bend(up=0, util=0), AT), AT + 6)
    last = next(d for d in judge(samples) if d.subject["node"] == "n2")
    status = {step.step: step.status for step in last.steps}
    assert {status[step] for step in (Step.MEMORY, Step.REQUESTS, Step.SCHEDULING, Step.SOFTWARE)} == {Status.NO_DATA}
    assert (last.output_pct, last.tokens_per_s) == (None, None)
    assert "does not answer" in last.headline.text("en")


@pytest.mark.parametrize("name", TWINS)
def test_its_null_twin_is_nothing(name: str) -> None:
    walked = walk(scene(fleet(TWINS[name], AT), AT + 120), AT + 120)
    assert verdicts(walked) == []
    assert all(step.status != Status.CONFIRMED for _, ds in walked for d in ds for step in d.steps)


def test_a_bad_deploy_is_blamed_and_a_good_one_is_not() -> None:
    for work, expected in ((1.28, {Cause.SOFTWARE}), (1.0, set())):
        nodes = fleet(bend(work=work, version="0.32.0"), AT + 4)
        nodes[1].events = [event("n2", "deploy", AT, "vllm 0.31.0 -> 0.32.0")]
        named = verdicts(walk(scene(nodes, AT + 120), AT + 120))
        assert {cause for _, _, cause in named} == expected
        assert all(t <= AT + 4 + 60 for t, _, _ in named[:1])


def test_a_version_that_changes_is_a_deploy_though_nobody_reported_one() -> None:
    named = verdicts(walk(scene(fleet(bend(work=1.28, version="0.32.0"), AT), AT + 90), AT + 90))
    assert {cause for _, _, cause in named} == {Cause.SOFTWARE}


def test_heat_beside_a_deploy_is_heat() -> None:
    nodes = fleet(bend(mask=0x20, temp=86, clock=1215, power=430, work=1.22), AT)
    nodes[1].events = [event("n2", "deploy", AT - 20, "vllm 0.31.0 -> 0.32.0")]
    assert {cause for _, _, cause in verdicts(walk(scene(nodes, AT + 90), AT + 90))} == {Cause.THERMAL}


def test_a_queue_that_a_brake_causes_is_its_symptom() -> None:
    def brake(moment: Moment) -> None:
        moment.mask, moment.clock, moment.power, moment.work = 0x88, 870.0, 330.0, 1.5
        if moment.t > AT + 25:
            moment.kv, moment.waiting, moment.preemptions = 99.0, 30.0, 0.3

    walked = walk(scene(fleet(brake, AT), AT + 100), AT + 100)
    assert {cause for _, _, cause in verdicts(walked)} == {Cause.POWER}
    last = next(d for d in walked[-1][1] if d.subject["node"] == "n2")
    assert {v.cause for v in last.verdicts} == {Cause.POWER}
    memory = next(step for step in last.steps if step.step is Step.MEMORY)
    assert memory.status is Status.SYMPTOM


def test_xid_79_is_a_gpu_fault_and_xid_63_is_maintenance() -> None:
    for code, expected in ((79, {Cause.GPU_FAULT}), (63, set())):
        nodes = fleet(None)
        nodes[1].events = [event("n2", "xid", AT, "Xid", subject="2", code=code)]
        assert {cause for _, _, cause in verdicts(walk(scene(nodes, AT + 60), AT + 60))} == expected


def test_a_slow_day_and_a_busy_night_are_no_incident() -> None:
    def tide(t: int) -> float:
        return 40 - 30 * math.cos(2 * math.pi * t / 900)

    nodes = [Node(f"n{i}", seed=i, load=tide, cadence=2, gpus=2) for i in (1, 2)]
    assert verdicts(walk(scene(nodes, 1800), 1800, step=10)) == []


def cpu_node(fault: Fault | None, **options: object) -> list[Node]:
    node = Node("box", seed=5, load=lambda t: 3.0, cpu_only=True, fault=fault, at=AT)
    for name, to in options.items():
        setattr(node, name, to)
    return [node]


def test_a_host_without_a_gpu_is_judged_on_its_cpu_and_says_what_it_cannot_know() -> None:
    last = walk(scene(cpu_node(bend(cpu=93)), AT + 60), AT + 60)[-1][1]
    assert len(last) == 1 and last[0].verdicts == ()
    assert last[0].util_pct == pytest.approx(93, abs=2)
    assert last[0].output_pct == pytest.approx(100, abs=5)
    physical = next(step for step in last[0].steps if step.step is Step.PHYSICAL)
    assert physical.status is Status.NO_DATA
    assert "no GPU reports" in physical.evidence[0].text()
    assert {step.status for step in last[0].steps if step.step not in (Step.PHYSICAL,)} == {Status.RULED_OUT}


def test_a_cpu_hog_on_a_host_without_a_gpu_is_the_host_cpu() -> None:
    named = verdicts(walk(scene(cpu_node(bend(cpu=99, psi_cpu=48, load1=30, work=1.5)), AT + 90), AT + 90))
    assert {cause for _, _, cause in named} == {Cause.HOST_CPU}
    assert named[0][0] <= AT + NAMED_WITHIN_S


def test_nothing_is_slow_while_warming_and_hard_faults_are_named_all_the_same() -> None:
    for fault, expected in ((bend(work=2.0), set()), (bend(frozen=True), {Cause.SCHEDULING})):
        alone = [Node("n9", seed=3, fault=fault, at=50)]
        walked = walk(scene(alone, 110), 110)
        assert {cause for _, _, cause in verdicts(walked)} == expected
    warming = walk(scene([Node("n9", seed=3)], 60), 60)[-1][1][0]
    assert warming.headline.key == "rules.summary.warming" and warming.output_pct is None


def test_two_minutes_of_health_are_enough_to_see_a_third_lost() -> None:
    alone = [Node("n9", seed=3, fault=bend(mask=0x88, clock=870, power=330, work=1.5), at=150)]
    named = verdicts(walk(scene(alone, 240), 240))
    assert {cause for _, _, cause in named} == {Cause.POWER}
    diagnosis = judge(scene(alone, 240))[0]
    assert diagnosis.output_pct == pytest.approx(100 / 1.5, abs=7)


def test_a_new_node_is_compared_with_its_peers() -> None:
    late = Node("n4", seed=9, fault=bend(mask=0x20, temp=86, clock=1100, power=400, work=1.6), at=0)
    samples = scene(fleet(None), AT + 60)
    samples += [s for s in scene([late], AT + 60) if s.time_ns >= T0 + (AT - 10) * SECOND]
    samples.sort(key=lambda s: s.time_ns)
    last = {d.subject["node"]: d for d in walk(samples, AT + 60)[-1][1]}
    assert last["n4"].verdicts[0].cause is Cause.THERMAL
    assert last["n4"].output_pct == pytest.approx(100 / 1.6, abs=12)
    assert not last["n1"].verdicts


def test_an_incident_is_not_learned_as_usual() -> None:
    walked = walk(scene(fleet(bend(mask=0x88, clock=870, power=330, work=1.4), AT), AT + 600), AT + 600, step=10)
    last = next(d for d in walked[-1][1] if d.subject["node"] == "n2")
    assert last.verdicts[0].cause is Cause.POWER
    assert last.output_pct == pytest.approx(100 / 1.4, abs=4)


def test_a_short_gap_is_a_gap_and_a_long_one_is_telemetry() -> None:
    def gap(length: int) -> Fault:
        return lambda m: setattr(m, "silent", m.t < AT + length)

    assert verdicts(walk(scene(fleet(gap(20), AT), AT + 100), AT + 100)) == []
    walked = walk(scene(fleet(gap(60), AT), AT + 100), AT + 100)
    named = verdicts(walked)
    assert {(node, cause) for _, node, cause in named} == {("n2", Cause.TELEMETRY)}
    silent = next(d for t, ds in walked if t == AT + 50 for d in ds if d.subject["node"] == "n2")
    assert [step.status for step in silent.steps[1:]] == [Status.NO_DATA] * 5
    assert silent.output_pct is None


def test_a_simulation_that_was_switched_off_is_not_blindness() -> None:
    samples = [
        Sample(s.measurement, {**s.tags, "origin": "simulated"}, s.fields, s.time_ns)
        for s in scene([Node("s1", seed=1)], 30)
    ]
    samples += scene([Node("n1", seed=2)], 150)
    samples.sort(key=lambda s: s.time_ns)
    walked = walk(samples, 150)
    assert [d.subject["node"] for d in walked[-1][1]] == ["n1"]
    assert {node for t, node, _ in verdicts(walked) if t > 100} == set()


def test_an_engine_that_is_watched_no_more_is_named_for_a_while_and_then_gone() -> None:
    old = [s for s in scene([Node("n1", seed=1)], 40) if s.measurement == "engine"]
    kept = [Sample(s.measurement, s.tags, s.fields, s.time_ns) for s in scene([Node("n1", seed=1, cadence=5)], 1000)]
    new = [
        Sample(s.measurement, {**s.tags, "engine": "other"}, s.fields, s.time_ns) if s.measurement == "engine" else s
        for s in kept
    ]
    walked = walk(sorted([*old, *new], key=lambda s: s.time_ns), 1000, step=20)
    silent = [t for t, ds in walked for d in ds if d.subject.get("engine") == "chat" and d.verdicts]
    assert silent and max(silent) <= 40 + 920
    assert [d.subject.get("engine") for d in walked[-1][1]] == ["other"]


def test_an_engine_that_answers_without_metrics_is_named_with_the_flag_that_hides_them() -> None:
    samples = []
    for sample in scene([Node("n1", seed=1)], 60):
        if sample.measurement == "engine":
            sample = Sample("engine", sample.tags, {"up": 1}, sample.time_ns)
        samples.append(sample)
    diagnosis = judge(samples)[0]
    assert diagnosis.verdicts[0].cause is Cause.TELEMETRY
    fix = diagnosis.verdicts[0].fixes[0].text()
    assert all(flag in fix for flag in ("--disable-log-stats", "--enable-metrics", "with --metrics"))


def test_one_hot_gpu_of_four_is_named_by_its_index() -> None:
    samples = []
    for sample in scene(fleet(bend(work=1.3), AT, gpus=4), AT + 90):
        hot = sample.measurement == "gpu" and (sample.tags["gpu"], sample.tags["node"]) == ("2", "n2")
        if hot and sample.time_ns >= T0 + AT * SECOND:
            bent = {"temp_c": 89.0, "sm_clock_mhz": 1100.0, "throttle_reasons": 0x20, "power_w": 380.0}
            sample = Sample("gpu", sample.tags, {**sample.fields, **bent}, sample.time_ns)
        samples.append(sample)
    last = next(d for d in walk(samples, AT + 90)[-1][1] if d.subject["node"] == "n2")
    assert last.verdicts[0].scope == "gpu" and last.verdicts[0].subject["gpu"] == "2"


def test_the_same_fault_on_the_whole_rack_is_the_racks() -> None:
    nodes = [Node(f"n{i}", seed=i) for i in range(1, 6)]
    for node in nodes[:4]:
        node.fault, node.at = bend(mask=0x20, temp=86, clock=1215, power=430, work=1.22, inlet=36), AT
    nodes[4].rack = "r2"
    last = {d.subject["node"]: d for d in walk(scene(nodes, AT + 60), AT + 60)[-1][1]}
    for name in ("n1", "n2", "n3", "n4"):
        verdict = last[name].verdicts[0]
        assert (verdict.cause, verdict.scope, dict(verdict.subject)) == (Cause.THERMAL, "rack", {"rack": "r1"})
    assert not last["n5"].verdicts


def test_two_slow_nodes_of_five_stay_two() -> None:
    nodes = [Node(f"n{i}", seed=i) for i in range(1, 6)]
    for node in nodes[:2]:
        node.fault, node.at = bend(mask=0x88, clock=870, power=330, work=1.4), AT
    last = {d.subject["node"]: d for d in walk(scene(nodes, AT + 60), AT + 60)[-1][1]}
    assert {last[name].verdicts[0].scope for name in ("n1", "n2")} == {"node"}


def test_a_node_without_an_engine_is_judged_for_hard_faults() -> None:
    bare = [Node("n1", seed=1, engine=False, fault=bend(gpu_state=1), at=60)]
    walked = walk(scene(bare, 100), 100)
    assert {cause for _, _, cause in verdicts(walked)} == {Cause.GPU_FAULT}
    assert verdicts(walk(scene([Node("n1", seed=1, engine=False)], 100), 100)) == []


@pytest.mark.parametrize("cadence", [1, 2, 5])
def test_the_cadence_of_the_samples_does_not_matter(cadence: int) -> None:
    named = verdicts(walk(scene(fleet(FAULTS["power brake"][1], AT, cadence=cadence), AT + 90), AT + 90))
    assert {(node, cause) for _, node, cause in named} == {("n2", Cause.POWER)}
    assert named[0][0] <= AT + NAMED_WITHIN_S


@pytest.mark.parametrize("seed", [101, 202, 303])
def test_other_seeds_say_the_same(seed: int) -> None:
    for name in ("hot inlet", "long prompts", "kv full"):
        named = verdicts(walk(scene(fleet(FAULTS[name][1], AT, seed=seed), AT + 70), AT + 70))
        assert {(node, cause) for _, node, cause in named} == {("n2", FAULTS[name][0])}


def test_a_diagnosis_survives_the_store() -> None:
    for diagnosis in judge(scene(fleet(FAULTS["hot inlet"][1], AT), AT + 60)):
        sample = check(to_sample(diagnosis))
        again = from_sample(sample)
        assert again.headline.text("zh") == diagnosis.headline.text("zh")
        assert [v.cause for v in again.verdicts] == [v.cause for v in diagnosis.verdicts]


def test_an_empty_recording_has_no_diagnosis() -> None:
    assert judge([]) == []


def test_a_recording_judged_at_a_moment_does_not_see_what_came_later() -> None:
    samples = scene(fleet(FAULTS["power brake"][1], AT), AT + 90)
    assert all(not d.verdicts for d in judge(samples, T0 + (AT - 5) * SECOND))
    assert any(d.verdicts for d in judge(samples))


@pytest.mark.parametrize("field", ["requests_running", "tokens_per_s", "stats_age_s"])
def test_a_number_beyond_reason_costs_its_engine_that_number_and_nobody_else_anything(field: str) -> None:
    samples = [
        Sample(s.measurement, s.tags, {**s.fields, field: 1e308}, s.time_ns)
        if s.measurement == "engine" and s.tags["node"] == "n1" and s.time_ns > T0 + 100 * SECOND
        else s
        for s in scene(fleet(bend(work=1.4, mask=0x88, clock=870, power=330, temp=52), AT), AT + 60)
    ]
    judged = judge(samples)
    assert next(d for d in judged if d.subject["node"] == "n2").verdicts[0].cause is Cause.POWER


def test_a_pair_whose_judgement_fails_is_left_out_and_the_others_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    triage = Triage()
    triage.add(scene(fleet(None, AT), 60))
    whole = triage._judge

    def fail_on_one(pair: Pair, *rest: object) -> Diagnosis:
        if pair.node == "n1":
            raise ZeroDivisionError
        return whole(pair, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(triage, "_judge", fail_on_one)
    nodes = {d.subject["node"] for d in triage.evaluate(T0 + 60 * SECOND)}
    assert "n1" not in nodes and "n2" in nodes
