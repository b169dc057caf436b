"""Readers: which protocol an address of a BMC speaks, and what a reader of it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from agent.power.reading import BmcReading
from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget


class BmcReader(Protocol):
    """Reads one BMC. `read` runs on one thread and returns within the target's deadline; BmcFault where the BMC gives nothing.
    `close` may be called from another thread, while a reading is under way too, and leaves nothing open at the BMC.
    """

    def read(self) -> BmcReading: ...

    def close(self) -> None: ...


class Plain:
    """A reader whose protocol leaves nothing open between two readings."""

    def __init__(self, read: Callable[[BmcTarget], BmcReading], target: BmcTarget) -> None:
        self._read = read
        self._target = target

    def read(self) -> BmcReading:
        return self._read(self._target)

    def close(self) -> None:
        pass


READERS: Mapping[str, Callable[[BmcTarget, str], BmcReader]] = {
    # one line a scheme; each gets the target and the agent's language
    "https": RedfishReader,
    "http": RedfishReader,
}


def reader_of(target: BmcTarget, language: str) -> BmcReader | None:
    """The reader for the target's scheme; None where there is none."""
    make = READERS.get(target.url.partition(":")[0])
    return make(target, language) if make else None
