"""Numbers, moments and places of a report in words, alike in Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from dashboard.units import NONE, duration, number
from pairscope.report.paired import Row
from pairscope.report.settings import ReportSettings
from telemetry import catalogue
from telemetry.lineprotocol import printable
from telemetry.messages import say

PLACES = ("cluster", "circuit", "rack", "node", "engine", "gpu")
COMBINED = {
    "gpu.util_pct": "mean",
    "gpu.power_w": "summed",
    "gpu.sm_clock_mhz": "slowest",
    "gpu.temp_c": "hottest",
    "gpu.mem_temp_c": "hottest",
}

__all__ = ["NONE", "clock", "duration", "moment", "money", "number", "place", "quantity", "short_place"]


def moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%m-%d %H:%M:%S")


def place(scope: str, subject: Mapping[str, str], language: str) -> str:
    """The scope with the names that belong to it: `node r2 / n07`."""
    names = [subject[tag] for tag in PLACES[2:] if subject.get(tag)]
    if scope in ("rack", "circuit", "cluster"):
        names = [subject[scope]] if subject.get(scope) else []
    return f"{say(f'rules.scope.{scope}', language)} {printable(' / '.join(names))}".rstrip()


def short_place(subject: Mapping[str, str]) -> str:
    return printable(" / ".join(subject[tag] for tag in ("node", "engine") if subject.get(tag)))


def quantity(row: Row, gpus: int, language: str) -> str:
    """What a row of the paired table is about."""
    measurement, _, name = row.lane.partition(".")
    if measurement == "throttle":
        return say("report.row.throttle", language, reason=say(f"dashboard.reason.{name}", language))
    if measurement == "row":
        return say(f"report.{row.lane}", language)
    title = catalogue.title(measurement, name, language)
    if row.lane in COMBINED and gpus > 1:
        return say(f"report.row.{COMBINED[row.lane]}", language, title=title, count=gpus)
    return title


def money(amount: float | None, settings: ReportSettings) -> str:
    if amount is None:
        return NONE
    digits = 2 if abs(amount) < 1000 else 0
    return f"{amount:,.{digits}f} {settings.currency}".replace(",", "\u202f").rstrip()
