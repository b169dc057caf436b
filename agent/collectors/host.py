"""Host: CPU, memory, pressure, disk and network of this machine, from psutil, /proc and the cgroup tree."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from agent.collectors.interface import Finding, Level, Tags, Tick
from agent.counters import Rate
from telemetry.catalogue import HOST, title
from telemetry.messages import say
from telemetry.sample import Sample

Fields = dict[str, float]

_PSI = {"cpu": "psi_cpu_pct", "io": "psi_io_pct", "memory": "psi_memory_pct"}
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # guest time is within user time already
LOOK_EVERY_S = 60.0
_NO_DISK = ("loop", "ram", "zram", "sr", "fd")


class HostCollector:
    """The `host` measurement. Shares and rates are over the time since the last tick, so the first tick has none.

    `proc` and `sys` are where /proc and /sys are mounted.
    """

    name = "host"

    def __init__(self, tags: Tags, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._proc = proc
        self._sys = sys
        self._rates: dict[str, Rate] = {}
        self._cpu: list[tuple[float, float, float]] = []
        self._cgroups: dict[Path, tuple[float, float]] = {}
        self._ticks = 0
        self._read: set[str] = set()  # the fields that were ever read
        self._failed: set[str] = set()  # the readings that failed last time
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._looked_s = -math.inf  # when the parts of this machine were last listed
        self._cgroup_folders: list[Path] = []
        self._disks: set[str] = set()
        self._interfaces: set[str] = set()
        self._sources: Sequence[Callable[[float], Fields]] = (
            self._read_cpu,
            self._read_load,
            self._read_memory,
            self._read_swap,
            self._read_pressure,
            self._read_cgroup,
            self._read_disk,
            self._read_network,
        )

    def collect(self, tick: Tick) -> Sequence[Sample]:
        if tick.monotonic_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = tick.monotonic_s
            try:
                self._look()
            except (OSError, ValueError):
                self.errors += 1
        fields: Fields = {}
        for read in self._sources:
            name = read.__name__.removeprefix("_read_")
            try:
                fields |= read(tick.monotonic_s)
                self._failed.discard(name)
            except (OSError, ValueError, IndexError, KeyError, psutil.Error):
                self.errors += 1
                self._failed.add(name)
        self._ticks += 1
        self._read.update(fields)
        return [Sample("host", self._tags, fields, tick.time_ns)] if fields else []

    @property
    def pending(self) -> bool:
        """Rates need two readings."""
        return self._ticks < 2

    def findings(self, language: str) -> Sequence[Finding]:
        names = ", ".join(title("host", name, language) for name in HOST.fields if name in self._read)
        found = [Finding("host", "ok", say("doctor.host.reads", language, names=names))] if names else []
        if self._failed:
            text = say("doctor.host.failed", language, count=self.errors, names=", ".join(sorted(self._failed)))
            level: Level = "warning" if names else "error"
            found.append(Finding("host", level, text, say("doctor.host.failed_remedy", language)))
        if not self._read.intersection(_PSI.values()) and "pressure" not in self._failed:
            remedy = say("doctor.host.no_pressure_remedy", language)
            found.append(Finding("host", "warning", say("doctor.host.no_pressure", language), remedy))
        if "cgroup_throttled_pct" not in self._read and "cgroup" not in self._failed:
            found.append(Finding("host", "absent", say("doctor.host.no_cgroup", language)))
        return found

    def close(self) -> None:
        pass

    def _look(self) -> None:
        """List what hardly ever changes: the cgroups above this process, whole disks, physical network interfaces."""
        self._cgroup_folders = list(self._cpu_cgroups())
        self._disks = _names(self._sys / "block")
        interfaces = _names(self._sys / "class/net")
        self._interfaces = {name for name in interfaces if (self._sys / "class/net" / name / "device").exists()}

    def _rate(self, key: str, series: Mapping[Hashable, float], now_s: float) -> float | None:
        rate = self._rates.setdefault(key, Rate())
        return rate.per_second(series, now_s)

    def _read_cpu(self, _now_s: float) -> Fields:
        """Busy is all that is neither idle nor waiting for I/O."""
        now = [_cpu_split(times) for times in psutil.cpu_times(percpu=True)]
        before, self._cpu = self._cpu, now
        if len(before) != len(now):
            return {}
        # the kernel's idle and iowait may step back a little, hence the floor at 0
        cores = [
            tuple(max(0.0, b - a) for a, b in zip(then, core, strict=True))
            for then, core in zip(before, now, strict=True)
        ]
        elapsed = sum(sum(core) for core in cores)
        if elapsed <= 0:
            return {}
        return {
            "cpu_pct": 100 * sum(core[0] for core in cores) / elapsed,
            "cpu_core_max_pct": max(100 * core[0] / sum(core) for core in cores if sum(core) > 0),
            "iowait_pct": 100 * sum(core[1] for core in cores) / elapsed,
        }

    def _read_load(self, _now_s: float) -> Fields:
        return {"load1": os.getloadavg()[0]}

    def _read_memory(self, _now_s: float) -> Fields:
        memory = psutil.virtual_memory()
        return {"mem_used_pct": 100 * (memory.total - memory.available) / memory.total}

    def _read_swap(self, now_s: float) -> Fields:
        """/proc/vmstat counts pages of the kernel's own size, which is 64 KiB on some hosts."""
        text = (self._proc / "vmstat").read_text()
        if not re.match(r"\w+ \d+$", text, re.MULTILINE):
            raise ValueError("vmstat is not names and counts")
        fields: Fields = {}
        for name, key in (("swap_in_bytes_s", "pswpin"), ("swap_out_bytes_s", "pswpout")):
            count = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
            rate = self._rate(name, {key: float(count[1]) * self._page_bytes}, now_s) if count else None
            if rate is not None:
                fields[name] = rate
        return fields

    def _read_pressure(self, now_s: float) -> Fields:
        """Share of the time in which some task waited, from the stall counters in microseconds (kernel: accounting/psi.rst)."""
        fields: Fields = {}
        for resource, name in _PSI.items():
            text = _text(self._proc / "pressure" / resource)  # absent on older kernels and with psi=0
            if text is None:
                continue
            some = next(line for line in [*text.splitlines(), "some total=x"] if line.startswith("some "))
            stalled_us = float(some.rpartition("total=")[2])
            rate = self._rate(name, {resource: stalled_us}, now_s)
            if rate is not None:
                fields[name] = min(100.0, rate / 1e6 * 100)
        return fields

    def _read_cgroup(self, _now_s: float) -> Fields:
        """Share of the CPU periods in which this cgroup, or one above it, was throttled; the most throttled one counts.

        Absent where no cgroup has a CPU controller to say so.
        """
        shares: list[float] = []
        seen: dict[Path, tuple[float, float]] = {}
        for folder in self._cgroup_folders:
            text = _text(folder / "cpu.stat")
            counts = dict(line.split(" ", 1) for line in (text or "").splitlines() if " " in line)
            if "nr_periods" not in counts or "nr_throttled" not in counts:
                continue
            seen[folder] = (float(counts["nr_periods"]), float(counts["nr_throttled"]))
            if folder in self._cgroups:
                periods, throttled = (now - then for now, then in zip(seen[folder], self._cgroups[folder], strict=True))
                if periods >= 0 and throttled >= 0:
                    shares.append(100 * throttled / periods if periods else 0.0)
        self._cgroups = seen
        return {"cgroup_throttled_pct": min(100.0, max(shares))} if shares else {}

    def _cpu_cgroups(self) -> Iterator[Path]:
        """This process' cgroup with the CPU controller and those above it, v1 and v2."""
        for line in (_text(self._proc / "self" / "cgroup") or "").splitlines():
            number, controllers, path = line.split(":", 2)
            roots = []
            if number == "0" and not controllers:
                roots = [self._sys / "fs/cgroup", self._sys / "fs/cgroup/unified"]
            elif "cpu" in controllers.split(","):
                roots = [self._sys / "fs/cgroup" / name for name in ("cpu", controllers)]
            for root in dict.fromkeys(roots):
                folder = root / path.lstrip("/")
                yield from (
                    level for level in (folder, *folder.parents) if level.is_relative_to(root) and level.is_dir()
                )

    def _read_disk(self, now_s: float) -> Fields:
        """The busiest disk's share of time with a request in flight. Whole disks only: partitions would count twice."""
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        disks = self._disks or set(counters)
        shares = []
        for name in sorted(disks & set(counters)):
            busy_ms = getattr(counters[name], "busy_time", None)
            if busy_ms is not None and not name.startswith(_NO_DISK):
                share = self._rate(f"disk {name}", {name: float(busy_ms)}, now_s)
                if share is not None:
                    shares.append(min(100.0, share / 10))
        return {"disk_busy_pct": max(shares)} if shares else {}

    def _read_network(self, now_s: float) -> Fields:
        """Bytes a second over all physical interfaces, or, where there is none (a container), over all but loopback."""
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        outside = {name for name in counters if name != "lo"}
        names = (self._interfaces & outside) or outside
        if not names:
            return {}
        fields: Fields = {}
        for field, attribute in (("net_rx_bytes_s", "bytes_recv"), ("net_tx_bytes_s", "bytes_sent")):
            series: dict[Hashable, float] = {name: float(getattr(counters[name], attribute)) for name in names}
            rate = self._rate(field, series, now_s)
            if rate is not None:
                fields[field] = rate
        return fields


def _cpu_split(times: object) -> tuple[float, float, float]:
    """(busy, iowait, idle) seconds of one core."""
    share: dict[str, float] = times._asdict()  # type: ignore[attr-defined]
    busy = sum(seconds for name, seconds in share.items() if name not in _NOT_BUSY)
    return busy, share.get("iowait", 0.0), share["idle"]


def _names(folder: Path) -> set[str]:
    """What a folder holds; nothing where it does not exist."""
    try:
        return {entry.name for entry in folder.iterdir()}
    except OSError:
        return set()


def _text(path: Path) -> str | None:
    """The file's text; None where it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return None
