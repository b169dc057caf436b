"""One GPU as the library shows it: which readings are due at a sweep, and what came of them."""

from __future__ import annotations

from agent.amd_smi import activity, codes, faults, link, memory, power
from agent.amd_smi.activity import Residency
from agent.amd_smi.calls import Calls, GpuFault
from agent.amd_smi.temperature import Temperature
from agent.driver import OK, SUCCESS, Number, Reading
from agent.due import Due
from agent.timing import ReaderTiming

SOURCE = "amd"


class Gpu:
    """A handle and what is remembered about it. `index` is the library's and moves when a GPU is lost; `uuid` stays."""

    def __init__(self, index: int, uuid: str, texts: dict[str, str], calls: Calls, timing: ReaderTiming) -> None:
        self.index = index
        self.uuid = uuid
        self.calls = calls
        self._words = {"source": SOURCE, **texts}
        self._temperature = Temperature()
        self._residency = Residency()
        share = (1 + index % 8) / 8
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
            fields, pids, untold = self._read(now)
        except GpuFault as fault:
            return self._out(fault.code)
        if not self.calls.answered and self.calls.failures:
            return self._out(self.calls.failures[0])
        return Reading(OK, SUCCESS, fields, pids, untold)

    def _out(self, code: int) -> Reading:
        self.calls.forget_refusals()
        return Reading(codes.state_of(code), code, {}, None)

    def _read(self, now: float) -> tuple[dict[str, Number | str], tuple[int, ...] | None, bool]:
        """Fields, process ids where they were due and told, and whether they were due and not told."""
        calls = self.calls
        fields: dict[str, Number | str] = {}
        pids, untold = None, False
        limits = self._limits_due.now(now)
        metrics = calls.table("amdsmi_get_gpu_metrics_info")
        fields |= activity.read(calls, metrics)
        fields |= self._residency.read(metrics, now)
        fields |= power.read(calls, limits=limits)
        if limits:  # before the temperatures, since margins are told against them
            fields |= self._temperature.read_limits(calls)
            fields |= activity.read_maxima(calls)
        fields |= self._temperature.read(calls)
        if self._memory_due.now(now) or limits:
            fields |= memory.read(calls)
            fields |= link.read(calls, maxima=limits)
        if self._processes_due.now(now):
            pids = memory.read_processes(calls)
            untold = pids is None
            if pids is not None:
                fields["processes"] = len(pids)
        if self._health_due.now(now):
            fields |= faults.read(calls)
            fields |= link.read_replays(calls)
        if self._names_due.now(now):  # now and then: they would be half of every sample
            fields |= self._words
        return fields, pids, untold
