"""The last minutes of samples in memory, one table a device: what the evidence is read from.

A device is one series (measurement and tags): a GPU, an engine, a host, a power supply. Its samples are rows of numbers in flat
arrays, in single precision where a reading has no more than its seven digits and a byte a row where it never changes, so that a
thousand GPUs at one sample a second fit in some tens of megabytes. Absent is NaN in here and never leaves as one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan

from rules.column import NAN, Column, Steady, settled
from telemetry.catalogue import REACH
from telemetry.sample import Sample, Value

SECOND = 1_000_000_000


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEPT: Mapping[str, frozenset[str]] = {
    "gpu": _names(
        "util_pct mem_util_pct sm_active_pct mem_used_bytes mem_total_bytes temp_c mem_temp_c temp_margin_c temp_limit_c "
        "mem_temp_limit_c power_w power_limit_w power_limit_default_w power_limit_requested_w sm_clock_mhz sm_clock_max_mhz "
        "mem_clock_mhz mem_clock_max_mhz pstate throttle_reasons fan_pct pcie_rx_bytes_s pcie_gen pcie_gen_max pcie_width "
        "pcie_width_max processes state throttle_sw_power_s throttle_sw_thermal_s throttle_hw_thermal_s "
        "throttle_hw_power_brake_s pcie_replays_total ecc_uncorrected_total remapped_rows_total remap_pending remap_failed "
        "xid_total healthy link_up throttle_thermal_s"
    ),
    "engine": _names(
        "generation_tokens_total delivered_tokens_total prompt_tokens_total preemptions_total requests_finished_total "
        "requests_failed_total oom_total steps_total tokens_per_s prompt_tokens_per_s requests_running requests_waiting "
        "kv_used_pct kv_fragmentation_pct kv_blocks_count ttft_p50_s ttft_p95_s itl_mean_s step_mean_s prompt_len_mean "
        "output_len_mean context_mean prefix_queries_total prefix_hits_total spec_drafted_total spec_accepted_total up "
        "starting stalled stats_age_s uptime_s probe_ok proc_cpu_max_pct"
    ),
    "rank": frozenset(("step_compute_mean_s", "step_wait_mean_s")),
    "host": _names(
        "cpu_pct cpu_core_max_pct load1 mem_used_pct swap_in_bytes_s swap_out_bytes_s iowait_pct psi_cpu_pct psi_io_pct "
        "psi_memory_pct cgroup_throttled_pct disk_busy_pct clock_offset_s"
    ),
    "psu": frozenset(("ok", "output_w", "capacity_w")),
    "power": frozenset(("node_w", "headroom_pct", "headroom_redundant_pct", "redundancy", "cap_w")),
    "thermal": frozenset(("inlet_c", "exhaust_c", "fan_pct", "fan_min_rpm")),
    "circuit": frozenset(("load_pct",)),
}
"""The fields that some rule reads; everything else is let go at the door."""

TEXTS = frozenset(("version", "config_hash", "counter_style", "kv_used_kind"))
CHANGE_KINDS = {"version": "deploy", "config_hash": "config"}
"""A text of the engine that changes is an event of this kind, also where nobody reported one."""

SLOW = _names(
    "temp_limit_c mem_temp_limit_c power_limit_w power_limit_default_w power_limit_requested_w sm_clock_max_mhz "
    "mem_clock_max_mhz pcie_gen_max pcie_width_max mem_total_bytes remap_pending remap_failed kv_blocks_count"
)
"""Fields that may be read once an hour; their last known value holds."""

EXACT = frozenset(
    name
    for fields in KEPT.values()
    for name in fields
    if name.endswith(("_total", "_s")) and not name.endswith(("_bytes_s", "tokens_per_s", "_mean_s"))
) | {"throttle_reasons"}
"""Counters, times and masks: kept in double precision, since single has seven digits only."""

SLOW_HOLDS_NS = 7200 * SECOND


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: a deploy, a restart, an Xid. `subject` names the engine or the GPU."""

    kind: str
    node: str
    subject: str
    text: str
    code: int | None
    time_ns: int


OF_ONE_PAIR = frozenset(("gpu", "engine", "rank"))
MOST_SPANS, MOST_MEDIANS = 8, 64


