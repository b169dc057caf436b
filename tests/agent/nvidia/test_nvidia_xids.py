"""XID errors: from NVML's events, from the kernel's log when NVML is silent, each once, of the right GPU, with what to do about it.

| public issue | what it is tested by |
|---|---|
| gpud#1003, gpumedic's dropped PCI domain | an address is normalised with its domain |
| gpud#164, NVSentinel#1440 | XID 0 and malformed lines are refused |
| gpud#525, gpud#987, dcgm-exporter#304 | one error told twice is one, five equal ones are five |
| dcgm-exporter#190, #500, #502, DCGM#277 | repeats are counted, no last value sticks |
| NVSentinel#155 | a loss that only a line of the log tells |
| NVSentinel#1629, #911 | each XID has a severity and an action |
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import pci
from agent.collectors.gpu import Patience
from agent.collectors.nvidia import NvidiaCollector
from agent.kernel_log import KernelLog
from agent.nvml import kernel_lines
from agent.nvml.kernel_lines import Told
from agent.nvml.xid_ledger import Source, XidLedger
from agent.timing import ReaderTiming
from telemetry import xid
from telemetry.catalogue import GPU_STATES
from telemetry.messages import catalogue
from tests.agent.nvidia.conftest import EVERY_TICK, UNHURRIED, Host, events, gpus, states
from tests.doubles.nvml.scenario import add_mig

HOPPER, AMPERE = "PCI:0008:01:00", "PCI:0009:01:00"  # they differ in the domain alone
LOST, HUNG = GPU_STATES.index("lost"), GPU_STATES.index("hung")


class Log:
    """A file in the form of /dev/kmsg."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sequence = 100
        path.write_text("6,100,1,-;NVRM: Xid (PCI:0008:01:00): 62, of before\n")

    def say(self, text: str) -> None:
        self.sequence += 1
        with self.path.open("a") as file:
            file.write(f"3,{self.sequence},{self.sequence * 1000},-;{text}\n")

    def xid(self, address: str, code: int) -> None:
        self.say(f"NVRM: Xid ({address}): {code}, pid=4242, name=python3, Ch 00000008")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "kmsg")


def watching(
    host: Host, log: Log, timing: ReaderTiming = EVERY_TICK, patience: Patience = UNHURRIED
) -> NvidiaCollector:
    made = NvidiaCollector({"node": "n07"}, timing, patience, kernel_log=KernelLog(kernel_lines.WORD, log.path))
    host.collectors.append(made)
    host.tick()
    return made


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("PCI:0008:01:00", "0008:01:00"),
        ("00000008:01:00.0", "0008:01:00"),
        ("0008:01:00.7", "0008:01:00"),
        ("0000:AF:1f", "0000:af:1f"),
        ("10000:e1:00.0", "10000:e1:00"),
        ("01:00.0", ""),
        ("PCI:", ""),
        ("", ""),
        ("gggg:01:00", ""),
    ],
)
def test_an_address_is_normalised_with_its_domain(text: str, address: str) -> None:
    assert pci.normalised(text) == address


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("NVRM: Xid (PCI:0008:01:00): 79, pid=4242, GPU has fallen off the bus.", Told("0008:01:00", 79)),
        ("NVRM: Xid (0000:0a:00): 13, Graphics Exception", Told("0000:0a:00", 13)),
        ("NVRM: Xid (PCI:0000:C1:00 GPU-I:05): 31, pid=1", Told("0000:c1:00", 31)),
        ("NVRM: Xid (PCI:0000:9b:00): 154", Told("0000:9b:00", 154)),
        (
            "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            Told("0000:9b:00", 154),
        ),
        ("NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.", Told("0000:41:00", None)),
        ("NVRM: GPU at PCI:0000:41:00.0 has fallen off the bus and is not responding.", Told("0000:41:00", None)),
        ("NVRM: Xid (PCI:0000:9b:00): GPU recovery action changed from 0x0 (None) to", None),
        ("NVRM: Xid (PCI:0000:9b:00): 0, pid=1", None),
        ("NVRM: Xid (PCI:0000:9b:00): -79, pid=1", None),
        ("NVRM: Xid (PCI:0000:9b:00): 7.5, pid=1", None),
        ("NVRM: Xid (PCI:0000:9b:00): 123456789, pid=1", None),
        ("NVRM: Xid (PCI:zz): 79, pid=1", None),
        ("NVRM: Xid (): 79", None),
        ("NVRM: a GPU has fallen off the bus", None),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06", None),
        ("usb 1-1: Xid (PCI:0008:01:00): 79", None),
    ],
)
def test_a_line_tells_an_xid_a_fall_or_nothing(line: str, told: Told | None) -> None:
    assert kernel_lines.parse(line) == told


