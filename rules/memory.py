"""What is remembered of one pair: its step model, its usual values, and which causes stand. Learned in health only.

Spans and readings are held back for a minute before they are learned and are dropped when the pair turns out to be abnormal, so that
an incident is not learned as usual before it is seen.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rules.expected import Point, StepModel
from rules.usual import EVERY_S, Usual
from rules.verdict import Cause
from rules.window import SECOND

HELD_BACK_NS = 60 * SECOND
FORGET_NS = 60 * SECOND  # a cause that was not seen for so long starts anew
SPAN_NS = 10 * SECOND


@dataclass(slots=True)
class PairMemory:
    model: StepModel = field(default_factory=StepModel)
    usual: Usual = field(default_factory=Usual)
    held: dict[Cause, tuple[int, int]] = field(default_factory=dict)  # cause -> (since_ns, last seen)
    slow_since_ns: int | None = None  # slow, and no cause found
    seen_ns: int = 0
    _points: deque[tuple[int, Point]] = field(default_factory=deque)
    _readings: deque[tuple[int, tuple[tuple[str, str], ...], array[float]]] = field(default_factory=deque)
    _next_reading_ns: int = 0
    _next_point_ns: int = 0

    def wants_readings(self, at_ns: int) -> bool:
        """Whether it is time for readings: they are noted each half minute, and gathering them costs as much as a rule."""
        return at_ns >= self._next_reading_ns

    def note(self, at_ns: int, point: Point | None, readings: Mapping[tuple[str, str], float]) -> None:
        """Hold back what was seen in a healthy moment; learn what has been held long enough."""
        if point is not None and at_ns >= self._next_point_ns:
            self._points.append((at_ns, point))
            self._next_point_ns = at_ns + SPAN_NS
        if readings and self.wants_readings(at_ns):
            lanes = tuple(readings)
            if self._readings and self._readings[-1][1] == lanes:
                lanes = self._readings[-1][1]  # the same ones each time: their names are kept once
            self._readings.append((at_ns, lanes, array("f", readings.values())))
            self._next_reading_ns = at_ns + int(EVERY_S * SECOND)
        learned = []
        while self._points and self._points[0][0] <= at_ns - HELD_BACK_NS:
            learned.append(self._points.popleft()[1])
        if learned:
            self.model.learn(learned)
        while self._readings and self._readings[0][0] <= at_ns - HELD_BACK_NS:
            _, lanes, values = self._readings.popleft()
            self.usual.learn(dict(zip(lanes, values, strict=True)))

    def freeze(self) -> None:
        """Something is abnormal: what was held back may already be part of it."""
        self._points.clear()
        self._readings.clear()

    def hold(self, causes: Mapping[Cause, int], at_ns: int) -> None:
        """Remember since when each cause stands."""
        for cause, since_ns in causes.items():
            known = self.held.get(cause)
            self.held[cause] = (min(known[0], since_ns) if known else since_ns, at_ns)
        for cause, (_, seen_ns) in list(self.held.items()):
            if seen_ns < at_ns - FORGET_NS:
                del self.held[cause]

    def state(self) -> dict[str, object]:
        return {"spans": self.model.state(), "usual": self.usual.state(), "seen_ns": self.seen_ns}

    @staticmethod
    def of(plain: Mapping[str, object]) -> PairMemory:
        """ValueError for anything that `state` could not have made."""
        spans, usual, seen_ns = plain.get("spans"), plain.get("usual"), plain.get("seen_ns")
        if not isinstance(spans, list) or not isinstance(usual, dict) or not isinstance(seen_ns, int):
            raise ValueError("a pair's learned baseline is not complete")
        return PairMemory(model=StepModel.of(spans), usual=Usual.of(usual), seen_ns=seen_ns)