class Device:
    """The rows of one series, oldest first. Spans are half-open to the left: start < time <= end, in wall nanoseconds."""

    __slots__ = ("_known", "_medians", "_spans", "columns", "last_ns", "measurement", "tags", "texts", "times")

    def __init__(self, measurement: str, tags: Mapping[str, str]) -> None:
        self.measurement = measurement
        self.tags = dict(tags)
        self.times = array("q")
        self.last_ns = 0  # of the newest row ever, also when it was let go
        self.columns: dict[str, Column] = {}
        self.texts: dict[str, str] = {}
        self._known: dict[str, tuple[int, float]] = {}
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}  # of times already looked up, to rows
        self._medians: dict[tuple[str, int, int], float | None] = {}  # already worked out

    def add(self, time_ns: int, fields: Mapping[str, Value]) -> None:
        """One row; the same time again merges into the last row, an older time is let go."""
        if time_ns < self.last_ns or (time_ns == self.last_ns and not self.times):
            return
        if time_ns > self.last_ns:
            self.last_ns = time_ns
            self._forget()
            self.times.append(time_ns)
            for known in self.columns.values():
                known.append(NAN)
        kept = KEPT[self.measurement]
        for name, value in fields.items():
            if name not in kept or isinstance(value, str) or not -REACH <= value <= REACH:
                continue
            if name in SLOW:
                self._known[name] = (time_ns, float(value))
            column = self.columns.get(name)
            if column is None:
                rows = bytearray(len(self.times))
                column = self.columns[name] = Steady("d" if name in EXACT else "f", value, rows)
            if isinstance(column, Steady):
                if column.take(value):
                    continue
                column = self.columns[name] = column.spread()
            column[-1] = value

    def trim(self, before_ns: int) -> None:
        count = bisect_right(self.times, before_ns)
        if count:
            self._forget()
            del self.times[:count]
            for name, column in self.columns.items():
                del column[:count]
                self.columns[name] = settled(column)

    def points(self, field: str, start_ns: int, end_ns: int) -> list[tuple[int, float]]:
        column = self.columns.get(field)
        if column is None:
            return []
        low, high = self._rows(start_ns, end_ns)
        if isinstance(column, Steady):
            return column.points(self.times, low, high)
        return [point for point in zip(self.times[low:high], column[low:high], strict=True) if point[1] == point[1]]

    def backwards(self, field: str, start_ns: int, end_ns: int) -> Iterator[tuple[int, float]]:
        """The points newest first, for a look that ends early."""
        column = self.columns.get(field)
        if column is None:
            return
        low, high = self._rows(start_ns, end_ns)
        times = self.times
        for i in range(high - 1, low - 1, -1):
            if column[i] == column[i]:
                yield times[i], column[i]

    def grown(self, field: str, start_ns: int, end_ns: int) -> tuple[float, float] | None:
        """(growth, seconds) of a counter from its first to its last reading in the span; after a reset it counts from zero. None with
        fewer than two readings."""
        rows = self._known_rows(field, start_ns, end_ns)
        if rows is None:
            return None
        column, (low, high) = self.columns[field], rows
        seconds = (self.times[high - 1] - self.times[low]) / SECOND
        first, last = column[low], column[high - 1]
        if first == last:
            return 0.0, seconds  # it stood: nearly all counters of faults do
        part = column[low:high]
        if first == min(part) and last == max(
            part
        ):  # no reset: the usual case; NaN is neither less nor more than anything
            return last - first, seconds
        counts = [count for count in part if count == count]
        return sum(max(after - before, 0.0) or after * (after < before) for before, after in pairwise(counts)), seconds

    def values(self, field: str, start_ns: int, end_ns: int) -> list[float]:
        column = self.columns.get(field)
        if column is None:
            return []
        low, high = self._rows(start_ns, end_ns)
        if isinstance(column, Steady):
            return [column.reading] * column.count(low, high)
        part = column[low:high].tolist()
        if isnan(sum(part)):
            return [value for value in part if value == value]
        return part

    def median(self, field: str, start_ns: int, end_ns: int) -> float | None:
        """Of the readings in the span: worked out once, since all engines of a node ask the same of its host."""
        key = (field, start_ns, end_ns)
        if key in self._medians:
            return self._medians[key]
        readings = self.values(field, start_ns, end_ns)
        count = len(readings)
        found: float | None = None
        if count:
            readings.sort()
            found = (readings[count // 2] + readings[(count - 1) // 2]) / 2
        if self.measurement not in OF_ONE_PAIR:
            if len(self._medians) >= MOST_MEDIANS:
                self._medians.clear()
            self._medians[key] = found
        return found

    def newest(self, field: str, start_ns: int, end_ns: int) -> float | None:
        """The last reading of the span."""
        column = self.columns.get(field)
        if column is None:
            return None
        low, high = self._rows(start_ns, end_ns)
        while high > low:
            high -= 1
            if column[high] == column[high]:
                return column[high]
        return None

    def _forget(self) -> None:
        self._spans.clear()
        self._medians.clear()

    def ends(self, field: str, start_ns: int, end_ns: int) -> tuple[float, float] | None:
        """The first and the last reading of the span; None with fewer than two."""
        rows = self._known_rows(field, start_ns, end_ns)
        if rows is None:
            return None
        column = self.columns[field]
        return column[rows[0]], column[rows[1] - 1]

    def _known_rows(self, field: str, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """The rows of the span without those at its ends that have no reading; None with fewer than two."""
        column = self.columns.get(field)
        if column is None:
            return None
        low, high = self._rows(start_ns, end_ns)
        while low < high and column[low] != column[low]:
            low += 1
        while high > low and column[high - 1] != column[high - 1]:
            high -= 1
        return (low, high) if high - low >= 2 else None

    def _rows(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        found = self._spans.get((start_ns, end_ns))
        if found is None:
            found = bisect_right(self.times, start_ns), bisect_right(self.times, end_ns)
            if len(self._spans) >= MOST_SPANS:
                self._spans.clear()
            self._spans[start_ns, end_ns] = found
        return found

    def known(self, field: str, at_ns: int) -> float | None:
        """The last known value of a field of SLOW, if it is not older than two hours."""
        entry = self._known.get(field)
        if entry is None or not at_ns - SLOW_HOLDS_NS < entry[0] <= at_ns:
            return None
        return entry[1]


class Window:
    """All devices of a fleet over the last `horizon_s` seconds, and the events of the last hour."""

    def __init__(self, horizon_s: float = 300.0, events_s: float = 3600.0) -> None:
        self._horizon_ns = int(horizon_s * SECOND)
        self._events_ns = int(events_s * SECOND)
        self._devices: dict[tuple[str, tuple[tuple[str, str], ...]], Device] = {}
        self._nodes: dict[str, dict[str, list[Device]]] = {}
        self.circuits: dict[str, Device] = {}
        self.events: list[Event] = []
        self.last_ns = 0

    def add(self, samples: Iterable[Sample]) -> None:
        """Take samples, each device's in order of time; what no rule reads is let go."""
        for sample in samples:
            if sample.measurement == "event":
                self._add_event(sample)
            elif sample.measurement in KEPT and sample.tags.get("node"):  # without a node it is nobody's
                device = self._device(sample)
                if device.measurement == "engine":
                    self._add_texts(device, sample)
                device.add(sample.time_ns, sample.fields)
                self.last_ns = max(self.last_ns, sample.time_ns)

    def trim(self, at_ns: int) -> None:
        """Let go of what is older than the horizon. Each call moves every table: call it now and then."""
        for device in self._devices.values():
            device.trim(at_ns - self._horizon_ns)
        if self.events and self.events[0].time_ns < at_ns - self._events_ns:
            self.events = [event for event in self.events if event.time_ns >= at_ns - self._events_ns]

    def nodes(self) -> Sequence[str]:
        return list(self._nodes)

    def devices(self, node: str, measurement: str) -> Sequence[Device]:
        return self._nodes.get(node, {}).get(measurement, ())

    def all_devices(self, node: str) -> Iterator[Device]:
        for devices in self._nodes.get(node, {}).values():
            yield from devices

    def events_of(self, node: str, start_ns: int, end_ns: int) -> list[Event]:
        return [event for event in self.events if event.node == node and start_ns < event.time_ns <= end_ns]

    def _device(self, sample: Sample) -> Device:
        key = (sample.measurement, tuple(sorted(sample.tags.items())))
        device = self._devices.get(key)
        if device is None:
            device = self._devices[key] = Device(sample.measurement, sample.tags)
            node = self._nodes.setdefault(sample.tags.get("node", ""), {})
            node.setdefault(sample.measurement, []).append(device)
            if sample.measurement == "circuit":
                self.circuits[sample.tags.get("circuit", "")] = device
        return device

    def _add_event(self, sample: Sample) -> None:
        code = sample.fields.get("code")
        event = Event(
            kind=sample.tags.get("kind", ""),
            node=sample.tags.get("node", ""),
            subject=sample.tags.get("subject", ""),
            text=str(sample.fields.get("text", "")),
            code=int(code) if isinstance(code, int | float) and -REACH <= code <= REACH else None,
            time_ns=sample.time_ns,
        )
        if event not in self.events[-200:]:
            self.events.append(event)

    def _add_texts(self, device: Device, sample: Sample) -> None:
        for name in TEXTS:
            text = sample.fields.get(name)
            if not isinstance(text, str) or sample.time_ns <= device.last_ns:
                continue
            before = device.texts.get(name)
            if before is not None and before != text and name in CHANGE_KINDS:
                self.events.append(
                    Event(
                        CHANGE_KINDS[name],
                        device.tags.get("node", ""),
                        device.tags.get("engine", ""),
                        f"{before} -> {text}",
                        None,
                        sample.time_ns,
                    )
                )
            device.texts[name] = text
