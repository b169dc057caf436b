"""A crew: jobs done one after another by one thread; a job that holds its thread too long is left with it and another goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """`run` may return jobs that come right after it. Two jobs of one name never run at once."""

    name: str
    run: Callable[[], Iterable[Job]]


class Crew:
    """Threads that appear only when one is stuck. Each name holds at most one thread, however often it is asked for."""

    def __init__(
        self, takeover_s: float, clock: Callable[[], float], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._takeover_s = takeover_s
        self._clock = clock
        self._on_error = on_error
        self._turn = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._held: dict[str, float] = {}  # job -> since when a thread is in it, monotonic s
        self._active: threading.Thread | None = None  # the one thread that takes jobs
        self._active_job: str | None = None

    def assign(self, jobs: Iterable[Job]) -> None:
        """Replace what is still to do. Jobs whose name a stuck thread holds are left out when their turn comes."""
        with self._turn:
            self._jobs = deque(jobs)
            self._take_over_if_stuck()
            self._turn.notify_all()

    def relieve(self) -> float | None:
        """Put another thread on when the present one is stuck. Seconds until that may be due; None when nothing is to do."""
        with self._turn:
            return self._take_over_if_stuck()

    def stuck(self, but: str = "") -> list[str]:
        """Names of the jobs that threads are in now, `but` the caller's own."""
        with self._turn:
            return sorted(name for name in self._held if name != but)

    def _take_over_if_stuck(self) -> float | None:
        if not self._jobs:
            return None
        if self._active is not None and self._active_job is not None:
            left = self._held[self._active_job] + self._takeover_s - self._clock()
            if left > 0:
                return left
            self._active = None
        if self._active is None:
            self._active_job = None
            self._active = threading.Thread(target=self._work, daemon=True)
            self._active.start()
        return self._takeover_s

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: bool(self._jobs) or self._active is not me)
                if self._active is not me:
                    return
                job = self._jobs.popleft()
                if job.name in self._held:
                    continue
                self._held[job.name] = self._clock()
                self._active_job = job.name
            following: Iterable[Job] = ()
            try:
                following = job.run()
            except Exception as error:  # the thread outlives any job
                self._on_error(job.name, error)
            finally:
                with self._turn:
                    del self._held[job.name]
                    if self._active is me:
                        self._active_job = None
                        self._jobs.extendleft(reversed(list(following)))
