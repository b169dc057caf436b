"""DCGM's fields: the names under which exporters publish them, their units and their bounds.

Names are those of dcgm_fields.h: the old one first, then the one that DCGM 4.6 gave the same field. Two names mislead: the value of
GPU_UTIL_RATIO is a percentage, as it always was, and the *_THROUGHPUT and PROF_*_BYTES families are rates, whatever TYPE an exporter's list
gives them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.exposition import Exposition, Labels
from telemetry.catalogue import REACH
from telemetry.lineprotocol import printable

MIB = float(1 << 20)
KIB = 1024.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One field: its value times `scale` is in the unit of `field`; a value outside least..most, before scaling, is none.

    `wide`: a 64-bit counter, whose values may pass 2^31. `instance`: a MIG instance has one of its own; any other value on an
    instance's series is the whole GPU's.
    """

    field: str
    names: tuple[str, ...]
    scale: float = 1.0
    least: float = 0.0
    most: float = REACH
    wide: bool = False
    instance: bool = False


def _dev(*names: str) -> tuple[str, ...]:
    return tuple(f"DCGM_FI_DEV_{name}" for name in names)


def _prof(*names: str) -> tuple[str, ...]:
    return tuple(f"DCGM_FI_PROF_{name}" for name in names)


RATIOS = (
    Metric("gr_active_pct", _prof("GR_ENGINE_ACTIVE", "GR_ENGINE_UTIL_RATIO"), 100.0, most=1.001, instance=True),
    Metric("sm_active_pct", _prof("SM_ACTIVE", "SM_UTIL_RATIO"), 100.0, most=1.001, instance=True),
    Metric("tensor_active_pct", _prof("PIPE_TENSOR_ACTIVE", "TENSOR_UTIL_RATIO"), 100.0, most=1.001, instance=True),
    Metric("dram_active_pct", _prof("DRAM_ACTIVE", "DRAM_UTIL_RATIO"), 100.0, most=1.001, instance=True),
)
"""Profiling fields: ratios 0..1."""

RATES = (
    Metric("prof_pcie_rx", _prof("PCIE_RX_BYTES"), most=1e12),
    Metric("prof_pcie_tx", _prof("PCIE_TX_BYTES"), most=1e12),
    Metric("nvlink_rx_bytes_s", _prof("NVLINK_RX_BYTES"), most=1e13),
    Metric("nvlink_tx_bytes_s", _prof("NVLINK_TX_BYTES"), most=1e13),
)
"""Profiling fields: bytes a second, headers included."""

VIOLATIONS = (
    Metric("throttle_sw_power_s", _dev("POWER_VIOLATION"), wide=True, most=1e19),
    Metric("throttle_thermal_s", _dev("THERMAL_VIOLATION"), wide=True, most=1e19),
    Metric("throttle_sync_boost_s", _dev("SYNC_BOOST_VIOLATION"), wide=True, most=1e19),
)
"""Durations in nanoseconds by NVML and today's DCGM, in microseconds by the lists of older exporters."""

DURATIONS = tuple(
    Metric(field, _dev(f"CLOCKS_EVENT_REASON_{name}_NS"), 1e-9, wide=True, most=1e18)
    for field, name in (
        ("throttle_sw_power_s", "SW_POWER_CAP"),
        ("throttle_sync_boost_s", "SYNC_BOOST"),
        ("throttle_sw_thermal_s", "SW_THERM_SLOWDOWN"),
        ("throttle_hw_thermal_s", "HW_THERM_SLOWDOWN"),
        ("throttle_hw_power_brake_s", "HW_POWER_BRAKE_SLOWDOWN"),
    )
)
"""The same durations by the fields whose name says the unit."""

