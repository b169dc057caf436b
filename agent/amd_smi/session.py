"""The connection to the driver: load the library, enumerate the GPUs, start again when the driver goes away."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from agent import pci
from agent.amd_smi import codes, library
from agent.amd_smi.calls import NA, Calls
from agent.amd_smi.gpu import Gpu
from agent.driver import DriverGone, Row
from agent.timing import ReaderTiming
from telemetry.lineprotocol import printable

LONGEST_NAME = 128


class Session:
    """Everything between amdsmi_init and amdsmi_shut_down. While it is opened or closed no thread may be inside a call of it."""

    codes = codes.CODES

    def __init__(self, timing: ReaderTiming, _root: Path) -> None:
        self._timing = timing
        self._smi: Any = None
        self._initialised = False
        self._handles: list[Any] = []
        self.gpus: list[Gpu] = []
        self.rows: list[Row] = []  # by index; of a GPU not attached yet with the code for a timeout

    def open(self) -> int:
        """Load, initialise and count; a status code, 0 when the driver answers. Never raises for a driver that is absent."""
        self.close()
        if self._smi is None:
            self._smi, code = library.load()
            if self._smi is None:
                return code
        smi = self._smi
        try:
            smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
            self._initialised = True
            self._handles = list(smi.amdsmi_get_processor_handles())
        except smi.AmdSmiLibraryException as error:
            self.close()
            return int(error.get_error_code())
        self.rows = [Row(index, "", "", codes.TIMEOUT, False) for index in range(len(self._handles))]
        return codes.SUCCESS

    def attach(self, index: int) -> None:
        """Get the GPU's identity; may hang for a GPU that hangs."""
        self.rows[index] = self._enumerate(index)

    def close(self) -> None:
        """Give everything back. Never call it while another thread is inside a library call."""
        if self._initialised:
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()
        self._initialised = False
        self._handles, self.gpus, self.rows = [], [], []

    def bound(self) -> list[tuple[int, str, str]]:
        """None: the kernel shows AMD GPUs, but not under the uuid that the library gives them."""
        return []

    def take_xids(self) -> list[tuple[str, int]]:
        """None: XID errors are NVIDIA's."""
        return []

    def _enumerate(self, index: int) -> Row:
        calls = Calls(self._smi, self._handles[index], self._timing.reprobe_s)
        calls.begin(0.0)
        try:
            uuid = self._identity(calls)
            if not uuid:
                return Row(index, "", "", calls.failures[0] if calls.failures else codes.NOT_SUPPORTED, False)
            texts = {
                "name": calls.table("amdsmi_get_gpu_asic_info").get("market_name"),
                "driver": calls.table("amdsmi_get_gpu_driver_info").get("driver_version"),
            }
        except DriverGone:
            return Row(index, "", "", codes.NOT_INIT, False)
        known = {key: printable(text)[:LONGEST_NAME] for key, text in texts.items() if text and text != NA}
        calls.forget_refusals()
        self.gpus.append(Gpu(index, uuid, known, calls, self._timing))
        address = self._address(calls)
        return Row(index, uuid, known.get("name", ""), codes.SUCCESS, False, address, known.get("driver", ""))

    def _identity(self, calls: Calls) -> str:
        """The uuid; the PCI address of a GPU that says none, only zeros, or another GPU's. Empty when neither is told."""
        uuid = printable(str(calls.ask("amdsmi_get_gpu_device_uuid") or ""))[:LONGEST_NAME]
        taken = {gpu.uuid for gpu in self.gpus}
        if uuid.strip("0-") and uuid not in taken:
            return uuid
        address = self._address(calls)
        return f"PCI-{address}" if address else ""

    @staticmethod
    def _address(calls: Calls) -> str:
        return pci.normalised(str(calls.ask("amdsmi_get_gpu_device_bdf") or ""))
