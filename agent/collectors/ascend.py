"""Ascend NPUs through npu-exporter: the `gpu` measurement, in the same fields as any other accelerator's.

npu-exporter's families and units: power in W, HBM and DDR in MiB, utilisations in %, clocks in MHz, health and link 1 or 0. A reading that
failed is -1, or the largest 32-bit number. An NPU has no mask of throttle reasons: none is written, and its clock beside its rated clock
is what tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.exporter import DEVICE_LIMIT, EVERY_S, MISSES, Device, ExporterScrape, Presence, Reading
from agent.collectors.interface import Collector, Finding, Level, Tags, Tick
from agent.exposition import Exposition
from agent.settings import AgentSettings
from telemetry.catalogue import GPU
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.sample import Sample, Value

OK, ABSENT = 0, 6  # of catalogue.GPU_STATES
MIB = float(1 << 20)
DEVICE_NODE = Path("/dev/davinci_manager")
"""What the driver makes on a host with NPUs."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The families that tell a field, best first; what is outside least..most, in the exporter's unit, is no value."""

    field: str
    names: tuple[str, ...]
    most: float
    least: float = 0.0
    scale: float = 1.0


def _chip(*names: str) -> tuple[str, ...]:
    return tuple(f"npu_chip_info_{name}" for name in names)


METRICS = (
    Metric("aicore_util_pct", _chip("utilization"), 100.0),
    Metric("overall", _chip("overall_utilization"), 100.0),
    Metric("tensor_active_pct", _chip("cube_utilization"), 100.0),
    Metric("mem_util_pct", _chip("hbm_bandwidth_utilization"), 100.0),
    Metric("temp_c", _chip("temperature"), 200.0, least=-40.0),
    Metric("mem_temp_c", _chip("hbm_temperature"), 200.0, least=1.0),
    Metric("power_w", _chip("power"), 20_000.0, least=0.1),  # an NPU that runs is never at 0 W
    Metric("sm_clock_mhz", _chip("aicore_current_freq"), 10_000.0),
    Metric("sm_clock_max_mhz", _chip("aicore_freq"), 10_000.0, least=1.0),
    Metric("hbm_used", _chip("hbm_used_memory"), 1e8, scale=MIB),
    Metric("hbm_total", _chip("hbm_total_memory"), 1e8, least=1.0, scale=MIB),
    Metric("ddr_used", _chip("used_memory"), 1e8, scale=MIB),
    Metric("ddr_total", _chip("total_memory"), 1e8, least=1.0, scale=MIB),
    Metric("ecc_corrected_total", _chip("hbm_ecc_single_bit_error_cnt"), 2**31 - 2),
    Metric("ecc_uncorrected_total", _chip("hbm_ecc_double_bit_error_cnt"), 2**31 - 2),
    Metric("processes", _chip("process_info_num"), 100_000.0),
    Metric("healthy", _chip("health_status"), 1.0),
    Metric("link_up", _chip("link_status"), 1.0),
)
FAULTS = _chip("error_code", *(f"error_code_{number}" for number in range(1, 10)))
NOT_READ = (-1.0, float(2**31 - 1), float(2**32 - 1), float(2**32))  # the last is how 32-bit floats round the third
WANTED = ("util_pct", "temp_c", "power_w", "sm_clock_mhz", "mem_used_bytes", "healthy")


@dataclass(slots=True)
class Row:
    """What an answer says of one NPU."""

    index: str
    uuid: str = ""
    serial: str = ""
    name: str = ""
    values: dict[str, float] | None = None
    faults: frozenset[int] = frozenset()
    stamp_ms: float | None = None


