"""One owner for each XID error: the driver's events and the kernel's log both tell of it, and it is one."""

from __future__ import annotations

from collections import deque
from typing import Literal

Source = Literal["events", "log"]

WINDOW_S = 5.0
MOST_OPEN = 256


class XidLedger:
    """Matches the tellings of two sources by GPU and code. Equal errors stay as many as either source tells: five are five."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._open: dict[tuple[str, int], deque[tuple[Source, float]]] = {}

    def is_new(self, source: Source, uuid: str, code: int, now: float, heard: float) -> bool:
        """Whether the other source has not told of this one. Monotonic seconds: `now`, and `heard`, when this source was last
        heard: what the other has told long before that is not the same error, unless this source hung since then.
        """
        tellings = self._open.setdefault((uuid, code), deque(maxlen=MOST_OPEN))
        while tellings and tellings[0][0] != source and heard - tellings[0][1] > self._window_s:
            tellings.popleft()
        if tellings and tellings[0][0] != source:
            tellings.popleft()
            if not tellings:
                del self._open[uuid, code]
            return False
        tellings.append((source, now))
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        return True
