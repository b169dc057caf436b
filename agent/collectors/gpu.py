"""GPUs of any one vendor: the `gpu` measurement, from a reader process that may hang in the driver while this one never does."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.collectors.engine_identity import Change, Identities
from agent.collectors.gpu_memory import GpuMemory, RememberedGpu
from agent.collectors.gpu_roster import GpuRoster, KnownGpu
from agent.collectors.interface import GpuProcesses, Tags, Tick
from agent.driver import ABSENT, HUNG, LOST, OK, SUCCESS, DriverCodes, Row
from agent.frames import BadFrame, Message
from agent.reader_process import ReaderProcess
from agent.timing import ReaderTiming, to_argument
from telemetry.catalogue import GPU, GPU_STATES, MIG, Field, Measurement
from telemetry.lineprotocol import printable
from telemetry.messages import say
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)

MOST_INSTANCES = 64
"""MIG instances of one GPU that are taken from an answer."""


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
    without_library: int | None = None  # the driver's code for a host that doesn't even have its library

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
    ) -> None:
        """`memory` is a folder in which it may remember this host's GPUs; `expected` how many there should be, where that is known."""
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
        self._language = language
        self._memory = GpuMemory(memory / f"{self.name}.json" if memory else None, expected)
        self._identities = Identities(memory / f"{self.name}_driver.json" if memory else None)
        self._recalled = False
        self._swept = False  # the reader has ended a sweep since its first start, or since `resume`
        self._silent_s = 0.0  # for how long the reader has not ended a sweep
        self._paused = False
        self._reprobe = False

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
            if self._paused:
                self._release()
                return self._besides(tick)
            self._ticks.append(tick)
            samples: list[Sample] = []
            self._tend(tick.monotonic_s)
            reprobe = self._reprobe
            if self._process.send({"tick": tick.number, **({"reprobe": True} if reprobe else {})}):
                self._reprobe = self._reprobe and not reprobe
                self._listen(tick, samples)
            if not self._swept and tick.monotonic_s - self._started_s >= self.patience.hung_s:
                self._recall(tick, listed=True)  # nothing was ever heard: what hangs is what there was
            self._silent_s = tick.monotonic_s - self._heard_s
            samples += self._besides(tick)
            for gpu in self._roster:
                samples += self._silent(gpu, tick)
            self.gpu_processes = [
                GpuProcesses(gpu.index, gpu.uuid, self.pids_by_gpu.get(gpu.uuid), gpu.migs)
                for gpu in self._roster
                if gpu.listed
            ]
            return [*samples, *self._counts(tick)]

    def pause(self) -> None:
        """End the reader, and with it every hold on a device; nothing is said of the GPUs until `resume`."""
        self._paused = True
        if self._turn.acquire(timeout=0.6):
            self._release()
            self._turn.release()

    def resume(self) -> None:
        """Enumerate afresh: with another GPU in its slot, one that was exchanged is no loss."""
        if self._paused and self._turn.acquire(timeout=0.6):
            self._roster = GpuRoster()
            self._driver, self._swept, self._recalled = SUCCESS, False, False
            self._start_at_s = 0.0
            self._paused = False
            self._turn.release()

    def reprobe(self) -> None:
        """With the next tick forget what the driver refused, enumerate and read every group again."""
        self._reprobe = True

    def remember(self, tick: int) -> None:
        self._memory.file.keep(tick)
        self._identities.file.keep(tick)

    def close(self) -> None:
        """End the reader, also one that hangs; returns within a second."""
        took = self._turn.acquire(timeout=0.6)
        self._closed = True
        self._process.close(0.3)
        if took:
            self._turn.release()

    # the reader

    def _release(self) -> None:
        self.gpu_processes, self.pids_by_gpu = (), {}
        if not self._process.killed:
            self._process.kill(0.3)
        self._process.reap()

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
                samples += self._enumerate([Row.heard(raw) for raw in message["gpus"]], tick)
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
                self._heard_s, self._swept = tick.monotonic_s, True
                self._hear_driver(int(message["driver"]), tick)
                return int(message["tick"]) == tick.number
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrame(f"{type(error).__name__}: {error}") from None
        return False

    def _enumerate(self, rows: Sequence[Row], tick: Tick) -> list[Sample]:
        """Take the driver's list, beside what this host is known to have."""
        listed = [
            RememberedGpu(row.uuid, row.index, row.name, row.pci) for row in rows if row.uuid and row.code == SUCCESS
        ]
        self._memory.update(listed, tick.number)
        self._recall(tick, listed=False)
        self._roster.enumerate(rows, tick.monotonic_s)
        self._roster.forget({gpu.uuid for gpu in self._memory.known})
        version = printable(next((row.driver for row in rows if row.driver), ""))[:80]
        changes = self._identities.update(self.name, {"version": version}, tick.number) if version else []
        return [self._driver_event(change, tick) for change in changes]

    def _driver_event(self, change: Change, tick: Tick) -> Sample:
        text = say("gpu.event.driver", self._language, before=change.before, after=change.after)
        tags = {**self._tags, "kind": "deploy", "subject": "driver"}
        return Sample("event", tags, {"text": text, "code": 0, "detail": self.driver.library}, tick.time_ns)

    def _recall(self, tick: Tick, *, listed: bool) -> None:
        """Take the GPUs that this host had when the agent last ran into the roster, once. `listed`: as if the driver had them."""
        if self._recalled:
            return
        self._recalled = True
        for gpu in self._memory.known:
            self._roster.recall(gpu.index, gpu.uuid, gpu.name, gpu.pci, self._started_s, listed=listed)

    def _counts(self, tick: Tick) -> list[Sample]:
        """How many GPUs answer, beside how many there should be; nothing on a host that has none of this kind."""
        if not len(self._roster) and not (self._memory.told and self._swept and self._driver != self.without_library):
            return []
        expected = self._expected
        seen = sum(gpu.state == OK for gpu in self._roster)
        return [Sample("host", self._tags, {"gpus_seen": seen, "gpus_expected": expected}, tick.time_ns)]

    @property
    def _expected(self) -> int:
        told = self._memory.told
        return max(self._memory.count, len(self._roster)) if told is None else told

    def _besides(self, tick: Tick) -> list[Sample]:
        """What is known of the GPUs from elsewhere than their driver's library."""
        return []

    def _hear_driver(self, code: int, tick: Tick) -> None:
        if code == self.driver.stale:
            self._complain(f"no GPU readings: {self.driver.name_of(code)}; {self.driver.stale_remedy}")
        elif code != SUCCESS and code not in self.driver.quiet:
            self._complain(f"no GPU readings: {self.driver.name_of(code)}")
        if code != SUCCESS:
            self._recall(tick, listed=False)
        self._driver = code

    def _reading(self, message: Message, tick: Tick) -> list[Sample]:
        gpu = self._roster.find(str(message["uuid"]))
        if gpu is None:
            return []
        self.errors += int(message["errors"])
        if "pids" in message:
            self._take_pids(gpu, message["pids"])
        if "facts" in message:
            _take_facts(gpu, message["facts"])
        gpu.answered_s = tick.monotonic_s
        asked = next((past for past in self._ticks if past.number == message["tick"]), None)
        if asked is None:
            return []  # it comes from a call that hung: proof of life, but nothing of now
        fields = _typed(GPU, message["fields"])
        if not fields.keys() <= gpu.told:
            gpu.told = gpu.told.union(fields)
        if gpu.fallen is not None:
            if asked.number <= gpu.fallen:
                return []  # of before its fall
            gpu.fallen = None
        samples = self._change(gpu, int(message["state"]), int(message["code"]), tick)
        if gpu.xids is not None and gpu.state == OK:
            fields["xid_total"] = gpu.xids
        samples.append(self._sample(gpu, asked, fields))
        return [*samples, *self._mig_samples(gpu, message.get("migs", ()), asked)]

    def _mig_samples(self, gpu: KnownGpu, migs: Any, asked: Tick) -> list[Sample]:
        samples = []
        for uuid, raw in list(migs)[:MOST_INSTANCES]:
            tags = {**self._tags, "gpu": str(gpu.index), "uuid": gpu.uuid, "mig": printable(str(uuid))[:96]}
            fields = _typed(MIG, raw)
            if fields:
                samples.append(Sample("mig", tags, fields, asked.time_ns))
        return samples

    def _take_pids(self, gpu: KnownGpu, pids: Any) -> None:
        others = {uuid: told for uuid, told in self.pids_by_gpu.items() if uuid != gpu.uuid}
        self.pids_by_gpu = others if pids is None else {**others, gpu.uuid: tuple(int(pid) for pid in pids)}

    def _xid(self, uuid: str, code: int, tick: Tick) -> list[Sample]:
        """An error that the driver names by a number, for those whose driver does."""
        return []

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
        elif gpu.fallen is not None:
            state, code = (
                gpu.state,
                gpu.code,
            )  # as the kernel's log said, whether or not the driver's library can say it
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
        word = say(f"gpu.state.{GPU_STATES[state]}", self._language)
        if gpu.fallen == tick.number:
            text = say("gpu.event.fallen", self._language, index=gpu.index, state=word)
        else:
            why = say("gpu.code.10", self._language) if state == HUNG else self.driver.name_of(code, self._language)
            text = say("gpu.event.lost", self._language, index=gpu.index, state=word, why=why)
        return [self._event("gpu_lost", gpu, text, code, tick)]

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


def _typed(measurement: Measurement, raw: Mapping[str, object]) -> dict[str, Value]:
    """The fields that the catalogue knows. JSON has one kind of number for whole floats' sake: the catalogue says which is meant."""
    return {name: _value(measurement.fields[name], value) for name, value in raw.items() if name in measurement.fields}


def _value(field: Field, value: object) -> Value:
    if field.type is str:
        if not isinstance(value, str):
            raise ValueError(f"{field.name} is no text")
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field.name} is no number")
    return float(value) if field.type is float else int(value)


def _take_facts(gpu: KnownGpu, facts: Mapping[str, Any]) -> None:
    persistence = facts.get("persistence")
    gpu.persistence = None if persistence is None else int(persistence)
    activity = facts.get("activity")
    gpu.activity = None if activity is None else int(activity)
    gpu.migs = tuple(printable(str(uuid))[:96] for uuid in facts.get("migs", ()))[:MOST_INSTANCES]


def patience_of(interval_s: float) -> Patience:
    """With ticks that many seconds apart."""
    usual = Patience()
    return Patience(answer_s=min(2.0, usual.answer_s * interval_s), hung_s=max(usual.hung_s, 1.5 * interval_s))
