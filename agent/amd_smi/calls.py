"""The calls that one GPU answers: asks the library, turns its errors into absent values and remembers what it refuses."""

from __future__ import annotations

import math
from typing import Any

from agent.amd_smi import codes
from agent.driver import DriverGone

NA = "N/A"
GIVE_UP_AFTER = 4
"""A GPU whose first calls fail all is asked no more in this sweep: each may cost a time-out of its own."""


class GpuFault(Exception):
    """The whole GPU is out; `code` says how."""

    def __init__(self, code: int) -> None:
        super().__init__(codes.name_of(code))
        self.code = code


class Calls:
    """What one GPU answers and refuses. A refused call is asked again after `reprobe_s`, since a driver or mode may change."""

    def __init__(self, smi: Any, handle: Any, reprobe_s: float) -> None:
        self.smi = smi
        self._handle = handle
        self._reprobe_s = reprobe_s
        self._now = 0.0
        self._refused: dict[tuple[object, ...], float] = {}  # call -> monotonic s when it is asked again
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

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the library's function says of this GPU, or None when there is no value. Raises GpuFault and DriverGone."""
        key = (name, *arguments)
        until = self._refused.get(key)
        if until is not None and self._now < until:
            return None
        try:
            answer = getattr(self.smi, name)(self._handle, *arguments)
        except self.smi.AmdSmiLibraryException as error:
            self._note(key, int(error.get_error_code()))
            return None
        except AttributeError:
            self._note(key, codes.FAIL_LOAD_SYMBOL)  # the package of this version has no such function
            return None
        except Exception:  # the package trips over what the library wrote, such as a name that isn't UTF-8
            self._note(key, codes.UNEXPECTED_DATA)
            return None
        self._refused.pop(key, None)
        self.answered += 1
        return answer

    def table(self, name: str, *arguments: Any) -> dict[str, Any]:
        """The same for a function that answers with names and values; empty when there is no answer."""
        answer = self.ask(name, *arguments)
        return answer if isinstance(answer, dict) else {}

    def _note(self, key: tuple[object, ...], code: int) -> None:
        if code in codes.DRIVER_GONE:
            raise DriverGone(codes.name_of(code))
        if code in codes.REFUSALS:
            self._refused[key] = self._now + self._reprobe_s
            if code == codes.NO_PERM:
                self.failures.append(code)
        elif code != codes.NO_DATA:
            self.errors += code not in codes.BUSY_NOW
            self.failures.append(code)
        if not self.answered and len(self.failures) >= GIVE_UP_AFTER:
            raise GpuFault(self.failures[0])


def within(value: Any, least: float, most: float) -> float | None:
    """The number where it lies between the two, both included; None for "N/A", for a sentinel with all bits set and for nonsense."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if least <= value <= most else None


def count(value: Any) -> int | None:
    """A counter's reading; None for "N/A" and for one with all bits set, of 32 or of 64."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**63 and value != 2**32 - 1 else None
