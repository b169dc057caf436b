"""The process that talks to a driver: `python -m agent.reader LIBRARY [TIMING [ROOT]]`. It may hang in a call; nobody waits for it.

LIBRARY is the folder in agent/ whose `session` module speaks with the driver.

It reads `{"tick": n}` frames on standard input (with `"reprobe": true` to ask everything anew) and answers on standard output:
`inventory` when the GPUs have been enumerated, one `gpu` frame for each GPU as soon as it is read, `xid` for each XID error, and
`done` with the driver's code when the sweep is over.
It ends when standard input does.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.crew import Crew, Job
from agent.driver import OK, SUCCESS, DriverGone, DriverGpu, DriverSession, Row
from agent.frames import Message, Unpacker, pack
from agent.timing import ReaderTiming, from_argument
from telemetry.process import die_with_parent

ROOT = Path("/")
LONGEST_REDISCOVERY_S = 600.0
LEAST_BETWEEN_OPENINGS_S = 5.0


class Reader:
    """Turns a tick into jobs for the crew. `send` takes a message for the agent and may be called from any thread."""

    def __init__(
        self,
        session: DriverSession,
        timing: ReaderTiming,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timing = timing
        self._send = send
        self._clock = clock
        self._session = session
        self.crew = Crew(timing.takeover_s, clock, self._job_failed)
        self._code: int | None = None  # of the driver; None before the first attempt
        self._next_opening_s = 0.0  # monotonic s, while the driver or a GPU is out
        self._rediscover_s = timing.rediscover_s
        self._faulty = False  # a GPU has been out since the last opening
        self._reopen = False
        self._opened_s = 0.0
        self._checked_s = 0.0  # when the kernel driver's list was last compared
        self._told: list[Row] = []  # the enumeration as the agent knows it
        self._read_s: dict[str, float] = {}  # by uuid, when its last reading ended

    def tick(self, number: int) -> None:
        """Begin the sweep of this tick; what an earlier one left undone is dropped."""
        self.crew.assign([Job("plan", lambda: self._plan(number))])

    def reprobe(self) -> None:
        """Open anew at the next sweep: enumerate, forget what was refused, read every group again."""
        self._reopen = True

    def _plan(self, number: int) -> Iterable[Job]:
        if self._is_opening_due() and not self.crew.stuck(but="plan"):
            self._open()
        # also those that an earlier tick didn't get to, as when one before them hangs
        rows = [row for row in self._session.rows if row.code == self._session.codes.timeout]
        attaching = [Job(f"gpu {row.index}", self._attaching(row.index)) for row in rows]
        return [*attaching, Job("inventory", lambda: self._sweep(number))]

    def _sweep(self, number: int) -> Iterable[Job]:
        rows = list(self._session.rows)
        if rows != self._told:  # also when a GPU that was stuck is attached at last
            self._told = rows
            self._faulty = self._faulty or any(row.code != SUCCESS for row in rows)
            told = [row.told() for row in rows]
            self._send({"kind": "inventory", "gpus": told})
            self._tell_bound({row.uuid for row in rows})
        gpus = sorted(self._session.gpus, key=lambda gpu: self._read_s.get(gpu.uuid, 0.0))
        jobs = [Job(f"gpu {gpu.index}", self._reading(gpu, number)) for gpu in gpus]
        jobs.append(Job("xid", self._take_xids))
        jobs.append(Job("done", lambda: self._done(number)))
        return jobs

    def _is_opening_due(self) -> bool:
        if self._reopen:
            return True
        if self._code == SUCCESS and not self._faulty:
            self._rediscover_s = self._timing.rediscover_s
            if self._clock() - self._checked_s >= self._timing.identity_s:
                self._checked_s = self._clock()
                self._tell_bound({row.uuid for row in self._session.rows})
            return False
        return self._clock() >= self._next_opening_s

    def _open(self) -> None:
        was_faulty, self._faulty, self._reopen = self._faulty, False, False
        self._code = self._session.open()
        self._opened_s = self._checked_s = self._clock()
        if self._code != SUCCESS:
            self._next_opening_s = self._clock() + self._timing.retry_s
            self._tell_bound(set())
        else:
            # starting again disturbs the other GPUs, so a GPU that stays out is asked less and less often
            self._rediscover_s = min(LONGEST_REDISCOVERY_S, self._rediscover_s * (2 if was_faulty else 1))
            self._next_opening_s = self._clock() + self._rediscover_s
        self._told = []

    def _tell_bound(self, listed: set[str]) -> None:
        """Name the GPUs that the kernel driver has and its library doesn't list."""
        missing = [list(row) for row in self._session.bound() if row[1] not in listed]
        if missing:
            self._faulty = True
            self._send({"kind": "bound", "gpus": missing})

    def _attaching(self, index: int) -> Callable[[], Iterable[Job]]:
        def attach() -> Iterable[Job]:
            self._session.attach(index)
            return ()

        return attach

    def _reading(self, gpu: DriverGpu, number: int) -> Callable[[], Iterable[Job]]:
        def read() -> Iterable[Job]:
            errors = gpu.errors
            try:
                reading = gpu.read(self._clock())
            except DriverGone:
                self._code = self._session.codes.gone
                self._next_opening_s = self._opened_s + min(self._timing.retry_s, LEAST_BETWEEN_OPENINGS_S)
                return ()
            finally:
                self._read_s[gpu.uuid] = self._clock()
            self._faulty = self._faulty or reading.state != OK
            message: Message = {
                "kind": "gpu",
                "tick": number,
                "uuid": gpu.uuid,
                "state": reading.state,
                "code": reading.code,
                "fields": reading.fields,
                "errors": gpu.errors - errors,
            }
            if reading.pids is not None or reading.untold:
                message["pids"] = reading.pids
            if reading.migs:
                message["migs"] = [[mig.uuid, mig.fields] for mig in reading.migs]
            if reading.facts is not None:
                message["facts"] = reading.facts
            self._send(message)
            return ()

        return read

    def _take_xids(self) -> Iterable[Job]:
        for uuid, code in self._session.take_xids():
            self._send({"kind": "xid", "uuid": uuid, "code": code})
        return ()

    def _job_failed(self, job: str, error: Exception) -> None:
        self._send({"kind": "error", "job": job, "text": f"{type(error).__name__}: {error}"})

    def _done(self, number: int) -> Iterable[Job]:
        self._send({"kind": "done", "tick": number, "driver": self._code})
        if self._code is not None and self._code == self._session.codes.stale:
            os._exit(0)  # the new library is only loaded by a new process
        return ()


