"""The host collector reads what /proc and the cgroup tree say, divides by the time that passed, and leaves out what isn't there."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.collectors.host import HostCollector
from agent.collectors.interface import Tick
from telemetry.catalogue import HOST, check


class Machine:
    """A /proc and a /sys of the test's making. Two cores, two disks (one with a partition), two interfaces beside loopback."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        for name in ("sda", "nvme0n1", "loop0"):
            (self.sys / "block" / name).mkdir(parents=True)
        (self.sys / "class/net/eth0/device").mkdir(parents=True)
        (self.sys / "class/net/docker0").mkdir(parents=True)
        self.write(
            "proc/meminfo",
            "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nBuffers: 0 kB\nCached: 0 kB\n"
            "Active: 0 kB\nInactive: 0 kB\nShmem: 0 kB\nSlab: 0 kB\n",
        )
        self.cpu((100, 0, 50, 800, 50), (10, 0, 10, 980, 0))
        self.write("proc/vmstat", "pswpin 10\npswpout 20\n")
        self.pressure(cpu=1_000_000, io=2_000_000, memory=3_000_000)
        self.disks(sda=1000, sda1=1000, nvme0n1=5000, loop0=9000)
        self.net(eth0=(1000, 2000), docker0=(7777, 8888), lo=(5, 5))
        self.write("proc/self/cgroup", "0::/system.slice/agent.service\n")
        self.cgroup("system.slice/agent.service", 100, 10)

    def write(self, path: str, text: str) -> None:
        target = self.proc.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def cpu(self, *cores: tuple[int, int, int, int, int]) -> None:
        """user nice system idle iowait of each core, in clock ticks."""
        rows = [f"cpu{n} {' '.join(map(str, core))} 0 0 0 0 0" for n, core in enumerate(cores)]
        total = [sum(column) for column in zip(*cores, strict=True)]
        self.write("proc/stat", "\n".join([f"cpu {' '.join(map(str, total))} 0 0 0 0 0", *rows, "btime 1"]) + "\n")

    def pressure(self, **total_us: int) -> None:
        for kind, total in total_us.items():
            self.write(
                f"proc/pressure/{kind}",
                f"some avg10=99.00 avg60=99.00 avg300=99.00 total={total}\n"
                f"full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
            )

    def disks(self, **busy_ms: int) -> None:
        self.write(
            "proc/diskstats",
            "".join(f"   8 {n} {name} 1 0 2 3 4 0 5 6 0 {busy} 9\n" for n, (name, busy) in enumerate(busy_ms.items())),
        )

    def net(self, **counts: tuple[int, int]) -> None:
        rows = [f"{name}: {rx} 1 0 0 0 0 0 0 {tx} 1 0 0 0 0 0 0" for name, (rx, tx) in counts.items()]
        self.write("proc/net/dev", "\n".join(["Inter-| Receive", " face |bytes", *rows]) + "\n")

    def cgroup(self, path: str, periods: int, throttled: int, root: str = "sys/fs/cgroup") -> None:
        self.write(f"{root}/{path}/cpu.stat", f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(made.proc), raising=False)
    return made


def two_ticks(machine: Machine, between: Callable[[], Any], seconds: float = 2.0) -> dict[str, Any]:
    collector = HostCollector({"node": "n1"}, machine.proc, machine.sys)
    collector.collect(Tick(1, 10**18, 50.0))
    between()
    (sample,) = collector.collect(Tick(2, 10**18 + 1, 50.0 + seconds))
    assert collector.errors == 0
    return dict(check(sample).fields)


def test_every_field_is_over_the_time_since_the_last_tick(machine: Machine) -> None:
    def pass_time() -> None:
        machine.cpu((160, 0, 90, 880, 70), (20, 0, 10, 1170, 0))
        machine.write("proc/vmstat", "pswpin 110\npswpout 20\n")
        machine.pressure(cpu=1_500_000, io=2_000_000, memory=3_020_000)
        machine.disks(sda=1100, sda1=1990, nvme0n1=6500, loop0=99_000)
        machine.net(eth0=(5000, 2600), docker0=(999_999, 999_999), lo=(99_999, 99_999))
        machine.cgroup("system.slice/agent.service", 140, 20)

    fields = two_ticks(machine, pass_time)
    load1 = fields.pop("load1")
    assert load1 >= 0
    assert fields == {
        # core 0: 100 busy of 200 ticks, 20 waiting; core 1: 10 of 200
        "cpu_pct": pytest.approx(100 * 110 / 400),
        "cpu_core_max_pct": pytest.approx(50.0),
        "iowait_pct": pytest.approx(5.0),
        "mem_used_pct": pytest.approx(60.0),
        "swap_in_bytes_s": pytest.approx(50 * resource.getpagesize()),
        "swap_out_bytes_s": 0.0,
        "psi_cpu_pct": pytest.approx(25.0),
        "psi_io_pct": 0.0,
        "psi_memory_pct": pytest.approx(1.0),
        "cgroup_throttled_pct": pytest.approx(25.0),
        "disk_busy_pct": pytest.approx(75.0),
        "net_rx_bytes_s": pytest.approx(2000.0),
        "net_tx_bytes_s": pytest.approx(300.0),
    }


def test_the_first_tick_has_only_what_needs_no_past(machine: Machine) -> None:
    (sample,) = HostCollector({"node": "n1"}, machine.proc, machine.sys).collect(Tick(1, 10**18, 50.0))
    assert sorted(sample.fields) == ["load1", "mem_used_pct"]


