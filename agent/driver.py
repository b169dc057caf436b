"""What the reader asks of a vendor's library, whichever it is: a session that enumerates GPUs, and GPUs that are read one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from telemetry.catalogue import GPU_STATES

Number = float | int

SUCCESS = 0  # with every vendor

OK = GPU_STATES.index("ok")
LOST = GPU_STATES.index("lost")
NO_PERMISSION = GPU_STATES.index("no_permission")
HUNG = GPU_STATES.index("hung")
ABSENT = GPU_STATES.index("absent")


@dataclass(frozen=True, slots=True)
class DriverCodes:
    """A vendor's status numbers for those who know no vendor.

    library: its name in log lines. timeout: of an enumerated GPU that hasn't been attached yet, or doesn't answer.
    missing: of one that is enumerated no more. gone: the connection is void. stale: only a new process can connect again; None
    when that never helps. stale_remedy: what the host's operator does about it. quiet: there is no driver on this host, which is
    nothing to complain of.
    """

    library: str
    timeout: int
    missing: int
    gone: int
    stale: int | None
    stale_remedy: str
    quiet: frozenset[int]
    state_of: Callable[[int], int]
    name_of: Callable[..., str]  # (code, language="en")


class DriverGone(Exception):
    """The connection to the driver is void."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the enumeration. A GPU whose handle can't be had has a code, and no uuid unless the driver still tells it."""

    index: int
    uuid: str
    name: str
    code: int
    xid_events: bool
    pci: str = ""  # normalised address
    driver: str = ""  # its version

    def told(self) -> list[Any]:
        """As it stands in a frame."""
        return list(astuple(self))

    @classmethod
    def heard(cls, raw: Any) -> Row:
        """The inverse of `told`; ValueError or TypeError when it isn't one."""
        index, uuid, name, code, xid_events, pci, driver = raw
        return cls(int(index), str(uuid), str(name), int(code), bool(xid_events), str(pci), str(driver))


@dataclass(frozen=True, slots=True)
class MigReading:
    """Fields of the `mig` measurement that were read of one instance in this sweep."""

    uuid: str
    fields: Mapping[str, Number | str]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a sweep brought of one GPU: fields of the `gpu` measurement that were read in it and no others.

    `code` is the vendor's, behind a state other than ok. `pids` is None when processes were not asked for; `untold` when they were and
    the driver doesn't tell. `migs`: what was read of its MIG instances. `facts`: what findings need and no measurement holds.
    """

    state: int
    code: int
    fields: Mapping[str, Number | str]
    pids: tuple[int, ...] | None
    untold: bool = False
    migs: Sequence[MigReading] = ()
    facts: Mapping[str, Any] | None = None


class DriverGpu(Protocol):
    """A GPU with a handle. `index` is the driver's and moves when a GPU is lost; `uuid` stays."""

    index: int
    uuid: str

    @property
    def errors(self) -> int:
        """Calls that failed in a way that isn't expected of any card, since the GPU was attached."""
        ...

    def read(self, now: float) -> Reading:
        """Everything that is due at `now`, monotonic seconds. May hang. Raises DriverGone."""
        ...


class DriverSession(Protocol):
    """The connection to a driver. While it is opened or closed no thread may be inside a call of it."""

    @property
    def codes(self) -> DriverCodes: ...

    @property
    def rows(self) -> Sequence[Row]:
        """By index; of a GPU that isn't attached yet with the code `timeout`."""
        ...

    @property
    def gpus(self) -> Sequence[DriverGpu]: ...

    def open(self) -> int:
        """Connect and count; the vendor's code. Never raises for a driver that is absent."""
        ...

    def attach(self, index: int) -> None:
        """Get a GPU's handle and identity; may hang for a GPU that hangs."""
        ...

    def bound(self) -> Sequence[tuple[int, str, str]]:
        """(index, uuid, normalised PCI address) of the GPUs that the kernel driver has, told without its library where that can be told."""
        ...

    def take_xids(self) -> Sequence[tuple[str, int]]:
        """(uuid, code) of the driver's error events since the last call. Doesn't wait."""
        ...
