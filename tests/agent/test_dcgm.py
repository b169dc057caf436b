"""A GPU read through dcgm-exporter: every number in its unit, none that is stale or a mark for "none", and NVML's word first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent.collectors.dcgm import DcgmCollector
from agent.collectors.dcgm_fields import METRICS
from agent.collectors.engine_scrape import EngineClient
from agent.collectors.interface import Beside, Examined, Pausable, Tick
from agent.latest import LatestSamples, prometheus_text
from agent.sampler import SLOW_FIELDS, SLOW_SOURCES, collectors
from agent.settings import AgentSettings
from telemetry.catalogue import check
from telemetry.sample import Sample
from tests.doubles.engine_endpoint import nothing_listens
from tests.doubles.exporter_endpoint import FIRST, SECOND, Device, ExporterEndpoint

NOW_NS = 1_796_000_000 * 10**9
UPTIME_S = 1e7


@pytest.fixture
def server() -> Iterator[ExporterEndpoint]:
    endpoint = ExporterEndpoint()
    yield endpoint
    endpoint.close()


class Nvml:
    """Another collector, which knows some GPUs."""

    name, errors = "gpu", 0

    def __init__(self, *uuids: str) -> None:
        self._uuids = uuids

    def knows(self, uuid: str) -> bool:
        return uuid in self._uuids

    def collect(self, tick: Tick) -> Sequence[Sample]:
        return []

    def close(self) -> None:
        pass


class Ticks:
    """Ticks by a clock of its own: a scrape every five seconds of it, however fast the test runs."""

    def __init__(self, url: str, uptime_s: float = UPTIME_S, every_s: float = 5.0) -> None:
        self.collector = DcgmCollector({"node": "n07"}, url, every_s, uptime_s=lambda: uptime_s)
        self.now_s = 1000.0
        self.number = 0

    def _tick(self) -> list[Sample]:
        self.number += 1
        tick = Tick(self.number, NOW_NS + int(self.now_s * 1e9), self.now_s)
        samples = [check(sample) for sample in self.collector.collect(tick)]
        assert all(sample.time_ns == tick.time_ns for sample in samples)
        return samples

    def scrape(self, after_s: float = 5.0) -> list[Sample]:
        """What the next scrape brings."""
        self.now_s += after_s
        samples = self._tick()
        asked, give_up_s = self.collector._scrape.last, time.monotonic() + 90
        while time.monotonic() < give_up_s:
            samples += self._tick()
            if self.collector._scrape.last is not asked:
                return samples
            time.sleep(0.005)
        raise AssertionError("no answer")

    def gpus(self, after_s: float = 5.0) -> dict[str, Sample]:
        return by_index(self.scrape(after_s))

    def texts(self, language: str = "en") -> str:
        return "\n".join(f"{f.level}: {f.text} | {f.remedy}" for f in self.collector.findings(language))


def by_index(samples: Sequence[Sample]) -> dict[str, Sample]:
    return {sample.tags["gpu"]: sample for sample in samples if sample.measurement == "gpu"}


def events(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.measurement == "event"]


@pytest.fixture
def ticks(server: ExporterEndpoint) -> Iterator[Ticks]:
    made = Ticks(server.url)
    yield made
    made.collector.close()


def with_extra(device: Device, **extra: float | None) -> Device:
    return replace(device, extra={**device.extra, **{f"DCGM_FI_{name}": value for name, value in extra.items()}})


# what is read


def test_each_gpu_is_a_series_of_its_own_with_its_own_values_in_the_catalogues_units(ticks: Ticks) -> None:
    found = ticks.gpus()
    assert dict(found["0"].tags) == {"node": "n07", "gpu": "0", "uuid": "GPU-5c0a1e77-0001"}
    assert dict(found["0"].fields) == {
        "util_pct": 98.0,
        "mem_util_pct": 41.0,
        "sm_clock_mhz": 1980.0,
        "mem_clock_mhz": 2619.0,
        "temp_c": 61.0,
        "mem_temp_c": 72.0,
        "power_w": 512.5,
        "energy_j": pytest.approx(9_876_543_210.123),
        "mem_used_bytes": 60_000.0 * 2**20,
        "mem_total_bytes": 81_559.0 * 2**20,
        "throttle_reasons": 0,
        "gr_active_pct": pytest.approx(97.0),
        "sm_active_pct": pytest.approx(81.0),
        "dram_active_pct": pytest.approx(67.0),
        "tensor_active_pct": pytest.approx(33.0),
        "pcie_rx_bytes_s": 3.5e9,
        "pcie_tx_bytes_s": 1.25e9,
        "name": "NVIDIA H100 80GB HBM3",
        "state": 0,
        "source": "dcgm",
    }
    assert found["1"].tags["uuid"] == "GPU-a9d3f210-0002"
    assert all(
        found["1"].fields[name] != value
        for name, value in found["0"].fields.items()
        if name not in ("state", "source", "throttle_reasons")
    )


NEW_NAMES = {
    "DEV_GPU_UTIL": "DEV_GPU_UTIL_RATIO",
    "DEV_GPU_TEMP": "DEV_GPU_TEMP_CELSIUS",
    "DEV_MEMORY_TEMP": "DEV_MEMORY_TEMP_CELSIUS",
    "DEV_POWER_USAGE": "DEV_BOARD_POWER_WATTS",
    "DEV_CLOCK_THROTTLE_REASONS": "DEV_CLOCKS_EVENT_REASONS",
    "PROF_SM_ACTIVE": "PROF_SM_UTIL_RATIO",
    "PROF_PIPE_TENSOR_ACTIVE": "PROF_TENSOR_UTIL_RATIO",
    "PROF_DRAM_ACTIVE": "PROF_DRAM_UTIL_RATIO",
    "PROF_GR_ENGINE_ACTIVE": "PROF_GR_ENGINE_UTIL_RATIO",
}


def test_the_names_and_labels_of_newer_versions_read_the_same(server: ExporterEndpoint, ticks: Ticks) -> None:
    before = ticks.gpus()
    text = server.text

    def renamed() -> str:
        said = text()
        for old, new in NEW_NAMES.items():
            said = said.replace(f"DCGM_FI_{old}{{", f"DCGM_FI_{new}{{")
        return said

    server.text = renamed  # type: ignore[method-assign]
    server.new_names = True
    server.run(5)
    after = ticks.gpus()
    for index, sample in before.items():
        assert after[index].tags == sample.tags
        assert {**after[index].fields, "energy_j": 0} == {**sample.fields, "energy_j": 0}


def test_no_two_fields_share_a_name_and_each_has_one() -> None:
    names = [name for metric in METRICS for name in metric.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("family", "value", "field", "expected"),
    [
        ("DEV_ENFORCED_POWER_LIMIT", 650.0, "power_limit_w", 650.0),
        ("DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS", 651.0, "power_limit_w", 651.0),
        ("DEV_POWER_MGMT_LIMIT_DEF", 700.0, "power_limit_default_w", 700.0),
        ("DEV_POWER_MGMT_LIMIT", 690.0, "power_limit_requested_w", 690.0),
        ("DEV_PCIE_REPLAY_COUNTER", 7, "pcie_replays_total", 7),
        ("DEV_ECC_SBE_VOL_TOTAL", 12, "ecc_corrected_total", 12),
        ("DEV_ECC_DBE_VOL_TOTAL", 3, "ecc_uncorrected_total", 3),
        ("DEV_ROW_REMAP_FAILURE", 1, "remap_failed", 1),
        ("DEV_ROW_REMAP_PENDING", 1, "remap_pending", 1),
        ("PROF_NVLINK_RX_BYTES", 4.5e10, "nvlink_rx_bytes_s", 4.5e10),
        ("PROF_NVLINK_TX_BYTES", 5.5e10, "nvlink_tx_bytes_s", 5.5e10),
        ("DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS", 2.5e9, "throttle_hw_power_brake_s", 2.5),
        ("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", 3.5e9, "throttle_sw_thermal_s", 3.5),
        ("DEV_FB_TOTAL", 81_920.0, "mem_total_bytes", 81_920.0 * 2**20),
    ],
)
def test_a_family_that_is_not_in_the_default_list_is_read_when_it_is_there(
    server: ExporterEndpoint, ticks: Ticks, family: str, value: float, field: str, expected: float
) -> None:
    server.devices = (with_extra(FIRST, **{family: value}), SECOND)
    found = ticks.gpus()
    assert found["0"].fields[field] == expected
    assert found["1"].fields.get(field) != expected


def test_of_two_names_of_one_field_the_older_one_stands(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(FIRST, DEV_BOARD_POWER_WATTS=400.0),)
    assert ticks.gpus()["0"].fields["power_w"] == 512.5


def test_rows_remapped_for_both_reasons_are_one_count(server: ExporterEndpoint, ticks: Ticks) -> None:
    extra = {"DEV_CORRECTABLE_REMAPPED_ROWS": 5.0, "DEV_UNCORRECTABLE_REMAPPED_ROWS": 2.0}
    server.devices = (with_extra(FIRST, **extra),)
    assert ticks.gpus()["0"].fields["remapped_rows_total"] == 7


def test_pcie_throughput_of_nvml_is_a_rate_in_kib_whatever_its_type_says(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    extra = {"PROF_PCIE_RX_BYTES": None, "DEV_PCIE_RX_THROUGHPUT": 1000.0, "DEV_PCIE_TX_THROUGHPUT": 9.0}
    server.devices = (with_extra(FIRST, **extra),)
    fields = ticks.gpus()["0"].fields
    assert fields["pcie_rx_bytes_s"] == 1_024_000.0
    assert fields["pcie_tx_bytes_s"] == 1.25e9  # the profiling field is the better one
    server.run(5)
    assert ticks.gpus()["0"].fields["pcie_rx_bytes_s"] == 1_024_000.0  # no difference of anything


def test_a_gpu_that_pods_share_is_one_series(server: ExporterEndpoint, ticks: Ticks) -> None:
    text = server.text
    server.text = lambda: text() + text().replace('Hostname="n07"', 'Hostname="n07",pod="b"')  # type: ignore[method-assign]
    samples = [sample for sample in ticks.scrape() if sample.measurement == "gpu"]
    assert [(sample.fields["util_pct"], sample.fields["power_w"]) for sample in samples] == [
        (98.0, 512.5),
        (45.0, 301.25),
    ]


def test_a_gpu_without_a_uuid_is_known_by_its_pci_address(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.with_uuid = False
    found = ticks.gpus()
    assert [found[index].tags["uuid"] for index in "01"] == ["pci-00000000:1b:00.0", "pci-00000000:2b:00.0"]


def test_mig_instances_have_their_own_activity_and_memory_and_the_gpu_keeps_its_power(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    whole = {"DCGM_FI_DEV_GPU_UTIL": 0.0, "DCGM_FI_DEV_POWER_USAGE": 230.0}
    one = {**whole, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.5, "DCGM_FI_DEV_FB_USED": 100.0, "DCGM_FI_DEV_FB_FREE": 900.0}
    two = {**whole, "DCGM_FI_PROF_SM_ACTIVE": 0.25, "DCGM_FI_DEV_FB_USED": 300.0}
    names = [f"DCGM_FI_{name}" for name in ("DEV_GPU_UTIL", "DEV_POWER_USAGE", "DEV_FB_USED", "DEV_FB_FREE")]
    parent = replace(
        FIRST,
        extra=dict.fromkeys([*names, "DCGM_FI_PROF_SM_ACTIVE"], None),
        instances=(("7", "1g.10gb", one), ("9", "2g.20gb", two)),
    )
    server.devices = (parent,)
    samples = ticks.scrape()
    gpu = by_index(samples)["0"]
    assert gpu.fields["power_w"] == 230.0
    assert not {"util_pct", "mem_used_bytes", "sm_active_pct"} & gpu.fields.keys()
    mig = {sample.tags["mig"]: dict(sample.fields) for sample in samples if sample.measurement == "mig"}
    assert mig == {
        "GPU-5c0a1e77-0001/7": {
            "gr_active_pct": 50.0,
            "mem_used_bytes": 100.0 * 2**20,
            "mem_total_bytes": 1000.0 * 2**20,
            "profile": "1g.10gb",
        },
        "GPU-5c0a1e77-0001/9": {"sm_active_pct": 25.0, "mem_used_bytes": 300.0 * 2**20, "profile": "2g.20gb"},
    }


def test_a_zero_is_a_value(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (replace(FIRST, util=0.0, mem_util=0.0, sm=0.0, fb_used=0.0), SECOND)
    fields = ticks.gpus()["0"].fields
    assert [fields[name] for name in ("util_pct", "mem_util_pct", "sm_active_pct", "mem_used_bytes")] == [0.0] * 4


# what is left out


@pytest.mark.parametrize("blank", [2147483632.0, 2147483635.0, 9223372036854775794.0, 18446744073709551615.0, 2.0**47])
def test_dcgms_marks_for_none_are_absent_and_named(server: ExporterEndpoint, ticks: Ticks, blank: float) -> None:
    names = ("DEV_MEMORY_TEMP", "DEV_POWER_USAGE", "DEV_FB_USED", "PROF_SM_ACTIVE", "DEV_XID_ERRORS")
    boundless = ("DEV_PCIE_REPLAY_COUNTER", "DEV_ECC_SBE_VOL_TOTAL", "PROF_PCIE_RX_BYTES")  # no bound would catch these
    server.devices = (with_extra(FIRST, **dict.fromkeys(names + boundless, blank)), SECOND)
    samples = ticks.scrape()
    fields = by_index(samples)["0"].fields
    assert not {"mem_temp_c", "power_w", "mem_used_bytes", "mem_total_bytes", "sm_active_pct"} & fields.keys()
    assert not {"pcie_replays_total", "ecc_corrected_total", "pcie_rx_bytes_s"} & fields.keys()
    assert fields["temp_c"] == 61.0
    assert "DCGM_FI_DEV_MEMORY_TEMP" in ticks.texts()
    assert not events(samples)


def test_an_energy_counter_beyond_32_bits_is_no_mark_for_none(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (replace(FIRST, energy_mj=2147483640.0), replace(SECOND, energy_mj=9223372036854775794.0))
    found = ticks.gpus()
    assert found["0"].fields["energy_j"] == pytest.approx(2147483.64)
    assert "energy_j" not in found["1"].fields


@pytest.mark.parametrize(
    ("family", "value", "field"),
    [
        ("PROF_SM_ACTIVE", 63.0, "sm_active_pct"),
        ("DEV_GPU_UTIL", 240.0, "util_pct"),
        ("DEV_GPU_TEMP", -300.0, "temp_c"),
        ("DEV_POWER_USAGE", 512_000.0, "power_w"),
    ],
)
def test_a_value_of_another_scale_is_left_out_and_named_not_guessed_at(
    server: ExporterEndpoint, ticks: Ticks, family: str, value: float, field: str
) -> None:
    server.devices = (with_extra(FIRST, **{family: value}),)
    assert field not in ticks.gpus()["0"].fields
    assert f"DCGM_FI_{family}" in ticks.texts()


def test_a_zero_that_a_card_without_the_sensor_gives_is_absent_and_no_complaint(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    server.devices = (with_extra(FIRST, DEV_MEMORY_TEMP=0.0, DEV_ENFORCED_POWER_LIMIT=0.0, DEV_POWER_USAGE=0.0),)
    assert not {"mem_temp_c", "power_limit_w", "power_w"} & ticks.gpus()["0"].fields.keys()
    assert "DCGM_FI_DEV" not in ticks.texts()


def test_profiling_that_is_all_zero_on_a_busy_gpu_is_lost_and_said_so(server: ExporterEndpoint, ticks: Ticks) -> None:
    zero = {"gr": 0.0, "sm": 0.0, "dram": 0.0, "tensor": 0.0, "pcie_rx": 0.0, "pcie_tx": 0.0}
    server.devices = (replace(FIRST, **zero), replace(SECOND, **zero))  # type: ignore[arg-type]
    found = ticks.gpus()
    lost = {"sm_active_pct", "dram_active_pct", "tensor_active_pct", "gr_active_pct", "pcie_rx_bytes_s"}
    assert not lost & found["0"].fields.keys()
    assert found["1"].fields["sm_active_pct"] == 0.0  # at 45 % util a zero may be true
    assert "profiling is lost" in ticks.texts()
    server.devices = (FIRST.later(5), SECOND.later(5))
    assert ticks.gpus()["0"].fields["sm_active_pct"] == pytest.approx(81.0)
    assert "profiling is lost" not in ticks.texts()


# time


def test_an_answer_is_written_once_and_the_ticks_between_have_none(ticks: Ticks) -> None:
    assert ticks.gpus()
    for _ in range(4):
        ticks.now_s += 1
        assert ticks._tick() == []


def test_a_reading_that_the_exporter_repeats_is_not_written_again(server: ExporterEndpoint, ticks: Ticks) -> None:
    assert len(ticks.gpus()) == 2
    assert ticks.gpus() == {}
    server.devices = (server.devices[0], server.devices[1].later(30))
    assert list(ticks.gpus()) == ["1"]


def test_a_clock_that_fell_between_two_scrapes_is_written_as_it_is(server: ExporterEndpoint, ticks: Ticks) -> None:
    assert ticks.gpus()["0"].fields["sm_clock_mhz"] == 1980.0
    server.run(5, clock=1050.0)
    assert ticks.gpus()["0"].fields["sm_clock_mhz"] == 1050.0


def test_a_gpu_whose_energy_stands_still_while_it_draws_power_is_absent_and_named(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    ticks.gpus()
    for _ in range(20):
        server.devices = (server.devices[0], server.devices[1].later(5))
        assert list(ticks.gpus()) == ["1"]
    assert "readings of gpu0 stand still" in ticks.texts()
    server.run(5)
    assert list(ticks.gpus()) == ["0", "1"]
    assert "stand still" not in ticks.texts()


def test_an_exporter_with_a_long_interval_is_not_frozen(server: ExporterEndpoint, ticks: Ticks) -> None:
    written = 0
    for number in range(72):
        if number % 12 == 0:
            server.run(60)
        written += len(ticks.gpus())
        assert "stand still" not in ticks.texts()
    assert written == 12


def test_one_short_gap_between_readings_does_not_make_a_short_interval(server: ExporterEndpoint, ticks: Ticks) -> None:
    ticks.gpus()
    for number in range(30):
        if number % 6 == 0 or number == 1:
            server.run(30)
        ticks.gpus()
        assert "stand still" not in ticks.texts()


def test_an_idle_gpu_without_an_energy_counter_may_stand_still(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(replace(FIRST, util=0.0), DEV_TOTAL_ENERGY_CONSUMPTION=None),)
    for _ in range(25):
        assert list(ticks.gpus()) == ["0"]


def test_a_virtual_gpu_that_tells_no_power_may_stand_still_at_full_use(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(FIRST, DEV_TOTAL_ENERGY_CONSUMPTION=None, DEV_POWER_USAGE=None),)
    for _ in range(25):
        assert list(ticks.gpus()) == ["0"]


def test_a_busy_gpu_without_an_energy_counter_can_not_stand_still(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.devices = (with_extra(FIRST, DEV_TOTAL_ENERGY_CONSUMPTION=None),)
    assert list(ticks.gpus()) == ["0"]
    for _ in range(20):
        assert ticks.gpus() == {}
    assert "readings of gpu0 stand still" in ticks.texts()


def test_a_timestamp_that_an_exporter_gives_says_which_readings_are_new(server: ExporterEndpoint, ticks: Ticks) -> None:
    server.stamp_ms = (NOW_NS + int(ticks.now_s * 1e9)) // 10**6
    assert ticks.gpus()
    server.run(5)  # values move, the stamp does not
    assert ticks.gpus() == {}
    server.stamp_ms += 5000
    assert ticks.gpus()
    server.stamp_ms -= 400_000
    assert ticks.gpus() == {}
    assert "stand still" in ticks.texts()


# throttle durations


def violating(server: ExporterEndpoint, value: float, reasons: int = 0x4) -> None:
    device = with_extra(server.devices[0].later(5), DEV_POWER_VIOLATION=value)
    server.devices = (replace(device, reasons=reasons),)


def test_a_duration_that_outruns_the_clock_as_microseconds_is_nanoseconds(server: ExporterEndpoint) -> None:
    ticks = Ticks(server.url)
    violating(server, 3e9)
    assert "throttle_sw_power_s" not in ticks.gpus()["0"].fields
    assert "nanoseconds or microseconds" in ticks.texts()
    violating(server, 8e9)  # 5 s more; 5000 s as microseconds
    assert ticks.gpus()["0"].fields["throttle_sw_power_s"] == pytest.approx(8.0)
    assert "nanoseconds or microseconds" not in ticks.texts()
    ticks.collector.close()


def test_a_duration_longer_than_the_hosts_uptime_as_microseconds_is_nanoseconds_at_once(
    server: ExporterEndpoint,
) -> None:
    ticks = Ticks(server.url, uptime_s=1000.0)
    violating(server, 9e11)
    assert ticks.gpus()["0"].fields["throttle_sw_power_s"] == pytest.approx(900.0)
    ticks.collector.close()


def test_a_duration_that_runs_with_the_clock_as_microseconds_while_its_reason_stands_is_microseconds(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    for number in range(1, 6):
        violating(server, 1e6 + 5e6 * number)
        fields = ticks.gpus()["0"].fields
    assert fields["throttle_sw_power_s"] == pytest.approx(26.0)


def test_a_duration_of_unknown_unit_is_left_out_and_zero_is_zero(server: ExporterEndpoint, ticks: Ticks) -> None:
    violating(server, 0.0, reasons=0)
    assert ticks.gpus()["0"].fields["throttle_sw_power_s"] == 0.0
    for number in range(1, 6):
        violating(server, 1000.0 * number, reasons=0)
        assert "throttle_sw_power_s" not in ticks.gpus()["0"].fields


def test_a_reason_that_comes_and_goes_or_a_slow_counter_shows_no_unit(server: ExporterEndpoint) -> None:
    for growth, reasons in ((5e6, (4, 0)), (5e5, (4, 4))):
        ticks = Ticks(server.url)
        for number in range(1, 11):
            violating(server, growth * number, reasons[number % 2])
            assert "throttle_sw_power_s" not in ticks.gpus()["0"].fields
        ticks.collector.close()


def test_a_duration_that_grows_faster_than_the_clock_in_nanoseconds_is_left_out(server: ExporterEndpoint) -> None:
    ticks = Ticks(server.url, uptime_s=1000.0)
    violating(server, 9e11)
    ticks.gpus()
    violating(server, 9e11 + 300e9)
    assert "throttle_sw_power_s" not in ticks.gpus()["0"].fields
    violating(server, 9e11 + 304e9)
    assert ticks.gpus()["0"].fields["throttle_sw_power_s"] == pytest.approx(1204.0)
    ticks.collector.close()


# what happens to a GPU


def test_an_xid_is_an_event_when_the_gauge_changes_to_it_and_only_then(server: ExporterEndpoint, ticks: Ticks) -> None:
    codes: list[object] = []
    for xid in (31, 31, 79, 79, 0, 79):
        server.run(5, xid=xid)
        codes += [(event.tags["subject"], event.fields["code"]) for event in events(ticks.scrape())]
    # 31 was there before the first look; 79 came, and came again after a restart of the exporter
    assert codes == [("gpu0", 79), ("gpu0", 79)]


def test_a_gpu_whose_series_end_is_absent_with_its_uuid_and_one_event(server: ExporterEndpoint, ticks: Ticks) -> None:
    ticks.gpus()
    server.devices = (FIRST.later(5),)
    assert "1" not in ticks.gpus()  # once may be a start
    server.run(5)
    samples = ticks.scrape()
    assert dict(by_index(samples)["1"].fields) == {"state": 6, "source": "dcgm"}
    assert by_index(samples)["1"].tags["uuid"] == SECOND.uuid
    (event,) = events(samples)
    assert (event.tags["kind"], event.tags["subject"], event.fields["detail"]) == ("gpu_lost", "gpu1", SECOND.uuid)
    server.run(5)
    samples = ticks.scrape()
    assert by_index(samples)["1"].fields["state"] == 6 and not events(samples)
    assert "no longer lists gpu1" in ticks.texts()
    server.devices = (FIRST.later(50), SECOND.later(50))
    assert ticks.gpus()["1"].fields["state"] == 0


@pytest.mark.parametrize("fault", ["empty", "nonsense", "404", "truncated"])
def test_an_exporter_that_starts_or_fails_says_nothing_of_lost_gpus(
    server: ExporterEndpoint, ticks: Ticks, fault: str
) -> None:
    ticks.gpus()
    server.fault = fault
    for _ in range(4):
        assert ticks.scrape() == []


def test_what_nvml_knows_has_its_state_xids_and_losses_from_nvml(server: ExporterEndpoint, ticks: Ticks) -> None:
    ticks.collector.beside([Nvml(FIRST.uuid), ticks.collector])
    found = ticks.gpus()
    assert not {"state", "source"} & found["0"].fields.keys()
    assert found["0"].fields["sm_active_pct"] == pytest.approx(81.0)
    assert found["1"].fields["state"] == 0
    server.run(5, xid=79)
    assert not events(ticks.scrape())
    server.devices = (SECOND.later(10),)
    for _ in range(3):
        server.run(5)
        samples = ticks.scrape()
        assert not events(samples) and list(by_index(samples)) == ["1"]


def test_a_gpu_that_is_gone_after_a_pause_is_no_loss(server: ExporterEndpoint, ticks: Ticks) -> None:
    assert isinstance(ticks.collector, Pausable)
    ticks.gpus()
    ticks.collector.pause()
    for _ in range(3):
        server.devices = (FIRST.later(5 * ticks.number),)
        assert ticks.scrape() == []
    ticks.collector.resume()
    for _ in range(3):
        server.run(5)
        samples = ticks.scrape()
        assert list(by_index(samples)) == ["0"] and not events(samples)


# faults


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("404", "HTTP 404"),
        ("500", "HTTP 500"),
        ("endless", "16 MiB"),
        ("bomb", "when inflated"),
        ("truncated", "can't be used"),
        ("empty", "lists no GPU"),
        ("nonsense", "lists no GPU"),
    ],
)
def test_a_broken_exporter_costs_its_samples_and_is_named(
    server: ExporterEndpoint, ticks: Ticks, fault: str, said: str
) -> None:
    server.fault = fault
    assert ticks.scrape() == []
    assert said in ticks.texts()
    assert ticks.texts("zh") != ticks.texts("en")
    server.fault = ""
    assert len(ticks.gpus()) == 2


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_an_exporter_that_hangs_holds_up_no_tick(
    server: ExporterEndpoint, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    server.fault = fault
    ticks = Ticks(server.url)
    monkeypatch.setattr(ticks.collector._scrape, "_client", EngineClient(server.url, 60.0))
    began_s = time.monotonic()
    for _ in range(10):
        ticks.now_s += 1
        assert ticks._tick() == []
    assert time.monotonic() - began_s < 50
    assert ticks.collector.pending
    server.released.set()
    ticks.collector.close()


def test_nothing_that_listens_is_an_error_with_a_remedy_that_shows_no_password() -> None:
    url = nothing_listens().replace("http://", "http://user:hunter2@")
    ticks = Ticks(url + "/metrics")
    assert ticks.scrape() == []
    assert ticks.collector.errors == 1
    assert "nothing listens at http://127.0.0.1" in ticks.texts() and "dcgm_url" in ticks.texts()
    assert "hunter2" not in ticks.texts()


def test_what_an_exporter_leaves_out_is_said_with_the_line_that_switches_it_on(
    server: ExporterEndpoint, ticks: Ticks
) -> None:
    bare = {f"PROF_{name}": None for name in ("SM_ACTIVE", "DRAM_ACTIVE", "PIPE_TENSOR_ACTIVE", "GR_ENGINE_ACTIVE")}
    server.devices = (with_extra(FIRST, **bare, DEV_CLOCK_THROTTLE_REASONS=None),)
    assert "has not answered yet" in ticks.texts()
    ticks.scrape()
    assert "DCGM_FI_PROF_SM_ACTIVE, gauge" in ticks.texts()
    assert "DCGM_FI_DEV_CLOCKS_EVENT_REASONS, gauge" in ticks.texts()
    assert "ok: 1 devices" in ticks.texts()


def test_hostile_labels_and_numbers_are_bounded(server: ExporterEndpoint, ticks: Ticks) -> None:
    lines = [f'DCGM_FI_DEV_GPU_TEMP{{gpu="{number}",UUID="GPU-{number:04d}-x"}} 50' for number in range(2000)]
    odd = [
        'DCGM_FI_DEV_GPU_TEMP{gpu="-1",UUID="GPU-z"} 50',
        'DCGM_FI_DEV_GPU_TEMP{gpu="٣",UUID="GPU-z"} 50',
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-z"} 50',
        'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-0000-x"} 1e300',
        'DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-0000-x"} NaN',
        'DCGM_FI_DEV_MEM_CLOCK{gpu="0",UUID="GPU-0000-x",modelName="a\\nb\x07c"} 900',
    ]
    server.text = lambda: "\n".join([*lines, *odd]) + "\n"  # type: ignore[method-assign]
    found = ticks.gpus()
    assert len(found) == 64
    assert not {"power_w", "sm_clock_mhz"} & found["0"].fields.keys()
    assert found["0"].fields["mem_clock_mhz"] == 900.0


# where it is wired


def test_a_slow_source_stays_in_the_agents_metrics_between_its_readings_and_not_for_ever(ticks: Ticks) -> None:
    latest = LatestSamples(1.0, SLOW_FIELDS, {}, SLOW_SOURCES)
    samples = ticks.scrape()
    latest.publish(samples, 1000.0)
    latest.publish([], 1031.0)
    assert 'pairscope_gpu_power_w{gpu="0"' in prometheus_text(latest.fresh(1031.0))
    latest.publish([], 1100.0)
    assert latest.fresh(1100.0) == []


def test_profiling_fields_stand_beside_nvmls_samples_until_the_next_scrape() -> None:
    latest = LatestSamples(1.0, SLOW_FIELDS, {}, SLOW_SOURCES)
    tags = {"node": "n", "gpu": "0", "uuid": "GPU-a"}
    latest.publish([Sample("gpu", tags, {"state": 0, "sm_active_pct": 61.0}, 1)], 0.0)
    for second in range(1, 31):
        latest.publish([Sample("gpu", tags, {"state": 0, "power_w": 400.0}, second)], float(second))
    assert latest.fresh(30.0)[0].fields["sm_active_pct"] == 61.0
    latest.publish([Sample("gpu", tags, {"state": 4}, 31)], 31.0)
    assert "sm_active_pct" not in latest.fresh(31.0)[0].fields


def test_the_collector_exists_where_its_address_is_configured(tmp_path: Path) -> None:
    settings = AgentSettings(tmp_path, "sqlite:///x.db", node="n", nvml=False, dcgm_url="http://127.0.0.1:9400/metrics")
    made = collectors(settings, None)
    (found,) = [collector for collector in made if collector.name == "dcgm"]
    assert isinstance(found, Examined) and isinstance(found, Beside)
    for collector in made:
        collector.close()
    without = collectors(AgentSettings(tmp_path, "sqlite:///x.db", node="n", nvml=False), None)
    assert "dcgm" not in [collector.name for collector in without]
