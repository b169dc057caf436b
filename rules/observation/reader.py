"""One number out of the samples of a device, beside what is usual for it and since when it is not usual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from rules.evidence import Observation, Seen
from rules.usual import PeerHabits, Usual
from rules.window import SECOND, Device

NOW_S = 30.0
"""The span that counts as now: three spans of ten seconds, long enough for a duty cycle, short enough to name a fault in a minute."""

SPAN_S = 10.0
"""The newest of them, for what fills up and is late in a median of all three."""

ROOM_S = 150.0
"""BMC, PSU and PDU are read every 30-60 s: look back over two readings."""

BACK_S = 300.0
"""How far back a beginning is looked for."""

FINISH_S = 60.0
"""Engines that count tokens when a request finishes need longer spans."""


AWAY = 0.05
"""A reading that is off its usual by less has not left it."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one pair's devices at one moment; `peers` are the usual values of pairs of the same kin."""

    usual: Usual
    peers: PeerHabits
    at_ns: int

    def start(self, look_s: float) -> int:
        return self.at_ns - int(look_s * SECOND)

    def gauge(self, device: Device, name: str, source: str = "", look_s: float = NOW_S) -> Seen:
        found = device.median(name, self.start(look_s), self.at_ns)
        return None if found is None else self.seen(device, name, source, found)

    def last(self, device: Device, name: str, source: str = "", look_s: float = NOW_S) -> Seen:
        """The newest reading: for states and slow fields."""
        newest = device.newest(name, self.start(look_s), self.at_ns)
        if newest is not None:
            return self.seen(device, name, source, newest)
        known = device.known(name, self.at_ns)
        return None if known is None else self.seen(device, name, source, known)

    def plain(self, reading: float, lane: str, source: str = "") -> Observation:
        """A derived reading beside what is usual for it, without its beginning."""
        low, middle, high, learned_from = self.habit(lane, source)
        return Observation(reading, lane, source, middle, low, high, learned_from)

    def state(self, device: Device, name: str) -> int | None:
        """The newest reading of a state, which is as it is and has no usual."""
        newest = device.newest(name, self.start(NOW_S), self.at_ns)
        return None if newest is None else int(newest)

    def seen(self, device: Device, name: str, source: str, reading: float) -> Observation:
        lane = f"{device.measurement}.{name}"
        own = self.usual.range(lane, source)
        learned_from = "history"
        if own is None:
            own, learned_from = self.peers.range(lane), "peers"
            if own is None:
                return Observation(reading, lane, source)
        low, middle, high = own
        began = None
        if abs(reading - middle) >= AWAY * max(abs(middle), 1e-9):
            began = partial(self._left, device, name, reading, middle)
        return Observation(reading, lane, source, middle, low, high, learned_from, began)

    def _left(self, device: Device, name: str, reading: float, middle: float) -> int | None:
        return self.left(device.backwards(name, self.start(BACK_S), self.at_ns), reading, middle)

    def habit(self, lane: str, source: str) -> tuple[float | None, float | None, float | None, str]:
        own = self.usual.range(lane, source)
        if own is not None:
            return own[0], own[1], own[2], "history"
        theirs = self.peers.range(lane)
        if theirs is not None:
            return *theirs, "peers"
        return None, None, None, ""

    def left(self, backwards: Iterable[tuple[int, float]], reading: float, middle: float) -> int | None:
        """Since when the points, newest first, are beyond the midpoint between usual and now, but for lapses below ten seconds."""
        midpoint = (reading + middle) / 2
        above = reading > middle
        since: int | None = None
        for time_ns, point in backwards:
            if (point > midpoint) == above:
                since = time_ns
            elif (since if since is not None else self.at_ns) - time_ns > 10 * SECOND:
                break
        return since

    def growth(self, device: Device, name: str, look_s: float) -> tuple[float, float] | None:
        """(growth, seconds) of a counter over the last `look_s`; a reset counts from zero. None with fewer than two readings."""
        return device.grown(name, self.start(look_s), self.at_ns)

    def rate(self, device: Device, name: str, lane: str, source: str = "", per_s: float = 1.0) -> Seen:
        grown = self.growth(device, name, NOW_S)
        if grown is None or grown[1] <= 0:
            return None
        return self.plain(grown[0] / grown[1] * per_s, lane, source)
