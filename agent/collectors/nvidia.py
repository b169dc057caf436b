"""NVIDIA GPUs through NVML: the `gpu` measurement, from a reader process that may hang in the driver while this one never does."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.collectors.gpu_roster import GpuRoster, KnownGpu
from agent.collectors.interface import GpuProcesses, Tags, Tick
from agent.driver import ABSENT, HUNG, LOST, OK, SUCCESS, DriverCodes, Row
from agent.frames import BadFrame, Message
from agent.nvml import codes, xid
from agent.nvml.timing import ReaderTiming, to_argument
from agent.reader_process import ReaderProcess
from telemetry.catalogue import GPU, GPU_STATES
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the agent bears with its reader, seconds.

    answer: one tick's wait. hung: silence of a GPU until its state says so. restart: until a reader that is silent altogether is
    killed; restart_partly: one in which some GPUs hang and the others, which a restart disturbs, go on. Both are doubled each time,
    up to `longest`. settle: a reader that lived this long has started well.
    """

    answer_s: float = 0.4
    hung_s: float = 3.0
    restart_s: float = 60.0
    restart_partly_s: float = 120.0
    longest_s: float = 600.0
    settle_s: float = 60.0


class GpuCollector:
    """GPUs of one vendor: one sample a GPU a tick with what was read in that tick, and events for XID errors and GPUs that go out.

    An answer that comes after its tick's wait is delivered with the next tick's samples, dated with the tick it was asked in.
    """

    name: str
    driver: DriverCodes
    reader: str  # the folder in agent/ that speaks with the driver

    def __init__(
        self,
        tags: Tags,
        timing: ReaderTiming | None = None,
        patience: Patience | None = None,
        process: ReaderProcess | None = None,
        root: Path = Path("/"),
    ) -> None:
        timing = timing or ReaderTiming()
        self.errors = 0
        self.pids_by_gpu: Mapping[str, tuple[int, ...]] = {}
        """Compute processes by GPU uuid as last read: host process ids."""
        self.gpu_processes: Sequence[GpuProcesses] = ()
        self._tags = dict(tags)
        self._timing = timing
        self.patience = patience or Patience()
        self._process = process or ReaderProcess((self.reader, to_argument(timing), str(root)))
        self._turn = threading.Lock()
        self._closed = False
        self._roster = GpuRoster()
        self._ticks: deque[Tick] = deque(maxlen=2)
        self._driver = SUCCESS
        self._start_at_s = 0.0  # monotonic s
        self._started_s = 0.0
        self._heard_s = 0.0  # when the reader last ended a sweep, or was started
        self._failed_starts = 0
        self._strikes = 0  # readers killed in a row
        self._complaints: set[str] = set()

    @property
    def reader_pid(self) -> int | None:
        """Of the process that talks to the driver; None between two of them."""
        return self._process.pid

    def knows(self, uuid: str) -> bool:
        return self._roster.find(uuid) is not None

    def collect(self, tick: Tick) -> Sequence[Sample]:
        """Never waits longer than `Patience.answer_s`; never raises for a driver, a GPU or a reader that is out."""
        with self._turn:
            if self._closed:
                return ()
            self._ticks.append(tick)
            samples: list[Sample] = []
            self._tend(tick.monotonic_s)
            if self._process.send({"tick": tick.number}):
                self._listen(tick, samples)
            for gpu in self._roster:
                samples += self._silent(gpu, tick)
            self.gpu_processes = [
                GpuProcesses(gpu.index, gpu.uuid, self.pids_by_gpu.get(gpu.uuid)) for gpu in self._roster if gpu.listed
            ]
            return samples

    def close(self) -> None:
        """End the reader, also one that hangs; returns within a second."""
        took = self._turn.acquire(timeout=0.6)
        self._closed = True
        self._process.close(0.3)
        if took:
            self._turn.release()

    # the reader

    def _tend(self, now: float) -> None:
        if self._process.pid is not None:
            killed = self._process.killed
            if self._process.reap():
                if not killed:
                    self._ended(now)
            elif not self._process.killed and self._is_due_for_restart(now) and not self._process.is_in_kernel():
                self.errors += 1
                self._strikes = min(self._strikes + 1, 16)
                self._process.kill(0.1)
                self._process.reap()
        if self._process.pid is None and now >= self._start_at_s:
            try:
                self._process.start()
            except OSError as error:
                self._complain(f"the {self.driver.library} reader can't be started: {error}")
                self._start_at_s = now + self._timing.retry_s
            self._started_s = self._heard_s = now

    def _ended(self, now: float) -> None:
        if self._driver == self.driver.stale:
            self._start_at_s = now + self._timing.retry_s
            return
        self.errors += 1
        self._failed_starts = 0 if now - self._started_s > self.patience.settle_s else self._failed_starts + 1
        wait_s = 2.0 ** (self._failed_starts - 1) if self._failed_starts > 1 else 0.0
        self._start_at_s = now + min(self._timing.retry_s, wait_s)

    def _is_due_for_restart(self, now: float) -> bool:
        silent_s = now - max(self._heard_s, self._started_s)
        hung = [gpu.answered_s for gpu in self._roster if gpu.state == HUNG]
        if not hung and silent_s < self.patience.hung_s:
            self._strikes = 0
            return False
        hung_s = now - max(min(hung, default=now), self._started_s)
        restart_s, restart_partly_s = (
            min(self.patience.longest_s, usual_s * 2.0**self._strikes)
            for usual_s in (self.patience.restart_s, self.patience.restart_partly_s)
        )
        return silent_s >= restart_s or hung_s >= restart_partly_s

    def _listen(self, tick: Tick, samples: list[Sample]) -> None:
        give_up_s = time.monotonic() + self.patience.answer_s
        try:
            while (left_s := give_up_s - time.monotonic()) > 0:
                ends = [self._take(message, tick, samples) for message in self._process.receive(left_s)]
                if any(ends):
                    return
        except EOFError:
            return  # reaped and restarted at the next tick
        except BadFrame as error:
            self._complain(f"the {self.driver.library} reader talks nonsense: {error}")
            self._process.kill()
            self._ended(tick.monotonic_s)

    # what it says

    def _take(self, message: Message, tick: Tick, samples: list[Sample]) -> bool:
        """Whether this message ends the tick's sweep. Raises BadFrame for one that can't be understood."""
        try:
            kind = message["kind"]
            if kind == "inventory":
                self._driver = SUCCESS
                self._roster.enumerate([Row.heard(raw) for raw in message["gpus"]], tick.monotonic_s)
            elif kind == "bound":
                for index, uuid, pci in message["gpus"]:
                    self._roster.expect(int(index), str(uuid), str(pci), tick.monotonic_s)
            elif kind == "gpu":
                samples += self._reading(message, tick)
            elif kind == "xid":
                samples += self._xid(str(message["uuid"]), int(message["code"]), tick)
            elif kind == "error":
                self.errors += 1
                self._complain(f"the {self.driver.library} reader failed at {message['job']}: {message['text']}")
            elif kind == "done":
                self._heard_s = tick.monotonic_s
                self._hear_driver(int(message["driver"]))
                return int(message["tick"]) == tick.number
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrame(f"{type(error).__name__}: {error}") from None
        return False

    def _hear_driver(self, code: int) -> None:
        if code == self.driver.stale:
            self._complain(f"no GPU readings: {self.driver.name_of(code)}; {self.driver.stale_remedy}")
        elif code != SUCCESS and code not in self.driver.quiet:
            self._complain(f"no GPU readings: {self.driver.name_of(code)}")
        self._driver = code

    def _reading(self, message: Message, tick: Tick) -> list[Sample]:
        gpu = self._roster.find(str(message["uuid"]))
        if gpu is None:
            return []
        self.errors += int(message["errors"])
        if "pids" in message:
            self.pids_by_gpu = {**self.pids_by_gpu, gpu.uuid: tuple(int(pid) for pid in message["pids"])}
        gpu.answered_s = tick.monotonic_s
        asked = next((past for past in self._ticks if past.number == message["tick"]), None)
        if asked is None:
            return []  # it comes from a call that hung: proof of life, but nothing of now
        fields = {name: _typed(name, value) for name, value in message["fields"].items() if name in GPU.fields}
        samples = self._change(gpu, int(message["state"]), int(message["code"]), tick)
        if gpu.xids is not None and gpu.state == OK:
            fields["xid_total"] = gpu.xids
        samples.append(self._sample(gpu, asked, fields))
        return samples

    def _xid(self, uuid: str, code: int, tick: Tick) -> list[Sample]:
        gpu = self._roster.find(uuid)
        if gpu is None:
            return []
        gpu.xids = (gpu.xids or 0) + 1
        return [self._event("xid", gpu, xid.text_of(code), code, tick)]

    def _silent(self, gpu: KnownGpu, tick: Tick) -> list[Sample]:
        """What there is to say of a GPU that gave no reading in this tick: that it is out, once that is certain."""
        if gpu.answered_s == tick.monotonic_s and gpu.listed and gpu.listing_code == SUCCESS:
            return []
        if self._driver != SUCCESS:
            state, code = self.driver.state_of(self._driver), self._driver
        elif not gpu.listed:
            state, code = (gpu.state, gpu.code) if gpu.state == LOST else (ABSENT, self.driver.missing)
        elif gpu.listing_code not in (SUCCESS, self.driver.timeout):
            state, code = self.driver.state_of(gpu.listing_code), gpu.listing_code
        elif tick.monotonic_s - gpu.answered_s >= self.patience.hung_s:
            state, code = HUNG, self.driver.timeout
            self.errors += gpu.state != HUNG
        else:
            return []
        return [*self._change(gpu, state, code, tick), self._sample(gpu, tick, {})]

    def _change(self, gpu: KnownGpu, state: int, code: int, tick: Tick) -> list[Sample]:
        """The event of a GPU that goes out, or out in another way."""
        before, gpu.state, gpu.code = gpu.state, state, code
        if state in (before, OK):
            return []
        why = "the driver does not answer" if state == HUNG else self.driver.name_of(code)
        return [self._event("gpu_lost", gpu, f"GPU {gpu.index} {GPU_STATES[state]}: {why}", code, tick)]

    def _sample(self, gpu: KnownGpu, tick: Tick, fields: Mapping[str, Value]) -> Sample:
        tags = {**self._tags, "gpu": str(gpu.index)}
        if gpu.uuid:
            tags["uuid"] = gpu.uuid
        return Sample("gpu", tags, {**fields, "state": gpu.state}, tick.time_ns)

    def _event(self, kind: str, gpu: KnownGpu, text: str, code: int, tick: Tick) -> Sample:
        tags = {**self._tags, "kind": kind, "subject": gpu.subject}
        return Sample("event", tags, {"text": text, "code": code, "detail": gpu.uuid or gpu.subject}, tick.time_ns)

    def _complain(self, text: str) -> None:
        """Log a fault once, not once a tick."""
        if text not in self._complaints and len(self._complaints) < 64:
            self._complaints.add(text)
            log.warning("%s", text)


def _typed(name: str, value: object) -> Value:
    """JSON has one kind of number for whole floats' sake: the catalogue says which is meant."""
    kind = GPU.fields[name].type
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} is no text")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is no number")
    return float(value) if kind is float else int(value)


class NvidiaCollector(GpuCollector):
    """NVIDIA GPUs, through NVML."""

    name = "gpu"
    driver = codes.CODES
    reader = "nvml"


def gpu_collector(tags: Tags, interval_s: float = 1.0) -> NvidiaCollector:
    """The collector of NVIDIA GPUs, for every host: without a driver it says nothing and looks again every 30 s.

    `interval_s` is the time between ticks; the collector keeps well within it.
    """
    usual = Patience()
    return NvidiaCollector(
        tags,
        patience=Patience(answer_s=min(2.0, usual.answer_s * interval_s), hung_s=max(usual.hung_s, 1.5 * interval_s)),
    )
