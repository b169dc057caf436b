"""Silence after an outage: it is the store's or the network's, until the backlog had time to come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from rules.service import Service, TriageSettings, named_place
from rules.verdict import Cause
from telemetry.sample import Sample
from telemetry.store import StoreDown, open_store
from tests.rules.plant import SECOND, T0, bend, fleet, scene

LAST, BACK = 150, 195
"""The last second before the outage, and the first at which the store answers again."""


class Played(Service):
    """Its store gets what is to come only when its time has come."""

    def __init__(self, settings: TriageSettings) -> None:
        super().__init__(settings, open_store(settings.store_url))
        self.to_come: list[Sample] = []

    def turn(self, at_ns: int, now_s: float) -> bool:
        self.store.write([sample for sample in self.to_come if sample.time_ns <= at_ns])
        self.to_come = [sample for sample in self.to_come if sample.time_ns > at_ns]
        return super().turn(at_ns, now_s)


@pytest.fixture
def service(tmp_path: Path) -> Played:
    return Played(TriageSettings(store_url=f"sqlite://{tmp_path}/store.db", state_dir=tmp_path / "state"))


@pytest.fixture(scope="module")
def samples() -> Sequence[Sample]:
    return scene(fleet(bend(), at=10_000), 400)


def put(service: Played, samples: Sequence[Sample], start: int, end: int, *, but: str = "") -> None:
    service.to_come += [
        s for s in samples if T0 + start * SECOND <= s.time_ns < T0 + end * SECOND and s.tags["node"] != but
    ]


def turn(service: Played, t: int) -> bool:
    return service.turn(T0 + t * SECOND, float(t))


def silent_nodes(service: Played) -> set[str]:
    return {d.subject["node"] for d in service.diagnoses for v in d.verdicts if v.cause is Cause.TELEMETRY}


def outage(service: Played, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    put(service, samples, 0, LAST)
    for t in range(100, LAST, 5):
        assert turn(service, t)

    def away(*_: object, **__: object) -> list[Sample]:
        raise StoreDown("store: is the server running?")

    with monkeypatch.context() as patch:
        patch.setattr(service.store, "samples", away)
        for t in range(LAST, BACK, 5):
            assert not turn(service, t)


def test_a_store_that_returns_before_the_backlog_makes_no_node_silent(
    service: Played, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outage(service, samples, monkeypatch)
    for t in range(BACK, BACK + 15, 5):
        assert turn(service, t)
        assert not silent_nodes(service)
        assert {d.headline.key for d in service.diagnoses} == {"rules.summary.gap"}
    put(service, samples, LAST, 400)
    for t in range(BACK + 15, 400, 5):
        assert turn(service, t)
        assert not silent_nodes(service)
    assert not service.machine.alerts
    stored = service.store.samples("verdict", start_ns=T0, end_ns=T0 + 10**13)
    assert "telemetry" not in {sample.tags.get("cause") for sample in stored}
    told = [record for record in caplog.records if "silent" in record.getMessage()]
    assert len(told) == 1 and told[0].levelno == logging.WARNING
    assert told[0].getMessage().startswith("the store answers again after 45 s; ")
    down = next(record.getMessage() for record in caplog.records if "server running" in record.getMessage())
    assert down == "store: is the server running? Trying again"


def test_a_node_that_stays_silent_after_the_grace_is_judged(
    service: Played, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    outage(service, samples, monkeypatch)
    put(service, samples, LAST, 400, but="n2")
    for t in range(BACK, 400, 5):
        assert turn(service, t)
        assert silent_nodes(service) == (set() if t < BACK + 60 else {"n2"}), t


def test_one_silent_node_among_speaking_ones_is_judged_at_once(service: Played, samples: Sequence[Sample]) -> None:
    put(service, samples, 0, LAST)
    put(service, samples, LAST, 400, but="n2")
    for t in range(100, 250, 5):
        assert turn(service, t)
        assert silent_nodes(service) == (set() if t < LAST + 29 else {"n2"}), t


def test_all_nodes_silent_at_one_instant_are_judged_only_after_the_grace(
    service: Played, samples: Sequence[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    put(service, samples, 0, LAST)
    found = {}
    for t in range(100, 300, 5):
        assert turn(service, t)
        found[t] = silent_nodes(service)
    held = [t for t in found if t < LAST + 15 + 60]
    assert all(not found[t] for t in held)
    assert found[295] == {"n1", "n2", "n3"}
    told = [record.getMessage() for record in caplog.records if "fell silent together" in record.getMessage()]
    assert len(told) == 1


def test_a_place_is_named_with_labels_and_each_name_once() -> None:
    place = {"node": "sim-n02", "rack": "sim-r1", "circuit": "sim-c1", "cluster": "simulated", "origin": "simulated"}
    assert named_place(place) == "node sim-n02, rack sim-r1, circuit sim-c1 (simulated)"
    assert named_place({"cluster": "east"}) == "cluster east"
    assert named_place({}) == "all nodes"