def sender(descriptor: int) -> Callable[[Message], None]:
    """Writes whole frames; a closed pipe ends the process, since nobody is left to read for."""
    turn = threading.Lock()

    def send(message: Message) -> None:
        frame = pack(message)
        with turn:
            try:
                while frame:
                    frame = frame[os.write(descriptor, frame) :]
            except OSError:
                os._exit(0)

    return send


def serve(requests: int, reader: Reader) -> None:
    """Until the requests end. Only the last of several ticks that wait is answered."""
    unpacker = Unpacker()
    patience: float | None = None
    while True:
        ready, _, _ = select.select([requests], [], [], patience)
        if ready:
            piece = os.read(requests, 65536)
            if not piece:
                return
            messages = unpacker.feed(piece)
            if any(message.get("reprobe") for message in messages):
                reader.reprobe()
            if messages:
                reader.tick(int(messages[-1]["tick"]))
        patience = reader.crew.relieve()


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group; the agent ends this process itself
    timing = from_argument(sys.argv[2]) if len(sys.argv) > 2 else ReaderTiming()
    root = Path(sys.argv[3]) if len(sys.argv) > 3 else ROOT
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    session: DriverSession = importlib.import_module(f"agent.{sys.argv[1]}.session").Session(timing, root)
    serve(0, Reader(session, timing, sender(answers)))
    os._exit(0)  # threads inside the driver are not waited for


if __name__ == "__main__":
    main()
