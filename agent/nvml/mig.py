"""MIG: the instances that a GPU is parted into. Memory, processes and activity are theirs; power, clocks and temperature the GPU's."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pynvml

from agent.driver import DriverGone, MigReading
from agent.nvml import identity, memory
from agent.nvml.calls import Calls, GpuFault
from agent.nvml.gpm import MIG_METRICS, Gpm, Take
from telemetry.sample import Value

ENABLED = 1  # nvmlDeviceGetMigMode
MOST = 64
_PROFILE = re.compile(r"\bMIG +(\S+)", re.ASCII)


class Instance:
    """One instance: its handle, and what it refuses."""

    def __init__(self, uuid: str, handle: Any, profile: str, gpm: Gpm, reprobe_s: float) -> None:
        self.uuid = uuid
        self.handle = handle
        self.calls = Calls(reprobe_s)
        self.pids: tuple[int, ...] = ()
        self.gpm = gpm
        self._profile = profile

    def read(self, now: float, *, memory_due: bool, processes_due: bool, names_due: bool) -> dict[str, Value]:
        """What is due of it. Raises GpuFault and DriverGone."""
        self.calls.begin(now)
        fields: dict[str, Value] = {}
        if memory_due:
            fields |= memory.read_device(self.calls, self.handle)
            fields |= self.gpm.read(self.calls, self.handle, now)
        if processes_due:
            pids = memory.read_processes(self.calls, self.handle)
            self.pids = pids or ()
            if pids is not None:
                fields["processes"] = len(pids)
        if names_due and self._profile:
            fields["profile"] = self._profile
        return fields


class Mig:
    """The instances of one GPU. They may be made and destroyed at any time: the list is taken anew now and then."""

    def __init__(self, reprobe_s: float) -> None:
        self._reprobe_s = reprobe_s
        self._instances: dict[str, Instance] = {}

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(self._instances)

    @property
    def pids(self) -> tuple[int, ...]:
        """Compute processes of all instances, as last read."""
        return tuple(sorted({pid for instance in self._instances.values() for pid in instance.pids}))

    def enumerate(self, calls: Calls, handle: Any) -> None:
        """Take the list of instances of the GPU `handle`. Raises GpuFault and DriverGone."""
        mode = calls.ask("mig_mode", pynvml.nvmlDeviceGetMigMode, handle)
        listed: dict[str, Any] = {}
        if mode is not None and mode[0] == ENABLED:
            room = calls.ask("mig_room", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
            listed = dict(_handles(handle, min(int(room), MOST)))
        for uuid in self._instances.keys() - listed.keys():
            self._drop(uuid)
        shared = Counter(_gpu_instance(part) for part in listed.values())
        for uuid, part in listed.items():
            if uuid in self._instances:
                self._instances[uuid].handle = part
                continue
            number = _gpu_instance(part)
            found = _PROFILE.search(identity.text(partial(pynvml.nvmlDeviceGetName, part)))
            gpm = Gpm(_ways(handle, number if shared[number] == 1 else None), device=handle, wanted=MIG_METRICS)
            self._instances[uuid] = Instance(uuid, part, found.group(1) if found else "", gpm, self._reprobe_s)

    def read(self, now: float, *, memory_due: bool, processes_due: bool, names_due: bool) -> list[MigReading]:
        """What is due of each instance. One that fails altogether has been destroyed: the GPU itself says it when it is out."""
        readings = []
        for uuid, instance in list(self._instances.items()):
            try:
                fields = instance.read(now, memory_due=memory_due, processes_due=processes_due, names_due=names_due)
            except (GpuFault, DriverGone):
                self._drop(uuid)
                continue
            if fields:
                readings.append(MigReading(uuid, fields))
        return readings

    def forget(self) -> None:
        """Give back what the library holds."""
        for uuid in list(self._instances):
            self._drop(uuid)

    def _drop(self, uuid: str) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            self._instances.pop(uuid).gpm.forget()


def _handles(handle: Any, room: int) -> Iterator[tuple[str, Any]]:
    """(uuid, handle) of each instance; there are gaps between them."""
    for index in range(room):
        with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid = identity.uuid_of(part, "")
            if uuid:
                yield uuid, part


def _gpu_instance(part: Any) -> int | None:
    with contextlib.suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetGpuInstanceId(part))
    return None


def _ways(handle: Any, number: int | None) -> dict[str, Take]:
    """By the number of its GPU instance, where no other compute instance shares that, else by its own handle."""
    ways: dict[str, Take] = {"gpm_sample": pynvml.nvmlGpmSampleGet}
    if number is None:
        return ways

    def take(_part: Any, buffer: Any) -> Any:
        return pynvml.nvmlGpmMigSampleGet(handle, number, buffer)

    return {"gpm_mig_sample": take, **ways}
