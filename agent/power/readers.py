"""Readers: which protocol an address of a BMC speaks, and what a reader of it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from agent.power.ipmi import IpmiReader
from agent.power.reading import BmcReading
from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget


class BmcReader(Protocol):
    """Reads one BMC. `read` runs on one thread and returns within the target's deadline; BmcFault where the BMC gives nothing.
    `close` may be called from another thread, while a reading is under way too, and leaves nothing open at the BMC.
    """

    def read(self) -> BmcReading: ...

    def close(self) -> None: ...


READERS: Mapping[str, Callable[[BmcTarget, str, Path | None], BmcReader]] = {
    # one line a scheme; each gets the target, the agent's language, and a folder that outlives the process where there is one
    "https": lambda target, language, _memory: RedfishReader(target, language),
    "http": lambda target, language, _memory: RedfishReader(target, language),
    "ipmi": IpmiReader,
}


def reader_of(target: BmcTarget, language: str, memory: Path | None = None) -> BmcReader:
    """The reader for the target's scheme, one of those that its settings allow."""
    return READERS[target.url.partition(":")[0]](target, language, memory)
