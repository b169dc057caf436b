"""What a viewer looks at, and its form in the page's address: the pair, the range, the time zone, language and theme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from telemetry.messages import LANGUAGES

SECOND_NS = 1_000_000_000
DAY_S = 86_400

RANGES: Mapping[str, tuple[int, int]] = {
    # name: seconds, seconds of a bucket; about 500 buckets each. From six hours on they are whole minutes or quarters of an hour,
    # which the store has drawn together
    "15m": (900, 2),
    "1h": (3_600, 8),
    "6h": (21_600, 60),
    "24h": (86_400, 180),
    "7d": (604_800, 900),
}
DEFAULT_RANGE = "15m"
STEPS_S = (1, 2, 4, 8, 15, 30, 60, 120, 180, 300, 600, 900, 1_800, 3_600, 7_200)
MAX_BUCKETS = 520
SHORTEST_S, LONGEST_S = 30, 31 * DAY_S
NAME_LIMIT = 256  # characters of a node's or an engine's name that an address may carry
_ZONE = re.compile(r"[A-Za-z0-9_+\-/]{1,64}")


@dataclass(frozen=True, slots=True)
class PairKey:
    """A pair by name: an engine on a node, or the node alone (`engine` empty)."""

    node: str
    engine: str = ""

    def __str__(self) -> str:
        return f"{self.node} / {self.engine}" if self.engine else self.node


@dataclass(frozen=True, slots=True)
class Window:
    """Uniform buckets of wall time: `start_ns` and `end_ns` are multiples of `step_ns`; the bucket at `end_ns` is not in it."""

    start_ns: int
    end_ns: int
    step_ns: int

    @property
    def count(self) -> int:
        return (self.end_ns - self.start_ns) // self.step_ns


@dataclass(frozen=True, slots=True)
class Selection:
    """`start_ms`, `end_ms` (epoch) are set while the viewer has zoomed in; `offset_s` is east of UTC."""

    pair: PairKey | None = None
    range: str = DEFAULT_RANGE
    start_ms: int | None = None
    end_ms: int | None = None
    local: bool = False
    zone: str = "UTC"
    offset_s: int = 0
    language: str = "en"
    theme: str = "light"

    @property
    def zoomed(self) -> bool:
        return self.start_ms is not None and self.end_ms is not None

    def window(self, now_ns: int) -> Window:
        """The complete buckets of the selected span; the bucket that holds `now_ns` is still filling and left out."""
        if self.start_ms is not None and self.end_ms is not None:
            span_s = (self.end_ms - self.start_ms) / 1000
            step_ns = next((s for s in STEPS_S if span_s / s <= MAX_BUCKETS), STEPS_S[-1]) * SECOND_NS
            start_ns = self.start_ms * 1_000_000 // step_ns * step_ns
            end_ns = -(-self.end_ms * 1_000_000 // step_ns) * step_ns
            return Window(start_ns, max(start_ns + step_ns, min(end_ns, now_ns // step_ns * step_ns)), step_ns)
        seconds, step_s = RANGES[self.range]
        step_ns = step_s * SECOND_NS
        end_ns = now_ns // step_ns * step_ns
        return Window(end_ns - seconds * SECOND_NS // step_ns * step_ns, end_ns, step_ns)


def read(query: Mapping[str, str], language: str, now_ns: int) -> Selection:
    """The selection that an address names. What is missing or makes no sense gets its default; nothing raises."""
    node = query.get("node", "")[:NAME_LIMIT]
    start_ms, end_ms = _span(query, now_ns // 1_000_000)
    local = query.get("tz") == "local"
    zone, offset_s = _offset(query, now_ns) if local else ("UTC", 0)
    return Selection(
        pair=PairKey(node, query.get("engine", "")[:NAME_LIMIT]) if node else None,
        range=query["range"] if query.get("range") in RANGES else DEFAULT_RANGE,
        start_ms=start_ms,
        end_ms=end_ms,
        local=local,
        zone=zone,
        offset_s=offset_s,
        language=query["lang"] if query.get("lang") in LANGUAGES else language,
        theme="dark" if query.get("theme") == "dark" else "light",
    )


def _span(query: Mapping[str, str], now_ms: int) -> tuple[int | None, int | None]:
    start, end = _whole(query.get("from", "")), _whole(query.get("to", ""))
    if start is None or end is None or not 0 < start < end or start >= now_ms:
        return None, None
    end = min(max(end, start + SHORTEST_S * 1000), start + LONGEST_S * 1000)
    return start, end


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None


def _offset(query: Mapping[str, str], now_ns: int) -> tuple[str, int]:
    """The viewer's zone and its offset at `now_ns`: by name where this machine knows the zone, else by the browser's minutes."""
    name = query.get("zone", "")
    if _ZONE.fullmatch(name):
        try:
            shift = datetime.fromtimestamp(now_ns // SECOND_NS, ZoneInfo(name)).utcoffset()
        except (ZoneInfoNotFoundError, ValueError, OSError):
            shift = None
        if shift is not None:
            return name, round(shift.total_seconds())
    minutes = query.get("offset", "")
    if re.fullmatch(r"-?\d{1,3}", minutes) and abs(int(minutes)) <= 14 * 60:
        return "", int(minutes) * 60
    return "UTC", 0
