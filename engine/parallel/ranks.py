"""The first rank's side: start the others, tell them each step, hear how long it took them, and notice when one is gone."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.core import OutOfMemory, RankLost, StepResult, StepRunner
from engine.modelconfig import ModelConfig
from engine.parallel.group import JOIN_S, Group, here, meeting_place
from engine.parallel.messages import REPORT, packed, send, told
from engine.parallel.shard import Shard, refuse_unfit
from engine.scheduler import StepPlan
from engine.settings import EngineSettings, SettingsError
from engine.stats import RankTimes
from telemetry.process import childs_environment

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LAST_WORDS_S = 3.0
"""When a collective fails, the rank that has died is found within so long; else it is one that hangs."""
STOP_S = 2.0


class Ranks:
    """The processes of ranks 1 and up."""

    def __init__(self, settings: EngineSettings, config: ModelConfig, device: torch.device) -> None:
        """Start them and meet them. SettingsError where the model can't be split so; RankLost when one doesn't come up."""
        size = settings.tensor_parallel
        refuse(settings, config, device)
        self.times = [RankTimes() for _ in range(size)]
        self._closing = False
        store = meeting_place()
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                self._start(settings, rank, size, store.port)  # type: ignore[attr-defined]
            self.group = self._met(Shard(0, size), store, device_of(device, 0), settings.rank_timeout_s)
        except BaseException:
            self._end()
            raise

    def _start(self, settings: EngineSettings, rank: int, size: int, port: int) -> None:
        own, other = socket.socketpair()
        command = [sys.executable, "-c", f"from engine.parallel.worker import main; main({other.fileno()})"]
        environment = childs_environment(os.environ) | {"GLOO_SOCKET_IFNAME": "lo"}
        paths = [path or str(Path.cwd()) for path in sys.path]  # an engine from a source tree finds itself there
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with other:
            process = subprocess.Popen(
                command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._processes.append(process)
        self._sockets.append(own)
        own.settimeout(settings.rank_timeout_s)
        plain = replace(settings, migrate_token=None)
        send(own, told({"settings": asdict(plain), "rank": rank, "size": size, "port": port}))

    def _met(self, shard: Shard, store: Store, device: torch.device, timeout_s: float) -> Group:
        """The group, once all have joined it."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        end = time.monotonic() + JOIN_S
        others = [here(rank) for rank in range(1, shard.size)]
        while not store.check(others) and time.monotonic() < end:
            self.check()
            time.sleep(0.02)
        try:
            return Group(shard, store, device, timeout_s)
        except RuntimeError as error:
            raise self.lost(error) from None

    def begin(self) -> list[RankTimes]:
        """Forget what warming up has taken; the times that count from now on."""
        self.hear()
        self.times[:] = [RankTimes() for _ in self.times]
        return self.times

    def check(self) -> None:
        """RankLost when one of the processes has ended."""
        for rank, process in enumerate(self._processes, 1):
            code = process.poll()
            if code is not None and not self._closing:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise RankLost(
                    f"rank {rank} of {len(self.times)} has ended ({how}), and the model's other parts with it"
                )

    def lost(self, error: Exception) -> RankLost:
        """What is to be said of a failed exchange: which rank has ended, or that one hangs."""
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end:
            try:
                self.check()
            except RankLost as found:
                return found
            time.sleep(0.02)
        return RankLost(f"a rank did not answer in time: {str(error).splitlines()[0][:200]}")

    def lead(self, plan: StepPlan) -> None:
        """Tell all others what to compute. RankLost when one can't be told."""
        message = packed(plan)
        for own in self._sockets:
            try:
                send(own, message)
            except OSError as error:
                raise self.lost(error) from None

    def hear(self) -> None:
        """Take in what the others have said of earlier steps."""
        for rank, own in enumerate(self._sockets, 1):
            while select.select([own], [], [], 0)[0]:
                try:
                    said = own.recv(REPORT.size)
                except OSError:
                    break
                if len(said) < REPORT.size:  # closed
                    break
                self.times[rank].add(*REPORT.unpack(said))

    def close(self) -> None:
        """End the others and the group."""
        self._closing = True
        self._end()
        # a collective that hangs must not hold up the end
        closing = threading.Thread(target=self.group.close, daemon=True)
        closing.start()
        closing.join(STOP_S)

    def _end(self) -> None:
        self._closing = True
        for own in self._sockets:
            own.close()  # they read their end in it
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class LeadingRunner:
    """Runs each step on all ranks."""

    def __init__(self, inner: StepRunner, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def run(self, plan: StepPlan) -> StepResult:
        """As the runner does. RankLost when another rank is gone, hangs, or memory ran out in one: then the cache's parts disagree."""
        ranks = self._ranks
        ranks.hear()
        ranks.lead(plan)
        ranks.group.begin_step()
        try:
            result = self._inner.run(plan)
        except OutOfMemory as error:
            raise RankLost(f"{error}; the other ranks can't take it back: lower token_budget or max_seqs") from None
        except RuntimeError as error:
            raise ranks.lost(error) from error
        if plan.rows:
            wait_s = ranks.group.end_step()
            ranks.times[0].add(max(0.0, result.seconds - wait_s), wait_s)
        return result


def refuse(settings: EngineSettings, config: ModelConfig, device: torch.device) -> None:
    """SettingsError for what can't be split over ranks."""
    size = settings.tensor_parallel
    refuse_unfit(config, size)
    if settings.quantize != "none":
        raise SettingsError(
            f"quantize is {settings.quantize!r}: its cost in quality is measured on a whole model; with tensor_parallel use none"
        )
    if device.type == "cuda" and device.index:
        raise SettingsError(
            f"device is {settings.device!r}: with tensor_parallel each rank takes its own; use cuda or auto"
        )
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise SettingsError(f"tensor_parallel is {size}: torch sees {torch.cuda.device_count()} CUDA devices")


def device_of(device: torch.device, rank: int) -> torch.device:
    """Each rank's own CUDA device; the CPU is all ranks' one."""
    return device if device.type == "cpu" else torch.device("cuda", rank)
