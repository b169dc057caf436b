"""Engine tree: the processes of each engine of this host, from the one that answers at its address up to the one that started it all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from agent.listening import Listening
from agent.process_table import Process, ProcessTable, ancestors, descendants
from agent.settings import EngineTarget

ENGINE_WORDS = (
    *("vllm", "sglang", "text-generation", "text_generation", "llama-server", "llama_cpp", "lmdeploy", "ollama"),
    *(
        "tritonserver",
        "trtllm",
        "tensorrt_llm",
        "dynamo",
        "mindie",
        "mpirun",
        "orterun",
        "torchrun",
        "torch.distributed",
    ),
)
"""A parent whose program, script or module has one of these in its name is part of the engine, too."""

_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "fish")
_CONTAINER_CLIENTS = ("docker", "podman", "nerdctl", "kubectl", "crictl", "enroot", "apptainer", "singularity")


@dataclass(frozen=True, slots=True)
class Tree:
    """An engine's processes by pid. `environment` is the root's own; `container` its container's id where it is not the agent's."""

    root: Process
    members: Mapping[int, Process]
    environment: Mapping[str, str]
    container: str = ""


class EngineTrees:
    """Finds the trees of all engines at once, since what two of them have in common belongs to neither."""

    def __init__(self, table: ProcessTable, listening: Listening | None = None) -> None:
        self._table = table
        self._listening = listening or Listening(table)
        self._holders: dict[str, Process] = {}  # who listened at each address last time

    def find(self, targets: Sequence[EngineTarget], hosted: Mapping[str, int]) -> dict[str, Tree]:
        """The trees of the engines whose processes can be seen, by name. `hosted` has the pids of those that the agent runs."""
        processes = self._table.all()
        members: dict[str, dict[int, Process]] = {}
        roots: dict[str, int] = {}
        for target in targets:
            pid = hosted.get(target.name)
            if pid in processes:
                own = self._started_by(pid, processes)
                if not self._is_container_client(own):
                    roots[target.name], members[target.name] = pid, own
        listeners = {t.name: pid for t in targets if t.name not in roots and (pid := self._holder(t, processes))}
        agent = {os.getpid(), *ancestors(os.getpid(), processes)}
        for name, pid in listeners.items():
            others = {up for other, down in listeners.items() if other != name for up in ancestors(down, processes)}
            roots[name] = self._root(pid, processes, others | agent | set(roots.values()))
            members[name] = descendants([roots[name]], processes)
        own_container = self._table.container("self")
        return {name: self._tree(processes[roots[name]], found, own_container) for name, found in members.items()}

    def _tree(self, root: Process, members: Mapping[int, Process], own_container: str) -> Tree:
        container = self._table.container(root.pid)
        environment = self._table.environment(root)
        return Tree(root, members, environment, container if container != own_container else "")

    def _holder(self, target: EngineTarget, processes: dict[int, Process]) -> int | None:
        known = self._holders.get(target.base_url)
        likely = [known.pid] if known is not None else []
        pid = self._listening.holder(target.base_url, processes, likely)
        if pid is None:
            self._holders.pop(target.base_url, None)
        else:
            self._holders[target.base_url] = processes[pid]
        return pid

    def _root(self, pid: int, processes: Mapping[int, Process], barred: set[int]) -> int:
        """The topmost ancestor that is an engine's by its name and has nothing but this engine beneath it."""
        root = pid
        for parent in ancestors(pid, processes):
            if parent in barred or parent == 1:
                break
            if self._is_engine(processes[parent]):
                root = parent
        return root

    def _is_engine(self, process: Process) -> bool:
        arguments = self._table.arguments(process)[:5]
        if not arguments or PurePath(arguments[0]).name in _SHELLS:
            return False
        names = " ".join(PurePath(word).name for word in arguments).lower()
        return any(word in names for word in ENGINE_WORDS)

    def _started_by(self, pid: int, processes: Mapping[int, Process]) -> dict[int, Process]:
        """What the agent started, and what was started from there: also what has cut itself loose, by its session."""
        same_session = [process.pid for process in processes.values() if process.session == pid]
        return descendants([pid, *same_session], processes)

    def _is_container_client(self, members: Mapping[int, Process]) -> bool:
        """Whether the engine itself is somebody else's child: a container's, started through its client."""
        first = (self._table.arguments(process)[:1] for process in members.values())
        return any(PurePath(name[0]).name in _CONTAINER_CLIENTS for name in first if name)
