"""PDU: current, voltage and rating of each phase, from the tables of APC, Server Technology and Raritan."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from agent.power.snmp import Device, Index, Value

CONTINUOUS_SHARE = 0.8
"""A circuit breaker may be loaded to this share of its rating for longer than three hours (NEC 210.20(A): 125 % of the load)."""

CURRENT_LIMIT_A = 6000.0
VOLTAGE_LIMIT_V = 1000.0
_SYS_OBJECT_ID = "1.3.6.1.2.1.1.2.0"

Column = Mapping[Index, Value]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase (or line) at the PDU's inlet, RMS; `rating_a` is what the PDU says that its inlet or its breaker may carry."""

    current_a: float
    voltage_v: float | None = None
    rating_a: float | None = None

    @property
    def load_pct(self) -> float | None:
        """I / (0.8 x breaker), in %: at 100 % the circuit carries what it may carry for hours. None where the rating is not known."""
        return 100 * self.current_a / (CONTINUOUS_SHARE * self.rating_a) if self.rating_a else None


@dataclass(frozen=True, slots=True)
class PduReading:
    """`kind` is apc, servertech or raritan, or empty for a device that is none of them. Phases of all inlets, in table order."""

    kind: str
    phases: tuple[Phase, ...] = ()


def worst(phases: tuple[Phase, ...]) -> Phase | None:
    """The phase that is nearest to its breaker's limit; where a rating is missing, the one with the largest current."""
    if not phases:
        return None
    if all(phase.rating_a for phase in phases):
        return max(phases, key=lambda phase: phase.load_pct or 0.0)
    return max(phases, key=lambda phase: phase.current_a)


async def read_pdu(device: Device, kind: str = "auto") -> PduReading:
    """What the PDU says of its phases. `kind` auto asks for its sysObjectID, which begins with the vendor's enterprise number."""
    if kind == "auto":
        kind = kind_of(await device.get(_SYS_OBJECT_ID))
    reader = _READERS.get(kind)
    return PduReading(kind, await reader(device)) if reader else PduReading("")


def kind_of(object_id: Value | None) -> str:
    """apc, servertech, raritan or, for anything else, nothing."""
    found = re.match(r"\.?1\.3\.6\.1\.4\.1\.(\d+)(\.|$)", str(object_id), re.ASCII)
    return _ENTERPRISES.get(found[1], "") if found else ""


_ENTERPRISES = {"318": "apc", "1718": "servertech", "13742": "raritan"}


async def _apc(device: Device) -> tuple[Phase, ...]:
    """PowerNet-MIB, rPDU2: phase status (module, current in 0.1 A, voltage in V, -1 where not measured), and for each module the
    maximum current rating in A.
    """
    table = "1.3.6.1.4.1.318.1.1.26"
    currents = await device.column(f"{table}.6.3.1.5")
    voltages = await device.column(f"{table}.6.3.1.6")
    modules = await device.column(f"{table}.6.3.1.2")
    ratings = await device.column(f"{table}.4.2.1.9")
    phases = []
    for index, value in currents.items():
        module = modules.get(index)
        rating = ratings.get((module,)) if isinstance(module, int) else None
        if rating is None and len(ratings) == 1:
            rating = next(iter(ratings.values()))
        phases.append(_phase(value, 0.1, voltages.get(index), 1.0, rating))
    return _known(phases)


async def _servertech(device: Device) -> tuple[Phase, ...]:
    """Sentry4-MIB: lines (current in 0.01 A, capacity in A) and phases (voltage in 0.1 V), both by unit, cord and number; -1 is
    not measured.
    """
    table = "1.3.6.1.4.1.1718.4.1"
    currents = await device.column(f"{table}.4.3.1.3")
    capacities = await device.column(f"{table}.4.2.1.6")
    voltages = await device.column(f"{table}.5.3.1.3")
    return _known(
        [_phase(value, 0.01, voltages.get(index), 0.1, capacities.get(index)) for index, value in currents.items()]
    )


_RMS_CURRENT, _RMS_VOLTAGE = 1, 4  # SensorTypeEnumeration
_VOLT, _AMPERE = 1, 2  # SensorUnitsEnumeration
_AVAILABLE = 1  # TruthValue
_DIGITS_LIMIT = 9


@dataclass(frozen=True, slots=True)
class _Sensors:
    """A measurement table of PDU2-MIB with the columns of its configuration table. The index ends with the kind of sensor."""

    values: Column
    available: Column
    units: Column
    digits: Column

    def reading(self, thing: Index, sensor: int, unit: int) -> float | None:
        """value x 10^-digits; None without digits, in another unit than expected, or where the sensor is not there."""
        index = (*thing, sensor)
        value, digits = _number(self.values.get(index)), _number(self.digits.get(index))
        if value is None or digits is None or not 0 <= digits <= _DIGITS_LIMIT:
            return None
        if self.units.get(index, unit) != unit or self.available.get(index, _AVAILABLE) != _AVAILABLE:
            return None
        return value / 10**digits


async def _raritan(device: Device) -> tuple[Phase, ...]:
    """PDU2-MIB: the poles of the inlets or, where there is a single phase and so no poles, the inlets themselves; the rated current
    of an inlet is text, such as "32A".
    """
    ratings = await device.column("1.3.6.1.4.1.13742.6.3.3.3.1.7")
    for measured, configured in (("5.2.4.1", "3.3.6.1"), ("5.2.3.1", "3.3.4.1")):
        root = "1.3.6.1.4.1.13742.6"
        sensors = _Sensors(
            values=await device.column(f"{root}.{measured}.4"),
            available=await device.column(f"{root}.{measured}.2"),
            units=await device.column(f"{root}.{configured}.6"),
            digits=await device.column(f"{root}.{configured}.7"),
        )
        things = [index[:-1] for index in sensors.values if index and index[-1] == _RMS_CURRENT]
        phases = []
        for thing in things:
            current_a = sensors.reading(thing, _RMS_CURRENT, _AMPERE)
            voltage_v = sensors.reading(thing, _RMS_VOLTAGE, _VOLT)
            phases.append(_phase(current_a, 1.0, voltage_v, 1.0, _first_number(ratings.get(thing[:2]))))
        known = _known(phases)
        if known:
            return known
    return ()


_READERS: Mapping[str, Callable[[Device], Awaitable[tuple[Phase, ...]]]] = {
    "apc": _apc,
    "servertech": _servertech,
    "raritan": _raritan,
}


def _phase(
    current: object, current_scale: float, voltage: object, voltage_scale: float, rating: object
) -> Phase | None:
    """None where there is no current that can be true."""
    current_a = _within(current, current_scale, CURRENT_LIMIT_A)
    if current_a is None:
        return None
    voltage_v, rating_a = _within(voltage, voltage_scale, VOLTAGE_LIMIT_V), _within(rating, 1.0, CURRENT_LIMIT_A)
    return Phase(current_a, voltage_v or None, rating_a or None)


def _within(value: object, scale: float, limit: float) -> float | None:
    """The number in its unit; None for what is no number, below 0 (which these tables use for "not measured") or beyond `limit`."""
    number = _number(value)
    return number * scale if number is not None and 0 <= number * scale <= limit else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2**32:
        return None
    return float(value)


def _first_number(text: object) -> float | None:
    found = re.search(r"\d{1,4}(\.\d{1,2})?", str(text), re.ASCII) if isinstance(text, str) else None
    return float(found[0]) if found else None


def _known(phases: list[Phase | None]) -> tuple[Phase, ...]:
    return tuple(phase for phase in phases if phase is not None)
