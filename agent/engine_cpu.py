"""Engine CPU: what an engine's own processes take of the processor and of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from agent.counters import Rate
from agent.process_table import Process, ProcessTable

LOOKED_AT = 4
"""Of so many processes, the busiest ones, the threads are read: an engine has hundreds of threads, and nearly all of them sleep."""

WORTH_LOOKING_PCT = 5.0


class TreeCpu:
    """CPU and memory of one tree, from reading to reading. Reads one small file a process."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._rate = Rate()

    def read(self, members: Iterable[Process], monotonic_s: float) -> dict[str, float | int]:
        """Fields of the `engine` measurement. A process that is new since the last reading counts from its next one on."""
        now = [self._table.process(process.pid) for process in members if not process.is_zombie]
        known = {process.key for process in members}
        alive = [process for process in now if process is not None and process.key in known and not process.is_zombie]
        if not alive:
            self._rate.forget()
            return {}
        fields: dict[str, float | int] = {
            "procs": len(alive),
            "proc_rss_bytes": sum(process.rss_bytes for process in alive),
        }
        cores = self._rate.per_second({process.key: process.cpu_s for process in alive}, monotonic_s)
        if cores is not None:
            fields["proc_cpu_pct"] = 100 * cores
        return fields


class BusiestThread:
    """The busiest single thread of one tree, from reading to reading. Reads a file for each thread of a few processes."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._processes: dict[tuple[int, int], float] = {}  # CPU seconds as last read
        self._threads: dict[tuple[int, int], float] = {}
        self._read_s = -math.inf

    def read(self, members: Iterable[Process], monotonic_s: float) -> float | None:
        """100 = one core. None until the threads of the busiest process have been read twice."""
        passed_s = monotonic_s - self._read_s
        now = [process for member in members if (process := self._table.process(member.pid)) is not None]
        used = {process: process.cpu_s - self._processes.get(process.key, process.cpu_s) for process in now}
        busy = sorted(used, key=lambda process: -used[process])[:LOOKED_AT]
        busy = [
            process for process in busy if process is busy[0] or 100 * used[process] / passed_s >= WORTH_LOOKING_PCT
        ]
        read = {process: {t.key: t.cpu_s for t in self._table.threads(process.pid)} for process in busy}
        rates = {
            process: [
                100 * (cpu_s - self._threads[key]) / passed_s for key, cpu_s in threads.items() if key in self._threads
            ]
            for process, threads in read.items()
        }
        self._processes = {process.key: process.cpu_s for process in now}
        self._threads = {key: cpu_s for threads in read.values() for key, cpu_s in threads.items()}
        self._read_s = monotonic_s
        if not busy or passed_s <= 0 or not rates[busy[0]]:
            return None
        return max(0.0, *(rate for found in rates.values() for rate in found))
