"""A PDU's load is its worst phase against 80 % of its breaker, read from a real SNMP agent in each maker's own tables and scales."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.collectors.interface import Examined, Tick
from agent.collectors.pdu import PduCollector, Visited, circuits_of, visit_pdu
from agent.power.pdu import PduReading, Phase, kind_of, read_pdu, worst
from agent.power.snmp import Index, SnmpTrouble, Value, visit
from agent.settings import PduTarget
from telemetry.catalogue import check
from telemetry.messages import say
from telemetry.sample import Sample
from tests.doubles.snmp.agent import COMMUNITY, SnmpAgent

APC, APC_ID = "1.3.6.1.4.1.318.1.1.26", "1.3.6.1.4.1.318.1.3.4.5"
SENTRY, SENTRY_ID = "1.3.6.1.4.1.1718.4.1", "1.3.6.1.4.1.1718.4"
RARITAN, RARITAN_ID = "1.3.6.1.4.1.13742.6", "1.3.6.1.4.1.13742.6"

APC_ROWS: dict[str, int | str] = {
    # three phases of one PDU of 30 A, all different; device power, peaks and banks stand beside them with other numbers
    f"{APC}.4.2.1.9.1": 30,
    f"{APC}.4.3.1.5.1": 311,
    **{f"{APC}.6.3.1.2.{n}": 1 for n in (1, 2, 3)},
    **{f"{APC}.6.3.1.4.{n}": 2 for n in (1, 2, 3)},
    f"{APC}.6.3.1.5.1": 113,
    f"{APC}.6.3.1.5.2": 204,
    f"{APC}.6.3.1.5.3": 47,
    f"{APC}.6.3.1.6.1": 207,
    f"{APC}.6.3.1.6.2": 208,
    f"{APC}.6.3.1.6.3": 209,
    f"{APC}.6.3.1.7.1": 234,
    f"{APC}.8.3.1.5.1": 333,
}
SENTRY_ROWS: dict[str, int | str] = {
    f"{SENTRY}.3.3.1.3.1.1": 7777,
    **{f"{SENTRY}.4.2.1.6.1.1.{n}": 32 for n in (1, 2, 3)},
    f"{SENTRY}.4.3.1.3.1.1.1": 1123,
    f"{SENTRY}.4.3.1.3.1.1.2": 874,
    f"{SENTRY}.4.3.1.3.1.1.3": 1987,
    f"{SENTRY}.4.3.1.5.1.1.1": 351,
    f"{SENTRY}.5.3.1.3.1.1.1": 2401,
    f"{SENTRY}.5.3.1.3.1.1.2": 2385,
    f"{SENTRY}.5.3.1.3.1.1.3": 2377,
}


def raritan_poles(digits: int = 3) -> dict[str, int | str]:
    """Two poles are measured, each with a current, an active power and a voltage; the inlet as a whole has other numbers."""
    rows: dict[str, int | str] = {f"{RARITAN}.3.3.3.1.7.1.1": "32A", f"{RARITAN}.5.2.3.1.4.1.1.1": 99}
    for pole, milliampere, volt in ((1, 9876, 229), (2, 21012, 231), (3, 4321, 233)):
        for sensor, value, unit, places in ((1, milliampere, 2, digits), (4, volt, 1, 0), (5, 2345, 3, 0)):
            index = f"1.1.{pole}.{sensor}"
            rows[f"{RARITAN}.3.3.6.1.6.{index}"] = unit
            rows[f"{RARITAN}.3.3.6.1.7.{index}"] = places
            rows[f"{RARITAN}.5.2.4.1.2.{index}"] = 1
            rows[f"{RARITAN}.5.2.4.1.4.{index}"] = value
    return rows


def raritan_inlet() -> dict[str, int | str]:
    """A single phase: no poles."""
    rows: dict[str, int | str] = {f"{RARITAN}.3.3.3.1.7.1.1": "16A"}
    for sensor, value, unit, places in ((1, 715, 2, 2), (4, 2304, 1, 1), (5, 1640, 3, 0)):
        rows[f"{RARITAN}.3.3.4.1.6.1.1.{sensor}"] = unit
        rows[f"{RARITAN}.3.3.4.1.7.1.1.{sensor}"] = places
        rows[f"{RARITAN}.5.2.3.1.2.1.1.{sensor}"] = 1
        rows[f"{RARITAN}.5.2.3.1.4.1.1.{sensor}"] = value
    return rows


class Table:
    """A device that answers from rows at once."""

    def __init__(self, rows: Mapping[str, object]) -> None:
        self.rows = rows

    async def get(self, oid: str) -> Value | None:
        return self.rows.get(oid)  # type: ignore[return-value]

    async def column(self, oid: str) -> Mapping[Index, Value]:
        return {
            tuple(int(part) for part in name[len(oid) + 1 :].split(".")): value  # type: ignore[misc]
            for name, value in self.rows.items()
            if name.startswith(f"{oid}.")
        }


def read(rows: Mapping[str, object], kind: str) -> PduReading:
    return asyncio.run(read_pdu(Table(rows), kind))


def target(port: int = 161, **options: Any) -> PduTarget:
    settings: dict[str, Any] = {"host": "127.0.0.1", "port": port, "deadline_s": 10.0, "every_s": 5.0}
    if "user" not in options:
        settings["community"] = COMMUNITY
    return PduTarget(name="rack2-a", **{**settings, **options})


@pytest.fixture
def snmp(
    tmp_path: Path, free_port: Callable[[], int], need_program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, Mapping[str, int | str]], SnmpAgent]]:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    need_program("snmpd")
    agents: list[SnmpAgent] = []

    def start(object_id: str, rows: Mapping[str, int | str]) -> SnmpAgent:
        agent = SnmpAgent(tmp_path / str(len(agents)), free_port(), object_id, rows)
        agents.append(agent)
        agent.__enter__()
        give_up_s = time.monotonic() + 90
        while visit_pdu(target(agent.port, deadline_s=1.0)).state == "silent":
            assert time.monotonic() < give_up_s, "snmpd did not come up"
        return agent

    yield start
    for agent in agents:
        agent.__exit__(None, None, None)


@pytest.mark.server
@pytest.mark.parametrize(
    ("object_id", "rows", "kind", "current_a", "voltage_v", "rating_a"),
    [
        (APC_ID, APC_ROWS, "apc", 20.4, 208.0, 30.0),
        (SENTRY_ID, SENTRY_ROWS, "servertech", 19.87, 237.7, 32.0),
        (RARITAN_ID, raritan_poles(), "raritan", 21.012, 231.0, 32.0),
        (RARITAN_ID, raritan_inlet(), "raritan", 7.15, 230.4, 16.0),
    ],
)
def test_the_worst_phase_of_each_make_comes_in_amperes_and_volts(
    snmp: Callable[..., SnmpAgent],
    object_id: str,
    rows: Mapping[str, int | str],
    kind: str,
    current_a: float,
    voltage_v: float,
    rating_a: float,
) -> None:
    visited = visit_pdu(target(snmp(object_id, rows).port))
    assert (visited.state, visited.kind) == ("ok", kind)
    phase = worst(visited.phases)
    assert phase is not None
    assert phase.current_a == pytest.approx(current_a)
    assert phase.voltage_v == pytest.approx(voltage_v)
    assert phase.rating_a == pytest.approx(rating_a)
    assert phase.load_pct == pytest.approx(100 * current_a / (0.8 * rating_a))


@pytest.mark.server
def test_a_changed_current_is_read_and_version_3_is_spoken_with_sha_1_and_sha_256(
    snmp: Callable[..., SnmpAgent],
) -> None:
    agent = snmp(APC_ID, APC_ROWS)
    secrets = {"auth_password": "authentic-9", "privacy_password": "private-99"}
    for user in ("watch", "newer"):
        agent.serve(APC_ROWS)
        assert visit_pdu(target(agent.port, user=user, **secrets)).phases[0].current_a == pytest.approx(11.3)
        agent.serve({**APC_ROWS, f"{APC}.6.3.1.5.1": 114})
        assert visit_pdu(target(agent.port, user=user, **secrets)).phases[0].current_a == pytest.approx(11.4)
    for user, password in (("nobody", "authentic-9"), ("watch", "wrong-wrong")):
        refused = target(agent.port, user=user, auth_password=password, privacy_password="private-99")
        assert visit_pdu(refused).state == "refused"


@pytest.mark.server
def test_a_wrong_community_and_a_hung_pdu_are_silence_by_the_deadline(snmp: Callable[..., SnmpAgent]) -> None:
    agent = snmp(APC_ID, APC_ROWS)
    assert visit_pdu(target(agent.port, community="not-it", deadline_s=1.0)).state == "silent"
    agent.stop()
    began_s = time.monotonic()
    assert visit_pdu(target(agent.port, deadline_s=1.0)).state == "silent"
    assert time.monotonic() - began_s < 30


def test_a_name_without_an_address_and_a_closed_port_say_so(free_port: Callable[[], int]) -> None:
    assert visit_pdu(target(host="no-such-host.invalid")).state == "unknown_host"
    assert visit_pdu(target(free_port(), deadline_s=1.0)).state == "silent"


@pytest.mark.parametrize("manner", ["garbage", "echo", "other requests' answers", "giant"])
def test_what_speaks_no_snmp_ends_the_visit_by_its_deadline(manner: str) -> None:
    """A peer that answers each request with an endless row of packets."""
    seed = random.Random(manner)
    done = threading.Event()

    def answer(peer: socket.socket) -> None:
        peer.settimeout(0.1)
        data, address = b"", None
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                data, address = peer.recvfrom(9999)
            if address is None:
                continue
            flipped = bytearray(data)
            flipped[-20] ^= 0x55  # within the request's number
            packets = {"garbage": seed.randbytes(50), "echo": data, "giant": seed.randbytes(60_000)}
            peer.sendto(packets.get(manner, bytes(flipped)), address)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=answer, args=(peer,))
        thread.start()
        try:
            began_s = time.monotonic()
            assert visit_pdu(target(peer.getsockname()[1], deadline_s=1.0)).state in ("broken", "silent")
            assert time.monotonic() - began_s < 30
        finally:
            done.set()
            thread.join()


def test_no_secret_is_in_what_a_failed_visit_raises(free_port: Callable[[], int]) -> None:
    with pytest.raises(SnmpTrouble) as caught:
        visit(target(free_port(), deadline_s=1.0), lambda device: device.get("1.3"))
    assert COMMUNITY not in repr(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("object_id", "kind"),
    [
        (APC_ID, "apc"),
        (f".{SENTRY_ID}", "servertech"),
        (RARITAN_ID, "raritan"),
        ("1.3.6.1.4.1.3181.1", ""),
        ("1.3.6.1.4.1.8072.3.2.10", ""),
        ("", ""),
        (None, ""),
        (318, ""),
    ],
)
def test_the_make_is_known_by_the_whole_enterprise_number(object_id: Value | None, kind: str) -> None:
    assert kind_of(object_id) == kind


@pytest.mark.parametrize("digits", [0, 1, 2, 3])
def test_a_raritan_value_is_scaled_by_its_digits_column(digits: int) -> None:
    (first, *_) = read({**raritan_poles(digits), f"{RARITAN}.5.2.4.1.4.1.1.1.1": 4321}, "raritan").phases
    assert first.current_a == pytest.approx(4321 / 10**digits)


@pytest.mark.parametrize(
    ("oid", "value"),
    [("3.3.6.1.7.1.1.2.1", 10), ("3.3.6.1.7.1.1.2.1", -1), ("3.3.6.1.6.1.1.2.1", 3), ("5.2.4.1.2.1.1.2.1", 2)],
)
def test_a_raritan_value_with_odd_digits_unit_or_availability_costs_its_phase_only(oid: str, value: int) -> None:
    phases = read({**raritan_poles(), f"{RARITAN}.{oid}": value}, "raritan").phases
    assert [round(phase.current_a, 3) for phase in phases] == [9.876, 4.321]


@pytest.mark.parametrize("value", [-1, -113, 2**31 - 1, 2**64, "113", "", None, 1e300, float("nan"), True, b"\x00"])
def test_a_current_that_cannot_be_true_costs_its_phase_only(value: object) -> None:
    phases = read({**APC_ROWS, f"{APC}.6.3.1.5.2": value}, "apc").phases
    assert [round(phase.current_a, 1) for phase in phases] == [11.3, 4.7]


def test_a_voltage_that_is_not_measured_is_absent_and_not_minus_one() -> None:
    phases = read({**APC_ROWS, f"{APC}.6.3.1.6.1": -1, f"{APC}.6.3.1.6.2": 0}, "apc").phases
    assert [phase.voltage_v for phase in phases] == [None, None, 209.0]


def test_each_pdu_of_a_daisy_chain_has_its_own_rating() -> None:
    rows = {**APC_ROWS, f"{APC}.4.2.1.9.2": 16, f"{APC}.6.3.1.2.3": 2}
    assert [phase.rating_a for phase in read(rows, "apc").phases] == [30.0, 30.0, 16.0]


def test_a_smaller_current_on_a_smaller_breaker_is_the_worse_one() -> None:
    phases = (Phase(20.0, rating_a=60.0), Phase(12.0, rating_a=16.0))
    assert worst(phases) == phases[1]
    assert worst((Phase(20.0), Phase(12.0, rating_a=16.0))) == Phase(20.0)
    assert worst(()) is None


def test_thirty_amperes_may_carry_twenty_four_for_hours() -> None:
    assert Phase(24.0, rating_a=30.0).load_pct == pytest.approx(100.0)
    assert Phase(24.0).load_pct is None


@pytest.mark.server
def test_the_configured_rating_goes_first_and_the_configured_voltage_last(snmp: Callable[..., SnmpAgent]) -> None:
    agent = snmp(APC_ID, {**APC_ROWS, f"{APC}.6.3.1.6.2": -1, f"{APC}.4.2.1.9.1": 0})
    assert visit_pdu(target(agent.port)).state == "unrated"
    visited = visit_pdu(target(agent.port, rating_a=40.0, voltage_v=415.0))
    assert visited.state == "ok"
    assert [(phase.rating_a, phase.voltage_v) for phase in visited.phases] == [
        (40.0, 207.0),
        (40.0, 415.0),
        (40.0, 209.0),
    ]
    assert visit_pdu(target(agent.port, kind="raritan")).state == "empty"
    assert visit_pdu(target(snmp("1.3.6.1.4.1.8072.3.2.10", {}).port)).state == "foreign"


class Visits:
    """A PDU whose next visits the test decides."""

    def __init__(self, *visits: Visited) -> None:
        self.left = list(visits)

    def __call__(self, _target: PduTarget) -> Visited:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def collected(collector: PduCollector, visits: int, every_s: float = 5.0) -> list[Sample]:
    """The samples of so many visits, at ticks on a clock of the test's own."""
    samples: list[Sample] = []
    for number in range(1, visits + 1):
        now_s = number * 2 * every_s
        samples += collector.collect(Tick(number, number, now_s))
        give_up_s = time.monotonic() + 90
        while any(place.periodic._worker.busy for place in collector._places):
            assert time.monotonic() < give_up_s
            time.sleep(0.002)
        samples += collector.collect(Tick(number, number, now_s + 0.1))
    return [check(sample) for sample in samples]


