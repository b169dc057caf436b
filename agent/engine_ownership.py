"""Engine ownership: the processes, the GPUs and the CPU of each engine of this host, kept up to date beside the ticks.

The tag `gpus` of an engine's samples makes a series of its own for each value, so it changes as rarely as honesty allows: the
first tick waits a moment for the first search; what was found stands while that very process lives, also when the driver lists
nothing for a time; a list of fewer GPUs than before must stand for a while before it is believed. While an engine is away the tag
stays (the outage is of those GPUs) without the fields that vouch for it; a new process makes it void.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.collectors.interface import GpuProcesses, ListsGpuProcesses, Tick
from agent.engine_cpu import BusiestThread, TreeCpu
from agent.engine_gpus import EngineGpus, Owner, Whose, attribute, manual
from agent.engine_tree import EngineTrees, Tree
from agent.periodic import Periodic
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from agent.worker import Late, Worker
from telemetry.sample import Value

log = logging.getLogger(__name__)

SEARCH_EVERY_S = 10.0
THREADS_EVERY_S = 5.0
FIRST_WAIT_S = 0.3
"""How long the first tick waits for the first search, so that the first sample has its tag already."""

FEWER_AFTER_S = 60.0
"""A shorter list of GPUs is believed after this time: ranks start one after another, and the driver's lists race with them."""

HOST_PROC = "HOST_PROC"
"""Where a container finds the host's /proc, by the variable that Telegraf and others use."""


@dataclass(slots=True)
class _Owned:
    """What is known of one engine."""

    gpus: EngineGpus | None = None
    root: tuple[int, int] | None = None  # of the process that `gpus` is of
    tree: Tree | None = None
    is_alive: bool = False  # the root of `tree` was there at this tick
    fewer_since_s: float | None = None
    cpu: TreeCpu | None = None
    busiest_pct: float | None = None


@dataclass(slots=True)
class Sources:
    """Where it looks: the GPU collectors, and the engines that the agent runs itself (name -> pid). Set once all parts are made."""

    gpus: Sequence[ListsGpuProcesses] = ()
    hosted: Callable[[], Mapping[str, int]] = field(default=dict)