class AscendCollector:
    """One sample an NPU for each reading that the exporter has made, dated with the tick in which it came; none in between.

    `state` is 0 of an NPU that is read, whatever it says of its health: that is `healthy`, and a new fault code, or an NPU that turns
    unhealthy without one, is an event. Faults from before the agent's first look are no events.
    """

    name = "ascend"

    def __init__(self, tags: Tags, url: str, every_s: float = EVERY_S, language: str = "en") -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._language = language
        self._scrape = ExporterScrape("ascend", "ascend_url", url, every_s)
        self._presence = Presence()
        self._faults: dict[str, frozenset[int]] = {}
        self._healthy: dict[str, bool] = {}
        self._rows: Mapping[str, Row] = {}
        self._told: set[str] = set()  # fields that have ever been written

    @classmethod
    def of(cls, settings: AgentSettings, tags: Tags, device_node: Path = DEVICE_NODE) -> Collector | None:
        """The collector of the configured exporter; where there is none on a host with NPUs, one that says so."""
        if settings.ascend_url:
            return cls(tags, settings.ascend_url, max(EVERY_S, settings.interval_s), settings.language)
        return Unread() if settings.ascend and device_node.exists() else None

    def collect(self, tick: Tick) -> list[Sample]:
        exposition = self._scrape.take(tick)
        self.errors = self._scrape.errors
        return [] if exposition is None else self._samples(exposition, tick)

    def pause(self) -> None:
        self._scrape.pause()

    def resume(self) -> None:
        self._presence.forget()
        self._scrape.resume()

    def close(self) -> None:
        self._scrape.close()

    # samples

    def _samples(self, exposition: Exposition, tick: Tick) -> list[Sample]:
        self._rows = rows = read(exposition, self._tags["node"])
        samples: list[Sample] = []
        for row in rows.values():
            device = self._presence.seen(row.uuid, row.index, row.uuid)
            if device is not None:
                samples += self._row(row, device, tick)
        for device in self._presence.missing(rows, exposition):
            samples += self._gone(device, tick)
        return samples

    def _row(self, row: Row, device: Device, tick: Tick) -> list[Sample]:
        values = row.values or {}
        is_busy = values.get("overall", values.get("aicore_util_pct", 0.0)) > 0  # an idle one may stand still
        must_move = is_busy and values.get("power_w", 0.0) > 0
        reading = device.freshness.judge(tick, values, must_move=must_move, stamp_ms=row.stamp_ms)
        device.frozen = reading is Reading.FROZEN
        if reading is not Reading.NEW:
            return []
        fields: dict[str, Value] = {"state": OK, "source": "ascend"}
        fields |= {name: _typed(name, value) for name, value in _fields(values).items()}
        if row.name:
            fields["name"] = row.name
        self._told |= fields.keys()
        tags = {**self._tags, "gpu": device.index, "uuid": device.uuid}
        return [*self._events(row, device, values, tick), Sample("gpu", tags, fields, tick.time_ns)]

    # what happens to an NPU

    def _events(self, row: Row, device: Device, values: Mapping[str, float], tick: Tick) -> list[Sample]:
        known, self._faults[device.key] = self._faults.get(device.key), row.faults
        new = [] if known is None else sorted(row.faults - known)
        events = [self._fault(device, code, tick) for code in new]
        if "healthy" in values:
            healthy = bool(values["healthy"])
            was, self._healthy[device.key] = self._healthy.get(device.key), healthy
            if was and not healthy and not new:
                text = say("exporters.event.unhealthy", self._language, gpu=device.index)
                events.append(self._event("gpu_fault", device, text, 0, tick))
        return events

    def _fault(self, device: Device, code: int, tick: Tick) -> Sample:
        text = say("exporters.event.fault", self._language, gpu=device.index, code=code)
        return self._event("gpu_fault", device, text, code, tick)

    def _gone(self, device: Device, tick: Tick) -> list[Sample]:
        tags = {**self._tags, "gpu": device.index, "uuid": device.uuid}
        samples = [Sample("gpu", tags, {"state": ABSENT, "source": "ascend"}, tick.time_ns)]
        if device.missed == MISSES:
            text = say("exporters.event.gone", self._language, gpu=device.index)
            samples.insert(0, self._event("gpu_lost", device, text, 0, tick))
        return samples

    def _event(self, kind: str, device: Device, text: str, code: int, tick: Tick) -> Sample:
        tags = {**self._tags, "kind": kind, "subject": device.subject}
        return Sample("event", tags, {"text": text, "code": code, "detail": device.uuid}, tick.time_ns)

    # what `doctor` asks

    @property
    def pending(self) -> bool:
        return self._scrape.pending

    def findings(self, language: str) -> Sequence[Finding]:
        problem = self._scrape.problem(language)
        if problem is not None:
            return [problem]
        if not self._rows:
            return [_finding("error", "ascend_no_npus", language, "ascend_no_npus")]
        devices = self._presence.devices.values()
        frozen = [device.subject for device in devices if device.frozen]
        gone = [device.subject for device in devices if device.lost]
        unhealthy = [device.subject for device in devices if self._healthy.get(device.key) is False]
        missing = [name for name in WANTED if name not in self._told]
        found = [_finding("ok", "works", language, count=len(self._rows), fields=len(self._told))]
        if frozen:
            found.append(_finding("error", "frozen", language, "ascend_frozen", gpus=", ".join(frozen)))
        if gone:
            found.append(_finding("error", "gone", language, gpus=", ".join(gone)))
        if unhealthy:
            found.append(_finding("error", "ascend_unhealthy", language, "ascend_unhealthy", gpus=", ".join(unhealthy)))
        if missing:
            found.append(_finding("warning", "ascend_missing", language, "ascend_missing", names=", ".join(missing)))
        return found


