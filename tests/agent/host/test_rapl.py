"""CPU power is the growth of the packages' energy counters over the time between two readings, and of nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agent.collectors.interface import Examined, Tick
from agent.collectors.rapl import RaplCollector
from telemetry.catalogue import check


class Powercap:
    """A /sys with RAPL zones, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.monotonic_s = 1000.0
        self.number = 0

    def zone(self, zone: str, name: str, energy_uj: int | str, range_uj: int = 262_143_328_850) -> None:
        folder = self.root / "class/powercap" / zone
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{energy_uj}\n")
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")

    def collector(self) -> RaplCollector:
        return RaplCollector({"node": "n1"}, self.root, lambda: self.monotonic_s)

    def power_w(self, collector: RaplCollector, after_s: float = 1.0) -> float | None:
        self.monotonic_s += after_s
        self.number += 1
        samples = collector.collect(Tick(self.number, self.number, self.monotonic_s))
        return float(check(samples[0]).fields["cpu_power_w"]) if samples else None


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path)


def test_packages_are_added_and_memory_cores_and_the_platform_are_not(powercap: Powercap) -> None:
    zones = {
        "intel-rapl:0": ("package-0", 5_000_000, 180),
        "intel-rapl:1": ("package-1", 900_000_000, 95),
        "intel-rapl:0:0": ("core", 7, 1000),
        "intel-rapl:0:1": ("dram", 11, 2000),
        "intel-rapl:2": ("psys", 13, 4000),
        "intel-rapl-mmio:0": ("package-0", 17, 8000),
    }
    for zone, (name, start_uj, _) in zones.items():
        powercap.zone(zone, name, start_uj)
    collector = powercap.collector()
    assert powercap.power_w(collector) is None, "the first reading has no time to divide by"
    for zone, (name, start_uj, watts) in zones.items():
        powercap.zone(zone, name, start_uj + watts * 2_000_000)
    assert powercap.power_w(collector, after_s=2.0) == pytest.approx(180 + 95)


def test_a_counter_that_goes_round_loses_nothing(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 65_532_000_000, range_uj=65_532_610_987)
    collector = powercap.collector()
    powercap.power_w(collector)
    powercap.zone("intel-rapl:0", "package-0", 239_389_013, range_uj=65_532_610_987)
    assert powercap.power_w(collector) == pytest.approx(240.0)


def test_a_counter_that_may_have_gone_round_twice_says_nothing(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 1_000, range_uj=65_532_610_987)
    collector = powercap.collector()
    powercap.power_w(collector)
    powercap.zone("intel-rapl:0", "package-0", 300_001_000, range_uj=65_532_610_987)
    assert powercap.power_w(collector, after_s=600) is None
    powercap.zone("intel-rapl:0", "package-0", 600_001_000, range_uj=65_532_610_987)
    assert powercap.power_w(collector) == pytest.approx(300.0)


def test_a_counter_that_was_reset_is_not_a_burst_of_power(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 100_000_000_000)
    collector = powercap.collector()
    powercap.power_w(collector)
    powercap.zone("intel-rapl:0", "package-0", 5)
    assert powercap.power_w(collector) is None


def test_without_one_of_its_packages_a_host_has_no_power_rather_than_half_of_it(powercap: Powercap) -> None:
    powercap.zone("intel-rapl:0", "package-0", 0)
    powercap.zone("intel-rapl:1", "package-1", 0)
    collector = powercap.collector()
    powercap.power_w(collector)
    powercap.zone("intel-rapl:0", "package-0", 50_000_000)
    powercap.zone("intel-rapl:1", "package-1", "garbage")
    assert powercap.power_w(collector) is None
    assert collector.errors == 1
    assert [finding.level for finding in collector.findings("en")] == ["warning"]


@pytest.mark.parametrize("text", ["", "-5", "1e9", "nan", "9" * 40, "\x00\x00"])
def test_a_counter_that_is_no_number_is_left_out(powercap: Powercap, text: str) -> None:
    powercap.zone("intel-rapl:0", "package-0", 0)
    collector = powercap.collector()
    powercap.power_w(collector)
    powercap.zone("intel-rapl:0", "package-0", text)
    power_w = powercap.power_w(collector)
    assert power_w is None or math.isfinite(power_w)
    assert power_w is None


def test_a_host_without_counters_is_absent_and_not_an_error(powercap: Powercap) -> None:
    collector = powercap.collector()
    assert powercap.power_w(collector) is None
    assert collector.errors == 0
    assert isinstance(collector, Examined)
    assert [(finding.level, finding.source) for finding in collector.findings("en")] == [("absent", "CPU power")]


def test_counters_that_only_root_may_read_are_a_finding_with_its_remedy_until_they_may_be_read(
    powercap: Powercap, monkeypatch: pytest.MonkeyPatch
) -> None:
    powercap.zone("intel-rapl:0", "package-0", 10)
    opened = Path.open
    denied = True

    def guarded(path: Path, mode: str = "r", **options: object) -> object:
        if path.name == "energy_uj" and "b" in mode and denied:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", guarded)
    collector = powercap.collector()
    for _ in range(5):
        assert powercap.power_w(collector) is None
    assert collector.errors == 1, "it isn't tried at every tick"
    (finding,) = collector.findings("en")
    assert finding.level == "warning"
    assert "tmpfiles.d" in finding.remedy
    assert not collector.pending
    denied = False
    assert powercap.power_w(collector, after_s=61) is None
    assert collector.pending
    powercap.zone("intel-rapl:0", "package-0", 77_000_010)
    assert powercap.power_w(collector) == pytest.approx(77.0)
    assert [finding.level for finding in collector.findings("zh")] == ["ok"]
