"""The calls that one GPU answers: asks the driver, turns its errors into absent values and remembers what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from agent.driver import DriverGone
from agent.nvml import codes

Number = float | int
FieldId = int | tuple[int, int]
"""A field id alone is of scope 0, the GPU's; a pair is (id, scope)."""

SIGNED_FIELDS = frozenset(
    {
        pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT,
        pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT,
        pynvml.NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT,
        pynvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT,
    }
)
"""Offsets below zero: the member siVal is the truth whatever valueType says (as uiVal, -2 reads 4294967294)."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t
ALL_ONES = frozenset({2**32 - 1, 2**64 - 1})
"""What an unsigned answer, of either width, is when a driver fills in a blank."""

_BLANKS = {"uiVal": 2**32 - 1, "ulVal": 2**64 - 1, "ullVal": 2**64 - 1, "usVal": 2**16 - 1}
"""All bits set is the driver's way to say "no value" in an unsigned member."""


class GpuFault(Exception):
    """The whole GPU is out; `code` says how."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML code {code}")
        self.code = code


class Calls:
    """What one GPU answers and refuses. A refused call is asked again after `reprobe_s`, since a driver or mode may change."""

    def __init__(self, reprobe_s: float) -> None:
        self._reprobe_s = reprobe_s
        self._now = 0.0
        self._refused: dict[str | FieldId, float] = {}  # call or field id -> monotonic s when it is asked again
        self.errors = 0  # unexpected ones, since start
        self.answered = 0  # in this sweep
        self.failures: list[int] = []  # codes of this sweep other than "not supported"

    def begin(self, now: float) -> None:
        """Start a sweep at `now`, monotonic seconds."""
        self._now = now
        self.answered = 0
        self.failures = []

    def forget_refusals(self) -> None:
        """Ask everything again in the next sweep: for a GPU that refuses all, where a refusal says nothing of the one call."""
        self._refused.clear()

    def ask(self, key: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns, or None when there is no value. Raises GpuFault and DriverGone."""
        if self._refused and self._is_refused(key):
            return None
        try:
            answer = function(*arguments)
        except pynvml.NVMLError as error:
            self._note(key, error.value)
            return None
        self.answered += 1
        return None if type(answer) is int and answer in ALL_ONES else answer

    def refuse(self, key: str | FieldId) -> None:
        """Take an answer that can't be right for a refusal."""
        self._refused[key] = self._now + self._reprobe_s

    def fields(self, handle: Any, ids: Sequence[FieldId]) -> dict[FieldId, Number]:
        """Field values by id, in NVML's units; ids without a value are left out. Raises GpuFault and DriverGone."""
        asked = [fid for fid in ids if not self._is_refused(fid)] if self._refused else list(ids)
        if not asked:
            return {}
        failed = len(self.failures)
        answer = self.ask("field_values", pynvml.nvmlDeviceGetFieldValues, handle, asked)
        if answer is None:
            if self.failures[failed:] == [codes.INVALID_ARGUMENT] and len(asked) > 1:
                # one id that this driver doesn't know spoils the lot: find it, once
                del self.failures[failed:]
                return {fid: value for one in asked for fid, value in self._field(handle, one).items()}
            return {}
        return self._taken(answer)

    def _field(self, handle: Any, fid: FieldId) -> dict[FieldId, Number]:
        answer = self.ask(f"field {fid}", pynvml.nvmlDeviceGetFieldValues, handle, [fid])
        if answer is None:
            self.refuse(fid)
            return {}
        return self._taken(answer)

    def _taken(self, answer: Any) -> dict[FieldId, Number]:
        self.answered -= 1  # the call itself says little; its entries count
        values: dict[FieldId, Number] = {}
        for entry in answer:
            fid: FieldId = (int(entry.fieldId), int(entry.scopeId)) if entry.scopeId else int(entry.fieldId)
            if entry.nvmlReturn != codes.SUCCESS:
                # an id that an older driver doesn't know comes back as an invalid argument
                code = int(entry.nvmlReturn)
                self._note(fid, codes.NOT_SUPPORTED if code == codes.INVALID_ARGUMENT else code)
                continue
            self.answered += 1
            value = _decoded(fid, entry)
            if value is not None:
                values[fid] = value
        return values

    def _is_refused(self, key: str | FieldId) -> bool:
        until = self._refused.get(key)
        if until is None:
            return False
        if self._now < until:
            return True
        del self._refused[key]
        return False

    def _note(self, key: str | FieldId, code: int) -> None:
        if code in codes.GPU_FAULTS:
            raise GpuFault(code)
        if code in codes.DRIVER_GONE:
            raise DriverGone(f"NVML code {code}")
        if code in codes.REFUSALS:
            self.refuse(key)
            if code == codes.NO_PERMISSION:
                self.failures.append(code)
        elif code not in codes.QUIET:
            self.errors += 1
            self.failures.append(code)


def _decoded(fid: FieldId, entry: Any) -> Number | None:
    kind = int(entry.valueType)
    if fid in SIGNED_FIELDS:
        member = "siVal"
    elif 0 <= kind < len(_MEMBERS):
        member = _MEMBERS[kind]
    else:
        return None
    value: Number = getattr(entry.value, member)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value == _BLANKS.get(member) or (value < 0 and fid not in SIGNED_FIELDS):
        return None
    return value
