"""AMD GPUs through AMD SMI: the `gpu` measurement, from a reader process that may hang in the driver while this one never does."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.amd_smi import codes, library
from agent.collectors.gpu import GpuCollector, Patience, patience_of
from agent.collectors.interface import Finding, Level, Tags, Tick
from agent.driver import OK, SUCCESS
from agent.reader_process import ReaderProcess
from agent.settings import AgentSettings
from agent.timing import ReaderTiming
from telemetry.catalogue import GPU_STATES
from telemetry.messages import say
from telemetry.sample import Sample

EXPECTED = (
    "util_pct",
    "mem_util_pct",
    "mem_used_bytes",
    "temp_c",
    "mem_temp_c",
    "power_w",
    "power_limit_w",
    "energy_j",
    "sm_clock_mhz",
    "mem_clock_mhz",
)
"""What a data-centre card of any generation tells; one that is missing is worth a word."""

_REMEDIES = {
    codes.NO_PACKAGE: "no_package",
    codes.FAIL_LOAD_MODULE: "no_library",
    codes.FAIL_LOAD_SYMBOL: "other_version",
    codes.NO_PERM: "no_permission",
    codes.DRIVER_NOT_LOADED: "no_driver",
    codes.NO_DRV: "no_driver",
}


class AmdCollector(GpuCollector):
    """Looks for the library and for devices first, and starts no process on a host that has neither."""

    name = "amd"
    driver = codes.CODES
    reader = "amd_smi"
    without_library = codes.FAIL_LOAD_MODULE

    def __init__(
        self,
        tags: Tags,
        timing: ReaderTiming | None = None,
        patience: Patience | None = None,
        process: ReaderProcess | None = None,
        root: Path = Path("/"),
        *,
        language: str = "en",
        memory: Path | None = None,
        expected: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(tags, timing, patience, process, root, language=language, memory=memory, expected=expected)
        self._root = root
        self._environment = environment
        self._look_at_s = -math.inf  # monotonic s
        self._devices = 0
        self._installed = True  # the Python package
        self._wanted = False  # there is something to read, and something to read it with

    def collect(self, tick: Tick) -> Sequence[Sample]:
        """Never waits longer than `Patience.answer_s`; never raises for a library, a driver or a GPU that is out."""
        if not self._wanted and tick.monotonic_s >= self._look_at_s:
            self._look_at_s = tick.monotonic_s + self._timing.retry_s
            self._look()
        return super().collect(tick) if self._wanted else ()

    @property
    def pending(self) -> bool:
        """Whether the reader works on its first sweep, and hasn't died over it twice."""
        waiting = self._wanted and not (self._swept or self._paused)
        return waiting and self._failed_starts < 2 and self._silent_s < self.patience.hung_s

    def findings(self, language: str) -> Sequence[Finding]:
        """What the readings so far have shown; asks the source nothing."""
        return [Finding(self.name, *rest) for rest in self._findings(language)]

    def _look(self) -> None:
        self._devices = library.devices(self._root)
        self._installed = library.has_package()
        found = bool(self._devices or self._memory.known) or library.has_library(self._root, self._environment)
        self._wanted = found and self._installed

    def _findings(self, language: str) -> Iterator[tuple[Level, str, str]]:
        known = list(self._roster)
        code = self._driver if self._wanted else (SUCCESS if self._installed else codes.NO_PACKAGE)
        if self._wanted and self._paused:
            yield "warning", say("gpu.finding.paused", language), ""
        elif self.pending:
            yield "warning", say("amd.finding.waiting", language), ""
        elif self._wanted and self._failed_starts >= 2 and not self._swept:
            yield "error", say("amd.finding.dies", language, times=self._failed_starts), ""
        elif self._wanted and self._silent_s >= self.patience.hung_s:
            yield "error", say("gpu.finding.hung", language), say("amd.remedy.hung", language)
        elif not known and (code in (SUCCESS, *self.driver.quiet)) and not self._devices:
            yield "absent", say("amd.finding.absent", language), ""
        elif code != SUCCESS:
            reason = codes.name_of(code, language)
            devices = max(self._devices, len(known))
            yield "error", say("amd.finding.out", language, devices=devices, reason=reason), _remedy(code, language)
        else:
            yield from self._gpu_findings(language)

    def _gpu_findings(self, language: str) -> Iterator[tuple[Level, str, str]]:
        known = list(self._roster)
        well = [gpu for gpu in known if gpu.state == OK and gpu.told]
        if well:
            yield "ok", say("amd.finding.fine", language, count=len(well)), ""
        if len(known) < self._devices:
            yield "error", say("amd.finding.fewer", language, devices=self._devices, count=len(known)), ""
        for gpu in known:
            missing = [field for field in EXPECTED if field not in gpu.told]
            if gpu.state != OK:
                reason = codes.name_of(gpu.code, language)
                state = say(f"gpu.state.{GPU_STATES[gpu.state]}", language)
                text = say("amd.finding.gpu_out", language, index=gpu.index, state=state, reason=reason)
                yield "error", text, _remedy(gpu.code, language)
            elif missing and gpu in well:
                text = say("amd.finding.refused", language, index=gpu.index, fields=", ".join(missing))
                yield "warning", text, ""


def _remedy(code: int, language: str) -> str:
    return say(f"amd.remedy.{_REMEDIES[code]}", language) if code in _REMEDIES else ""


def amd_collector(settings: AgentSettings, tags: Tags, memory: Path | None) -> AmdCollector | None:
    """The collector of AMD GPUs, for every host: without a library or a device it says nothing and looks again every 30 s.

    It keeps well within the time between ticks.
    """
    if not settings.amd:
        return None
    return AmdCollector(
        tags,
        patience=patience_of(settings.interval_s),
        language=settings.language,
        memory=memory,
        expected=settings.gpus_expected,
    )
