"""Out of memory: how the agent knows that the kernel, or the engine itself, ended a process because memory ran out."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

REMEMBER_S = 10.0
_SAID = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|CUDA_ERROR_OUT_OF_MEMORY|failed to allocate .{0,40}memory"
)


def says_out_of_memory(log_tail: str) -> bool:
    """Whether a log's last lines say that memory (host or device) ran out."""
    return _SAID.search(log_tail) is not None


class OomKills:
    """The kernel's count of processes that it killed for lack of memory (/proc/vmstat oom_kill, which counts cgroups' too)."""

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, monotonic_s: float) -> None:
        """Remember the count of this moment."""
        count = self._read()
        if count is not None:
            self._seen.append((monotonic_s, count))
            while len(self._seen) > 1 and monotonic_s - self._seen[1][0] >= REMEMBER_S:
                self._seen.popleft()

    def happened(self) -> bool:
        """Whether the kernel killed for memory since the look of REMEMBER_S ago; False where it does not count."""
        count = self._read()
        return count is not None and bool(self._seen) and count > self._seen[0][1]

    def _read(self) -> int | None:
        try:
            for line in self._vmstat.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return None
