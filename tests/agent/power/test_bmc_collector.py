"""The BMC collector: one reading a period, its events once, and no tick waits for a BMC."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.collectors.bmc import BmcCollector
from agent.collectors.interface import Examined, Tick
from agent.latest import LatestSamples
from agent.power.fault import BmcFault, Trouble
from agent.power.reading import BmcReading, Supply
from agent.sampler import COLLECTORS, slow_measurements
from agent.settings import AgentSettings, BmcTarget
from telemetry.catalogue import check
from telemetry.sample import Sample

TAGS = {"node": "n07", "rack": "r2"}
TARGET = BmcTarget("https://bmc.example", every_s=30.0)
SUPPLIES = (
    Supply("PSU1", True, 410.0, 385.0, 2400.0, 229.0),
    Supply("PSU2", True, 405.0, 380.0, 2600.0, 231.0),
)
READING = BmcReading(
    supplies=SUPPLIES, spares=1, redundancy=2, node_w=822.0, cap_w=1900.0, inlet_c=22.0, exhaust_c=39.0, fan_pct=41.0
)


class Reader:
    """Answers with what `next` holds: a reading, a fault to raise, or an event to wait for first."""

    def __init__(self) -> None:
        self.next: BmcReading | BmcFault = READING
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self.closed = 0

    def read(self) -> BmcReading:
        self.asked += 1
        self.gate.wait(120)
        if isinstance(self.next, BmcFault):
            raise self.next
        return self.next

    def close(self) -> None:
        self.closed += 1
        self.gate.set()


class Visits:
    """A collector over a reader that does what it is told, and a clock that goes on by the period."""

    def __init__(self, target: BmcTarget = TARGET, language: str = "en") -> None:
        self.reader = Reader()
        self.collector = BmcCollector(TAGS, target, self.reader, language)
        self.second = 0.0
        self.number = 0

    def tick(self, second: float) -> list[Sample]:
        self.second = second
        self.number += 1
        samples = list(self.collector.collect(Tick(self.number, int((1000 + second) * 1e9), second)))
        return [check(sample) for sample in samples]

    def period(self, answer: BmcReading | BmcFault = READING) -> list[Sample]:
        """The samples of one whole period: the visit starts at its beginning, its answer is taken a little later."""
        self.reader.next = answer
        started = self.tick(self.second + 30.0)
        until_s = time.monotonic() + 60
        while self.collector._periodic._worker.busy and time.monotonic() < until_s:
            time.sleep(0.002)
        return [*started, *self.tick(self.second + 1.0)]


def events(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    return [(s.tags["subject"], str(s.fields["detail"])) for s in samples if s.measurement == "event"]


@pytest.fixture
def visits() -> Visits:
    return Visits()


def test_a_reading_is_written_once_at_the_tick_in_which_it_was_taken(visits: Visits) -> None:
    samples = visits.period()
    assert [sample.measurement for sample in samples] == ["psu", "psu", "power", "thermal"]
    assert {sample.time_ns for sample in samples} == {int((1000 + 31.0) * 1e9)}
    assert samples[2].fields["headroom_redundant_pct"] == pytest.approx(100 * (1 - 765 / 2400))
    for second in range(32, 60):
        assert visits.tick(float(second)) == []
    assert visits.reader.asked == 1


def test_a_bmc_that_hangs_holds_up_no_tick_and_is_reported_once_and_once_when_it_is_back(visits: Visits) -> None:
    visits.reader.gate.clear()
    began_s = time.monotonic()
    found = [visits.tick(float(second)) for second in range(301)]
    assert time.monotonic() - began_s < 60
    assert events([sample for samples in found for sample in samples]) == [("bmc", "silent")]
    assert events(found[90]) == [("bmc", "silent")]
    assert visits.reader.asked <= 1
    visits.reader.gate.set()
    assert events(visits.period())[0] == ("bmc", "back")
    assert events(visits.period()) == []


def test_a_bmc_that_refuses_is_silent_after_three_periods_and_says_why(visits: Visits) -> None:
    fault = BmcFault(Trouble.REFUSED, "HTTP 401")
    found = [visits.period(fault) for _ in range(6)]
    assert visits.collector.errors == 6
    silent = [sample for samples in found for sample in samples]
    assert events(silent) == [("bmc", "silent")]
    assert "HTTP 401" in str(silent[0].fields["text"])
    assert events(visits.period()) == [("bmc", "back")]


def test_what_changed_is_told_once_and_the_first_reading_is_no_change(visits: Visits) -> None:
    assert events(visits.period()) == []
    hurt = replace(
        READING, supplies=(SUPPLIES[0], replace(SUPPLIES[1], ok=False)), redundancy=0, cap_w=1500.0, leak=None
    )
    assert events(visits.period(hurt)) == [
        ("node", "PSU2: failed"),
        ("node", "redundancy lost"),
        ("node", "cap 1900 W -> 1500 W"),
    ]
    assert events(visits.period(hurt)) == []
    unread = replace(hurt, supplies=None, redundancy=None, cap_w=None)
    assert events(visits.period(unread)) == []  # what can't be read is no change
    assert events(visits.period(hurt)) == []
    assert events(visits.period(replace(READING, cap_w=1500.0, leak=False))) == [
        ("node", "PSU2: back"),
        ("node", "redundancy full"),
    ]
    assert events(visits.period(replace(READING, supplies=SUPPLIES[:1], cap_w=1500.0, leak=True))) == [
        ("node", "PSU2: gone"),
        ("node", "leak"),
    ]


def test_a_supply_that_is_put_in_is_told_and_one_that_is_put_in_broken_too(visits: Visits) -> None:
    visits.period(replace(READING, supplies=SUPPLIES[:1]))
    assert events(visits.period()) == [("node", "PSU2: added")]
    third = replace(SUPPLIES[1], name="PSU3", ok=False)
    assert events(visits.period(replace(READING, supplies=(*SUPPLIES, third))))[:2] == [
        ("node", "PSU3: added"),
        ("node", "PSU3: failed"),
    ]


def test_a_cap_that_is_set_or_lifted_is_told_and_one_that_was_not_read_is_not(visits: Visits) -> None:
    visits.period()
    uncapped, unread = replace(READING, cap_w=None), replace(READING, cap_w=None, node_w=None)
    assert [events(visits.period(answer)) for answer in (uncapped, uncapped, READING)] == [[], [], []]
    assert [events(visits.period(unread)) for _ in range(5)] == [[]] * 5
    assert [events(visits.period(uncapped)) for _ in range(4)] == [[], [], [("node", "cap 1900 W lifted")], []]
    assert events(visits.period()) == [("node", "cap 1900 W set")]
    assert events(visits.period(replace(READING, cap_w=1900.3))) == []


def test_events_speak_the_agents_language() -> None:
    visits = Visits(language="zh")
    visits.period()
    hurt = replace(READING, supplies=(replace(SUPPLIES[0], ok=False), SUPPLIES[1]))
    texts = [sample.fields["text"] for sample in visits.period(hurt) if sample.measurement == "event"]
    assert texts[0] == "电源模块 PSU1 不再供电"


def test_numbers_beyond_any_hardware_and_names_that_tear_lines_are_not_written(visits: Visits) -> None:
    wild = BmcReading(
        supplies=(
            Supply("P\nSU\x00", True, 1e9, -3.0, 0.0, float("nan"), 47.0),
            Supply("twin", True, 400.0, 380.0, 2400.0, 230.0),
            Supply("twin", False, 1.0, 2.0, 3.0, 4.0),
        ),
        node_w=1e300,
        cap_w=32_767_000.0,
        inlet_c=-273.0,
        fan_min_rpm=1e7,
        fan_pct=101.0,
        redundancy=7,
        spares=-1,
    )
    samples = visits.period(wild)
    assert [dict(sample.fields) for sample in samples if sample.measurement != "psu"] == []
    assert [(s.tags["psu"], dict(s.fields)) for s in samples] == [
        ("P SU", {"ok": 1}),
        ("twin", {"input_w": 400.0, "output_w": 380.0, "capacity_w": 2400.0, "voltage_v": 230.0, "ok": 1}),
        ("twin #3", {"input_w": 1.0, "output_w": 2.0, "capacity_w": 3.0, "voltage_v": 4.0, "ok": 0}),
    ]


def test_it_says_how_the_bmc_is_and_what_to_do(visits: Visits) -> None:
    collector = visits.collector
    assert isinstance(collector, Examined)
    assert [finding.level for finding in collector.findings("en")] == ["warning"]
    visits.reader.gate.clear()
    visits.tick(0.0)
    assert collector.pending
    visits.reader.gate.set()
    visits.period(BmcFault(Trouble.UNTRUSTED, "self-signed certificate", "AB:CD"))
    assert not collector.pending
    (finding,) = collector.findings("en")
    assert finding.level == "error" and "self-signed" in finding.text
    assert 'fingerprint_sha256 = "AB:CD"' in finding.remedy
    visits.period(replace(READING, exhaust_c=None, problems=("Thermal: HTTP 503",)))
    ok, missing, problem = collector.findings("en")
    assert ok.level == "ok" and "power supplies 2" in ok.text and "822 W" in ok.text and "22 °C" in ok.text
    assert missing.level == "warning" and missing.text == "it does not tell: exhaust air"
    assert problem.text == "Thermal: HTTP 503"
    visits.period(replace(READING, redundancy=0, supplies=(SUPPLIES[0], replace(SUPPLIES[1], ok=False))))
    texts = [finding.text for finding in collector.findings("zh")]
    assert "不供电的电源模块:PSU2" in texts and any("供电冗余已丧失" in text for text in texts)


def test_switched_off_verification_and_feeds_that_name_no_supply_are_warned_of() -> None:
    target = replace(TARGET, verify_tls=False, redundancy="A/B", feed_b=("PSU 9",))
    visits = Visits(target)
    visits.period()
    texts = {finding.text: finding.remedy for finding in visits.collector.findings("en")}
    assert any("not verified" in text for text in texts)
    assert any("PSU1, PSU2" in remedy for remedy in texts.values())


def test_closing_closes_the_reader(visits: Visits) -> None:
    visits.collector.close()
    assert visits.reader.closed == 1


def test_no_bmc_no_collector(tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings = AgentSettings(tmp_path, "sqlite:///x.db")
    assert COLLECTORS["bmc"](settings, TAGS, None) is None
    assert not {"psu", "power", "thermal"} & slow_measurements(settings).keys()


def test_the_page_shows_a_bmcs_numbers_for_three_of_its_periods(tmp_path, visits: Visits) -> None:  # type: ignore[no-untyped-def]
    settings = AgentSettings(tmp_path, "sqlite:///x.db", bmc=TARGET)
    latest = LatestSamples(1.0, None, slow_measurements(settings))
    latest.publish([*visits.period(), Sample("host", TAGS, {"load1": 1.0}, 1)], 100.0)
    for second in range(101, 191):
        latest.publish([], float(second))
        shown = {sample.measurement for sample in latest.fresh(float(second))}
        assert shown == {"psu", "power", "thermal"} | ({"host"} if second <= 103 else set())
    assert latest.fresh(191.0) == []