@pytest.mark.parametrize(
    ("gone", "absent"),
    [
        ("pressure/io", {"psi_io_pct"}),
        ("pressure/cpu", {"psi_cpu_pct"}),
        ("self/cgroup", {"cgroup_throttled_pct"}),
    ],
)
def test_what_the_kernel_does_not_offer_is_absent_and_no_error(machine: Machine, gone: str, absent: set[str]) -> None:
    (machine.proc / gone).unlink()
    fields = two_ticks(machine, lambda: machine.cpu((160, 0, 90, 880, 70), (20, 0, 10, 1170, 0)))
    everything = {
        name for name in HOST.fields if name not in ("clock_offset_s", "cpu_power_w", "gpus_expected", "gpus_seen")
    }
    assert everything - fields.keys() == absent


@pytest.mark.parametrize("broken", ["stat", "vmstat", "diskstats", "meminfo", "net/dev", "pressure/cpu"])
def test_a_source_that_is_broken_costs_its_own_fields_and_is_counted(machine: Machine, broken: str) -> None:
    collector = HostCollector({"node": "n1"}, machine.proc, machine.sys)
    collector.collect(Tick(1, 10**18, 50.0))
    machine.write(f"proc/{broken}", "some total=nonsense\n")
    (sample,) = collector.collect(Tick(2, 10**18 + 1, 52.0))
    check(sample)
    assert len(sample.fields) >= 6
    lost = {
        "stat": "cpu_pct",
        "vmstat": "swap_in_bytes_s",
        "diskstats": "disk_busy_pct",
        "meminfo": "mem_used_pct",
        "net/dev": "net_rx_bytes_s",
        "pressure/cpu": "psi_cpu_pct",
    }[broken]
    assert lost not in sample.fields


def test_counters_that_restart_give_no_negative_rate(machine: Machine) -> None:
    def restart() -> None:
        machine.net(eth0=(10, 10), docker0=(1, 1), lo=(1, 1))
        machine.disks(sda=0, sda1=0, nvme0n1=0, loop0=0)
        machine.pressure(cpu=0, io=0, memory=0)
        machine.cgroup("system.slice/agent.service", 1, 0)
        machine.cpu((100, 0, 50, 790, 40), (10, 0, 10, 980, 0))

    fields = two_ticks(machine, restart)
    assert sorted(fields) == ["load1", "mem_used_pct", "swap_in_bytes_s", "swap_out_bytes_s"]


def test_the_most_throttled_cgroup_above_counts(machine: Machine) -> None:
    machine.cgroup("system.slice", 100, 0)

    def throttle() -> None:
        machine.cgroup("system.slice/agent.service", 110, 11)
        machine.cgroup("system.slice", 200, 60)

    assert two_ticks(machine, throttle)["cgroup_throttled_pct"] == pytest.approx(60.0)


def test_throttling_is_read_from_cgroup_v1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/box\n2:memory:/other\n0::/\n")
    machine.cgroup("box", 100, 0, "sys/fs/cgroup/cpu,cpuacct")
    fields = two_ticks(machine, lambda: machine.cgroup("box", 120, 15, "sys/fs/cgroup/cpu,cpuacct"))
    assert fields["cgroup_throttled_pct"] == pytest.approx(75.0)


def test_a_core_that_comes_or_goes_costs_one_reading_of_cpu(machine: Machine) -> None:
    fields = two_ticks(machine, lambda: machine.cpu((160, 0, 90, 880, 70)))
    assert "cpu_pct" not in fields


def test_in_a_container_without_physical_interfaces_all_but_loopback_count(machine: Machine) -> None:
    machine.net(veth1=(100, 0), lo=(0, 0))
    fields = two_ticks(machine, lambda: machine.net(veth1=(300, 0), lo=(9_000_000, 0)))
    assert fields["net_rx_bytes_s"] == pytest.approx(100.0)


def test_this_very_machine_is_read() -> None:
    collector = HostCollector({"node": "n1"})
    collector.collect(Tick(1, 10**18, 50.0))
    (sample,) = collector.collect(Tick(2, 10**18 + 1, 51.0))
    check(sample)
    assert 0 < sample.fields["mem_used_pct"] < 100  # type: ignore[operator]


def test_the_host_says_what_it_reads_and_what_its_kernel_does_not_tell(machine: Machine) -> None:
    collector = HostCollector({"node": "n1"}, machine.proc, machine.sys)
    assert collector.pending
    collector.collect(Tick(1, 1, 1.0))
    assert collector.pending
    collector.collect(Tick(2, 2, 2.0))
    assert not collector.pending
    assert [finding.level for finding in collector.findings("en")] == ["ok"]
    assert "CPU pressure" in collector.findings("en")[0].text


def test_a_host_without_pressure_and_with_a_broken_proc_says_both(machine: Machine) -> None:
    for kind in ("cpu", "io", "memory"):
        (machine.proc / "pressure" / kind).unlink()
    machine.write("proc/vmstat", "nonsense\n")
    (machine.proc / "self/cgroup").unlink()
    collector = HostCollector({"node": "n1"}, machine.proc, machine.sys)
    for number in (1, 2):
        collector.collect(Tick(number, number, float(number)))
    found = {finding.level: finding for finding in collector.findings("en")[1:]}
    assert [finding.level for finding in collector.findings("en")] == ["ok", "warning", "warning", "absent"]
    assert "psi=1" in found["warning"].remedy
    assert "swap" in collector.findings("en")[1].text
