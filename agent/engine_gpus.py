"""Engine GPUs: which GPUs each engine uses, how that is known, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.collectors.interface import GpuProcesses
from agent.engine_tree import Tree
from agent.visible_devices import visible

How = Literal["manual", "nvml", "cgroup", "env"]

CERTAIN = 1.0
SHARED = 0.95  # another engine computes on one of these GPUs as well
BY_CONTAINER = 0.8
BY_ENVIRONMENT = 0.6
BY_ENVIRONMENT_UNORDERED = 0.5


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """`indices`, ascending, are the tags `gpu` of the GPUs. `mapping` says how they are known: by configuration, by the driver's
    list of processes, by that list and the container, or by the root process's environment. `confidence` is 0..1.
    """

    indices: tuple[int, ...]
    mapping: How
    confidence: float

    @property
    def tag(self) -> str:
        return "+".join(str(index) for index in self.indices)


def manual(tag: str) -> EngineGpus:
    return EngineGpus(tuple(sorted({int(index) for index in tag.split("+")})), "manual", CERTAIN)


Whose = Callable[[int], "Owner"]


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of a process that a driver names: its pid here (None: it can't be seen from here) and its container."""

    pid: int | None
    container: str = ""


def attribute(
    trees: Mapping[str, Tree], gpus: Sequence[GpuProcesses], whose: Whose, *, host_pids: bool
) -> dict[str, EngineGpus]:
    """The GPUs of each engine of which anything is known. `host_pids`: the agent sees the pids that the driver names as they are;
    otherwise `whose` translates them, which is a match by container rather than by process.
    """
    owners = {gpu.index: [whose(pid) for pid in gpu.pids or ()] for gpu in gpus}
    users = {index: {name for name, tree in trees.items() if _in_tree(found, tree)} for index, found in owners.items()}
    containers = [tree.container for tree in trees.values()]
    found: dict[str, EngineGpus] = {}
    for name, tree in trees.items():
        mine = tuple(sorted(index for index, names in users.items() if name in names))
        if mine and host_pids:
            is_shared = any(len(users[index]) > 1 for index in mine)
            found[name] = EngineGpus(mine, "nvml", SHARED if is_shared else CERTAIN)
        elif mine:
            found[name] = EngineGpus(mine, "cgroup", BY_CONTAINER)
        elif tree.container and containers.count(tree.container) == 1 and (beside := _in_container(owners, tree)):
            found[name] = EngineGpus(beside, "cgroup", BY_CONTAINER)
        elif told := visible(tree.environment, gpus, bool(tree.container)):
            confidence = BY_ENVIRONMENT if told.is_ordered else BY_ENVIRONMENT_UNORDERED
            found[name] = EngineGpus(tuple(sorted(told.indices)), "env", confidence)
    return found


def _in_tree(owners: Sequence[Owner], tree: Tree) -> bool:
    return any(owner.pid in tree.members for owner in owners if owner.pid is not None)


def _in_container(owners: Mapping[int, Sequence[Owner]], tree: Tree) -> tuple[int, ...]:
    """GPUs on which something computes that is not of the engine's tree, but in its container."""
    return tuple(sorted(i for i, found in owners.items() if any(owner.container == tree.container for owner in found)))
