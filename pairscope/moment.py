"""Moments and spans as a person types them, in nanoseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS_S = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
LONGEST_S = 100 * 366 * 86_400


def moment_ns(text: str) -> int:
    """Nanoseconds since the epoch of ISO 8601 (without offset: UTC), epoch seconds or epoch nanoseconds. ValueError otherwise."""
    if re.fullmatch(r"\d{18,19}", text):
        return min(int(text), 2**62)
    if found := re.fullmatch(r"(\d{9,10})(?:\.(\d{1,9}))?", text):
        return int(found[1]) * 10**9 + int((found[2] or "0").ljust(9, "0"))
    when = datetime.fromisoformat(text)
    since = (when if when.tzinfo else when.replace(tzinfo=UTC)) - EPOCH
    found_ns = (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000
    if not 0 < found_ns < 2**62:
        raise ValueError(f"{text!r} is no moment between 1970 and 2116")
    return found_ns


def span_ns(text: str) -> int:
    """Nanoseconds of 90, 90s, 10m, 2h, 7d or 1d12h30m; the parts add up. ValueError for anything else, for none and for a century."""
    parts = re.fullmatch(r"(?=\d)(?:(\d{1,6})d)?(?:(\d{1,7})h)?(?:(\d{1,8})m)?(?:(\d{1,10}(?:\.\d{1,9})?)s?)?", text)
    if parts is None:
        raise ValueError(f"{text!r} is no span")
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts.groups(), UNITS_S.values(), strict=True))
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"{text!r} is no span")
    return round(seconds * 1e9)


def iso(time_ns: int) -> str:
    """ISO 8601 in UTC, as short as the moment allows: whole seconds without a fraction, others with all nine digits."""
    seconds, rest = divmod(time_ns, 10**9)
    told = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{told}.{rest:09d}Z" if rest else f"{told}Z"