OK = Visited("ok", "apc", (Phase(11.0, 207.0, 30.0), Phase(20.4, 208.0, 30.0)))


def test_each_visit_makes_one_sample_of_its_worst_phase() -> None:
    collector = PduCollector([target()], {"node": "n1", "circuit": "c4"}, read=Visits(OK))
    samples = collected(collector, 3)
    assert [sample.tags for sample in samples] == [{"node": "n1", "circuit": "c4"}] * 3
    assert samples[0].fields == {
        "current_a": 20.4,
        "voltage_v": 208.0,
        "rating_a": 30.0,
        "load_pct": pytest.approx(85.0),
    }
    collector.close()


def test_a_pdu_that_is_lost_and_back_makes_two_events_and_no_circuit_between() -> None:
    visits = Visits(OK, Visited("silent"), Visited("silent"), Visited("broken"), OK, OK)
    collector = PduCollector([target()], {"node": "n1"}, read=visits)
    samples = collected(collector, 6)
    assert [sample.measurement for sample in samples] == ["circuit", "event", "event", "circuit", "circuit"]
    lost, back = (sample for sample in samples if sample.measurement == "event")
    assert (lost.tags["subject"], lost.fields["code"], back.fields["code"]) == ("rack2-a", 1, 0)
    assert "rack2-a" in str(lost.fields["text"])
    assert collector.errors == 3
    collector.close()


