"""What a store refused for good, kept in a small file for whoever asks why."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from telemetry import lineprotocol
from telemetry.store import Rejected

MOST_BYTES = 1 << 20


class RejectedFile:
    """`rejected.lp`: line protocol, each refused sample below a comment with the reason. When it is full, it replaces `rejected.lp.1`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rejected.lp"

    def add(self, rejected: Sequence[Rejected]) -> None:
        """Never raises: on a full disk the samples are only counted."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            with self.path.open("a", encoding="utf-8") as file:
                for entry in rejected[:1000]:
                    file.write(f"# {now} {lineprotocol.printable(entry.reason)}\n{_line(entry)}\n")


def _line(entry: Rejected) -> str:
    try:
        return lineprotocol.encode(entry.sample)
    except ValueError:
        return f"# {lineprotocol.printable(repr(entry.sample))[:10_000]}"
