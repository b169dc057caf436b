"""One GPU as the driver shows it: which readings are due at a sweep, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from agent.driver import Reading
from agent.due import Due
from agent.nvml import activity, codes, faults, link, memory, power
from agent.nvml.calls import Calls, GpuFault, Number
from agent.nvml.gpm import Gpm
from agent.nvml.link import Link
from agent.nvml.mig import Mig
from agent.nvml.temperature import FIELDS as TEMPERATURE_FIELDS
from agent.nvml.temperature import Temperature
from agent.timing import GROUPS, ReaderTiming
from telemetry.sample import Value

WORDS = frozenset(GROUPS["names_s"])

FAST_FIELDS = (*TEMPERATURE_FIELDS, *power.FIELDS, *activity.THROTTLE_FIELDS, *link.FIELDS)
"""One driver call for all of these."""

BUSY_PCT = 50.0


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
        self._mig = Mig(timing.reprobe_s)
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
            reading = self._read(now)
        except GpuFault as fault:
            return Reading(codes.state_of(fault.code), fault.code, {}, None)
        if self.calls.answered == 0 and self.calls.failures:
            code = self.calls.failures[0]
            self.calls.forget_refusals()
            return Reading(codes.state_of(code), code, {}, None)
        return reading

    def _read(self, now: float) -> Reading:
        calls, handle = self.calls, self.handle
        due = {
            "memory_due": self._memory_due.now(now),
            "processes_due": self._processes_due.now(now),
            "names_due": self._names_due.now(now),
        }
        if due["names_due"]:
            self._mig.enumerate(calls, handle)
        fields: dict[str, Value] = {}
        if self._limits_due.now(now):  # first, since margins are told against them
            fields |= self._read_limits()
        values = calls.fields(handle, FAST_FIELDS)
        moment = activity.read(calls, handle, values)
        fields |= moment
        fields |= power.read(calls, handle, values)
        fields |= self._temperature.read(calls, handle, values, int(moment.get("throttle_reasons", 0)))
        fields |= self._link.read(values, now)
        if due["memory_due"]:
            fields |= memory.read(calls, handle, self.identity.name, self._meminfo)
            fields |= link.read_state(calls, handle)
            fields |= activity.read_fan(calls, handle)
            fields |= self._profiling(now, moment.get("util_pct", 0))
        if self._health_due.now(now):
            fields |= faults.read(calls, handle, self.identity.brand)
            if not values.keys() & set(link.FIELDS):
                fields |= link.read_throughput(calls, handle)
        migs = self._mig.read(now, **due)
        pids = self._pids(moment.get("util_pct", 0)) if due["processes_due"] else None
        if pids is not None:
            fields["processes"] = len(pids)
        untold = due["processes_due"] and pids is None
        self._forget_words(fields, memory_due=due["memory_due"])
        fields = self._with_words(fields, due["names_due"])
        facts = self._facts() if due["names_due"] else None
        return Reading(codes.OK, codes.SUCCESS, fields, pids, untold, migs, facts)

    def _facts(self) -> dict[str, Any]:
        return {
            "persistence": self.calls.ask("persistence", pynvml.nvmlDeviceGetPersistenceMode, self.handle),
            "activity": self._gpm.supported,
            "migs": self._mig.uuids,
        }

    def _read_limits(self) -> dict[str, Value]:
        calls, handle = self.calls, self.handle
        return {
            **self._temperature.read_limits(calls, handle),
            **power.read_limits(calls, handle),
            **activity.read_maxima(calls, handle),
            **link.read_maxima(calls, handle),
        }

    def _profiling(self, now: float, util_pct: Number) -> dict[str, Number]:
        """A busy GPU whose SMs, tensor cores and DRAM all do exactly nothing has lost its profiling: those zeros are no readings."""
        active = self._gpm.read(self.calls, self.handle, now)
        return {} if util_pct >= BUSY_PCT and active and not any(active.values()) else active

    def _pids(self, util_pct: Number) -> tuple[int, ...] | None:
        """In a container the driver may hide the processes: a GPU that works for nobody is one whose processes aren't told."""
        pids = memory.read_processes(self.calls, self.handle)
        together = tuple(sorted({*(pids or ()), *self._mig.pids}))
        if not together and (pids is None or util_pct > 0):
            return None
        return together

    def _forget_words(self, fields: dict[str, Value], *, memory_due: bool) -> None:
        """A word about a number goes with it."""
        if "power_w" not in fields:
            self._words.pop("power_scope", None)
        if memory_due and "mem_total_bytes" not in fields:
            self._words.pop("memory_kind", None)

    def _with_words(self, fields: dict[str, Value], due: bool) -> dict[str, Value]:
        """Words are told now and then, and when they change: they would be half of every sample."""
        self._words |= {name: fields.pop(name) for name in WORDS & fields.keys()}
        if due or self._words != self._told:
            self._told = dict(self._words)
            return {**fields, **self._words}
        return fields

    def forget(self) -> None:
        """Give back what the library holds for this GPU; call before the library is shut down."""
        self._gpm.forget()
        self._mig.forget()
