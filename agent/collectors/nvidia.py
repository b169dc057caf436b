"""NVIDIA GPUs through NVML, and through the kernel's log, which speaks when NVML is silent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent.collectors.gpu import GpuCollector, Patience, patience_of
from agent.collectors.interface import Finding, Tags, Tick
from agent.collectors.nvidia_findings import Condition, findings
from agent.driver import LOST
from agent.kernel_log import KernelLog
from agent.nvml import codes, kernel_lines
from agent.nvml.xid_ledger import XidLedger
from agent.reader_process import ReaderProcess
from agent.settings import AgentSettings
from agent.timing import ReaderTiming
from telemetry import xid
from telemetry.lineprotocol import printable
from telemetry.sample import Sample


class NvidiaCollector(GpuCollector):
    """NVIDIA GPUs, through NVML, and through the kernel's log, which speaks when NVML is silent."""

    name = "gpu"
    driver = codes.CODES
    reader = "nvml"
    without_library = codes.LIBRARY_NOT_FOUND

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
        kernel_log: KernelLog | None = None,
    ) -> None:
        super().__init__(tags, timing, patience, process, root, language=language, memory=memory, expected=expected)
        self._kernel_log = kernel_log
        self._ledger = XidLedger()

    @property
    def pending(self) -> bool:
        """Whether the reader works on its first sweep."""
        return not (self._swept or self._paused) and self._silent_s < self.patience.hung_s

    def findings(self, language: str) -> Sequence[Finding]:
        """What the readings so far have shown; asks the driver nothing."""
        silent = self._silent_s >= self.patience.hung_s
        log = None if self._kernel_log is None else self._kernel_log.problem
        condition = Condition(self._driver, self._swept, self._paused, silent, list(self._roster), self._expected, log)
        return findings(condition, language)

    def close(self) -> None:
        """As of any GPUs; the kernel's log is left, too."""
        super().close()
        if self._kernel_log is not None:
            self._kernel_log.close()

    def _besides(self, tick: Tick) -> list[Sample]:
        """The kernel's log of this tick: XID errors that NVML has not told of, and GPUs that have fallen off the bus."""
        if self._kernel_log is None:
            return []
        records = self._kernel_log.read(tick.monotonic_s)
        if self._kernel_log.readable:
            for gpu in self._roster:
                gpu.xids = gpu.xids or 0
        return [sample for record in records for sample in self._kernel_line(record.text, tick)]

    def _kernel_line(self, text: str, tick: Tick) -> list[Sample]:
        told = kernel_lines.parse(text)
        if told is None:
            if kernel_lines.is_unclear(text):
                self._complain(f"an XID line of the kernel's log isn't understood: {printable(text)[:200]}")
            return []
        gpu = self._roster.at(told.pci)
        samples: list[Sample] = []
        if told.code is not None:
            uuid = gpu.uuid if gpu is not None else told.pci
            if self._ledger.is_new("log", uuid, told.code, tick.monotonic_s, tick.monotonic_s):
                known = gpu is not None
                samples += self._counted(uuid, told.code, tick) if known else self._stray(told.pci, told.code, tick)
        if gpu is not None and not self._paused and told.code in (None, kernel_lines.FALLEN):
            gpu.fallen = tick.number
            samples += self._change(gpu, LOST, codes.GPU_IS_LOST, tick)
        return samples

    def _xid(self, uuid: str, code: int, tick: Tick) -> list[Sample]:
        """One that NVML tells of, unless the kernel's log has told of it."""
        is_new = self._ledger.is_new("events", uuid, code, tick.monotonic_s, self._heard_s)
        return self._counted(uuid, code, tick) if is_new else []

    def _counted(self, uuid: str, code: int, tick: Tick) -> list[Sample]:
        gpu = self._roster.find(uuid)
        if gpu is None:
            return []
        gpu.xids = (gpu.xids or 0) + 1
        return [self._event("xid", gpu, xid.text_of(code, self._language), code, tick)]

    def _stray(self, pci: str, code: int, tick: Tick) -> list[Sample]:
        """The XID error of a GPU that isn't known otherwise."""
        text = xid.text_of(code, self._language)
        tags = {**self._tags, "kind": "xid", "subject": f"pci {pci}"}
        return [Sample("event", tags, {"text": text, "code": code, "detail": pci}, tick.time_ns)]


def gpu_collector(settings: AgentSettings, tags: Tags, memory: Path | None) -> NvidiaCollector | None:
    """The collector of NVIDIA GPUs, for every host: without a driver it says nothing and looks again every 30 s.

    It keeps well within the time between ticks.
    """
    if not settings.nvml:
        return None
    return NvidiaCollector(
        tags,
        patience=patience_of(settings.interval_s),
        language=settings.language,
        memory=memory,
        expected=settings.gpus_expected,
        kernel_log=KernelLog(kernel_lines.WORD),
    )
