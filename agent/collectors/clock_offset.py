"""Clock offset: how far this host's clock is from its reference, as the time service that steers it says."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.child import Program
from agent.collectors.interface import Finding, Tags, Tick
from agent.periodic import Periodic
from telemetry.messages import say
from telemetry.sample import Sample

EVERY_S = 60.0
CHRONYC_WITHIN_S = 4.0
_STA_PLL, _STA_UNSYNC, _STA_NANO = 0x0001, 0x0040, 0x2000
_TIME_ERROR = 5
_LOCAL_REFERENCE = "7F7F0101"  # chrony's own clock, in lieu of a source
_LEAP = ("Normal", "Insert second", "Delete second")

State = Literal["ok", "unsynchronised", "untold", "unreadable"]


@dataclass(frozen=True, slots=True)
class ClockState:
    """`offset_s`: this clock minus its reference, so positive is ahead; None unless `state` is ok. `source`: who says so."""

    state: State
    source: str
    offset_s: float | None = None


class ClockOffsetCollector:
    """`clock_offset_s` of the `host` measurement: this clock minus its reference, in seconds; positive is ahead.

    It is what the time service knows and has still to correct, not a measurement of our own: chrony tells it through `chronyc`;
    ntpd and systemd-timesyncd steer through the kernel, which tells it through adjtimex(2). A clock that nobody synchronises has
    no offset that is known: the field is absent and a finding says so.
    """

    name = "clock"

    def __init__(self, tags: Tags, read: Callable[[], ClockState] | None = None) -> None:
        self.errors = 0
        self._tags = dict(tags)
        self._chronyc = Program("chronyc", limit_bytes=4096)
        self._read = read or self._ask
        self._periodic: Periodic[ClockState] = Periodic("clock-offset", EVERY_S, lambda _tick: self._read())
        self._state: ClockState | None = None

    @property
    def pending(self) -> bool:
        return self._state is None

    def collect(self, tick: Tick) -> Sequence[Sample]:
        state = self._periodic.take(tick)
        if state is None:
            return []
        self._state = state
        self.errors += state.state == "unreadable"
        if state.offset_s is None:
            return []
        return [Sample("host", self._tags, {"clock_offset_s": state.offset_s}, tick.time_ns)]

    def close(self) -> None:
        self._periodic.close()
        self._chronyc.stop()

    def findings(self, language: str) -> Sequence[Finding]:
        if self._state is None:
            return []
        source, state = say("agent.clock.source", language), self._state
        text = say(
            f"agent.clock.{state.state}", language, source=state.source, offset_ms=1000 * (state.offset_s or 0.0)
        )
        if state.state == "ok":
            return [Finding(source, "ok", text)]
        return [Finding(source, "warning", text, say(f"agent.clock.{state.state}_remedy", language))]

    def _ask(self) -> ClockState:
        answer = self._chronyc.run(["-c", "tracking"], CHRONYC_WITHIN_S)
        told = chrony_state(answer.out) if answer.well else None
        return told or kernel_state(read_kernel())


def chrony_state(text: str) -> ClockState | None:
    """What `chronyc -c tracking` says: 14 fields, the fifth is the correction still to be made in seconds, positive where the
    clock is slow, the last the leap status (chrony: chronyc(1), tracking). None where it says nothing that is understood.
    """
    fields = text.strip().split(",")
    if len(fields) < 14:
        return None
    if fields[13] not in _LEAP or fields[0] == _LOCAL_REFERENCE:
        return ClockState("unsynchronised", "chrony")
    try:
        correction_s = float(fields[4])
    except ValueError:
        return None
    return ClockState("ok", "chrony", -correction_s) if math.isfinite(correction_s) else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel's clock discipline (adjtimex(2)): its return value, the phase that is still to be added, and status bits."""

    code: int
    offset: int  # ns with _STA_NANO, else microseconds
    status: int


def kernel_state(kernel: Kernel | None) -> ClockState:
    """The phase is only told by a service that steers through the kernel's own loop; others leave it at 0, which means nothing."""
    if kernel is None:
        return ClockState("unreadable", "adjtimex")
    if kernel.code == _TIME_ERROR or kernel.status & _STA_UNSYNC:
        return ClockState("unsynchronised", "adjtimex")
    if not kernel.status & _STA_PLL:
        return ClockState("untold", "adjtimex")
    return ClockState("ok", "adjtimex", -kernel.offset / (1e9 if kernel.status & _STA_NANO else 1e6))


class _Timex(ctypes.Structure):
    """struct timex of <sys/timex.h>, as far as it is read; the rest is room for the kernel to write in."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_kernel() -> Kernel | None:
    """adjtimex(2) with no mode set, which only reads and needs no right; None where it isn't allowed or there is none."""
    timex = _Timex()
    try:
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return Kernel(code, timex.offset, timex.status) if code >= 0 else None
