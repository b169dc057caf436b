"""The clock's offset is what the time service says of it, with its sign; a clock that nobody steers has none."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from agent.collectors.clock_offset import (
    ClockOffsetCollector,
    ClockState,
    Kernel,
    chrony_state,
    kernel_state,
    read_kernel,
)
from agent.collectors.interface import Tick
from telemetry.catalogue import check
from telemetry.sample import Sample

PLL, UNSYNC, NANO = 0x0001, 0x0040, 0x2000


def tracking(correction: str = "0.000123456", leap: str = "Normal", reference: str = "C0A80101") -> str:
    return (
        f"{reference},192.168.1.1,3,1795981572.65,{correction},-0.5,0.25,-12.345,0.001,0.05,0.012,0.003,64.2,{leap}\n"
    )


def collected(collector: ClockOffsetCollector) -> list[Sample]:
    """Ticks until the first reading is in."""
    samples: list[Sample] = []
    give_up_s = time.monotonic() + 90
    number = 0
    while collector.pending and time.monotonic() < give_up_s:
        number += 1
        samples += collector.collect(Tick(number, number, float(number) / 100))
        time.sleep(0.01)
    assert not collector.pending
    return [check(sample) for sample in samples]


def test_a_clock_that_chrony_calls_slow_is_behind() -> None:
    assert chrony_state(tracking("0.000123456")) == ClockState("ok", "chrony", -0.000123456)
    assert chrony_state(tracking("-2.5", leap="Insert second")) == ClockState("ok", "chrony", 2.5)


@pytest.mark.parametrize("text", [tracking(leap="Not synchronised"), tracking(reference="7F7F0101")])
def test_a_chrony_without_a_source_leaves_the_clock_unsynchronised(text: str) -> None:
    assert chrony_state(text) == ClockState("unsynchronised", "chrony")


@pytest.mark.parametrize(
    "text", ["", "506 Cannot talk to daemon\n", "a,b,c\n", tracking("nan"), tracking("inf"), tracking("x")]
)
def test_a_chrony_that_says_nonsense_is_not_believed(text: str) -> None:
    assert chrony_state(text) is None


def test_the_kernels_phase_has_the_unit_that_its_status_names_and_the_sign_of_a_correction() -> None:
    assert kernel_state(Kernel(0, 1500, PLL)) == ClockState("ok", "adjtimex", pytest.approx(-0.0015))
    assert kernel_state(Kernel(0, -1500, PLL | NANO)) == ClockState("ok", "adjtimex", pytest.approx(1.5e-6))


@pytest.mark.parametrize("kernel", [Kernel(5, 0, PLL), Kernel(0, 3, PLL | UNSYNC)])
def test_an_unsynchronised_kernel_has_no_offset(kernel: Kernel) -> None:
    assert kernel_state(kernel) == ClockState("unsynchronised", "adjtimex")


def test_a_zero_that_no_service_has_put_there_is_not_an_offset() -> None:
    assert kernel_state(Kernel(0, 0, NANO)).state == "untold"


def test_this_machines_kernel_answers_or_says_that_it_does_not() -> None:
    kernel = read_kernel()
    assert kernel is None or 0 <= kernel.code <= 5


def test_an_offset_is_sampled_once_for_each_reading() -> None:
    collector = ClockOffsetCollector({"node": "n1"}, lambda: ClockState("ok", "chrony", 0.25))
    samples = collected(collector)
    samples += [sample for n in range(50, 60) for sample in collector.collect(Tick(n, n, n / 10))]
    assert [sample.fields for sample in samples] == [{"clock_offset_s": 0.25}]
    assert [finding.level for finding in collector.findings("en")] == ["ok"]
    collector.close()


@pytest.mark.parametrize("state", ["unsynchronised", "untold", "unreadable"])
def test_a_clock_without_an_offset_is_a_finding_and_no_sample(state: str) -> None:
    collector = ClockOffsetCollector({"node": "n1"}, lambda: ClockState(state, "adjtimex"))  # type: ignore[arg-type]
    assert collected(collector) == []
    for language in ("en", "zh"):
        (finding,) = collector.findings(language)
        assert finding.level == "warning"
        assert finding.remedy
    collector.close()


def test_chronyc_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for chronyc that answers only to the arguments of the real one."""
    program = tmp_path / "chronyc"
    program.write_text(f'#!/bin/sh\n[ "$*" = "-c tracking" ] && printf %s "{tracking("0.75").strip()}"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    collector = ClockOffsetCollector({"node": "n1"})
    assert [sample.fields for sample in collected(collector)] == [{"clock_offset_s": -0.75}]
    collector.close()
