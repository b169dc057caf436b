"""The connection to the driver: initialise, enumerate the GPUs, take XID events, start again when the driver goes away."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import pynvml

from agent.driver import Row
from agent.nvml import bound, codes, identity
from agent.nvml.gpu import Gpu, Identity
from agent.timing import ReaderTiming

XID_EVENT = 8  # nvmlEventTypeXidCriticalError
EVENTS_PER_SWEEP = 64


class Session:
    """Everything between nvmlInit and nvmlShutdown. While it is opened or closed no thread may be inside a call of it."""

    codes = codes.CODES

    def __init__(self, timing: ReaderTiming, root: Path) -> None:
        self._timing = timing
        self._root = root
        self._meminfo = root / "proc/meminfo"
        self._initialised = False
        self._events: Any = None
        self._by_handle: dict[int, Gpu] = {}
        self.gpus: list[Gpu] = []
        self.rows: list[Row] = []  # by index; of a GPU not attached yet with the code for a timeout
        self.driver = ""  # its version
        self.errors = 0

    def open(self) -> int:
        """Initialise and count; the NVML code, 0 when the driver answers. Never raises for a driver that is absent."""
        self.close()
        try:
            pynvml.nvmlInit()
            self._initialised = True
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            code = int(error.value)
            self.close()
            return code
        self.driver = identity.text(pynvml.nvmlSystemGetDriverVersion)
        with contextlib.suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()
        self.rows = [Row(index, "", "", codes.TIMEOUT, False) for index in range(count)]
        return codes.SUCCESS

    def attach(self, index: int) -> None:
        """Get the GPU's handle and identity; may hang for a GPU that hangs."""
        self.rows[index] = self._enumerate(index)

    def close(self) -> None:
        """Give everything back. Never call it while another thread is inside a driver call."""
        with contextlib.suppress(pynvml.NVMLError):
            for gpu in self.gpus:
                gpu.forget()
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
        if self._initialised:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        self._initialised = False
        self._events = None
        self._by_handle, self.gpus, self.rows = {}, [], []

    def bound(self) -> list[tuple[int, str, str]]:
        """(index, uuid, PCI address) of the GPUs that the kernel driver has bound."""
        return bound.read(self._root)

    def take_xids(self) -> list[tuple[str, int]]:
        """(uuid, code) of the XID errors since the last call, in order; five equal ones are five. Doesn't wait."""
        taken: list[tuple[str, int]] = []
        if self._events is None or not self._by_handle:
            return taken
        for _ in range(EVENTS_PER_SWEEP):
            try:
                data = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError as error:
                if error.value not in (codes.TIMEOUT, codes.GPU_IS_LOST):
                    self.errors += 1
                break
            gpu = self._by_handle.get(_address(data.device)) or self._parent(data.device)
            if gpu is not None and data.eventType & XID_EVENT:
                taken.append((gpu.uuid, int(data.eventData)))
        return taken

    def _parent(self, handle: Any) -> Gpu | None:
        """The GPU of a MIG instance that an event names in its stead."""
        with contextlib.suppress(pynvml.NVMLError):
            return self._by_handle.get(_address(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)))
        return None

    def _enumerate(self, index: int) -> Row:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = identity.address_of(handle)
            uuid = identity.uuid_of(handle, address)
        except pynvml.NVMLError as error:
            return Row(index, "", "", int(error.value), False)
        name = identity.text(lambda: pynvml.nvmlDeviceGetName(handle))
        brand = None
        with contextlib.suppress(pynvml.NVMLError):
            brand = int(pynvml.nvmlDeviceGetBrand(handle))
        gpu = Gpu(Identity(index, uuid, name, brand, self.driver), handle, self._timing, self._meminfo)
        xid_events = self._register(handle, gpu)
        self.gpus.append(gpu)
        return Row(index, uuid, name, codes.SUCCESS, xid_events, address, self.driver)

    def _register(self, handle: Any, gpu: Gpu) -> bool:
        if self._events is None:
            return False
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except pynvml.NVMLError:
            return False
        self._by_handle[_address(handle)] = gpu
        return True


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
