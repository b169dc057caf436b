"""NVIDIA GPUs through dcgm-exporter: the `gpu` and `mig` measurements, beside NVML or instead of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from agent.collectors.dcgm_fields import RATES, RATIOS, Answer, Row, Told, read
from agent.collectors.dcgm_violations import ViolationUnit
from agent.collectors.exporter import EVERY_S, KEPT_S, MISSES, Device, ExporterScrape, Presence, Reading
from agent.collectors.interface import Collector, Finding, KnowsDevices, Level, Tags, Tick
from agent.exposition import Exposition
from agent.nvml import codes
from agent.settings import AgentSettings
from telemetry import xid
from telemetry.catalogue import GPU, MIG
from telemetry.messages import say
from telemetry.sample import Sample, Value

BUSY_PCT = 90.0
"""A GPU that is as busy as this and whose profiling fields are all exactly 0 is one whose profiling has been lost."""

_DIRECT = frozenset(GPU.fields)
_RATIO_FIELDS = tuple(metric.field for metric in RATIOS)
_PROFILED = frozenset(metric.field for metric in (*RATIOS, *RATES))
_ACTIVE = ("sm_active_pct", "dram_active_pct", "tensor_active_pct")

KEPT: Mapping[str, float] = dict.fromkeys((*_RATIO_FIELDS, "nvlink_rx_bytes_s", "nvlink_tx_bytes_s"), KEPT_S)
"""How long the fields that NVML may not tell stand, seconds."""


class DcgmCollector:
    """One sample a GPU for each reading that the exporter has made, dated with the tick in which it came; none in between.

    Where another collector knows the GPU its word stands: this one adds fields and leaves state, XIDs and losses to it. Alone, it
    tells them as far as an exporter can: the XID gauge holds the last code for ever, so only its change to another code is an event;
    a repeated code is invisible, and so is one from before the agent's first look.
    """

    name = "dcgm"

    def __init__(
        self,
        tags: Tags,
        url: str,
        every_s: float = EVERY_S,
        language: str = "en",
        uptime_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._language = language
        self._scrape = ExporterScrape("dcgm", "dcgm_url", url, every_s)
        self._presence = Presence()
        self._unit = ViolationUnit(uptime_s)
        self._xids: dict[str, int] = {}  # the gauge's last value, by GPU
        self._unprofiled: set[str] = set()  # GPUs whose profiling is lost
        self._others: Sequence[KnowsDevices] = ()
        self._answer: Answer | None = None
        self._told: set[str] = set()  # fields that have ever been written

    @classmethod
    def of(cls, settings: AgentSettings, tags: Tags) -> DcgmCollector | None:
        if not settings.dcgm_url:
            return None
        return cls(tags, settings.dcgm_url, max(EVERY_S, settings.interval_s), settings.language)

    def beside(self, others: Sequence[Collector]) -> None:
        """The other collectors of this host: those that read GPUs themselves have the say on those they know."""
        self._others = [other for other in others if isinstance(other, KnowsDevices)]

    def collect(self, tick: Tick) -> list[Sample]:
        exposition = self._scrape.take(tick)
        samples = [] if exposition is None else self._samples(exposition, tick)
        self.errors = self._scrape.errors
        return samples

    def pause(self) -> None:
        self._scrape.pause()

    def resume(self) -> None:
        self._presence.forget()
        self._scrape.resume()

    def close(self) -> None:
        self._scrape.close()

    # samples

    def _samples(self, exposition: Exposition, tick: Tick) -> list[Sample]:
        self._answer = answer = read(exposition)
        samples: list[Sample] = []
        for row in answer.rows.values():
            samples += self._row(row, tick)
        for device in self._presence.missing(answer.rows, exposition):
            samples += self._gone(device, tick)
        return samples

    def _row(self, row: Row, tick: Tick) -> list[Sample]:
        device = self._presence.seen(row.key, row.index, row.uuid)
        if device is None:
            return []
        values = row.told.values
        # what draws power and counts energy, or works, can't stand still; a virtual GPU that tells neither may
        must_move = values.get("power_w", 0.0) > 0 and ("energy_j" in values or values.get("util_pct", 0.0) > 0)
        reading = device.freshness.judge(tick, _everything(row), must_move=must_move, stamp_ms=row.stamp_ms)
        device.frozen = reading is Reading.FROZEN
        if reading is not Reading.NEW:
            return []
        fields = self._fields(row, tick)
        self._told |= fields.keys()
        samples = self._xid(device, values, tick)
        samples.append(self._sample(device, fields, tick))
        for number, told in row.instances.items():
            samples += self._instance(row, number, told, tick)
        return samples

    def _fields(self, row: Row, tick: Tick) -> dict[str, Value]:
        values = {**row.told.values, **_derived(row.told.values)}
        if values.get("util_pct", 0.0) >= BUSY_PCT and _all_zero(values):
            self._unprofiled.add(row.key)
            values = {name: value for name, value in values.items() if name not in _PROFILED}
        else:
            self._unprofiled.discard(row.key)
        for source, field in (("pcie_rx", "pcie_rx_bytes_s"), ("pcie_tx", "pcie_tx_bytes_s")):
            rate = values.get(f"prof_{source}", values.get(f"nvml_{source}"))
            if rate is not None:
                values[field] = rate
        reasons = values.get("throttle_reasons")
        durations = self._unit.seconds(
            row.key, row.told.violations, None if reasons is None else int(reasons), tick.monotonic_s
        )
        values = {**durations, **values}
        fields = {name: _typed(name, value) for name, value in values.items() if name in _DIRECT}
        texts = {"name": row.name, "driver": row.driver}
        return {**fields, **{name: text for name, text in texts.items() if text}}

    def _sample(self, device: Device, fields: Mapping[str, Value], tick: Tick) -> Sample:
        tags = {**self._tags, "gpu": device.index, "uuid": device.uuid}
        own: dict[str, Value] = {} if self._is_known(device) else {"state": codes.OK, "source": "dcgm"}
        return Sample("gpu", tags, {**own, **fields}, tick.time_ns)

    def _instance(self, row: Row, number: str, told: Told, tick: Tick) -> list[Sample]:
        values = {**told.values, **_derived(told.values)}
        fields: dict[str, Value] = {name: float(value) for name, value in values.items() if name in MIG.fields}
        if not fields:
            return []
        if told.profile:
            fields["profile"] = told.profile
        tags = {**self._tags, "gpu": row.index, "uuid": row.uuid, "mig": f"{row.uuid}/{number}"}
        return [Sample("mig", tags, fields, tick.time_ns)]

    # what happens to a GPU

    def _xid(self, device: Device, values: Mapping[str, float], tick: Tick) -> list[Sample]:
        if "xid" not in values:
            return []
        code = int(values["xid"])
        before, self._xids[device.key] = self._xids.get(device.key), code
        if before is None or code in (0, before) or self._is_known(device):
            return []
        return [self._event("xid", device, xid.text_of(code), code, tick)]

    def _gone(self, device: Device, tick: Tick) -> list[Sample]:
        if self._is_known(device):
            return []
        tags = {**self._tags, "gpu": device.index, "uuid": device.uuid}
        samples = [Sample("gpu", tags, {"state": codes.ABSENT, "source": "dcgm"}, tick.time_ns)]
        if device.missed == MISSES:
            text = say("exporters.event.gone", self._language, gpu=device.index)
            samples.insert(0, self._event("gpu_lost", device, text, 0, tick))
        return samples

    def _event(self, kind: str, device: Device, text: str, code: int, tick: Tick) -> Sample:
        tags = {**self._tags, "kind": kind, "subject": device.subject}
        return Sample("event", tags, {"text": text, "code": code, "detail": device.uuid}, tick.time_ns)

    def _is_known(self, device: Device) -> bool:
        return any(other.knows(device.uuid) for other in self._others)

    # what `doctor` asks

    @property
    def pending(self) -> bool:
        return self._scrape.pending

    def findings(self, language: str) -> Sequence[Finding]:
        problem = self._scrape.problem(language)
        if problem is not None:
            return [problem]
        answer = self._answer
        if answer is None or not answer.rows:
            return [self._finding("error", "no_gpus", language, "dcgm_no_gpus")]
        devices = self._presence.devices.values()
        frozen = [device.subject for device in devices if device.frozen]
        gone = [device.subject for device in devices if device.lost]
        found = [self._finding("ok", "works", language, count=len(answer.rows), fields=len(self._told))]
        if frozen:
            found.append(self._finding("error", "frozen", language, "dcgm_frozen", gpus=", ".join(frozen)))
        if gone:
            found.append(self._finding("error", "gone", language, "gone", gpus=", ".join(gone)))
        if self._unprofiled:
            found.append(self._finding("warning", "unprofiled", language, "dcgm_unprofiled"))
        elif not any(self._has(answer, field) for field in _ACTIVE):
            found.append(self._finding("warning", "no_profiling", language, "dcgm_no_profiling"))
        is_alone = any(not self._is_known(device) for device in devices)
        if is_alone and not self._has(answer, "throttle_reasons"):
            found.append(self._finding("warning", "no_reasons", language, "dcgm_no_reasons"))
        if is_alone and any(row.told.violations for row in answer.rows.values()) and self._unit.scale is None:
            found.append(self._finding("warning", "no_unit", language, "dcgm_no_unit"))
        if answer.blank:
            found.append(self._finding("warning", "blank", language, names=_names(answer.blank)))
        if answer.outside:
            found.append(self._finding("warning", "outside", language, names=_names(answer.outside)))
        return found

    def _finding(self, level: Level, word: str, language: str, remedy: str = "", /, **values: object) -> Finding:
        text = say(f"exporters.finding.{word}", language, **values)
        return Finding(self.name, level, text, say(f"exporters.remedy.{remedy}", language) if remedy else "")

    @staticmethod
    def _has(answer: Answer, field: str) -> bool:
        return any(field in told.values for row in answer.rows.values() for told in (row.told, *row.instances.values()))


def _everything(row: Row) -> dict[str, float]:
    """All values of a GPU and its instances, to tell one reading from another."""
    found = {**row.told.values, **{f"raw {name}": value for name, value in row.told.violations.items()}}
    for number, told in row.instances.items():
        found |= {f"{number} {name}": value for name, value in told.values.items()}
    return found


def _derived(values: Mapping[str, float]) -> dict[str, float]:
    """Fields that are made of several of DCGM's.

    FB_USED leaves the driver's reserve out where FB_RESERVED exists; exporters of before count it in, and used + free is all.
    """
    found: dict[str, float] = {}
    used, free = values.get("fb_used"), values.get("fb_free")
    if used is not None:
        found["mem_used_bytes"] = used
    if "fb_total" in values:
        found["mem_total_bytes"] = values["fb_total"]
    elif used is not None and free is not None:
        found["mem_total_bytes"] = used + free + values.get("fb_reserved", 0.0)
    if "remapped_corrected" in values and "remapped_uncorrected" in values:
        found["remapped_rows_total"] = values["remapped_corrected"] + values["remapped_uncorrected"]
    for name in _RATIO_FIELDS:
        if name in values:
            found[name] = min(100.0, values[name])
    return found


def _all_zero(values: Mapping[str, float]) -> bool:
    ratios = [values[name] for name in _RATIO_FIELDS if name in values]
    return bool(ratios) and not any(ratios)


def _typed(name: str, value: float) -> Value:
    return float(value) if GPU.fields[name].type is float else int(value)


def _names(names: set[str], most: int = 6) -> str:
    shown = sorted(names)
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "")