DIRECT = (
    Metric("util_pct", _dev("GPU_UTIL", "GPU_UTIL_RATIO"), most=100.0),
    Metric("mem_util_pct", _dev("MEM_COPY_UTIL"), most=100.0),
    Metric("sm_clock_mhz", _dev("SM_CLOCK"), most=10_000.0),
    Metric("mem_clock_mhz", _dev("MEM_CLOCK"), most=100_000.0),
    Metric("sm_clock_max_mhz", _dev("MAX_SM_CLOCK"), least=1.0, most=10_000.0),
    Metric("mem_clock_max_mhz", _dev("MAX_MEM_CLOCK"), least=1.0, most=100_000.0),
    Metric("temp_c", _dev("GPU_TEMP", "GPU_TEMP_CELSIUS"), least=-40.0, most=200.0),
    # a memory at exactly 0 °C is a card without the sensor
    Metric("mem_temp_c", _dev("MEMORY_TEMP", "MEMORY_TEMP_CELSIUS"), least=1.0, most=200.0),
    # a card that runs is never at 0 W
    Metric("power_w", _dev("POWER_USAGE", "BOARD_POWER_WATTS"), least=0.1, most=20_000.0),
    Metric("power_limit_w", _dev("ENFORCED_POWER_LIMIT", "BOARD_POWER_LIMIT_ENFORCED_WATTS"), least=1.0, most=20_000.0),
    Metric(
        "power_limit_default_w",
        _dev("POWER_MGMT_LIMIT_DEF", "BOARD_POWER_LIMIT_DEFAULT_WATTS"),
        least=1.0,
        most=20_000.0,
    ),
    Metric(
        "power_limit_requested_w",
        _dev("POWER_MGMT_LIMIT", "BOARD_POWER_LIMIT_REQUESTED_WATTS"),
        least=1.0,
        most=20_000.0,
    ),
    Metric("energy_j", _dev("TOTAL_ENERGY_CONSUMPTION"), 1e-3, wide=True, most=1e18),
    Metric("fb_used", _dev("FB_USED"), MIB, most=1e8, instance=True),
    Metric("fb_free", _dev("FB_FREE"), MIB, most=1e8, instance=True),
    Metric("fb_reserved", _dev("FB_RESERVED"), MIB, most=1e8, instance=True),
    Metric("fb_total", _dev("FB_TOTAL"), MIB, least=1.0, most=1e8, instance=True),
    Metric("pstate", _dev("PSTATE", "GPU_PSTATE"), most=15.0),
    Metric("fan_pct", _dev("FAN_SPEED"), most=200.0),
    Metric("throttle_reasons", _dev("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS"), wide=True, most=2.0**52),
    Metric("pcie_gen", _dev("PCIE_LINK_GEN"), least=1.0, most=16.0),
    Metric("pcie_gen_max", _dev("PCIE_MAX_LINK_GEN"), least=1.0, most=16.0),
    Metric("pcie_width", _dev("PCIE_LINK_WIDTH"), least=1.0, most=64.0),
    Metric("pcie_width_max", _dev("PCIE_MAX_LINK_WIDTH"), least=1.0, most=64.0),
    # KiB a second by the driver's own 20 ms measurement
    Metric("nvml_pcie_rx", _dev("PCIE_RX_THROUGHPUT"), KIB, most=1e9),
    Metric("nvml_pcie_tx", _dev("PCIE_TX_THROUGHPUT"), KIB, most=1e9),
    Metric("pcie_replays_total", _dev("PCIE_REPLAY_COUNTER", "PCIE_REPLAY_TOTAL")),
    Metric("ecc_corrected_total", _dev("ECC_SBE_VOL_TOTAL")),
    Metric("ecc_uncorrected_total", _dev("ECC_DBE_VOL_TOTAL")),
    Metric("remapped_corrected", _dev("CORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_CORRECTABLE_TOTAL")),
    Metric("remapped_uncorrected", _dev("UNCORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_UNCORRECTABLE_TOTAL")),
    Metric("remap_failed", _dev("ROW_REMAP_FAILURE", "ROW_REMAP_FAILED"), most=1.0),
    Metric("remap_pending", _dev("ROW_REMAP_PENDING"), most=1.0),
    Metric("recovery_action", _dev("GET_GPU_RECOVERY_ACTION", "GPU_RECOVERY_ACTION"), most=7.0),
    Metric("xid", _dev("XID_ERRORS", "XID_ERROR"), most=65_535.0),
)

METRICS = (*RATIOS, *RATES, *DURATIONS, *VIOLATIONS, *DIRECT)


