"""The roster: every GPU that has ever been seen on this host, so that one that vanishes is reported and not forgotten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from agent.driver import OK, SUCCESS, Row


@dataclass(slots=True)
class KnownGpu:
    """A GPU by its uuid; `uuid` is empty for one that has been lost since before it could be asked."""

    uuid: str
    index: int
    name: str
    answered_s: float  # monotonic s of the tick it last answered to, or was first seen
    state: int = OK
    code: int = SUCCESS  # the driver's, behind the state
    listed: bool = True  # in the driver's present enumeration
    listing_code: int = SUCCESS  # of the enumeration, when its handle can't be had
    pci: str = ""  # normalised address
    driver: str = ""  # its version
    bound: bool = False  # the kernel driver has it
    fallen: int | None = None  # number of the tick in which the kernel's log said that it has fallen off the bus
    persistence: int | None = None  # 0 off, 1 on
    activity: int | None = None  # whether it tells what its SMs do: 0 no, 1 yes
    migs: tuple[str, ...] = ()  # uuids of its MIG instances
    told: frozenset[str] = frozenset()  # the fields that were ever read
    xids: int | None = None  # since the agent's start; None when nobody delivers them

    @property
    def subject(self) -> str:
        """How events name it."""
        return f"gpu{self.index}"


class GpuRoster:
    """Keyed by uuid: an index moves when a GPU is lost."""

    def __init__(self) -> None:
        self._gpus: dict[str, KnownGpu] = {}

    def __iter__(self) -> Iterator[KnownGpu]:
        return iter(sorted(self._gpus.values(), key=lambda gpu: (gpu.index, gpu.uuid)))

    def __len__(self) -> int:
        return len(self._gpus)

    def find(self, uuid: str) -> KnownGpu | None:
        return self._gpus.get(uuid)

    def enumerate(self, rows: Iterable[Row], now: float) -> None:
        """Take over the driver's list.

        A row without a uuid is the known GPU of that index that the list doesn't name otherwise; else a GPU without a uuid.
        """
        rows = list(rows)
        named = {row.uuid for row in rows if row.uuid}
        for known in self._gpus.values():
            known.listed = False
        for row in rows:
            gpu = self._gpus.get(row.uuid) if row.uuid else self._nameless(row.index, named)
            if gpu is None:
                gpu = KnownGpu(row.uuid, row.index, row.name, now)
                self._gpus[row.uuid or f"index {row.index}"] = gpu
            gpu.index, gpu.listed, gpu.listing_code = row.index, True, row.code
            if row.uuid:
                gpu.name, gpu.pci, gpu.driver = row.name, row.pci or gpu.pci, row.driver
                gpu.xids = (gpu.xids or 0) if row.xid_events else gpu.xids
        unnamed = [key for key, gpu in self._gpus.items() if not gpu.uuid]
        for key in unnamed:  # it has a name now, or is listed no more: either way it isn't known under its index
            if any(row.index == self._gpus[key].index and row.uuid for row in rows) or not self._gpus[key].listed:
                del self._gpus[key]

    def expect(self, index: int, uuid: str, pci: str, now: float) -> None:
        """A GPU that the kernel driver has bound, whether its library lists it or not."""
        self._gpus.setdefault(uuid, KnownGpu(uuid, index, "", now, listed=False, pci=pci)).bound = True

    def recall(self, index: int, uuid: str, name: str, pci: str, now: float, *, listed: bool) -> None:
        """A GPU that this host had when the agent last ran."""
        self._gpus.setdefault(uuid, KnownGpu(uuid, index, name, now, listed=listed, pci=pci))

    def forget(self, keep: Collection[str]) -> None:
        """Drop those that nobody lists and that aren't to be kept: they were replaced."""
        for uuid in [gpu.uuid for gpu in self._gpus.values() if not (gpu.listed or gpu.bound or gpu.uuid in keep)]:
            del self._gpus[uuid]

    def at(self, pci: str) -> KnownGpu | None:
        """The GPU at a normalised PCI address, the one that is listed where two were."""
        there = [gpu for gpu in self._gpus.values() if gpu.pci == pci]
        return max(there, key=lambda gpu: gpu.listed, default=None)

    def _nameless(self, index: int, named: set[str]) -> KnownGpu | None:
        for gpu in self._gpus.values():
            if gpu.index == index and gpu.uuid not in named:
                return gpu
        return None
