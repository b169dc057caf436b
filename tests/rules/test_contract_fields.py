"""What supplies, circuits, cards and drivers say of themselves is evidence: beside a loss it strengthens, names or rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from rules.triage import judge
from rules.verdict import Cause, Diagnosis
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.rules.plant import SECOND, T0, Fault, bend, event, fleet, scene

AT, END = 150, 200
SLOW = bend(work=1.3)
Fields = Mapping[str, float | int]


def with_fields(
    samples: Sequence[Sample], measurement: str, fields: Fields, *, gpu: str = "", first_s: int = AT
) -> Iterator[Sample]:
    for sample in samples:
        struck = sample.measurement == measurement and sample.tags["node"] == "n2"
        if struck and sample.time_ns >= T0 + first_s * SECOND and gpu in (sample.tags.get("gpu", ""), ""):
            sample = check(Sample(measurement, sample.tags, {**sample.fields, **fields}, sample.time_ns))
        yield sample


def of_n2(samples: Sequence[Sample]) -> Diagnosis:
    return next(d for d in judge(samples) if d.subject["node"] == "n2")


def judged(fault: Fault | None, measurement: str = "gpu", fields: Fields | None = None, **options: object) -> Diagnosis:
    samples = scene(fleet(fault, AT), END)
    return of_n2(list(with_fields(samples, measurement, fields or {}, **options)))  # type: ignore[arg-type]


def keys(diagnosis: Diagnosis) -> set[str]:
    return {
        entry.key.removeprefix("rules.evidence.")
        for lines in (*(v.evidence for v in diagnosis.verdicts), *(s.evidence for s in diagnosis.steps))
        for entry in lines
    }


def extra(measurement: str, tags: Mapping[str, str], fields: Fields) -> list[Sample]:
    return [
        check(Sample(measurement, {"node": "n2", "rack": "r1", **tags}, fields, T0 + t * SECOND))
        for t in range(AT, END, 5)
    ]


def test_a_card_that_calls_itself_unhealthy_is_at_fault_and_one_that_is_well_is_not() -> None:
    sick = judged(None, fields={"healthy": 0}, gpu="1")
    assert sick.verdicts[0].cause is Cause.GPU_FAULT
    assert sick.verdicts[0].gpus == ("1",)
    assert "unhealthy" in keys(sick)
    assert judged(None, fields={"healthy": 1}).verdicts == ()


def test_a_port_that_is_down_beside_a_loss_is_the_network_and_without_one_nothing() -> None:
    down = judged(SLOW, fields={"link_up": 0}, gpu="0")
    assert down.verdicts[0].cause is Cause.NETWORK
    harmless = judged(None, fields={"link_up": 0}, gpu="0")
    assert harmless.verdicts == () and "port_harmless" in keys(harmless)
    assert "ports_up" in keys(judged(None, fields={"link_up": 1}))


def test_seconds_of_heat_without_saying_which_kind_count_as_heat() -> None:
    samples: list[Sample] = []
    seconds = 0.0
    for sample in scene(fleet(bend(work=1.3, temp=80, clock=1300), AT), END):
        if sample.measurement == "gpu":
            late = sample.time_ns >= T0 + AT * SECOND and sample.tags["node"] == "n2"
            seconds += 1.0 if late and sample.tags["gpu"] == "0" else 0.0
            fields = {name: value for name, value in sample.fields.items() if not name.startswith("throttle_")}
            counted = {"throttle_thermal_s": seconds if sample.tags["node"] == "n2" else 7.0}
            sample = check(Sample("gpu", sample.tags, {**fields, **counted}, sample.time_ns))
        samples.append(sample)
    diagnosis = of_n2(samples)
    assert diagnosis.verdicts[0].cause is Cause.THERMAL
    assert any(entry.key == "rules.evidence.heat_duty" for entry in diagnosis.verdicts[0].evidence)


@pytest.mark.parametrize(
    ("code", "fault", "cause"),
    [
        (79, None, Cause.GPU_FAULT),  # off the bus: outright
        (74, SLOW, Cause.GPU_FAULT),  # a link: beside a loss
        (74, None, None),
        (92, None, None),  # many corrected errors: watch
        (94, SLOW, None),  # contained: the application's
        (31, SLOW, None),
        (63, SLOW, None),  # recorded
        (777, None, Cause.GPU_FAULT),  # nobody knows it to be harmless
    ],
)
def test_an_xid_counts_by_how_bad_it_is(code: int, fault: Fault | None, cause: Cause | None) -> None:
    nodes = fleet(fault, AT)
    nodes[1].events = [event("n2", "xid", AT + 2, f"Xid {code}", subject="1", code=code)]
    diagnosis = of_n2(scene(nodes, END))
    named = {verdict.cause for verdict in diagnosis.verdicts}
    assert (Cause.GPU_FAULT in named) is (cause is Cause.GPU_FAULT)


def test_a_warning_takes_no_heat_for_itself() -> None:
    nodes = fleet(bend(mask=0x20, temp=86, clock=1215, power=430, work=1.3), AT)
    nodes[1].events = [event("n2", "xid", AT + 2, "Xid 92", subject="1", code=92)]
    assert of_n2(scene(nodes, END)).verdicts[0].cause is Cause.THERMAL


def test_supplies_and_circuit_speak_beside_a_brake_and_are_no_incident_alone() -> None:
    said = [
        *extra("power", {}, {"redundancy": 0, "node_w": 9800.0, "cap_w": 10_000.0}),
        *extra("circuit", {"circuit": "c7"}, {"load_pct": 108.0}),
    ]
    alone = of_n2(sorted([*tagged(None), *said], key=lambda sample: sample.time_ns))
    assert alone.verdicts == ()
    assert {"redundancy_lost", "circuit_load", "node_cap"} <= keys(alone)
    braked = of_n2(sorted([*tagged(bend(mask=0x88, clock=870, power=330, work=1.4)), *said], key=lambda s: s.time_ns))
    told = {entry.key.removeprefix("rules.evidence.") for entry in braked.verdicts[0].evidence}
    assert braked.verdicts[0].cause is Cause.POWER
    assert {"redundancy_lost", "circuit_load", "node_cap"} <= told


def test_a_slowdown_that_names_no_reason_is_surer_where_redundancy_is_lost() -> None:
    bare = bend(mask=0x8, clock=870, power=330, work=1.4)
    unsure = of_n2(scene(fleet(bare, AT), END)).verdicts[0]
    said = extra("power", {}, {"redundancy": 0})
    sure = of_n2(sorted([*scene(fleet(bare, AT), END), *said], key=lambda sample: sample.time_ns)).verdicts[0]
    assert (unsure.cause, sure.cause) == (Cause.POWER, Cause.POWER)
    assert sure.confidence > unsure.confidence + 0.03


def tagged(fault: Fault | None) -> list[Sample]:
    """The scene with every node on circuit c7, which is read on n2."""
    return [
        Sample(sample.measurement, {**sample.tags, "circuit": "c7"}, sample.fields, sample.time_ns)
        for sample in scene(fleet(fault, AT), END)
    ]