@given(st.text())
def test_no_line_breaks_the_parser(text: str) -> None:
    kernel_lines.parse(f"NVRM: Xid ({text}")
    kernel_lines.parse(f"NVRM: Xid (PCI:0000:9b:00){text}")
    assert kernel_lines.parse(text) is None or "NVRM: Xid (" in text or "fallen off" in text


def test_the_log_tells_the_xids_of_a_card_whose_events_nvml_does_not_deliver(host: Host, log: Log) -> None:
    host.scenario.refuse(1, "register_events")
    watching(host, log)
    for code in (31, 31, 31, 31, 31, 79):
        log.xid(AMPERE, code)
    told = events(host.tick(), "xid")
    assert [(event.tags["subject"], event.fields["code"]) for event in told] == [("gpu1", 31)] * 5 + [("gpu1", 79)]
    assert told[0].fields["detail"] == "GPU-a9d3f210-0002"
    seen = gpus(host.tick())
    assert (seen["0001"].fields["xid_total"], seen["0002"].fields["xid_total"]) == (0, 6)


def test_what_was_in_the_log_before_the_agent_is_not_told(host: Host, log: Log) -> None:
    watching(host, log)
    samples = host.tick()
    assert events(samples, "xid") == []
    assert gpus(samples)["0001"].fields["xid_total"] == 0


@pytest.mark.parametrize("log_first", [True, False])
def test_an_xid_that_both_tell_is_one_and_five_equal_ones_are_five(host: Host, log: Log, log_first: bool) -> None:
    watching(host, log)

    def by_log() -> None:
        for _ in range(5):
            log.xid(HOPPER, 31)

    def by_nvml() -> None:
        for _ in range(5):
            host.scenario.xid(0, 31)

    ways = (by_log, by_nvml) if log_first else (by_nvml, by_log)
    told = []
    for way in ways:
        way()
        told += events(host.tick(), "xid")
    assert [event.fields["code"] for event in told] == [31] * 5
    assert gpus(host.tick())["0001"].fields["xid_total"] == 5


def test_equal_xids_of_two_gpus_or_a_minute_apart_are_not_one(host: Host, log: Log) -> None:
    watching(host, log)
    log.xid(HOPPER, 31)
    host.scenario.xid(1, 31)
    told = events(host.tick(), "xid")
    host.tick(seconds=30.0)
    host.tick(seconds=30.0)
    host.scenario.xid(0, 31)
    told += events(host.tick(), "xid")
    assert sorted(event.tags["subject"] for event in told) == ["gpu0", "gpu0", "gpu1"]


def test_events_that_a_hung_driver_tells_late_are_not_counted_again() -> None:
    ledger = XidLedger(window_s=5.0)
    assert ledger.is_new("log", "GPU-1", 119, 100.0, 100.0)
    assert not ledger.is_new("events", "GPU-1", 119, 190.0, 99.0)  # not heard since before the error
    assert ledger.is_new("events", "GPU-1", 119, 190.0, 99.0)  # a second one
    assert ledger.is_new("log", "GPU-1", 119, 300.0, 300.0)