@pytest.mark.parametrize("state", ["ok", "unrated", "silent", "unknown_host", "refused", "broken", "foreign", "empty"])
def test_every_state_has_a_finding_in_both_languages_and_a_remedy_where_something_is_wrong(state: Any) -> None:
    visited = Visited(state, "apc", OK.phases if state in ("ok", "unrated") else ())
    collector = PduCollector([target()], {"node": "n1"}, read=Visits(visited))
    assert isinstance(collector, Examined)
    assert collector.pending
    collected(collector, 1)
    assert not collector.pending
    for language in ("en", "zh"):
        (finding,) = collector.findings(language)
        assert (finding.level == "ok") == (state == "ok")
        assert bool(finding.remedy) == (state != "ok")
        assert COMMUNITY not in finding.text + finding.remedy
        assert "{" not in finding.text + finding.remedy
    collector.close()


def test_a_visit_that_never_ends_holds_up_no_tick_and_is_told() -> None:
    release = threading.Event()

    def hang(_target: PduTarget) -> Visited:
        release.wait(60)
        return OK

    collector = PduCollector([target(deadline_s=1.0)], {"node": "n1"}, read=hang)
    samples = [sample for n in range(1, 12) for sample in collector.collect(Tick(n, n, float(n)))]
    release.set()
    assert [(sample.measurement, sample.fields["code"]) for sample in samples] == [("event", 1)]
    assert say("agent.pdu.silent") in str(samples[0].fields["text"])
    collector.close()


def test_two_pdus_are_never_one_circuit() -> None:
    targets = [
        PduTarget("a", "h", community="c", circuit="c1"),
        PduTarget("b", "h", community="c"),
        PduTarget("c", "h", community="c", circuit="c1"),
        PduTarget("d", "h", community="c"),
    ]
    assert circuits_of(targets, "host") == ["c1", "host", "c", "d"]
    assert circuits_of(targets, None) == ["c1", "b", "c", "d"]