class Unread:
    """A host with NPUs that nothing reads: says so when asked."""

    name = "ascend"

    def __init__(self) -> None:
        self.errors = 0

    def collect(self, _tick: Tick) -> list[Sample]:
        return []

    def close(self) -> None:
        pass

    @property
    def pending(self) -> bool:
        return False

    def findings(self, language: str) -> Sequence[Finding]:
        return [_finding("warning", "ascend_unread", language, "ascend_unread")]


def _finding(level: Level, word: str, language: str, remedy: str = "", /, **values: object) -> Finding:
    text = say(f"exporters.finding.{word}", language, **values)
    return Finding("ascend", level, text, say(f"exporters.remedy.{remedy}", language) if remedy else "")


def read(exposition: Exposition, node: str) -> dict[str, Row]:
    """The NPUs of a scrape by their identity. An NPU that several containers share has a series for each: the first stands."""
    rows: dict[str, Row] = {}
    for name in (*(name for metric in METRICS for name in metric.names), *FAULTS, *_chip("name", "serial_number")):
        for labels, value in exposition.series.get(name, {}).items():
            row = _row(rows, dict(labels))
            if row is None:
                continue
            stamp_ms = exposition.stamps_ms.get(name, {}).get(labels)
            if stamp_ms is not None:
                row.stamp_ms = max(stamp_ms, row.stamp_ms or stamp_ms)
            if name in FAULTS and value not in NOT_READ and 0 < value < 2**53:
                row.faults |= {int(value)}
    for metric in METRICS:
        for name in metric.names:
            for labels, value in exposition.series.get(name, {}).items():
                row = _row(rows, dict(labels))
                if row is not None and value not in NOT_READ and metric.least <= value <= metric.most:
                    row.values = row.values or {}
                    row.values.setdefault(metric.field, value * metric.scale)
    for row in rows.values():
        if not row.uuid:  # two chips of one card share its serial number
            row.uuid = f"{row.serial}-{row.index}" if row.serial else f"npu-{node}-{row.index}"
    return {row.uuid: row for row in rows.values()}


def _row(rows: dict[str, Row], labels: Mapping[str, str]) -> Row | None:
    """The row of a series by the NPU's number; None for one that names none, and beyond the limit."""
    index = labels.get("id") or labels.get("npuID") or labels.get("npu_id") or ""
    if not (index.isascii() and index.isdigit() and len(index) <= 4):
        return None
    index = str(int(index))
    row = rows.get(index)
    if row is None:
        if len(rows) >= DEVICE_LIMIT:
            return None
        row = rows[index] = Row(index)
    row.uuid = row.uuid or _identity(labels.get("vdie_id") or labels.get("uuid") or "")
    row.serial = row.serial or _identity(labels.get("serial_number", ""))
    row.name = row.name or printable(labels.get("model_name") or labels.get("modelName") or "")[:64].strip()
    return row


def _identity(text: str) -> str:
    """An identity as it may be used; empty for the ways in which exporters write that there is none."""
    cleaned = "-".join(printable(text)[:64].split())
    return cleaned if cleaned.upper() not in ("N/A", "NA", "UNKNOWN") and cleaned.strip("0-") else ""


def _fields(values: Mapping[str, float]) -> dict[str, float]:
    """Catalogue fields. Utilisation is the whole NPU's where it is told, and else that of its AI cores; memory is HBM, or DDR where an
    NPU has no other.
    """
    found = {name: value for name, value in values.items() if name in GPU.fields}
    util = values.get("overall", values.get("aicore_util_pct"))
    if util is not None:
        found["util_pct"] = util
    memory = "hbm" if "hbm_total" in values else "ddr"
    for part, field in (("used", "mem_used_bytes"), ("total", "mem_total_bytes")):
        if f"{memory}_{part}" in values:
            found[field] = values[f"{memory}_{part}"]
    return found


def _typed(name: str, value: float) -> Value:
    return float(value) if GPU.fields[name].type is float else int(value)
