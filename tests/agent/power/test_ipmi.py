"""The real ipmitool against simulated BMCs: live sensors, DCMI, one that hangs, and what must never be seen or left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.collectors.bmc import BmcCollector
from agent.collectors.interface import Tick
from agent.power.fault import BmcFault, Trouble
from agent.power.ipmi import IpmiReader
from agent.power.readers import reader_of
from agent.power.reading import BmcReading, Supply
from agent.settings import BmcTarget
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.ipmi import dcmi
from tests.doubles.ipmi.sensors import (
    DEGREES_C,
    FAN,
    OTHER,
    POWER_SUPPLY,
    POWER_UNIT,
    REDUNDANCY,
    RPM,
    TEMPERATURE,
    VOLTS,
    WATTS,
    Analog,
    Discrete,
)
from tests.doubles.ipmi.simulator import PASSWORD, USER, IpmiSimulator
from tests.processes import children_named

pytestmark = pytest.mark.server

SENSORS = (
    Analog("Inlet Temp", 1, TEMPERATURE, DEGREES_C, (7, 1)),
    Analog("Exhaust Temp", 2, TEMPERATURE, DEGREES_C, (7, 1)),
    Analog("CPU1 Temp", 3, TEMPERATURE, DEGREES_C, (3, 1)),
    Analog("Fan1A", 4, FAN, RPM, (29, 1), 120),
    Analog("Fan1B", 5, FAN, RPM, (29, 2), 120),
    Analog("Fan duty", 6, FAN, 0, (29, 3), percentage=True),
    Analog("Total Power", 7, OTHER, WATTS, (19, 1), 16),
    Analog("PS1 Input Power", 8, OTHER, WATTS, (10, 1), 8),
    Analog("PS2 Voltage", 9, 0x02, VOLTS, (10, 2)),
    Discrete("PS1 Status", 10, POWER_SUPPLY, (10, 1)),
    Discrete("PS2 Status", 11, POWER_SUPPLY, (10, 2)),
    Discrete("PS Redundancy", 12, POWER_UNIT, (7, 1), REDUNDANCY),
)
VALUES = {
    "Inlet Temp": 24,
    "Exhaust Temp": 43,
    "CPU1 Temp": 61,
    "Fan1A": 70,
    "Fan1B": 66,
    "Fan duty": 55,
    "Total Power": 183,
    "PS1 Input Power": 190,
    "PS2 Voltage": 208,
    "PS1 Status": 0b0001,
    "PS2 Status": 0b0001,
    "PS Redundancy": 0b0001,
}
AT_FIRST = BmcReading(
    supplies=(Supply("PSU 1", ok=True, input_w=1520.0), Supply("PSU 2", ok=True, voltage_v=208.0)),
    redundancy=2,
    node_w=2928.0,
    inlet_c=24.0,
    exhaust_c=43.0,
    fan_min_rpm=7920.0,
    fan_pct=55.0,
)


def wait_until(what: str, holds: Callable[[], bool], limit_s: float = 120.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.05)


def target(port: int, **options: Any) -> BmcTarget:
    settings: dict[str, Any] = {
        "url": f"ipmi://127.0.0.1:{port}",
        "user": USER,
        "password": PASSWORD,
        "deadline_s": 60.0,
    }
    return BmcTarget(**{**settings, **options})


@pytest.fixture
def simulator(
    tmp_path: Path, free_port: Callable[[], int], need_program: Callable[[str], str]
) -> Iterator[IpmiSimulator]:
    need_program("ipmi_sim")
    need_program("ipmitool")
    double = IpmiSimulator(tmp_path / "bmc", free_port(), SENSORS, VALUES)
    reader = IpmiReader(target(double.port))

    def answers() -> bool:
        with contextlib.suppress(BmcFault):
            return reader.read() == AT_FIRST
        return False

    try:
        wait_until("ipmi_sim did not come up", answers)
        yield double
    finally:
        reader.close()
        double.close()


class Spy:
    """An `ipmitool` first on the PATH that notes its arguments and then is the real one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._notes = folder / "notes"
        self._notes.touch()
        real = shutil.which("ipmitool")
        program = folder / "ipmitool"
        program.write_text(f'#!/bin/sh\necho "$@" >> {self._notes}\nexec {real} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    @property
    def runs(self) -> list[str]:
        return self._notes.read_text().splitlines()

    def count(self, command: str) -> int:
        return sum(command in run for run in self.runs)


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulator: IpmiSimulator) -> Spy:
    return Spy(tmp_path / "spy", monkeypatch)


@contextlib.contextmanager
def reader_at(port: int, memory: Path | None = None, **options: Any) -> Iterator[IpmiReader]:
    reader = IpmiReader(target(port, **options), memory=memory)
    try:
        yield reader
    finally:
        reader.close()


