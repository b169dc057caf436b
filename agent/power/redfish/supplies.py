"""Supplies: one power supply from the document of either schema, and what vendors write instead.

New: PowerSupply and PowerSupplyMetrics (DSP8010 2020.4 on). Old: an entry of Power.PowerSupplies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from agent.power.headroom import ASSUMED_EFFICIENCY
from agent.power.reading import Supply
from agent.power.redfish.document import (
    Json,
    health,
    is_present,
    number,
    positive,
    reading,
    rows,
    state,
    table,
    text,
)

WORKING_STATES = ("Enabled", "StandbySpare", "StandbyOffline", "Quiesced", "Updating")
"""States in which a supply gives power or would at once: a spare one stands by."""

INPUT_OVER_OUTPUT = (0.85, 1.2)
"""Input power may lie within these parts of output / efficiency; some BMCs give the rated input in its place."""

IDLE_INPUT_SHARE = 0.1
"""What a supply that gives nothing may take at most, of its capacity."""

TYPICAL_LOAD_PCT = 50.0

_NOMINAL = re.compile(r"(?:AC|DC|DCNeg)(\d{1,4})(?:To(\d{1,4}))?V", re.ASCII)


def of_power_supply(document: Json, metrics: Json) -> Supply | None:
    """From the new schema; None where the slot is empty."""
    if not is_present(document):
        return None
    voltage_v = reading(metrics.get("InputVoltage"))
    output_w = reading(metrics.get("OutputPowerWatts"))
    capacity_w = _capacity(document, voltage_v, "CapacityWatts")
    efficiency = _rated_efficiency(document)
    return Supply(
        name=text(document.get("Name")) or text(document.get("Id")),
        ok=_ok(document, voltage_v),
        input_w=_checked_input(reading(metrics.get("InputPowerWatts")), output_w, efficiency, capacity_w),
        output_w=output_w,
        capacity_w=capacity_w,
        voltage_v=voltage_v,
        efficiency=efficiency,
    )


def of_power_entry(document: Json, vendor: str = "") -> Supply | None:
    """From an entry of the old schema; None where the slot is empty. `vendor` is the maker's name in lower case."""
    if not is_present(document) or text(document.get("FirmwareVersion")) == "0.00":  # iLO 4 lists an empty bay so
        return None
    oem = table(document.get("Oem"))
    huawei = table(oem.get("Huawei"))
    voltage_v = number(document.get("LineInputVoltage"))
    capacity_w = _capacity(document, voltage_v, "OutputWattage")
    efficiency = _measured_efficiency(document)
    output_w = _first(document.get("PowerOutputWatts"), document.get("LastPowerOutputWatts"))
    if not output_w:  # HPE: 0 on a healthy supply between two updates; its own average tells whether it stands by
        output_w = _first(_hpe(oem).get("AveragePowerOutputWatts"), huawei.get("PowerOutputWatts"), output_w)
    input_w = _first(document.get("PowerInputWatts"), huawei.get("PowerInputWatts"))
    if "dell" in vendor and output_w is None:
        input_w = None  # iDRAC gives the rating here, and there is nothing to hold it against
    return Supply(
        name=text(document.get("Name")) or text(document.get("MemberId")),
        ok=_ok(document, voltage_v),
        input_w=_checked_input(input_w, output_w, efficiency, capacity_w),
        output_w=output_w,
        capacity_w=capacity_w,
        voltage_v=voltage_v,
        efficiency=efficiency,
    )


def bay_of(document: Json) -> str:
    """Where a supply sits, or its number: what tells it from others of its name."""
    bay = number(_hpe(table(document.get("Oem"))).get("BayNumber"))
    if bay is not None:
        return f"{bay:.0f}"
    return text(document.get("MemberId")) or text(document.get("Id"))


def named_apart(supplies: Sequence[tuple[Supply, str]]) -> tuple[Supply, ...]:
    """The supplies, with their bay behind a name that is no number's: HPE calls each of them HpeServerPowerSupply, and the name of
    one must not change when another is pulled.
    """
    return tuple(
        supply
        if any(letter.isdigit() for letter in supply.name)
        else replace(supply, name=f"{supply.name} {bay}".strip())
        for supply, bay in supplies
    )


def _ok(document: Json, voltage_v: float | None) -> bool | None:
    """Enabled, healthy and with line power. None where there is no status and nothing that speaks against it."""
    line = text(document.get("LineInputStatus"))
    if health(document) == "Critical" or line in ("LossOfInput", "OutOfRange") or voltage_v == 0:
        return False
    condition = state(document)
    if condition:
        return condition in WORKING_STATES
    return True if health(document) == "OK" else None


def _capacity(document: Json, voltage_v: float | None, watts: str) -> float | None:
    """W of output at the line voltage as measured: a supply on 110 V may give half of what it gives on 230 V."""
    rated = positive(document.get("PowerCapacityWatts"))
    if voltage_v:
        ranged = [
            found
            for entry in rows(document.get("InputRanges"))
            if _covers(entry, voltage_v) and (found := positive(entry.get(watts))) is not None
        ]
        if ranged:
            return min([*ranged, *([rated] if rated is not None else [])])
    return rated


def _covers(entry: Json, voltage_v: float) -> bool:
    lowest, highest = number(entry.get("MinimumVoltage")), number(entry.get("MaximumVoltage"))
    if lowest is not None and highest is not None:
        return lowest <= voltage_v <= highest
    nominal = _NOMINAL.fullmatch(text(entry.get("NominalVoltageType")))
    if nominal is None:
        return False
    low_v = float(nominal[1])
    high_v = float(nominal[2] or nominal[1])
    return 0.9 * low_v <= abs(voltage_v) <= 1.1 * high_v


def _measured_efficiency(document: Json) -> float | None:
    """0..1. Some write the percentage as a fraction."""
    told = positive(document.get("EfficiencyPercent"))
    if told is None:
        return None
    return told if told <= 1 else told / 100


def _rated_efficiency(document: Json) -> float | None:
    """0..1 by the rating nearest to half load, where supplies that share are used."""
    rated = [
        (abs((number(entry.get("LoadPercent")) or 0.0) - TYPICAL_LOAD_PCT), told)
        for entry in rows(document.get("EfficiencyRatings"))
        if (told := positive(entry.get("EfficiencyPercent"))) is not None
    ]
    if not rated:
        return None
    told = min(rated)[1]
    return told if told <= 1 else told / 100


def _checked_input(
    input_w: float | None, output_w: float | None, efficiency: float | None, capacity_w: float | None
) -> float | None:
    """Input power where it fits the output; a rating that stands in its place does not."""
    if input_w is None or output_w is None:
        return input_w
    if output_w == 0:
        return input_w if capacity_w is None or input_w <= IDLE_INPUT_SHARE * capacity_w else None
    expected_w = output_w / (efficiency or ASSUMED_EFFICIENCY)
    return input_w if INPUT_OVER_OUTPUT[0] <= input_w / expected_w <= INPUT_OVER_OUTPUT[1] else None


def _hpe(oem: Json) -> Json:
    return table(oem.get("Hpe")) or table(oem.get("Hp"))


def _first(*values: object) -> float | None:
    return next((found for value in values if (found := number(value)) is not None), None)
