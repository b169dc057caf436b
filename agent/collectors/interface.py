"""What a collector is: a source that is read once a tick and answers with samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from telemetry.sample import Sample


@dataclass(frozen=True, slots=True)
class Tick:
    """One moment of sampling. Every sample made in it carries `time_ns`; rates come from differences of `monotonic_s`."""

    number: int
    time_ns: int  # wall clock
    monotonic_s: float


class Collector(Protocol):
    """One source. `collect` never sleeps, never waits longer than its own deadline and never raises for a source that is
    absent or broken: what can't be read is left out, and counted in `errors`.
    """

    name: str  # gpu, engine, host ...
    errors: int  # reads that failed since start

    def collect(self, tick: Tick) -> Sequence[Sample]: ...

    def close(self) -> None: ...


Level = Literal["ok", "absent", "warning", "error"]
"""ok: works. absent: this host has no such thing, or it is switched off. warning: works in part. error: should work and doesn't."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What `pairscope doctor` says of one source: how it is, in one sentence, and what to do about it where there is something."""

    source: str  # gpu, engine chat-a, bmc ...
    level: Level
    text: str
    remedy: str = ""


@runtime_checkable
class Examined(Protocol):
    """A collector that can say how its source is. `pending`: a first reading that takes longer than a tick is under way."""

    @property
    def pending(self) -> bool: ...

    def findings(self, language: str) -> Sequence[Finding]:
        """What the readings so far have shown; asks the source nothing."""
        ...


@runtime_checkable
class Pausable(Protocol):
    """A collector that keeps devices open and can let go of them for a while, so that a GPU can be reset or a driver unloaded.

    Both may be called at any time from another thread than `collect`'s, never raise and return within a second; twice is as once.
    """

    def pause(self) -> None:
        """Close every device. Until `resume`, `collect` opens none and says nothing of them, nor that they are lost."""
        ...

    def resume(self) -> None:
        """Open them again at the next tick, and enumerate afresh: what was reset or exchanged meanwhile is no loss."""
        ...


@runtime_checkable
class Reprobable(Protocol):
    """A collector that remembers what it once asked (devices, limits, what isn't supported) and can ask it all again."""

    def reprobe(self) -> None:
        """At the next tick enumerate again, and read identity, limits and thresholds. Called as `Pausable.pause` is."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A collector that keeps on disk what it must know after a restart to tell of a change, such as a driver's version."""

    def remember(self, tick: int) -> None:
        """All that it told in ticks up to this number is on disk, and may be remembered. Called from another thread than `collect`'s,
        also after `close`; may wait for the disk.
        """
        ...


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """Which processes compute on one GPU. `index` is its tag `gpu`. `pids` are the host's process ids; None where the source
    doesn't tell. `migs` are the uuids of its MIG instances.
    """

    index: int
    uuid: str
    pids: tuple[int, ...] | None
    migs: tuple[str, ...] = ()


@runtime_checkable
class ListsGpuProcesses(Protocol):
    """A collector that knows which processes use its GPUs, as last read. It is replaced as a whole, so any thread may look."""

    gpu_processes: Sequence[GpuProcesses]


@runtime_checkable
class KnowsDevices(Protocol):
    """A collector that reads devices itself, and so has the say on their state."""

    def knows(self, uuid: str) -> bool:
        """Whether it has ever seen the device."""
        ...


@runtime_checkable
class Beside(Protocol):
    """A collector that must know the others, since one of them may speak of the same devices."""

    def beside(self, others: Sequence[Collector]) -> None: ...


Tags = Mapping[str, str]
"""The tags of this host (node and, where configured, rack, circuit, cluster); each collector adds its own to them."""
