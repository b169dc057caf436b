"""The table of pairs, worst first: its columns and rows for the grid."""

from __future__ import annotations

from typing import Any

from dashboard.fleet import Fleet, PairNow
from dashboard.marks import say_cause
from dashboard.selection import PairKey
from dashboard.strip import LOW_OUTPUT_PCT
from dashboard.units import duration
from telemetry.messages import say

_TEXT = ("node", "engine", "model")
_NUMBERS = ("output", "tokens", "util", "temp", "clock", "throttle", "kv", "queue")
_WIDTHS = {
    "node": 150,
    "engine": 100,
    "model": 104,
    "output": 94,
    "tokens": 80,
    "util": 76,
    "temp": 80,
    "clock": 90,
    "throttle": 100,
    "kv": 62,
    "queue": 66,
    "verdict": 130,
}


def columns(language: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for name in (*_TEXT, "verdict", *_NUMBERS):  # the verdict where a narrow screen still shows it
        text = name in (*_TEXT, "throttle", "verdict")
        column: dict[str, Any] = {
            "field": name,
            "headerName": say(f"dashboard.table.{name}", language),
            "minWidth": _WIDTHS[name],
            "flex": _WIDTHS[name],
        }
        if not text:
            column |= {
                "type": "rightAligned",
                "valueFormatter": {"function": "shownNumber(params.value)"},
            }
        if name == "node":
            column |= {"cellRenderer": "NodeCell"}
        if name == "output":
            column |= {
                "cellClassRules": {"cell-bad": f"params.value != null && params.value < {LOW_OUTPUT_PCT:.0f}"},
            }
        if name == "verdict":
            column |= {"cellClassRules": {"cell-bad": "params.data.named"}}
        made.append(column)
    return made


def rows(fleet: Fleet, selected: PairKey | None, language: str, stale_s: float) -> list[dict[str, Any]]:
    """Numbers in the units of the headers, None where not known. `id` is what names a row over refreshes."""
    return [_row(pair, fleet, selected, language, stale_s) for pair in fleet.worst_first()]


def _row(pair: PairNow, fleet: Fleet, selected: PairKey | None, language: str, stale_s: float) -> dict[str, Any]:
    age_s = pair.age_s(fleet.at_ns)
    silent = age_s > stale_s
    named = pair.cause not in ("", "none")
    if silent:
        verdict = say("dashboard.table.silent", language, age=duration(age_s, language))
    elif pair.up == 0:
        verdict = say(f"dashboard.{'strip.starting' if pair.starting else 'table.down'}", language)
    elif not pair.cause or (not named and pair.baseline == "warming" and pair.output_pct is None):
        verdict = say("dashboard.table.warming", language)
    else:
        verdict = say_cause(pair.cause, language)
    return {
        "id": f"{pair.key.node}\x1f{pair.key.engine}",
        "node": pair.key.node,
        "engine": pair.key.engine,
        "model": pair.model,
        "output": _round(pair.output_pct),
        "tokens": _round(pair.tokens_per_s),
        "util": _round(pair.util_pct),
        "temp": _round(pair.temp_c),
        "clock": _round(pair.clock_mhz),
        "throttle": ", ".join(say(f"dashboard.reason.{name}", language) for name in pair.reasons),
        "kv": _round(pair.kv_pct),
        "queue": _round(pair.waiting),
        "verdict": verdict,
        "named": not silent and (named or (pair.up == 0 and not pair.starting)),
        "silent": silent,
        "selected": pair.key == selected,
        "simulated": say("dashboard.simulated.badge", language) if pair.simulated else "",
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1) if abs(value) < 1000 else round(value)