def is_blank(value: float, wide: bool) -> bool:
    """Whether it is one of DCGM's values for "none" (dcgm_structs.h: *_BLANK and the 15 above each).

    0x7ffffff0.. of 32 bits, 0x7ffffffffffffff0.. of 64, 2^47.. as floating point. A wide counter reaches the smaller two honestly.
    """
    if value >= float(0x7FFFFFFFFFFFFFF0):
        return True
    return not wide and (0x7FFFFFF0 <= value <= 0x7FFFFFFF or 2.0**47 <= value <= 2.0**47 + 15)


@dataclass(slots=True)
class Told:
    """What an answer says of one GPU or one MIG instance: raw values by the metric's `field`, scaled."""

    values: dict[str, float]
    violations: dict[str, float]  # in the exporter's own unit
    profile: str = ""


@dataclass(slots=True)
class Row:
    """What an answer says of one GPU."""

    key: str
    index: str
    uuid: str
    name: str
    driver: str
    told: Told
    instances: dict[str, Told]
    stamp_ms: float | None = None


@dataclass(slots=True)
class Answer:
    """One scrape: rows by key, and the families that had no value and such as can't be true."""

    rows: dict[str, Row]
    blank: set[str]
    outside: set[str]


INSTANCE_LIMIT = 16
ROW_LIMIT = 256


def read(exposition: Exposition) -> Answer:
    """The rows of a scrape. A GPU that several pods share has a series for each, with one value: the first stands."""
    answer = Answer({}, set(), set())
    for metric in METRICS:
        for name in metric.names:
            for labels, value in exposition.series.get(name, {}).items():
                row = _row(answer.rows, dict(labels))
                if row is not None:
                    stamp_ms = exposition.stamps_ms.get(name, {}).get(labels)
                    if stamp_ms is not None:
                        row.stamp_ms = max(stamp_ms, row.stamp_ms or stamp_ms)
                    _take(answer, row, metric, name, labels, value)
    return answer


def _take(answer: Answer, row: Row, metric: Metric, name: str, labels: Labels, value: float) -> None:
    if is_blank(value, metric.wide):
        answer.blank.add(name)
        return
    if not metric.least <= value <= metric.most:
        if value != 0:  # where 0 can't be, it is a card's way to say that it has none
            answer.outside.add(name)
        return
    said = dict(labels)
    instance = said.get("GPU_I_ID", "")
    if not instance:
        told = row.told
    elif metric.instance:
        found = _instance(row, instance, said.get("GPU_I_PROFILE", ""))
        if found is None:
            return
        told = found
    elif metric.field in ("util_pct", "mem_util_pct"):
        return  # under MIG the whole GPU has none, and 0 is what exporters write for it
    else:
        told = row.told
    into = told.violations if metric in VIOLATIONS else told.values
    into.setdefault(metric.field, value if metric in VIOLATIONS else value * metric.scale)


def _instance(row: Row, number: str, profile: str) -> Told | None:
    number = printable(number)[:16].strip()
    if number not in row.instances:
        if len(row.instances) >= INSTANCE_LIMIT:
            return None
        row.instances[number] = Told({}, {}, printable(profile)[:32])
    return row.instances[number]


def _row(rows: dict[str, Row], labels: dict[str, str]) -> Row | None:
    """The row of a series; None for one that names no GPU, and beyond the limit."""
    index = labels.get("gpu", "")
    if not (index.isascii() and index.isdigit() and len(index) <= 4):
        return None
    uuid = _uuid(labels, index)
    row = rows.get(uuid)
    if row is None:
        if len(rows) >= ROW_LIMIT:
            return None
        name = printable(labels.get("modelName") or labels.get("model_name") or "")[:64]
        driver = printable(labels.get("DCGM_FI_DRIVER_VERSION") or labels.get("DCGM_FI_SYSTEM_DRIVER_VERSION") or "")
        row = rows[uuid] = Row(uuid, str(int(index)), uuid, name, driver[:32], Told({}, {}), {})
    return row


def _uuid(labels: dict[str, str], index: str) -> str:
    """The GPU's uuid; where it is missing or all zeros, its PCI address, and else its index."""
    for label in ("UUID", "uuid", "gpu_uuid"):
        uuid = printable(labels.get(label, "")).strip()[:64]
        if uuid.upper().removeprefix("GPU-").strip("0-"):
            return uuid
    address = printable(labels.get("pci_bus_id", "")).strip()[:32]
    return f"pci-{address.lower()}" if address.strip("0:.") else f"index-{int(index)}"
