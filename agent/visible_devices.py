"""Visible devices: which GPUs a process was told to use, by the environment that it was started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.collectors.interface import GpuProcesses

_BY_OWN_ORDER = ("ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_CUDA = "CUDA_VISIBLE_DEVICES"
_RUNTIME = "ROCR_VISIBLE_DEVICES"
_OF_CONTAINER = ("NVIDIA_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")
"""What a runtime below, or a container, was given: the inner variable counts within these."""


@dataclass(frozen=True, slots=True)
class Visible:
    """`indices` of GPUs on this host. `is_ordered`: their numbers mean the same to the agent and to the process."""

    indices: tuple[int, ...]
    is_ordered: bool


def visible(environment: Mapping[str, str], gpus: Sequence[GpuProcesses], is_contained: bool) -> Visible | None:
    """None where the environment doesn't say, or says it in a way that can't be told from here.

    `is_contained`: the process runs in a container that the agent is not in, so its numbers count the container's GPUs. CUDA takes
    the list up to the first entry that is no GPU, and numbers GPUs by PCI address only with CUDA_DEVICE_ORDER=PCI_BUS_ID (CUDA
    programming guide, environment variables); a uuid may be shortened as long as it is unique.
    """
    outer = _outer(environment, gpus, is_contained)
    if outer is None:
        return None
    name = next((name for name in (*_BY_OWN_ORDER, _CUDA) if name in environment), None)
    if name is None:
        return Visible(outer, is_ordered=True) if outer else None
    entries = [entry.strip() for entry in environment[name].split(",")]
    found: list[int] = []
    for entry in entries:
        index = _by_index(entry, outer, gpus) if entry.isdigit() else _by_uuid(entry, gpus)
        if index is None:
            break
        if index not in found:
            found.append(index)
    if not found:
        return None
    ordered = name != _CUDA or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(gpus) == 1
    return Visible(tuple(found), ordered or not any(entry.isdigit() for entry in entries))


def _outer(environment: Mapping[str, str], gpus: Sequence[GpuProcesses], is_contained: bool) -> tuple[int, ...] | None:
    """The GPUs that the inner variable counts within; () for all of the host's, None where that is not known."""
    names = (_RUNTIME, *_OF_CONTAINER) if is_contained else (_RUNTIME,)
    said = next((environment[name] for name in names if name in environment), "all")
    if said == "all":
        return ()
    entries = [entry.strip() for entry in said.split(",")]
    found = [_by_index(entry, (), gpus) if entry.isdigit() else _by_uuid(entry, gpus) for entry in entries]
    if any(index is None for index in found):
        return None  # "void": something else hands out the GPUs
    return tuple(sorted({index for index in found if index is not None}))


def _by_index(entry: str, outer: tuple[int, ...], gpus: Sequence[GpuProcesses]) -> int | None:
    number = int(entry) if len(entry) < 4 else 1000
    if outer:
        return outer[number] if number < len(outer) else None
    return _known(number, gpus)


def _known(index: int, gpus: Sequence[GpuProcesses]) -> int | None:
    """The index where it is one of the host's, or where the host's GPUs are not known."""
    return index if (not gpus and index < 1000) or any(gpu.index == index for gpu in gpus) else None


def _by_uuid(entry: str, gpus: Sequence[GpuProcesses]) -> int | None:
    """GPU-..., MIG-... of a MIG instance, or the older MIG-GPU-<uuid>/<instance>/<instance>."""
    if entry.startswith("MIG-GPU-"):
        entry = entry.removeprefix("MIG-").partition("/")[0]
    if len(entry) < 8:
        return None
    found = [gpu.index for gpu in gpus if gpu.uuid.startswith(entry) or any(m.startswith(entry) for m in gpu.migs)]
    return found[0] if len(found) == 1 else None
