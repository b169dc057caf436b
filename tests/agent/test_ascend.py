"""An NPU read through npu-exporter: in the fields of every other accelerator, with what failed left out and no throttle mask."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent.collectors.ascend import METRICS, AscendCollector
from agent.collectors.interface import Examined, Tick
from agent.sampler import collectors
from agent.settings import AgentSettings
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.exporter_endpoint import FIRST, SECOND, Device, ExporterEndpoint

NOW_NS = 1_796_000_000 * 10**9


@pytest.fixture
def server() -> Iterator[ExporterEndpoint]:
    endpoint = ExporterEndpoint("npu", (npu(FIRST, "4C1A-7731"), npu(SECOND, "9B22-0D5E")))
    yield endpoint
    endpoint.close()


def npu(device: Device, vdie: str) -> Device:
    return replace(device, uuid=vdie, model=f"Ascend910B{device.index + 3}")


class Ticks:
    def __init__(self, url: str) -> None:
        self.collector = AscendCollector({"node": "n07"}, url)
        self.now_s = 1000.0
        self.number = 0

    @property
    def now_ms(self) -> int:
        return NOW_NS // 10**6 + int(self.now_s * 1000)

    def _tick(self) -> list[Sample]:
        self.number += 1
        return [
            check(sample)
            for sample in self.collector.collect(Tick(self.number, NOW_NS + int(self.now_s * 1e9), self.now_s))
        ]

    def scrape(self, after_s: float = 5.0) -> list[Sample]:
        self.now_s += after_s
        samples = self._tick()
        before, give_up_s = self.collector._scrape.last, time.monotonic() + 90
        while time.monotonic() < give_up_s:
            samples += self._tick()
            if self.collector._scrape.last is not before:
                return samples
            time.sleep(0.005)
        raise AssertionError("no answer")

    def npus(self, after_s: float = 5.0) -> dict[str, Sample]:
        return by_index(self.scrape(after_s))

    def texts(self, language: str = "en") -> str:
        return "\n".join(f"{f.level}: {f.text} | {f.remedy}" for f in self.collector.findings(language))


def by_index(samples: Sequence[Sample]) -> dict[str, Sample]:
    return {sample.tags["gpu"]: sample for sample in samples if sample.measurement == "gpu"}


def events(samples: Sequence[Sample]) -> list[tuple[str, str, object]]:
    found = [sample for sample in samples if sample.measurement == "event"]
    return [(event.tags["kind"], event.tags["subject"], event.fields["code"]) for event in found]


def with_extra(device: Device, **extra: float | None) -> Device:
    return replace(device, extra={**device.extra, **{f"npu_chip_info_{name}": value for name, value in extra.items()}})


@pytest.fixture
def ticks(server: ExporterEndpoint) -> Iterator[Ticks]:
    made = Ticks(server.url)
    yield made
    made.collector.close()


def test_each_npu_has_its_own_values_in_the_catalogues_units_and_no_throttle_mask(ticks: Ticks) -> None:
    found = ticks.npus()
    assert dict(found["0"].tags) == {"node": "n07", "gpu": "0", "uuid": "4C1A-7731"}
    assert dict(found["0"].fields) == {
        "state": 0,
        "source": "ascend",
        "name": "Ascend910B3",
        "util_pct": 98.0,
        "aicore_util_pct": 81.0,
        "tensor_active_pct": 33.0,
        "mem_util_pct": 41.0,
        "temp_c": 61.0,
        "mem_temp_c": 72.0,
        "power_w": 512.5,
        "sm_clock_mhz": 1980.0,
        "sm_clock_max_mhz": 2080.0,
        "mem_used_bytes": 60_000.0 * 2**20,
        "mem_total_bytes": 80_681.0 * 2**20,
        "processes": 2,
        "healthy": 1,
        "link_up": 1,
    }
    same = {"state", "source", "healthy", "link_up"}
    assert all(found["1"].fields[name] != value for name, value in found["0"].fields.items() if name not in same)


def test_no_two_fields_share_a_family() -> None:
    names = [name for metric in METRICS for name in metric.names]
    assert len(names) == len(set(names))


def test_utilisation_is_that_of_the_cores_where_the_whole_npus_is_not_told(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    server.devices = (with_extra(server.devices[0], overall_utilization=None),)
    fields = ticks.npus()["0"].fields
    assert fields["util_pct"] == fields["aicore_util_pct"] == 81.0


def test_memory_is_ddr_where_an_npu_has_no_hbm(server: ExporterEndpoint, ticks: Ticks) -> None:
    extra = {"hbm_used_memory": None, "hbm_total_memory": None, "used_memory": 2000.0, "total_memory": 21_000.0}
    server.devices = (with_extra(server.devices[0], **extra),)
    fields = ticks.npus()["0"].fields
    assert (fields["mem_used_bytes"], fields["mem_total_bytes"]) == (2000.0 * 2**20, 21_000.0 * 2**20)


def test_an_npu_that_says_no_watt_has_no_power(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(server.devices[0], power=0.0, utilization=0.0, overall_utilization=0.0),)
    fields = ticks.npus()["0"].fields
    assert "power_w" not in fields
    assert fields["util_pct"] == 0.0


@pytest.mark.parametrize("failed", [-1.0, 2147483647.0, 4294967295.0, 4294967296.0])
def test_a_reading_that_failed_is_absent(server: ExporterEndpoint, ticks: Ticks, failed: float) -> None:
    families = {
        "temperature": "temp_c",
        "power": "power_w",
        "aicore_current_freq": "sm_clock_mhz",
        "overall_utilization": "",
        "utilization": "util_pct",
        "hbm_used_memory": "mem_used_bytes",
        "health_status": "healthy",
        "link_status": "link_up",
        "process_info_num": "processes",
        "error_code": "",
    }
    ticks.npus()
    server.devices = (with_extra(server.devices[0], **dict.fromkeys(families, failed)), server.devices[1])
    samples = ticks.scrape()
    assert not set(families.values()) & by_index(samples)["0"].fields.keys()
    assert by_index(samples)["0"].fields["mem_temp_c"] == 72.0
    assert events(samples) == []


def test_an_npu_without_an_identity_gets_a_steady_one_from_serial_number_or_node(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    server.with_uuid = False
    text = server.text
    serial = 'npu_chip_info_serial_number{id="1",vdie_id="N/A",serial_number="S 42"} 1\n'
    server.text = lambda: text() + serial  # type: ignore[method-assign]
    for number in range(2):
        server.devices = tuple(replace(device, temp=50.0 + number) for device in server.devices)
        found = ticks.npus()
        assert [found[index].tags["uuid"] for index in "01"] == ["npu-n07-0", "S-42-1"]


def test_the_exporters_timestamp_says_which_readings_are_new_and_which_are_old(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    server.stamp_ms = ticks.now_ms
    assert len(ticks.npus()) == 2
    server.run(5)
    assert ticks.npus() == {}
    server.stamp_ms = ticks.now_ms
    assert len(ticks.npus()) == 2
    for _ in range(20):
        ticks.scrape()
    assert "stand still" in ticks.texts()
    server.stamp_ms = ticks.now_ms - 3_700_000  # more than an hour: the series are not even read
    for _ in range(3):
        assert ticks.scrape() == []


def test_an_npu_whose_readings_are_too_old_to_be_read_is_not_lost(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.stamp_ms = ticks.now_ms
    ticks.npus()
    text = server.text
    for _ in range(4):
        server.stamp_ms, old = ticks.now_ms, str(ticks.now_ms - 3_700_000)
        lines = [line.replace(str(server.stamp_ms), old) if 'id="1"' in line else line for line in text().splitlines()]
        server.text = lambda lines=lines: "\n".join(lines) + "\n"  # type: ignore[method-assign, misc]
        samples = ticks.scrape()
        assert list(by_index(samples)) == ["0"] and not events(samples)


def test_a_fault_code_and_ill_health_are_events_once_when_they_come(server: ExporterEndpoint, ticks: Ticks) -> None:
    first, second = with_extra(server.devices[0], error_code=0x80CD8008), server.devices[1]
    seen = []
    for step in (
        (first, second),  # there before the first look
        (with_extra(first, error_code_1=0x80E01801, health_status=0), second),
        (with_extra(first, error_code_1=0x80E01801, health_status=0), second),
        (first, with_extra(second, health_status=0)),
    ):
        server.devices = step
        server.run(5, temp=50.0 + len(seen))
        server.devices = (server.devices[0], replace(server.devices[1], temp=40.0 + len(seen)))
        samples = ticks.scrape()
        seen.append(events(samples))
        assert by_index(samples)["0"].fields["state"] == 0
    assert seen == [[], [("gpu_fault", "gpu0", 0x80E01801)], [], [("gpu_fault", "gpu1", 0)]]
    assert by_index(samples)["1"].fields["healthy"] == 0
    assert "unhealthy by their own word: gpu1" in ticks.texts()


def test_an_npu_whose_series_end_is_absent_with_one_event(server: ExporterEndpoint, ticks: Ticks) -> None:
    ticks.npus()
    seen = []
    for number in range(3):
        server.devices = (replace(server.devices[0], temp=50.0 + number),)
        samples = ticks.scrape()
        seen.append((by_index(samples).get("1", None) is not None, events(samples)))
    assert seen == [(False, []), (True, [("gpu_lost", "gpu1", 0)]), (True, [])]


@pytest.mark.parametrize(
    ("fault", "said"), [("404", "HTTP 404"), ("500", "HTTP 500"), ("truncated", "can't be used"), ("empty", "no NPU")]
)
def test_a_broken_exporter_costs_its_samples_and_is_named(
    server: ExporterEndpoint, ticks: Ticks, fault: str, said: str
) -> None:
    server.fault = fault
    assert ticks.scrape() == []
    assert said in ticks.texts()
    assert ticks.texts("zh") != ticks.texts("en")
    server.fault = ""
    assert len(ticks.npus()) == 2
    assert "ok: 2 devices" in ticks.texts()


def test_fields_that_the_exporter_leaves_out_are_named(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(server.devices[0], power=None, aicore_current_freq=None),)
    ticks.scrape()
    assert "not told by it: power_w, sm_clock_mhz" in ticks.texts()


def test_a_host_with_npus_and_no_exporter_is_told_which_setting_reads_them(tmp_path: Path) -> None:
    settings = AgentSettings(tmp_path, "sqlite:///x.db", node="n", nvml=False)
    found = AscendCollector.of(settings, settings.tags, tmp_path)
    assert isinstance(found, Examined)
    (finding,) = found.findings("en")
    assert finding.level == "warning" and "ascend_url" in finding.remedy
    assert AscendCollector.of(settings, settings.tags, tmp_path / "none") is None
    assert AscendCollector.of(replace(settings, ascend=False), settings.tags, tmp_path) is None


def test_the_collector_exists_where_its_address_is_configured(tmp_path: Path) -> None:
    settings = AgentSettings(tmp_path, "sqlite:///x.db", node="n", nvml=False, ascend_url="http://127.0.0.1:8082")
    made = collectors(settings, None)
    assert "ascend" in [collector.name for collector in made]
    for collector in made:
        collector.close()
