"""How a number and its unit, a moment and a duration are printed, alike in charts, tables and sentences."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from telemetry.messages import say

NONE = "—"
"""Printed where a value is not known; never 0."""

_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def number(value: float | None, unit: str = "") -> str:
    """`value` with its unit and as many digits as one reads at a glance, bytes in powers of ten. NONE for None.

    The digits depend on the size alone, so that a reading does not change its width from look to look.
    """
    if value is None:
        return NONE
    prefix = ""
    if unit in ("B", "B/s"):
        for prefix, scale in _SCALES:  # noqa: B007 - the prefix that fits is the one left
            if abs(value) >= scale:
                value /= scale
                break
        else:
            prefix = ""
    size = abs(value)
    if size >= 100 or size == 0 or (unit == "" and value == int(value)):
        digits = 0
    elif unit == "%":
        digits = 0 if size >= 10 else 1
    elif unit == "°C":
        digits = 1
    else:
        digits = 1 if size >= 10 else 2
    text = f"{value:,.{digits}f}".replace(",", "\u202f")  # a narrow space that does not break
    return f"{text} {prefix}{unit}" if unit else text


def moment(time_ns: int, offset_s: int, *, day: bool = False) -> str:
    """Wall time in the viewer's zone, `02:13:05`; with `day`, `2026-01-30 02:13:05`."""
    when = datetime.fromtimestamp(time_ns / 1e9, UTC) + timedelta(seconds=offset_s)
    return when.strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")


def moment_near(time_ns: int, now_ns: int, offset_s: int) -> str:
    """The time alone when it is today's, else with its day."""
    same = moment(time_ns, offset_s, day=True)[:10] == moment(now_ns, offset_s, day=True)[:10]
    return moment(time_ns, offset_s, day=not same)


def duration(seconds: float, language: str) -> str:
    """Two units at most: `42 s`, `5 min 3 s`, `1 h 30 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    for big, small, size, part in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            first = say(f"dashboard.unit.{big}", language, n=whole // size)
            rest = whole % size // part
            return f"{first} {say(f'dashboard.unit.{small}', language, n=rest)}" if rest else first
    return say("dashboard.unit.s", language, n=whole)


def zone_name(zone: str, offset_s: int) -> str:
    """`UTC`, or `UTC+08:00 Asia/Shanghai`."""
    if offset_s == 0 and zone in ("", "UTC"):
        return "UTC"
    sign, minutes = ("-" if offset_s < 0 else "+"), abs(offset_s) // 60
    return f"UTC{sign}{minutes // 60:02d}:{minutes % 60:02d} {zone}".strip()
