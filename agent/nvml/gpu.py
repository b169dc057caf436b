"""One GPU as the driver shows it: which readings are due at a sweep, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.driver import Reading
from agent.due import Due
from agent.nvml import activity, codes, faults, link, memory, power
from agent.nvml.calls import Calls, GpuFault
from agent.nvml.gpm import Gpm
from agent.nvml.link import Link
from agent.nvml.temperature import FIELDS as TEMPERATURE_FIELDS
from agent.nvml.temperature import Temperature
from agent.nvml.timing import GROUPS, ReaderTiming
from telemetry.sample import Value

WORDS = frozenset(GROUPS["names_s"])

FAST_FIELDS = (*TEMPERATURE_FIELDS, *power.FIELDS, *activity.THROTTLE_FIELDS, *link.FIELDS)
"""One driver call for all of these."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`index` is NVML's and moves when a GPU is lost; `uuid` stays. `brand` is nvmlBrandType_t, `driver` its version."""

    index: int
    uuid: str
    name: str
    brand: int | None
    driver: str


class Gpu:
    """A handle and what is remembered about it."""

    def __init__(self, identity: Identity, handle: Any, timing: ReaderTiming, meminfo: Path) -> None:
        self.identity = identity
        self.index = identity.index
        self.uuid = identity.uuid
        self.handle = handle
        self.calls = Calls(timing.reprobe_s)
        self._meminfo = meminfo
        self._words: dict[str, Value] = {"source": "nvml"}
        self._words |= {name: word for name in ("name", "driver") if (word := getattr(identity, name))}
        self._told: dict[str, Value] = {}
        self._temperature = Temperature()
        self._link = Link()
        self._gpm = Gpm()
        share = (1 + self.index % 8) / 8
        self._memory_due = Due(timing.memory_s, share)
        self._processes_due = Due(timing.processes_s, share)
        self._health_due = Due(timing.health_s, share)
        self._limits_due = Due(timing.limits_s, share)
        self._names_due = Due(timing.names_s, share)

    @property
    def errors(self) -> int:
        """Calls that failed unexpectedly."""
        return self.calls.errors

    def read(self, now: float) -> Reading:
        """Everything that is due at `now`, monotonic seconds. Raises DriverGone."""
        self.calls.begin(now)
        try:
            fields, pids = self._read(now)
        except GpuFault as fault:
            return Reading(codes.state_of(fault.code), fault.code, {}, None)
        if self.calls.answered == 0 and self.calls.failures:
            code = self.calls.failures[0]
            self.calls.forget_refusals()
            return Reading(codes.state_of(code), code, {}, None)
        return Reading(codes.OK, codes.SUCCESS, fields, pids)

    def _read(self, now: float) -> tuple[dict[str, Value], tuple[int, ...] | None]:
        calls, handle = self.calls, self.handle
        fields: dict[str, Value] = {}
        pids = None
        if self._limits_due.now(now):  # first, since margins are told against them
            fields |= self._temperature.read_limits(calls, handle)
            fields |= power.read_limits(calls, handle)
            fields |= activity.read_maxima(calls, handle)
            fields |= link.read_maxima(calls, handle)
        values = calls.fields(handle, FAST_FIELDS)
        moment = activity.read(calls, handle, values)
        reasons = moment.get("throttle_reasons", 0)
        fields |= moment
        fields |= power.read(calls, handle, values)
        fields |= self._temperature.read(calls, handle, values, int(reasons))
        fields |= self._link.read(values, now)
        if self._memory_due.now(now):
            fields |= memory.read(calls, handle, self.identity.name, self._meminfo)
            fields |= link.read_state(calls, handle)
            fields |= activity.read_fan(calls, handle)
            fields |= self._gpm.read(calls, handle, now)
        if self._processes_due.now(now):
            pids = memory.read_processes(calls, handle)
            if pids is not None:
                fields["processes"] = len(pids)
        if self._health_due.now(now):
            fields |= faults.read(calls, handle, self.identity.brand)
            if not values.keys() & set(link.FIELDS):
                fields |= link.read_throughput(calls, handle)
        return self._with_words(fields, now), pids

    def _with_words(self, fields: dict[str, Value], now: float) -> dict[str, Value]:
        """Words are told now and then, and when they change: they would be half of every sample."""
        self._words |= {name: fields.pop(name) for name in WORDS & fields.keys()}
        if self._names_due.now(now) or self._words != self._told:
            self._told = dict(self._words)
            return {**fields, **self._words}
        return fields

    def forget(self) -> None:
        """Give back what the library holds for this GPU; call before the library is shut down."""
        self._gpm.forget()
