"""Hosting: runs engines as processes, each supervised by a thread: start, loading, ready, restart after death, stop."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.collectors.engine_scrape import Condition, EngineClient
from agent.collectors.interface import Tags, Tick
from agent.engine_log import EngineLog
from agent.engine_start import stage_of
from agent.engine_status import EngineStatus
from agent.launch import launch_command
from agent.listening import who_listens
from agent.oom import OomKills, says_out_of_memory
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from telemetry.messages import say
from telemetry.process import childs_environment
from telemetry.sample import Sample, Value

log = logging.getLogger(__name__)

EVENT_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class HostingTimes:
    """How patient hosting is. `restart_s[n]` is the wait before the n-th restart in a row; the last one repeats. An engine that
    was ready for `steady_s` has earned a fresh start of that count.
    """

    restart_s: Sequence[float] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    steady_s: float = 60.0
    look_s: float = 0.5  # between looks while it is not ready
    look_ready_s: float = 2.0
    health_deadline_s: float = 2.0
    rest_s: float = 10.0  # for what a stopped engine started, after its own end, unless `stop` ends it before
    down_after_looks: int = 3  # failed looks in a row before a ready engine is called down


class HostedEngine:
    """One engine. Its supervising thread lives as long as the engine is wanted, since the kernel ties the child to the thread
    that started it.
    """

    def __init__(
        self,
        target: EngineTarget,
        folder: Path,
        report: Callable[[str, int, str, str], None],
        *,
        times: HostingTimes,
        language: str,
        oom_kills: OomKills | None = None,
    ) -> None:
        assert target.command
        self._target = target
        self._command = target.command
        self._log = EngineLog(folder / f"{target.name}.log")
        self._report = report
        self._times = times
        self._language = language
        self._oom_kills = oom_kills or OomKills()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._failures = 0
        self._ready_since_s: float | None = None
        self._failed_looks = 0
        self._has_answered = False  # the present process, at its address
        self.status = EngineStatus(target.name, target.base_url, "starting")
        self._thread = threading.Thread(target=self._supervise, name=f"hosting-{target.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def runs(self, target: EngineTarget) -> bool:
        """Whether this process is the one that `target` asks for: how it is read besides doesn't matter to it."""
        ours = self._target
        return (ours.command, ours.base_url, ours.gpus) == (target.command, target.base_url, target.gpus)

    def ask_to_stop(self) -> None:
        """SIGTERM to the engine and all that it started; no restart from now on."""
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.returncode is None:
                _signal_group(self._process.pid, signal.SIGTERM)
        self._wake.set()

    def stop(self, until_s: float) -> None:
        """After `ask_to_stop`: wait until monotonic time `until_s`, then SIGKILL what is left."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            process = self._process
            if process is not None and process.returncode is None:
                log.warning("engine %s did not stop in time and was killed", self._target.name)
                _signal_group(process.pid, signal.SIGKILL)
        self._thread.join(1.0)

    def _supervise(self) -> None:
        client = EngineClient(self._target.base_url, self._times.health_deadline_s, api_key=self._target.api_key)
        try:
            while not self._stopping.is_set():
                exited = self._launch()
                if exited is not None:
                    self._attend(client, exited)
                if self._stopping.is_set():
                    break
                self._wait_to_restart(exited is None)
        except Exception:
            log.exception("engine %s: its supervision failed", self._target.name)
            self.ask_to_stop()
            self.status = replace(
                self.status, state="down", pid=None, problem="supervision failed; see the agent's log"
            )
        finally:
            client.close()

    def _launch(self) -> threading.Event | None:
        """Start the process; the event is set when it has ended. None when it can't be started at all."""
        self.status = replace(self.status, state="starting", stage="", progress=None, pid=None)
        program = self._command[0]
        if shutil.which(program) is None:
            self._cannot_start(program, os.strerror(2))
            return None
        if (other := who_listens(self._target.base_url)) is not None:
            self._cannot_listen(other)
            return None
        try:
            self._log_start = self._log.size()
            with self._log.open() as output, self._lock:
                if self._stopping.is_set():
                    return None
                self._process = subprocess.Popen(
                    launch_command(self._command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=engine_environment(self._target, os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            reason = error.strerror or str(error)
            self._cannot_start(program, f"{reason}: {error.filename}" if error.filename else reason)
            return None
        self.status = replace(self.status, pid=self._process.pid, problem="")
        log.info("engine %s started, pid %d, log %s", self._target.name, self._process.pid, self._log.path)
        exited = threading.Event()
        threading.Thread(target=self._reap, args=(self._process, exited), name="reaper", daemon=True).start()
        return exited

    def _reap(self, process: subprocess.Popen[bytes], exited: threading.Event) -> None:
        """Wait for the end; what the engine started and left behind goes with it, before its group's number is free again."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if self._stopping.is_set():
            self._wait_for_the_rest(process.pid)
        with self._lock:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
        exited.set()
        self._wake.set()

    def _wait_for_the_rest(self, pid: int) -> None:
        """A script ends at once when it is asked to, and the engine that it started needs its time: the grace is for both."""
        table = ProcessTable()
        give_up_s = time.monotonic() + self._times.rest_s
        while time.monotonic() < give_up_s and any(
            process.session == pid and not process.is_zombie for process in table.all().values()
        ):
            time.sleep(0.05)

    def _attend(self, client: EngineClient, exited: threading.Event) -> None:
        """Look after the running process until it ends."""
        self._ready_since_s = None
        self._failed_looks = 0
        self._has_answered = False
        while not exited.is_set():
            self._oom_kills.look(time.monotonic())
            self._look(client)
            self._log.rotate()
            self._wake.wait(self._times.look_s if self.status.state != "ready" else self._times.look_ready_s)
            if not exited.is_set():
                if self._stopping.is_set():
                    exited.wait()
                self._wake.clear()
        self._wake.clear()
        if not self._stopping.is_set():
            self._mourn()

    def _look(self, client: EngineClient) -> None:
        health = client.health()
        state = self.status.state
        self._has_answered |= health.condition is not Condition.SILENT
        if health.condition is Condition.LOADING and not (health.is_plain and state == "ready"):
            self._ready_since_s = None
            told = None if health.stage else self._stage()
            stage, progress = told or (health.stage, health.progress)
            self.status = replace(self.status, state="loading", stage=stage, progress=progress)
        elif health.condition is Condition.UNWELL:
            problem = say("agent.engine.unwell", self._language, word=health.word)
            self.status = replace(self.status, state="down", stage="", progress=None, problem=problem)
        elif health.condition is not Condition.SILENT:
            self._failed_looks = 0
            if state != "ready":
                self._ready_since_s = time.monotonic()
                log.info("engine %s is ready", self._target.name)
            self.status = replace(self.status, state="ready", stage="", progress=None, problem="")
        elif not self._has_answered:
            if (told := self._stage()) is not None:
                self.status = replace(self.status, state="loading", stage=told[0], progress=told[1])
        elif state in ("ready", "loading"):
            self._failed_looks += 1
            if self._failed_looks >= self._times.down_after_looks:
                problem = say("agent.engine.silent", self._language)
                self.status = replace(self.status, state="down", stage="", progress=None, problem=problem)

    def _stage(self) -> tuple[str, float | None] | None:
        """What its log says of its start: most engines listen only once they are ready."""
        return stage_of(self._log.tail(self._log_start))

    def _mourn(self) -> None:
        """Say how it died, in one event with the end of its log, and one more when memory ran out."""
        assert self._process is not None
        code = self._process.returncode
        steady = self._ready_since_s is not None and time.monotonic() - self._ready_since_s >= self._times.steady_s
        self._failures = 1 if steady else self._failures + 1
        tail = self._log.tail(self._log_start)
        name = self._target.name
        how = describe_exit(code, self._language)
        self.status = replace(
            self.status, state="restarting", stage="", progress=None, pid=None, restarts=self.status.restarts + 1
        )
        values = {"engine": name, "how": how, "number": self.status.restarts, "delay_s": self._delay_s()}
        self._report("restart", code, say("agent.event.died", self._language, **values), tail)
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and self._oom_kills.happened():
            self._report("oom", code, say("agent.event.oom_host", self._language, engine=name), tail)
        elif code != 0 and says_out_of_memory(tail):
            self._report("oom", code, say("agent.event.oom_device", self._language, engine=name), tail)
        log.warning("engine %s died: %s", name, how)

    def _cannot_start(self, program: str, reason: str) -> None:
        self._stay_down(say("agent.hosting.no_program", self._language, program=program, reason=reason))

    def _cannot_listen(self, other: str) -> None:
        key = "port_taken_by" if other else "port_taken"
        self._stay_down(say(f"agent.hosting.{key}", self._language, url=self._target.base_url, other=other))

    def _stay_down(self, problem: str) -> None:
        self._failures += 1
        if problem != self.status.problem:
            log.error("engine %s: %s", self._target.name, problem)
        self.status = replace(self.status, state="down", pid=None, problem=problem)

    def _delay_s(self) -> float:
        waits = self._times.restart_s
        return waits[min(max(self._failures, 1), len(waits)) - 1]

    def _wait_to_restart(self, never_started: bool) -> None:
        # a program that isn't there won't come back at once
        delay_s = max(self._delay_s(), self._times.look_s) if never_started else self._delay_s()
        self._wake.wait(delay_s)
        self._wake.clear()


class Hosting:
    """All hosted engines. It is read like a collector: each tick takes the events that happened since."""

    name = "engine"

    def __init__(
        self,
        tags: Tags,
        targets: Sequence[EngineTarget],
        folder: Path,
        *,
        times: HostingTimes | None = None,
        language: str = "en",
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._wall_ns = wall_ns
        self._events: deque[Sample] = deque(maxlen=EVENT_LIMIT)
        self._folder = folder
        self._times = times or HostingTimes()
        self._language = language
        self._turn = threading.Lock()  # for who may start engines
        self._ending = False
        self._engines = {target.name: self._hosted(target) for target in targets if target.command}

    def start(self) -> None:
        for engine in self._engines.values():
            engine.start()

    def change(self, targets: Sequence[EngineTarget], tags: Tags, grace_s: float) -> None:
        """Host these from now on: stop what is no longer wanted as it is, leave alone what is, start what is new.

        Waits until those that stop have ended, and kills them after `grace_s`: the next of that name needs their port and GPUs.
        """
        self._tags = dict(tags)
        wanted = {target.name: target for target in targets if target.command}
        staying = {name: at for name, at in self._engines.items() if name in wanted and at.runs(wanted[name])}
        _stop([engine for name, engine in self._engines.items() if name not in staying], grace_s)
        with self._turn:
            if self._ending:
                return
            starting = {name: self._hosted(target) for name, target in wanted.items() if name not in staying}
            self._engines = {name: staying.get(name) or starting[name] for name in wanted}
            for engine in starting.values():
                engine.start()

    def collect(self, _tick: Tick) -> Sequence[Sample]:
        """The events since the last call, each with the time at which it happened."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def statuses(self) -> Mapping[str, EngineStatus]:
        return {name: engine.status for name, engine in self._engines.items()}

    def pids(self) -> Mapping[str, int]:
        """The processes that run now, by engine."""
        return {name: pid for name, engine in self._engines.items() if (pid := engine.status.pid) is not None}

    def stop(self, grace_s: float = 3.0) -> None:
        """Ask all engines at once; SIGKILL to those that are still there after `grace_s`. None is started from now on."""
        with self._turn:
            self._ending = True
        _stop(list(self._engines.values()), grace_s)

    def close(self) -> None:
        self.stop(0.0)

    def _hosted(self, target: EngineTarget) -> HostedEngine:
        return HostedEngine(
            target, self._folder, self._reporter(target.name), times=self._times, language=self._language
        )

    def _reporter(self, subject: str) -> Callable[[str, int, str, str], None]:
        def report(kind: str, code: int, text: str, detail: str) -> None:
            fields: dict[str, Value] = {"text": text, "code": code}
            if detail:
                fields["detail"] = detail
            self._events.append(
                Sample("event", {**self._tags, "kind": kind, "subject": subject}, fields, self._wall_ns())
            )

        return report


def _stop(engines: Sequence[HostedEngine], grace_s: float) -> None:
    for engine in engines:
        engine.ask_to_stop()
    until_s = time.monotonic() + grace_s
    for engine in engines:
        engine.stop(until_s)


def describe_exit(code: int, language: str) -> str:
    """A Popen return code in words."""
    if code >= 0:
        return say("agent.hosting.by_exit", language, code=code)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return say("agent.hosting.by_signal", language, signal=name)


def engine_environment(target: EngineTarget, own: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without what concerns the agent alone, and with only the target's GPUs visible."""
    environment = childs_environment(own)
    environment.setdefault("PYTHONUNBUFFERED", "1")  # so that the log's end is what was said last
    if target.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = target.gpus.replace("+", ",")
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which the agent counts GPUs, too
    return environment


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
