"""Temperatures, the margin to the limit and the limits themselves, absolute or relative as the card gives them.

Cards up to Ampere give absolute thresholds. Ada, Hopper and later give a margin that counts down to zero (T.Limit) and thresholds as
signed offsets from that zero: a card at 38 °C with margin 49 and gpu-max offset 0 slows down at 87 °C.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pynvml

from agent.nvml.calls import Calls, FieldId, Number

MEMORY_TEMPERATURE = 82
GPU_TEMPERATURE = 308  # double, newest drivers
SLOWDOWN_OFFSET = 194
MEM_MAX_OFFSET = 195
GPU_MAX_OFFSET = 196

FIELDS = (MEMORY_TEMPERATURE, GPU_TEMPERATURE)
OFFSET_FIELDS = (SLOWDOWN_OFFSET, MEM_MAX_OFFSET, GPU_MAX_OFFSET)

GPU_SENSOR = 0  # sensor 1 is the hottest point of the die in new drivers, not the memory
SLOWDOWN_THRESHOLD, MEM_MAX_THRESHOLD, GPU_MAX_THRESHOLD = 1, 2, 3
THERMAL_REASONS = 0x20 | 0x40  # software and hardware thermal slowdown
NO_SIGNED_VALUE = -1  # all bits set
SIGHTINGS = 3
"""How often margin + temperature must give the same limit before it is believed: the two are read a moment apart."""
MEM_SIGHTINGS = 5
"""The same for the memory's, whose limit shows only while it is nearer than the core's."""


def _plausible(celsius: Number | None) -> bool:
    return celsius is not None and -40 < celsius < 200


class Temperature:
    """One GPU's temperatures. Remembers the card's limits and whether its margin can be trusted."""

    def __init__(self) -> None:
        self._limit_c: float | None = None  # absolute, from the card
        self._mem_limit_c: float | None = None
        self._offset_c: int | None = None  # of the core's slowdown point from the margin's zero
        self._margin_moves = False
        self._sightings: Counter[int] = Counter()
        self._mem_offset_c: int | None = None  # of the memory's highest operating point from the margin's zero
        self._mem_sightings: Counter[int] = Counter()
        self._before: tuple[float, float, float] | None = None  # core, memory, margin of the last sweep

    def read(self, calls: Calls, handle: Any, values: dict[FieldId, Number], reasons: int) -> dict[str, Number]:
        """temp_c, mem_temp_c and temp_margin_c. `reasons` is the throttle mask of the same sweep."""
        fields: dict[str, Number] = {}
        core = values.get(GPU_TEMPERATURE)
        if core is None:
            core = calls.ask("temperature_v", pynvml.nvmlDeviceGetTemperatureV, handle, GPU_SENSOR)
        if core is None:
            core = calls.ask("temperature", pynvml.nvmlDeviceGetTemperature, handle, GPU_SENSOR)
        if core is not None and core != NO_SIGNED_VALUE and _plausible(core):
            fields["temp_c"] = float(core)
        memory = values.get(MEMORY_TEMPERATURE)
        if memory and _plausible(memory):  # a memory at exactly 0 °C is a card without the sensor
            fields["mem_temp_c"] = float(memory)
        margin = self._margin(calls, handle, fields, reasons)
        if margin is not None:
            fields["temp_margin_c"] = margin
        return fields

    def _margin(self, calls: Calls, handle: Any, fields: dict[str, Number], reasons: int) -> float | None:
        told = calls.ask("margin", pynvml.nvmlDeviceGetMarginTemperature, handle)
        if told is not None and _plausible(told):
            # early H100 drivers answer 0 or less for ever: believe that only from a card that has shown more or is held down by heat
            self._margin_moves = self._margin_moves or told > 0
            if self._margin_moves or reasons & THERMAL_REASONS:
                self._learn(fields.get("temp_c"), fields.get("mem_temp_c"), float(told))
                return float(told)
        pairs = ((self._limit_c, fields.get("temp_c")), (self._mem_limit_c, fields.get("mem_temp_c")))
        gaps = [limit - celsius for limit, celsius in pairs if limit is not None and celsius is not None]
        return min(gaps) if gaps else None

    def _learn(self, core: Number | None, memory: Number | None, margin: float) -> None:
        """A limit is temperature + margin - offset of whichever of core and memory is nearer to its own.

        That it is the memory's shows where the margin moves against the memory's temperature and not against the core's.
        """
        if core is None:
            return
        if self._offset_c is not None:
            self._sightings[round(core + margin - self._offset_c)] += 1
        if memory is None or self._mem_offset_c is None:
            return
        before, self._before = self._before, (float(core), float(memory), margin)
        if before is None:
            return
        core_by, memory_by, margin_by = (now - then for now, then in zip(self._before, before, strict=True))
        if memory_by and margin_by == -memory_by and core_by != memory_by:
            self._mem_sightings[round(memory + margin - self._mem_offset_c)] += 1

    def read_limits(self, calls: Calls, handle: Any) -> dict[str, Number]:
        """temp_limit_c: where the core's software slowdown begins (else hardware's); mem_temp_limit_c, where the card tells it."""
        self._limit_c = self._threshold(calls, handle, GPU_MAX_THRESHOLD)
        if self._limit_c is None:
            self._limit_c = self._threshold(calls, handle, SLOWDOWN_THRESHOLD)
        self._mem_limit_c = self._threshold(calls, handle, MEM_MAX_THRESHOLD)
        offsets = calls.fields(handle, OFFSET_FIELDS)
        offset = offsets.get(GPU_MAX_OFFSET, offsets.get(SLOWDOWN_OFFSET))
        self._offset_c = None if offset is None else int(offset)
        mem_offset = offsets.get(MEM_MAX_OFFSET)
        self._mem_offset_c = None if mem_offset is None else int(mem_offset)
        fields: dict[str, Number] = {}
        limit = self._limit_c if self._limit_c is not None else self._seen_limit()
        if limit is not None:
            fields["temp_limit_c"] = limit
        mem_limit = self._mem_limit_c if self._mem_limit_c is not None else self._seen_mem_limit()
        if mem_limit is not None:
            fields["mem_temp_limit_c"] = mem_limit
        return fields

    def _threshold(self, calls: Calls, handle: Any, kind: int) -> float | None:
        celsius = calls.ask(f"threshold_{kind}", pynvml.nvmlDeviceGetTemperatureThreshold, handle, kind)
        # an offset that comes back unsigned, or a zero, is no threshold
        return float(celsius) if celsius is not None and 0 < celsius < 200 else None

    def _seen_limit(self) -> float | None:
        """The margin is to the nearer of core and memory limit, so the core's is the highest that keeps being seen."""
        if len(self._sightings) > 64:
            self._sightings = Counter(dict(self._sightings.most_common(16)))
        steady = [celsius for celsius, times in self._sightings.items() if times >= SIGHTINGS and 0 < celsius < 200]
        return float(max(steady)) if steady else None

    def _seen_mem_limit(self) -> float | None:
        if len(self._mem_sightings) > 64:
            self._mem_sightings = Counter(dict(self._mem_sightings.most_common(16)))
        for celsius, times in self._mem_sightings.most_common(1):
            if times >= MEM_SIGHTINGS and _plausible(celsius):
                return float(celsius)
        return None
