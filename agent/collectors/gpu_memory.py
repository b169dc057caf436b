"""GPU memory of the agent: which GPUs this host has had, kept on disk, so that one that is gone after a reboot is missed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.remembered import RememberedFile, remembered

log = logging.getLogger(__name__)

MOST = 256


@dataclass(frozen=True, slots=True)
class RememberedGpu:
    uuid: str
    index: int
    name: str
    pci: str


class GpuMemory:
    """Without a `path` it is forgotten with the process. `expected`: how many GPUs the host should have, where somebody said so."""

    def __init__(self, path: Path | None = None, expected: int | None = None) -> None:
        self._path = path
        self.file = RememberedFile(path)
        self.told = expected
        self.count = 0  # what was told, else the most that were seen at once
        self.known: Sequence[RememberedGpu] = ()
        """The GPUs of the last enumeration that went well, and those that are missing from it."""
        self._load()

    def update(self, listed: Iterable[RememberedGpu], tick: int) -> None:
        """Take an enumeration. A GPU that it lacks stays known until the count is back, or another GPU is in its slot: it has been
        replaced then, and is no loss. It is remembered from run to run once the samples of this tick are safe.
        """
        present = sorted(listed, key=lambda gpu: gpu.index)[:MOST]
        count = self.told if self.told is not None else max(self.count, len(present))
        taken = {gpu.uuid for gpu in present} | {gpu.pci for gpu in present if gpu.pci}
        missing = [gpu for gpu in self.known if not {gpu.uuid, gpu.pci} & taken]
        known = (*present, *missing[: max(0, count - len(present))])
        if (known, count) != (self.known, self.count):
            self.known, self.count = known, count
            self.file.put({"count": count, "gpus": [asdict(gpu) for gpu in known]}, tick)

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            held: Any = remembered(self._path)
            known = tuple(
                RememberedGpu(str(row["uuid"]), int(row["index"]), str(row["name"]), str(row["pci"]))
                for row in held["gpus"][:MOST]
            )
            count = int(held["count"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            log.warning("%s can't be read, the GPUs of this host are learnt anew: %s", self._path, error)
            return
        self.known, self.count = known, min(max(count, 0), MOST)