def test_what_changes_at_the_bmc_is_read(simulator: IpmiSimulator) -> None:
    with reader_at(simulator.port) as reader:
        assert reader.read() == AT_FIRST
        changed = {
            "Inlet Temp": 38,
            "Fan1B": 0,
            "Total Power": 201,
            "PS1 Input Power": 0,
            "PS1 Status": 0b1001,
            "PS2 Status": 0b0000,
            "PS2 Voltage": 0,
            "PS Redundancy": 0b0010,
        }
        for name, value in changed.items():
            simulator.set(name, value)
        expected = BmcReading(
            supplies=(Supply("PSU 1", ok=False, input_w=0.0),),
            redundancy=0,
            node_w=3216.0,
            inlet_c=38.0,
            exhaust_c=43.0,
            fan_min_rpm=0.0,
            fan_pct=55.0,
        )
        wait_until("the change was never read", lambda: reader.read() == expected)


def test_the_password_is_in_no_argument_and_the_list_of_sensors_is_fetched_once(
    simulator: IpmiSimulator, spy: Spy, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    for _ in range(2):  # the agent starts twice
        with reader_at(simulator.port, memory) as reader:
            assert reader.read() == reader.read() == AT_FIRST
    assert spy.count("sdr dump") == 1
    assert spy.count("sdr elist") == 4
    assert spy.count("dcmi") == 2, "a BMC without DCMI is not asked for it at every visit"
    assert not [run for run in spy.runs if PASSWORD in run]
    (records,) = memory.iterdir()
    records.write_bytes(b"\x07 not records " * 50)
    with reader_at(simulator.port, memory) as reader:
        wait_until("it never recovered from damaged records", lambda: _read(reader) == AT_FIRST)
    assert spy.count("sdr dump") == 2


def _read(reader: IpmiReader) -> BmcReading | None:
    try:
        return reader.read()
    except BmcFault:
        return None


def test_a_wrong_password_is_refused_and_after_three_times_not_tried_any_more(
    simulator: IpmiSimulator, spy: Spy
) -> None:
    with reader_at(simulator.port, password="wrong-9") as reader:
        for _ in range(5):
            with pytest.raises(BmcFault) as caught:
                reader.read()
            assert caught.value.trouble is Trouble.REFUSED
            assert "wrong-9" not in repr(caught.value)
        assert len(spy.runs) == 3


@pytest.mark.parametrize(("took_s", "trouble"), [(1.9, Trouble.REFUSED), (6.1, Trouble.UNREACHABLE)])
def test_a_slow_refusal_is_one_and_what_comes_after_all_resends_is_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, trouble: Trouble
) -> None:
    (tmp_path / "ipmitool").write_text(
        '#!/bin/sh\necho "Error: Unable to establish IPMI v2 / RMCP+ session" >&2; exit 1\n'
    )
    (tmp_path / "ipmitool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reader = IpmiReader(target(623), "en", monotonic=itertools.count(100.0, took_s).__next__)
    with pytest.raises(BmcFault) as caught:
        reader.read()
    reader.close()
    assert caught.value.trouble is trouble


def test_a_bmc_that_wants_another_cipher_suite_gets_it(
    simulator: IpmiSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated BMC knows suite 3 only: the stand-in refuses 3 in the real one's words, and passes 17 on as 3."""
    real = shutil.which("ipmitool")
    folder = tmp_path / "picky"
    folder.mkdir()
    (folder / "ipmitool").write_text(
        "#!/bin/sh\n"
        'case "$*" in *"-C 3 "*)\n'
        '  echo "Error in open session response message : no matching cipher suite" >&2\n'
        '  echo "Error: Unable to establish IPMI v2 / RMCP+ session" >&2; exit 1;;\nesac\n'
        f'exec {real} $(echo "$@" | sed "s/-C 17 /-C 3 /")\n'
    )
    (folder / "ipmitool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with reader_at(simulator.port) as reader:
        assert reader.read() == AT_FIRST


def test_a_hung_bmc_is_given_up_at_the_deadline_and_leaves_no_child(simulator: IpmiSimulator) -> None:
    with reader_at(simulator.port, deadline_s=2.0) as reader:
        _read(reader)
        simulator.hang()
        with pytest.raises(BmcFault) as caught:
            reader.read()
        assert caught.value.trouble in (Trouble.SLOW, Trouble.UNREACHABLE)
        assert not children_named("ipmitool")
        simulator.go_on()
        wait_until("it never came back", lambda: _read(reader) == AT_FIRST)


def test_no_tick_waits_for_a_hung_bmc_and_closing_ends_its_child(simulator: IpmiSimulator) -> None:
    simulator.hang()
    goal = target(simulator.port, deadline_s=300.0, every_s=5.0)
    reader = reader_of(goal, "en")
    assert reader is not None
    collector = BmcCollector({"node": "n1"}, goal, reader)
    samples: list[Sample] = []
    for number in range(1, 4):
        samples += collector.collect(Tick(number, number, float(number)))
    assert collector.pending, "the ticks are over before the visit is"
    assert samples == []
    wait_until("no visit was begun", lambda: bool(children_named("ipmitool")))
    collector.close()
    wait_until("a child was left", lambda: not children_named("ipmitool"))


def test_a_visit_becomes_samples_of_supplies_power_and_cooling(simulator: IpmiSimulator) -> None:
    goal = target(simulator.port, every_s=5.0)
    reader = reader_of(goal, "en")
    assert reader is not None
    collector = BmcCollector({"node": "n1"}, goal, reader)
    samples: list[Sample] = []
    number = 0

    def ticked() -> bool:
        nonlocal number
        number += 1
        samples.extend(check(sample) for sample in collector.collect(Tick(number, number, number / 100)))
        return bool(samples)

    wait_until("no sample came", ticked)
    collector.close()
    found = {(sample.measurement, sample.tags.get("psu", "")): dict(sample.fields) for sample in samples}
    assert found["psu", "PSU 1"] == {"input_w": 1520.0, "ok": 1}
    assert found["thermal", ""] == {"inlet_c": 24.0, "exhaust_c": 43.0, "fan_min_rpm": 7920.0, "fan_pct": 55.0}
    assert found["power", ""]["node_w"] == 2928.0
    assert found["power", ""]["redundancy"] == 2


@pytest.fixture
def dcmi_bmc(
    tmp_path: Path, free_port: Callable[[], int], need_program: Callable[[str], str]
) -> Iterator[tuple[int, Path]]:
    need_program("ipmitool")
    port, file = free_port(), tmp_path / "power"
    file.write_text("5210 4800 6100 5300 1 6500 1")
    root = Path(__file__).resolve().parents[3]
    arguments = [sys.executable, dcmi.__file__, USER, PASSWORD, str(port), str(file)]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        with reader_at(port) as reader:
            wait_until("the BMC did not come up", lambda: _read(reader) is not None)
        yield port, file
    finally:
        process.kill()
        process.wait(120)


def _replace(file: Path, text: str) -> None:
    """Whole at any time: what ipmitool asked twice, the second answer is made of it when nobody waits any more."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def _told(port: int) -> BmcReading:
    """One reading. Where the double answers later than ipmitool asks again it takes the second question amiss: then anew."""
    found: list[BmcReading] = []

    def is_told() -> bool:
        with reader_at(port) as reader:
            reading = _read(reader)
            found.extend([reading] if reading is not None else [])
        return bool(found)

    wait_until("DCMI tells nothing", is_told)
    return found[0]


def test_dcmi_tells_the_nodes_power_and_its_cap_where_there_are_no_sensors(dcmi_bmc: tuple[int, Path]) -> None:
    port, file = dcmi_bmc
    told = _told(port)
    assert (told.node_w, told.cap_w, told.supplies, told.inlet_c) == (5210.0, 6500.0, None, None)
    assert len(told.problems) == 1
    _replace(file, "5333 4801 6101 5301 1 6600 0")
    told = _told(port)
    assert (told.node_w, told.cap_w) == (5333.0, None)
    _replace(file, "5444 4802 6102 5302 0 6700 1")
    with reader_at(port) as reader, pytest.raises(BmcFault) as caught:
        reader.read()
    assert caught.value.trouble is Trouble.UNUSABLE


def test_a_host_without_ipmitool_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for language in ("en", "zh"):
        reader = IpmiReader(target(623), language)
        with pytest.raises(BmcFault) as caught:
            reader.read()
        reader.close()
        assert caught.value.trouble is Trouble.UNEQUIPPED
        assert "ipmitool" in caught.value.reason


def test_a_host_without_a_bmc_of_its_own_is_told_so(need_program: Callable[[str], str]) -> None:
    need_program("ipmitool")
    if any(Path(path).exists() for path in ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")):
        pytest.skip("this machine has a BMC")
    with reader_at(0, url="ipmi:") as reader, pytest.raises(BmcFault) as caught:
        reader.read()
    assert caught.value.trouble is Trouble.UNEQUIPPED
    assert "ipmi_devintf" in caught.value.reason


def test_an_address_that_is_none_and_one_where_nobody_answers_are_unreachable(
    need_program: Callable[[str], str], free_port: Callable[[], int]
) -> None:
    need_program("ipmitool")
    for url in ("ipmi://no-such-host.invalid", f"ipmi://127.0.0.1:{free_port()}"):
        with reader_at(0, url=url) as reader, pytest.raises(BmcFault) as caught:
            reader.read()
        assert caught.value.trouble is Trouble.UNREACHABLE