class EngineOwnership:
    """One for all engines of a host. `begin` and `settle` belong to each tick; neither reads more than a few small files."""

    def __init__(
        self,
        targets: Sequence[EngineTarget],
        table: ProcessTable | None = None,
        *,
        host_table: ProcessTable | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources = Sources()
        self._targets = targets
        self._table = table or ProcessTable()
        self._host_table = host_table or ProcessTable(os.environ.get(HOST_PROC, "/host/proc"))
        self._sees_host_pids = self._table.shows_host_pids
        self._monotonic = monotonic
        self._trees = EngineTrees(self._table)
        self._search: Worker[dict[str, Tree]] = Worker("engine-trees", self._find)
        self._threads: Periodic[dict[str, float]] = Periodic("engine-threads", THREADS_EVERY_S, self._busiest)
        self._busy = {target.name: BusiestThread(self._table) for target in targets}
        self._due_s = -math.inf
        self._asked: Tick | None = None
        self._found_once = False
        self._attributed: tuple[object, object] = (None, None)
        self._owned = {target.name: _Owned(cpu=TreeCpu(self._table)) for target in targets}
        for target in targets:
            if target.gpus:
                self._owned[target.name].gpus = manual(target.gpus)

    @property
    def pending(self) -> bool:
        """Whether the first search has not ended yet."""
        return bool(self._targets) and not self._found_once

    @property
    def has_gpus(self) -> bool:
        """Whether any GPU of this host is known."""
        return bool(self._gpus())

    def begin(self, tick: Tick) -> None:
        """Start a search where one is due."""
        if self._asked is None and tick.monotonic_s >= self._due_s and self._targets and self._search.start(tick):
            self._asked = tick
            self._due_s = tick.monotonic_s + SEARCH_EVERY_S

    def settle(self, tick: Tick, wait_s: float) -> None:
        """Take what a search has brought, and read what the engines' processes take. Only the very first search is waited for."""
        self._take(tick, 0.0 if self._found_once else min(wait_s, FIRST_WAIT_S))
        for owned in self._owned.values():
            owned.busiest_pct = None
        for name, busiest_pct in (self._threads.take(tick) or {}).items():
            self._owned[name].busiest_pct = busiest_pct
        for owned in self._owned.values():
            root = self._table.process(owned.tree.root.pid) if owned.tree is not None else None
            owned.is_alive = bool(root and owned.tree and root.key == owned.tree.root.key and not root.is_zombie)
            if owned.tree is not None and not owned.is_alive:
                owned.tree = None
                self.look_again()
        self._attribute(tick.monotonic_s)

    def look_again(self) -> None:
        """An engine came, went or restarted: search with the next tick."""
        self._due_s = -math.inf

    def tag(self, engine: str) -> str:
        """The engine's GPUs, "0+1"; empty when they are not known."""
        gpus = self._owned[engine].gpus
        return gpus.tag if gpus is not None else ""

    def gpus(self, engine: str) -> EngineGpus | None:
        """The engine's GPUs as far as its present process vouches for them, or the configuration."""
        owned = self._owned[engine]
        return owned.gpus if owned.gpus and (owned.is_alive or owned.gpus.mapping == "manual") else None

    def driver_says(self, engine: str) -> EngineGpus | None:
        """What would be known without the configuration's word."""
        owned = self._owned[engine]
        return self._attribution().get(engine) if owned.is_alive else None

    def pid(self, engine: str) -> int | None:
        """The root of the engine's processes; None when it can't be seen."""
        owned = self._owned[engine]
        return owned.tree.root.pid if owned.tree is not None and owned.is_alive else None

    def fields(self, engine: str, tick: Tick) -> dict[str, Value]:
        """Fields of the `engine` measurement, for this tick. Call it once a tick."""
        owned = self._owned[engine]
        fields: dict[str, Value] = {}
        gpus = self.gpus(engine)
        if gpus is not None:
            fields |= {"gpus_mapping": gpus.mapping, "gpus_confidence": gpus.confidence}
        if owned.tree is not None and owned.is_alive and owned.cpu is not None:
            fields |= owned.cpu.read(owned.tree.members.values(), tick.monotonic_s)
            if owned.busiest_pct is not None:
                fields["proc_cpu_max_pct"] = owned.busiest_pct
        return fields

    def close(self) -> None:
        self._search.close()
        self._threads.close()

    def _find(self, _tick: Tick) -> dict[str, Tree]:
        return self._trees.find(self._targets, self.sources.hosted())

    def _busiest(self, tick: Tick) -> dict[str, float]:
        trees = {name: tree for name, owned in self._owned.items() if (tree := owned.tree) is not None}
        now_s = self._monotonic()
        found = {name: self._busy[name].read(tree.members.values(), now_s) for name, tree in trees.items()}
        return {name: busiest_pct for name, busiest_pct in found.items() if busiest_pct is not None}

    def _take(self, tick: Tick, wait_s: float) -> None:
        if self._asked is None:
            return
        try:
            trees = self._search.take(self._asked, wait_s)
        except Late:
            return
        except Exception:
            log.exception("the search for the engines' processes failed")
            trees = {}
        self._asked = None
        self._found_once = True
        for name, owned in self._owned.items():
            owned.tree = trees.get(name)

    def _attribution(self) -> dict[str, EngineGpus]:
        trees = {
            name: tree for name, owned in self._owned.items() if (tree := owned.tree) is not None and owned.is_alive
        }
        return attribute(trees, self._gpus(), self._whose(), host_pids=self._sees_host_pids)

    def _gpus(self) -> list[GpuProcesses]:
        return [gpu for source in self.sources.gpus for gpu in source.gpu_processes]

    def _attribute(self, now_s: float) -> None:
        found = self._attribution()
        for target in self._targets:
            owned = self._owned[target.name]
            if owned.is_alive and owned.tree is not None and not target.gpus:
                self._believe(owned, found.get(target.name), owned.tree.root.key, now_s)

    def _believe(self, owned: _Owned, found: EngineGpus | None, root: tuple[int, int], now_s: float) -> None:
        known = owned.gpus
        if root != owned.root:
            owned.root, owned.gpus, owned.fewer_since_s = root, found, None
        elif found is None or known is None:
            owned.gpus = found or known
            owned.fewer_since_s = None
        elif set(found.indices) < set(known.indices):
            owned.fewer_since_s = owned.fewer_since_s or now_s
            if now_s - owned.fewer_since_s >= FEWER_AFTER_S:
                owned.gpus, owned.fewer_since_s = found, None
        else:
            owned.fewer_since_s = None
            if found.mapping == known.mapping or found.confidence >= known.confidence:
                owned.gpus = found

    def _whose(self) -> Whose:
        """In a container without the host's pids, a driver's pid is only understood through the host's own /proc."""
        if self._sees_host_pids:
            return lambda pid: Owner(pid, self._table.container(pid))
        namespace = self._table.namespace("self", "pid")

        def translated(pid: int) -> Owner:
            is_here = namespace is not None and self._host_table.namespace(pid, "pid") == namespace
            return Owner(self._host_table.inner_pid(pid) if is_here else None)

        return translated
