"""Sources at their worst: each collector over its double, well at first, and what makes everything that it is told unusable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.collectors import pdu as pdu_collector
from agent.collectors.ascend import AscendCollector
from agent.collectors.bmc import BmcCollector
from agent.collectors.dcgm import DcgmCollector
from agent.collectors.engine import EngineCollector
from agent.collectors.gpu import Patience
from agent.collectors.host import HostCollector
from agent.collectors.interface import Collector
from agent.collectors.pdu import PduCollector
from agent.collectors.rapl import RaplCollector
from agent.engine_ownership import EngineOwnership
from agent.power.ipmi import IpmiReader
from agent.power.redfish.reader import RedfishReader
from agent.process_table import ProcessTable
from agent.settings import BmcTarget, EngineTarget, PduTarget
from telemetry.catalogue import HOST
from tests.agent.amd import conftest as amd_host
from tests.agent.nvidia import conftest as nvidia_host
from tests.doubles.amdsmi import layout as amd_layout
from tests.doubles.amdsmi import library as amd_library
from tests.doubles.engine_endpoint import EngineEndpoint, Page
from tests.doubles.engine_texts.vllm import vllm
from tests.doubles.exporter_endpoint import ExporterEndpoint
from tests.doubles.nvml import layout as nvml_layout
from tests.doubles.nvml import library as nvml_library
from tests.doubles.redfish.documents import PROFILES
from tests.doubles.redfish.server import PASSWORD, USER, RedfishBmc
from tests.doubles.redfish.server import hang as hanging
from tests.doubles.redfish.state import NodeState

TAGS = {"node": "n07"}
OFTEN_S, STEP_S = 1.0, 5.0
"""Ticks are so far apart by the clock that they carry, however fast the test runs: each source is due at each."""
STILL_THERE = {"state", "source", "name", "driver"}
"""What a GPU is, which it is even when it tells nothing of how it does."""


@dataclass
class Plant:
    """A source: its collector, a field that shows it well, how to bring it to its worst, how often it was asked, and what it still says."""

    collector: Collector
    well: str
    worsen: Callable[[], None]
    asked: Callable[[], int]
    says: set[str]


Make = Callable[[Path, str, Callable[[str], str]], contextlib.AbstractContextManager[Plant]]


def all_ones(place: Any, leave: Sequence[str]) -> None:
    """Every number of a ctypes structure with all bits set, but for those that steer the double."""
    for name, kind, *_ in place._fields_:
        if name in leave:
            continue
        value = getattr(place, name)
        if hasattr(value, "_fields_"):
            all_ones(value, leave)
        elif hasattr(value, "_length_"):
            if not isinstance(value, bytes) and isinstance(value[0], int):
                for position in range(len(value)):
                    value[position] = -1
        elif isinstance(value, float):
            setattr(place, name, math.nan)
        elif isinstance(value, int):
            setattr(place, name, -1)
        assert kind


NVML_STEERING = (
    *(
        "uuid",
        "name",
        "brand",
        "fault",
        "hang",
        "hang_feature",
        "latency_us",
        "feature_code",
        "feature_calls",
        "pci_domain",
    ),
    *(
        "pci_bus",
        "pci_device",
        "gpm_supported",
        "gpm_code",
        "field_strict",
        "field_type",
        "field_code",
        "process_count",
    ),
    *("process_layout", "mig_mode", "mig_room", "mig_first", "gpu_instance", "threshold_code"),
)
IDENTITY = {"handle", "uuid", "name", "brand", "pci", "register_events"}


@contextmanager
def nvml(folder: Path, how: str, need: Callable[[str], str]) -> Iterator[Plant]:
    compiler = need("cc")
    with nvidia_host.running_host(nvml_library.build(compiler, made(folder / "lib")), compiler, folder) as host:
        gpu = host.scenario.gpu(0)
        host.scenario.state.gpu_count = 1

        def worsen() -> None:
            if how == "refused":
                host.scenario.refuse(0, *(set(nvml_layout.FEATURES) - IDENTITY))
            elif how == "blank":
                all_ones(gpu, NVML_STEERING)
                host.scenario.refuse(0, "processes_v2", "processes_v3", "margin")  # -1 is a margin
            else:
                host.scenario.hang(0)

        patience = Patience(answer_s=0.4, hung_s=1.0)
        collector = host.collector(nvidia_host.EVERY_TICK, patience)
        calls = "event_reasons" if how != "hang" else "utilization"
        count = (lambda: host.scenario.calls(0, calls)) if how == "blank" else counted(collector)
        says = STILL_THERE | {"xid_total", "gpus_seen", "gpus_expected"}
        yield Plant(
            collector, "power_w", worsen, count, says if how != "hang" else {"state", "gpus_seen", "gpus_expected"}
        )


AMD_STEERING = (
    "uuid",
    "bdf",
    "asic",
    "driver",
    "feature_code",
    "feature_calls",
    "hang",
    "hang_feature",
    "temperature_code",
)


@contextmanager
def amd(folder: Path, how: str, need: Callable[[str], str]) -> Iterator[Plant]:
    library = amd_library.build(need("cc"), made(folder / "lib"))
    with amd_host.running_host(library, folder) as host:
        host.scenario.state.gpu_count = 1
        gpu = host.scenario.gpu(0)

        def worsen() -> None:
            if how == "refused":
                host.scenario.refuse(0, *(set(amd_layout.FEATURES) - {"handle", "uuid", "bdf", "asic", "driver"}))
            else:
                all_ones(gpu, (*AMD_STEERING, "process_count", "processes"))
                host.scenario.refuse(0, "processes")

        collector = host.collector(amd_host.EVERY_TICK, Patience(answer_s=0.4, hung_s=1.0))
        yield Plant(collector, "power_w", worsen, counted(collector), STILL_THERE | {"gpus_seen", "gpus_expected"})


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def counted(thing: object, name: str = "collect") -> Callable[[], int]:
    """How often this method of it has ended, well or not."""
    count = 0
    method = getattr(thing, name)

    def spy(*arguments: Any) -> Any:
        nonlocal count
        try:
            return method(*arguments)
        finally:
            count += 1

    setattr(thing, name, spy)
    return lambda: count


BLANKS = {
    "sentinel": "9223372036854775794",
    "nan": "NaN",
    "empty": "",
    "word": "[N/A]",
    "infinite": "+Inf",
    "minus one": "-1",
}


def revalued(text: str, value: str) -> str:
    """An exposition in which every sample has this value."""
    return re.sub(r"^([^#\n]\S*|[^#\n].*\}) [^ \n]+$", rf"\1 {value}", text, flags=re.MULTILINE)


@contextmanager
def exporter(mode: str, how: str) -> Iterator[tuple[ExporterEndpoint, Callable[[], None]]]:
    server = ExporterEndpoint(mode)
    text = server.text

    def moving() -> str:
        server.run(1.0)
        return text()

    def worsen() -> None:
        if how in ("hang", "500", "nonsense", "truncated"):
            server.fault = how
        else:
            server.text = lambda: revalued(text(), BLANKS[how])  # type: ignore[method-assign]

    server.text = moving  # type: ignore[method-assign]
    yield server, worsen
    server.close()


@contextmanager
def dcgm(_folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    with exporter("dcgm", how) as (server, worsen):
        collector = DcgmCollector(TAGS, server.url, OFTEN_S)
        yield Plant(collector, "power_w", worsen, lambda: len(server.requests), STILL_THERE)
        collector.close()


@contextmanager
def ascend(_folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    with exporter("npu", how) as (server, worsen):
        collector = AscendCollector(TAGS, server.url, OFTEN_S)
        yield Plant(collector, "power_w", worsen, lambda: len(server.requests), STILL_THERE)
        collector.close()


@contextmanager
def engine(_folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    server = EngineEndpoint()
    tokens = 1000.0

    def page() -> Page:
        nonlocal tokens
        tokens += 64
        return Page(vllm(generated=(tokens,)).encode())

    def worsen() -> None:
        if how == "hang":
            server.hang("/metrics")
        else:
            server.pages["/metrics"] = Page(revalued(vllm(generated=(tokens,)), BLANKS[how]).encode())

    server.pages["/metrics"] = page
    targets = [EngineTarget("chat-a", server.url)]
    ownership = EngineOwnership(targets, ProcessTable("/no/processes"))
    collector = EngineCollector(TAGS, targets, wait_s=0.3, deadline_s=0.5, ownership=ownership)
    says = {
        "up",
        "starting",
        "partial",
        "stats_age_s",
        "state",
        "version",
        "config_hash",
        "counter_style",
        "http_status",
    }
    yield Plant(collector, "requests_running", worsen, lambda: server.requests.count("/metrics"), says)
    collector.close()
    server.close()


def without_numbers(value: Any, blank: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_numbers(item, blank) for key, item in value.items()}
    if isinstance(value, list):
        return [without_numbers(item, blank) for item in value]
    return blank if isinstance(value, int | float) and not isinstance(value, bool) else value


@contextmanager
def redfish(_folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    bmc = RedfishBmc(PROFILES["both"](NodeState()))
    blanks = {"null": None, "word": "N/A", "nan": math.nan, "empty": "", "infinite": math.inf, "sentinel": -(2**63)}

    def worsen() -> None:
        if how == "hang":
            bmc.faults |= dict.fromkeys(bmc.documents, hanging)
        else:
            bmc.documents = json.loads(json.dumps(without_numbers(bmc.documents, blanks[how])))

    target = BmcTarget(bmc.url, USER, PASSWORD, every_s=STEP_S, deadline_s=2.0)
    reader = RedfishReader(target)
    visits = counted(reader, "read")
    collector = BmcCollector(TAGS, target, reader)
    said = {"ok", "redundancy", "leak"}  # words, not numbers
    yield Plant(collector, "node_w", worsen, visits, said if how != "hang" else set())
    collector.close()
    bmc.close()


SENSORS = """\
Inlet Temp       | 01h | ok  |  7.1 | 24 degrees C
Fan1A            | 04h | ok  | 29.1 | 8400 RPM
Total Power      | 07h | ok  | 19.1 | 2928 Watts
PS1 Input Power  | 08h | ok  | 10.1 | 1520 Watts
"""


@contextmanager
def ipmi(folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    """A program in ipmitool's stead: what it prints can be no number in more ways than a simulated BMC knows."""
    readings = folder / "listing"
    program = made(folder / "bin") / "ipmitool"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *dump*) for last; do :; done; echo x > "$last";;'
        f" *elist*) cat {readings};; *) exit 1;; esac\n"
    )
    program.chmod(0o755)
    readings.write_text(SENSORS)
    blanks = {"no reading": "No Reading", "disabled": "Disabled", "empty": "", "word": "N/A", "nan": "nan Watts"}

    def worsen() -> None:
        readings.write_text(re.sub(r"[^|\n]+$", f" {blanks[how]}", SENSORS, flags=re.MULTILINE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        target = BmcTarget("ipmi://127.0.0.1", USER, PASSWORD, every_s=STEP_S)
        reader = IpmiReader(target, memory=made(folder / "memory"))
        visits = counted(reader, "read")
        collector = BmcCollector(TAGS, target, reader)
        yield Plant(collector, "node_w", worsen, visits, set())
        collector.close()


@contextmanager
def rapl(folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    zone = folder / "class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    counter, energy_uj, worst = zone / "energy_uj", 1_000_000, False

    def run() -> None:
        nonlocal energy_uj
        energy_uj += 100_000
        counter.write_text(f"{energy_uj}\n" if not worst else {"empty": "", "word": "N/A\n", "minus one": "-1\n"}[how])

    def worsen() -> None:
        nonlocal worst
        worst = True

    run()
    collector = RaplCollector(TAGS, folder)
    count = counted(collector)
    collect = collector.collect
    collector.collect = lambda tick: (run(), collect(tick))[1]  # type: ignore[method-assign, func-returns-value]
    yield Plant(collector, "cpu_power_w", worsen, count, set())
    collector.close()


@contextmanager
def host(folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    """What psutil reads is this machine's own; the rest is the test's."""
    proc, sys = made(folder / "proc"), made(folder / "sys")
    made(proc / "pressure")
    files = {
        proc / "vmstat": "nr_free_pages 5\npswpin 10\npswpout 20\n",
        **{
            proc / "pressure" / part: "some avg10=1.00 avg60=1.00 avg300=1.00 total=1000\n"
            for part in ("cpu", "io", "memory")
        },
    }
    for file, text in files.items():
        file.write_text(text)

    def worsen() -> None:
        for file, text in files.items():
            file.write_text(
                {"empty": "", "word": re.sub(r"\d+", "N/A", text), "minus one": re.sub(r"\d+", "-", text)}[how]
            )

    own = {name for name in HOST.fields if name.startswith(("psi_", "swap_", "cgroup_"))}
    collector = HostCollector(TAGS, proc, sys)
    yield Plant(collector, "psi_io_pct", worsen, counted(collector), set(HOST.fields) - own)


class Table:
    """An APC PDU's tables, as an SNMP agent gives them."""

    def __init__(self) -> None:
        base = "1.3.6.1.4.1.318.1.1.26"
        self.rows: dict[str, Any] = {
            f"{base}.{column}.1": n for column, n in (("6.3.1.5", 113), ("6.3.1.6", 207), ("4.2.1.9", 30))
        }
        self.asked = 0

    async def get(self, _oid: str) -> Any:
        self.asked += 1
        return "1.3.6.1.4.1.318.1.3.4.5"

    async def column(self, oid: str) -> dict[tuple[int, ...], Any]:
        name = f"{oid}.1"
        return {(1,): self.rows[name]} if name in self.rows else {}


@contextmanager
def pdu(_folder: Path, how: str, _need: Callable[[str], str]) -> Iterator[Plant]:
    table = Table()
    blanks = {"minus one": -1, "sentinel": 2**31 - 1, "empty": "", "word": "N/A", "none": None}

    def ask(_target: PduTarget, job: Callable[[Table], Any]) -> Any:
        return asyncio.run(job(table))

    def worsen() -> None:
        table.rows = dict.fromkeys(table.rows, blanks[how]) if how != "gone" else {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pdu_collector, "visit", ask)
        collector = PduCollector([PduTarget("rack2-a", "127.0.0.1", community="public", every_s=STEP_S)], TAGS)
        yield Plant(collector, "current_a", worsen, lambda: table.asked, set())
        collector.close()


WORST: dict[str, tuple[Make, Sequence[str]]] = {
    "nvml": (nvml, ("refused", "blank", "hang")),
    "amd": (amd, ("refused", "blank")),
    "dcgm": (dcgm, ("sentinel", "nan", "empty", "word", "infinite", "hang", "500", "nonsense", "truncated")),
    "ascend": (ascend, ("minus one", "nan", "empty", "word", "infinite", "hang", "500", "nonsense")),
    "engine": (engine, ("nan", "empty", "word", "infinite", "hang")),
    "redfish": (redfish, ("null", "word", "nan", "empty", "infinite", "sentinel", "hang")),
    "ipmi": (ipmi, ("no reading", "disabled", "empty", "word", "nan")),
    "pdu": (pdu, ("minus one", "sentinel", "empty", "word", "none", "gone")),
    "rapl": (rapl, ("empty", "word", "minus one")),
    "host": (host, ("empty", "word", "minus one")),
}