@given(st.lists(st.tuples(st.sampled_from(["events", "log"]), st.sampled_from([31, 79])), max_size=60))
def test_of_each_error_as_many_are_new_as_the_source_that_tells_most(tellings: list[tuple[Source, int]]) -> None:
    ledger = XidLedger()
    new = {31: 0, 79: 0}
    for source, code in tellings:
        new[code] += ledger.is_new(source, "GPU-1", code, 1.0, 1.0)
    for code in new:
        by_events, by_log = (sum(telling == (source, code) for telling in tellings) for source in ("events", "log"))
        assert max(by_events, by_log) <= new[code] <= by_events + by_log


def test_the_log_speaks_while_the_driver_hangs(host: Host, log: Log) -> None:
    watching(host, log, ReaderTiming(takeover_s=0.5))
    host.scenario.hang(0)
    log.xid(HOPPER, 119)
    told = events(host.tick(), "xid")
    assert [(event.tags["subject"], event.fields["code"]) for event in told] == [("gpu0", 119)]
    assert "reset" in str(told[0].fields["text"])


def test_a_gpu_of_which_only_the_log_says_that_it_fell_is_lost_at_once_and_told_once(host: Host, log: Log) -> None:
    watching(host, log, ReaderTiming(takeover_s=0.5))
    host.scenario.hang(0)
    log.say("NVRM: GPU 0008:01:00.0: GPU has fallen off the bus.")
    told, seen = [], []
    for _ in range(5):
        samples = host.tick()
        told += events(samples, "gpu_lost")
        seen.append(states(samples).get("0001"))
    assert seen == [LOST] * 5
    assert [event.tags["subject"] for event in told] == ["gpu0"]
    assert "fallen off the bus" in str(told[0].fields["text"])
    host.scenario.release()
    host.until(lambda samples: states(samples) == {"0001": 0, "0002": 0})


def test_an_xid_of_an_unknown_address_is_told_with_the_address(host: Host, log: Log) -> None:
    watching(host, log)
    log.xid("PCI:000a:01:00", 62)
    told = events(host.tick(), "xid")
    assert [(event.tags["subject"], event.fields["detail"]) for event in told] == [("pci 000a:01:00", "000a:01:00")]
    assert {sample.fields["xid_total"] for sample in gpus(host.tick()).values()} == {0}


def test_an_xid_without_an_instance_to_blame_is_its_gpus(host: Host) -> None:
    """On MIG an event may name the instance's handle; its instance ids are all ones when it can't be attributed."""
    add_mig(host.scenario, 0)
    host.collector()
    host.tick()
    host.scenario.xid(8, 31)
    host.scenario.xid(0, 43)
    told = events(host.tick(), "xid")
    assert [(event.tags["subject"], event.fields["code"]) for event in told] == [("gpu0", 31), ("gpu0", 43)]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_xid_with_a_meaning_has_a_name_and_an_action_in_both_languages(language: str) -> None:
    plain = xid.text_of(9999, language)
    assert "9999" in plain
    for code, meaning in xid.MEANINGS.items():
        text = xid.text_of(code, language)
        assert str(code) in text
        assert catalogue()[f"gpu.xid_action.{meaning.action}"][language] in text
        assert catalogue()["gpu.xid.unnamed"][language] not in text


@pytest.mark.parametrize("code", [13, 31, 43, 45, 69, 94])
def test_an_applications_own_error_is_not_the_gpus_end(code: int) -> None:
    """An XID 45 that was treated as fatal drained healthy nodes (NVSentinel#1629)."""
    assert xid.MEANINGS[code].severity == "application"


@pytest.mark.parametrize(("code", "action"), [(48, "reset_gpu"), (95, "reset_gpu"), (79, "reboot"), (64, "replace")])
def test_what_takes_a_gpu_out_is_critical_and_says_what_to_do(code: int, action: str) -> None:
    assert xid.MEANINGS[code] == xid.Meaning("critical", action)
